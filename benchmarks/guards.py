"""What a call of a compiled model costs before its program runs: guards, and all there is.

python -m benchmarks.guards
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
import transformers as hf

import autopar
from benchmarks.tables import markdown

LAYERS = 12
HEADER = ("GPT-2 of 12 layers, microseconds per call", "median", "least")


def times_us(call: Callable[[], Any], rounds: int) -> list[float]:
    """Microseconds per call, of `rounds` rounds of twenty."""
    found: list[float] = []
    for _ in range(rounds):
        start = time.process_time_ns()
        for _ in range(20):
            call()
        found.append((time.process_time_ns() - start) / 20e3)
    return found


@click.command(help=__doc__)
@click.option("--rounds", default=200, show_default=True, help="Rounds of twenty calls.")
def main(rounds: int) -> None:
    torch.set_num_threads(1)
    config = hf.GPT2Config(
        n_layer=LAYERS, n_embd=48, n_head=4, n_positions=16, vocab_size=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = autopar.compile(hf.GPT2LMHeadModel(config))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    model(**batch)
    runner = model._runner
    ((made,),) = runner.entries.values()
    rows: list[list[str]] = []
    for what, call in (
        ("the guard", made.guard.holds),
        ("all before the program runs", lambda: runner.prepare((), batch)),
    ):
        found = times_us(call, rounds)
        rows.append([what, f"{statistics.median(found):.1f}", f"{min(found):.1f}"])
    click.echo(markdown(HEADER, rows))


if __name__ == "__main__":
    main()
