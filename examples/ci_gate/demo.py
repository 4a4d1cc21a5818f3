"""The gate at work: python examples/ci_gate/demo.py

Ten changes to a small model, its cluster or what is asked of its plan, each of which `autopar
check` is to catch and to name; and ten that leave the plan as it is, which it is not to report. All
of it happens in a copy of this folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from seeds import CHANGES, CLUSTER, HARMLESS, MODEL, RECIPE, Seed  # noqa: E402

from autopar.cli.main import main as autopar  # noqa: E402

SAME, DIFFERENT = 0, 2


def check(folder: Path, *options: str) -> tuple[int, str]:
    """Exit status and output of `autopar check`, without a new process."""
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            autopar(["check", str(folder), "--width", "200", *options])
        except SystemExit as ended:
            return int(ended.code or 0), output.getvalue()
    raise AssertionError("the command line ends with a status")


def check_apart(folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """The same in a new process; nothing that was solved before is used."""
    command = [sys.executable, "-m", "autopar.cli.main", "check", str(folder), "--no-cache"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def planted(seed: Seed, golden: Path, folder: Path) -> None:
    """A copy of the folder `golden`, with what the seed changes."""
    shutil.copytree(golden, folder)
    for edit in seed.edits:
        path = folder / edit.file
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise ValueError(f"{seed.name}: {edit.file} has {text.count(edit.old)} x {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new))
    for old, new in seed.moves.items():
        (folder / new).parent.mkdir(parents=True)
        (folder / old).rename(folder / new)


def tried(seed: Seed, golden: Path, folder: Path) -> tuple[int, str]:
    """Status and output for a seed."""
    planted(seed, golden, folder)
    plans = folder / "plans"
    if seed.environment:
        return check_apart(plans, {**os.environ, **seed.environment})
    with chdir(Path(tempfile.gettempdir()) if seed.elsewhere else folder):
        return check(plans if seed.elsewhere else Path("plans"))


def report(seeds: tuple[Seed, ...], wanted: int, golden: Path, folder: Path) -> list[str]:
    """A line per seed on standard output; the names of those that went wrong."""
    wrong: list[str] = []
    for k, seed in enumerate(seeds):
        status, output = tried(seed, golden, folder / f"{wanted}-{k}")
        missing = [word for word in seed.words if word not in output]
        good = status == wanted and not missing
        verdict = "as it should be" if good else f"WRONG, {missing or 'status'}"
        print(f"  {seed.name:<36} status {status}   {', '.join(seed.words)[:60]:<60}  {verdict}")
        if not good:
            print(output)
            wrong.append(seed.name)
    return wrong


def main() -> int:
    """0 if the gate did what it should for every seed."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = str(Path(scratch, "cache"))
        golden = Path(scratch, "golden")
        golden.mkdir()
        for name in (MODEL, RECIPE, CLUSTER):
            (golden / name).parent.mkdir(exist_ok=True)
            shutil.copy(HERE / name, golden / name)
        status, output = check(golden / "plans", "--update")
        if status != SAME:
            raise RuntimeError(output)
        print("changes: each is to end with status 2, and to be named")
        wrong = report(CHANGES, DIFFERENT, golden, Path(scratch))
        print("harmless: each is to end with status 0")
        wrong += report(HARMLESS, SAME, golden, Path(scratch))
    print(f"{len(CHANGES) + len(HARMLESS)} tried, {len(wrong)} went wrong")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
