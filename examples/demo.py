"""The whole way in a few minutes: plan, train on four processes, compare with one.

Run by `make demo`. Ends with status 1 if the losses of the two runs differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
SCRIPT = str(HERE / "train_gpt2.py")
NUM_PROCESSES = 4
NUM_STEPS = 25
BATCH = 16
TOLERANCE = 1e-4

console = Console(highlight=False)


def run(title: str, *command: str) -> None:
    console.rule(title, align="left")
    shown = " ".join(command).replace(f"{HERE}/", "examples/").replace("-m autopar.cli", "autopar")
    console.print(f"$ {shown}".replace(sys.executable, "python"), style="dim", markup=False)
    # One thread for each process: the four share the machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        sys.exit(status)


def compare(parallel: list[float], single: list[float]) -> bool:
    console.rule("The same losses?", align="left")
    worst = max(abs(a - b) / abs(b) for a, b in zip(parallel, single, strict=True))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("step", f"{NUM_PROCESSES} processes", "1 process", "relative difference"):
        table.add_column(title, justify="right")
    for step in [*range(0, NUM_STEPS, 4), NUM_STEPS - 1]:
        a, b = parallel[step], single[step]
        table.add_row(str(step + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / abs(b):.1e}")
    console.print(table)
    equal = worst <= TOLERANCE
    verdict = "[green]the losses agree[/]" if equal else "[red]the losses differ[/]"
    console.print(f"{verdict}: at most {worst:.1e} apart over {NUM_STEPS} steps (float32)")
    return equal


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="autopar-demo-") as folder:
        plan, parallel, single = (str(Path(folder) / n) for n in ("plan.json", "4.json", "1.json"))
        run(
            f"Plan a GPT-2 for {NUM_PROCESSES} processes",
            *(sys.executable, "-m", "autopar.cli", "plan", f"{SCRIPT}:build"),
            *("--cluster", f"{NUM_PROCESSES}xcpu", "--global-batch", str(BATCH), "-o", plan),
        )
        training = ("--steps", str(NUM_STEPS), "--losses")
        run(
            f"Train it on {NUM_PROCESSES} processes",
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(NUM_PROCESSES), SCRIPT, "--plan", plan, *training, parallel),
        )
        run("Train it on one", sys.executable, SCRIPT, *training, single)
        losses = [json.loads(Path(file).read_text()) for file in (parallel, single)]
    return 0 if compare(*losses) else 1


if __name__ == "__main__":
    sys.exit(main())
