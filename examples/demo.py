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

EXAMPLES = Path(__file__).resolve().parent
SCRIPT = str(EXAMPLES / "train_gpt2.py")
NUM_PROCESSES = 4
NUM_STEPS = 25
BATCH = 16
TOLERANCE = 1e-4

ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # The processes share the machine's cores.
    "OMP_NUM_THREADS": "1",
    # DTensor remarks on each rank that clip_grad_norm_ reduces once per mesh axis.
    "TORCH_LOGS": "-torch.distributed.tensor",
}

console = Console(highlight=False)


def run(title: str, folder: str, *command: str) -> None:
    console.rule(title, align="left")
    python, *arguments = command
    shown = " ".join(["python", *arguments]).replace(f"{EXAMPLES}/", "examples/")
    console.print(f"$ {shown}", style="dim", markup=False, soft_wrap=True)
    status = subprocess.run([python, *arguments], cwd=folder, env=ENVIRONMENT, check=False)
    if status.returncode:
        sys.exit(status.returncode)


def compare(parallel: list[float], single: list[float]) -> bool:
    console.rule("The same losses?", align="left")
    worst = max(abs(a - b) / abs(b) for a, b in zip(parallel, single, strict=True))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("step", f"{NUM_PROCESSES} processes", "1 process", "relative difference"):
        table.add_column(title, justify="right")
    for step in [*range(0, NUM_STEPS - 1, 4), NUM_STEPS - 1]:
        a, b = parallel[step], single[step]
        table.add_row(str(step + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / abs(b):.1e}")
    console.print(table)
    equal = worst <= TOLERANCE
    verdict = "[green]the losses agree[/]" if equal else "[red]the losses differ[/]"
    console.print(f"{verdict}: at most {worst:.1e} apart over {NUM_STEPS} steps (float32)")
    return equal


def main() -> int:
    training = (SCRIPT, "--steps", str(NUM_STEPS), "--losses")
    with tempfile.TemporaryDirectory(prefix="autopar-demo-") as folder:
        run(
            f"Plan a GPT-2 for {NUM_PROCESSES} processes",
            folder,
            *(sys.executable, "-m", "autopar.cli.main", "plan", f"{SCRIPT}:build"),
            *("--cluster", f"{NUM_PROCESSES}xcpu", "--global-batch", str(BATCH)),
            *("-o", "plan.json"),
        )
        run(
            f"Train it on {NUM_PROCESSES} processes",
            folder,
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(NUM_PROCESSES)),
            *(*training, "parallel.json", "--plan", "plan.json"),
        )
        run("Train it on one", folder, sys.executable, *training, "single.json")
        parallel, single = (
            json.loads(Path(folder, name).read_text()) for name in ("parallel.json", "single.json")
        )
    return 0 if compare(parallel, single) else 1


if __name__ == "__main__":
    sys.exit(main())
