"""Where output goes: files are replaced whole, what is no file is written to, nothing is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cli.main import main
from autopar.cluster.parsing import parse_cluster
from autopar.errors import AutoparError
from autopar.ir import files
from autopar.ir.files import read_at_most, write_atomically
from autopar.plans.plan import Plan
from tests.report.plans import two_axis_plan

PLAN = two_axis_plan()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_WAIT_S", 0.2)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("target", ["there/plan.json", "there/new.json"])
def test_a_link_stays_and_leads_to_what_is_written(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "plan.json").write_bytes(b"old")
    link, chain = tmp_path / "link.json", tmp_path / "chain.json"
    link.symlink_to(target)
    chain.symlink_to(link)
    inode = (folder / "plan.json").stat().st_ino
    PLAN.save(chain)
    assert link.is_symlink() and chain.is_symlink()
    assert Plan.load(tmp_path / target) == PLAN
    # A new file was renamed over the old one: whoever has it open goes on reading the old.
    assert target.endswith("new.json") or (folder / "plan.json").stat().st_ino != inode
    assert names(tmp_path) == ["chain.json", "link.json", "there"]
    assert all(not name.startswith(".") for name in names(folder))


def test_what_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")
    path.chmod(0o600)
    PLAN.save(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_device_is_written_to(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    write_atomically(link, b"x")
    assert link.is_symlink() and names(tmp_path) == ["link"]
    assert Path("/dev/null").is_char_device()
    with pytest.raises(AutoparError, match=r"cannot write plan /dev/full: No space left on device"):
        PLAN.save("/dev/full")


def test_a_pipe_is_written_to_and_read_from(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = PLAN.to_bytes() * 20  # more than a pipe holds
    read: list[bytes] = []
    for write_s, read_s in ((0.0, 0.1), (0.1, 0.0)):

        def write(wait_s: float = write_s) -> None:
            time.sleep(wait_s)
            write_atomically(pipe, data)

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(read_s)
        read.append(read_at_most(pipe, 1 << 30))
        writer.join(30)
    assert read == [data, data]
    assert names(tmp_path) == ["pipe"]


def test_a_pipe_without_another_end_and_a_folder_are_told(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: PLAN.save(pipe), "cannot write plan .*: it is a pipe, and nobody read from it"),
        (lambda: Plan.load(pipe), "cannot read plan .*: it is a pipe, and nobody wrote to it"),
        (lambda: parse_cluster(str(pipe)), "cannot be read: it is a pipe, and nobody wrote to it"),
        (lambda: PLAN.save(tmp_path), "cannot write plan .*: Is a directory"),
        (lambda: Plan.load(tmp_path), "cannot read plan .*: Is a directory"),
        (lambda: PLAN.save(pipe / "x"), "cannot write plan .*: Not a directory"),
    ]
    for call, told in cases:
        with pytest.raises(AutoparError, match=told) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["pipe.toml"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "plan.html"
    page.write_bytes(b"old")
    PLAN.save(tmp_path / "plan.json")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(main, ["report", str(tmp_path / "plan.json"), "-o", str(page)])
    assert result.exit_code == 1
    assert result.stderr == f"autopar: error: cannot write {page}: No space left on device\n"
    assert page.read_bytes() == b"old" and names(tmp_path) == ["plan.html", "plan.json"]


def cli(arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`autopar ARGUMENTS`, as a shell would run it."""
    command = f"exec {sys.executable} -m autopar.cli.main {arguments}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.processes
def test_the_standard_output_of_a_shell(tmp_path: Path) -> None:
    """Through /dev/stdout into a file that has something already, and into a full disk."""
    PLAN.save(tmp_path / "plan.json")
    (tmp_path / "log").write_text("before\n")
    inode = (tmp_path / "log").stat().st_ino
    done = cli("report plan.json -o /dev/stdout >> log", tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "log").stat().st_ino == inode
    assert (tmp_path / "log").read_text().startswith("before\n<!")
    full = cli("show plan.json > /dev/full", tmp_path)
    assert full.returncode == 1
    assert full.stderr == (
        "autopar: error: cannot write to standard output: No space left on device\n"
    )
    assert cli("show <(cat plan.json) --width 80", tmp_path).stdout.startswith("model")
