"""The compiled loops: ready before a search's time begins, and there without a cache."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from pathlib import Path

import numba
import numpy as np
import pytest
from click.testing import CliRunner
from numba.core import caching

from autopar.cli.main import main
from autopar.errors import CacheWarning
from autopar.ir import files
from autopar.ir.problem import Status
from autopar.solver import driver, loops, solve
from autopar.solver.message_passing import path
from autopar.solver.pairwise.compiling import compiled
from tests.solver.fake_clock import FakeClock, fake_clock
from tests.solver.synthetic import transformer
from tests.solver.test_message_passing import ladder

HERE = Path(__file__).parent
COMPILING_S = 1e6

ALL_SEARCHES = """
from dataclasses import replace
from autopar.solver import driver, loops, solve
from autopar.solver.message_passing import path
from autopar.solver.pairwise.compiling import LOOPS
from tests.solver.synthetic import transformer
from tests.solver.test_message_passing import ladder
path.ready_message_passing()
loops.ready_column_generation()
ready = [loop.signatures for loop in LOOPS]
driver.MAX_ENTRIES = -1
solve(ladder(30, 4, 5, limit=40))
solve(replace(ladder(30, 4, 5, limit=40), usage_limit=None))
driver.MAX_CHOICES = -1
for stated in (transformer(1, (2, 4)), transformer(1, (2, 4), memory_limit=16_200_000_000)):
    solve(stated)
    solve(stated, cutoff=10**9)
assert len(LOOPS) == len(ready) > 10
assert [loop.signatures for loop in LOOPS] == ready
"""

WITHOUT_CACHES = """
from numba.core import caching
def refuse(self):
    raise PermissionError(13, "Permission denied")
caching._CacheLocator.ensure_cache_path = refuse
from autopar.cli.main import _spoken_warnings
with _spoken_warnings():
    import autopar.solver.loops
    import autopar.solver.message_passing.path
from autopar.solver.pairwise.compiling import LOOPS
assert len(LOOPS) > 10
"""


def run(script: str) -> str:
    """What a process of its own says on standard error."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stderr


def test_nothing_is_left_to_compile_for_a_search() -> None:
    run(ALL_SEARCHES)


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock by which compiling loops takes longer than any limit here."""
    fake = fake_clock(monkeypatch)

    def compile_slowly() -> None:
        fake.now_s += COMPILING_S

    monkeypatch.setattr(path, "ready_message_passing", compile_slowly)
    monkeypatch.setattr(loops, "ready_column_generation", compile_slowly)
    return fake


def test_compiling_takes_no_time_of_a_search(
    slow_compiler: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MAX_CHOICES", -1)
    stated = transformer(1, (2, 4))
    assert solve(stated, time_limit_s=1.0).objective == solve(stated).objective
    assert slow_compiler.now_s == COMPILING_S
    bounded = solve(stated, time_limit_s=1.0, cutoff=1)
    assert bounded.status is Status.BEATEN
    assert slow_compiler.now_s == 2 * COMPILING_S


def test_compiling_takes_no_time_of_rounds(
    slow_compiler: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything compiled that an integer program does without."""
    small = ladder(4, 2, 5, limit=40)
    assert solve(small, time_limit_s=1.0).status is Status.OPTIMAL
    assert slow_compiler.now_s == 0.0
    monkeypatch.setattr(driver, "MAX_ENTRIES", -1)
    assert solve(small, time_limit_s=1.0).status is Status.OPTIMAL
    assert slow_compiler.now_s == COMPILING_S


def test_compiling_takes_no_time_of_the_command(
    slow_compiler: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MAX_ENTRIES", -1)
    file = str(HERE / "iopddl_example.json")
    done = CliRunner().invoke(main, ["solve", file, "--time-limit", "10"])
    assert done.exit_code == 0, done.output
    assert "cost    445" in done.output
    assert slow_compiler.now_s == 2 * COMPILING_S


def test_one_line_says_that_loops_cannot_be_kept() -> None:
    """Where neither the package nor the user's cache folder can be written: all of them work."""
    said = run(WITHOUT_CACHES).splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        "autopar: warning: the solver's compiled loops cannot be kept (neither"
    )
    assert "NUMBA_CACHE_DIR" in said[0]


def double(values: np.ndarray) -> float:
    return 2.0 * values.sum()


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(files, "_warned", set())
    return tmp_path


def test_a_loop_works_without_a_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.warns(CacheWarning, match="neither .*solver nor .* can be written") as heard:
        loop = compiled(double)
        again = compiled(double)
    assert len(heard) == 1
    assert loop(np.ones(3)) == again(np.ones(3)) == 6.0


def test_a_loop_works_where_a_disk_is_full(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    loop = compiled(double)
    monkeypatch.setattr(caching.os, "replace", refuse)
    with pytest.warns(CacheWarning, match="No space left on device"):
        assert loop(np.ones(3)) == 6.0
    assert loop(np.ones(4)) == 8.0


def test_a_loop_works_where_its_cache_is_damaged(cache_folder: Path) -> None:
    assert compiled(double)(np.ones(3)) == 6.0
    (index,) = cache_folder.rglob("*.nbi")
    whole = index.read_bytes()
    for damaged in (b"", b"garbage", whole[:40], whole[:-5]):
        index.write_bytes(damaged)
        files._warned.clear()
        with pytest.warns(CacheWarning, match=str(cache_folder)):
            assert compiled(double)(np.ones(3)) == 6.0
