"""What the ranks of `test_ranks.py` do: train beside eager, each case by itself, and print what
differs or what was raised, as JSON."""

from __future__ import annotations

import json
import traceback
from typing import Any

import torch

from tests.cuda.training import gpt2, llama, trained

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "mesh": "2"},
    "fsdp": {"strategy": "fsdp", "mesh": "2"},
    "megatron": {"strategy": "megatron", "mesh": "2"},
    "free": {"mesh": "2"},
    "megatron, inductor": {"strategy": "megatron", "mesh": "2", "backend": "inductor"},
    "fsdp, inductor": {"strategy": "fsdp", "mesh": "2", "backend": "inductor"},
    "fsdp, microbatches": {"strategy": "fsdp", "mesh": "2", "microbatches": 2},
    "gpipe": {"stages": 2, "microbatches": 4, "schedule": "gpipe"},
    "eager-1f1b": {"stages": 2, "microbatches": 4, "schedule": "eager-1f1b"},
    "1f1b": {"stages": 2, "microbatches": 4, "schedule": "1f1b"},
    "interleaved": {"stages": 4, "microbatches": 4, "schedule": "interleaved:2"},
    "zb-h1": {"stages": 2, "microbatches": 4, "schedule": "zb-h1"},
    "zb-v": {"stages": 4, "microbatches": 4, "schedule": "zb-v"},
    "1f1b, inductor": {
        "stages": 2, "microbatches": 4, "schedule": "1f1b", "backend": "inductor",
    },
}  # fmt: skip


def trained_as(case: str, **more: Any) -> dict[str, float]:
    build = llama if "megatron" in case or "1f1b" in case else gpt2
    return trained(build(), **({"backend": "eager"} | CASES[case] | more))[0]


def outcome(case: str) -> dict[str, Any]:
    try:
        return trained_as(case)
    except Exception:
        return {"error": traceback.format_exc()[-4000:]}


def main() -> None:
    torch.cuda.set_device(0)
    for case in CASES:
        print(json.dumps({"case": case} | outcome(case)), flush=True)


if __name__ == "__main__":
    main()
