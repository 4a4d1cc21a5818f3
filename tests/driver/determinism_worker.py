"""Plans of several models, meshes and clusters in one process: prints a hash of each.

    python -m tests.driver.determinism_worker forwards|backwards daily|nightly

Whoever runs it sets hash seed and threads. What is planned before must not show.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import highspy
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.ir.problem import Problem
from autopar.solver import solve
from autopar.solver.clock import Clock
from autopar.solver.column_generation.path import generate_columns
from tests.grouped import grouped
from tests.solver.synthetic import transformer
from tests.solver.test_message_passing import ladder


@cache
def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=32_000, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(16, 2048, dtype=torch.long)
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


@cache
def mlp() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 1024)
        return nn.Sequential(*layers), torch.zeros(4096, 2048)


def planned(make: Callable[[], tuple[nn.Module, object]], cluster: str, **options: Any) -> bytes:
    model, inputs = make()
    return autopar.plan(model, inputs, cluster=cluster, **grouped(**options)).to_bytes()


def solved(problem: Problem) -> bytes:
    found = solve(problem)
    return repr((found.status, found.objective, found.bound, found.choice)).encode()


def column_generation(problem: Problem) -> bytes:
    found = generate_columns(problem, Clock(None), lambda _: None)
    return repr((found.bound, found.choice, found.statistics["rounds"])).encode()


CASES: dict[str, Callable[[], bytes]] = {
    "llama across nodes": partial(planned, llama, "4x1xL4", mesh="4"),
    "mlp in nodes": partial(planned, mlp, "2x4xH100", mesh="2x4"),
    "mlp in little memory": partial(planned, mlp, "2x4xH100", mesh="8", memory_limit="170MiB"),
    "mlp on the best mesh, with its margin": partial(
        planned, mlp, "2x4xH100", mesh="auto", margin=True
    ),
    "three axes": lambda: column_generation(transformer(1, (2, 2, 2))),
    "large problem": lambda: solved(ladder(60, 14, 3, limit=2000)),
}


NIGHTLY = ("three axes",)
"""What takes as long as all others."""


def hashes(names: list[str]) -> dict[str, str]:
    return {name: hashlib.sha256(CASES[name]()).hexdigest() for name in names}


def main(order: str, when: str) -> None:
    names = [name for name in CASES if when == "nightly" or name not in NIGHTLY]
    if order == "backwards":
        names.reverse()
        # A scheduler of HiGHS for another number of threads is there already.
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 2)
        highs.addVar(0, 1)
        highs.run()
    print(json.dumps(hashes(names)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
