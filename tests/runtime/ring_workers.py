"""A ring of processes, each with its piece of queries, keys and values."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

import autopar
from autopar.ir.fingerprint import fingerprint
from autopar.tracer import trace
from tests.codegen.test_attention_forms import FORMS, Attention, pins
from tests.planned import plan_for
from tests.redone import redecided
from tests.runtime.workers import distance


def three() -> dict[str, Any]:
    """How far loss and gradients are from one process's, under each mask."""
    torch.set_num_threads(1)
    return {kind: worst(kind) for kind in ("causal", "full")}


def worst(kind: str) -> float:
    reference = Attention(kind)
    graph = trace(reference, (), {}).graph
    found = plan_for(graph, "3", pins(FORMS["ring"]))
    structure = redecided(found.structure, fingerprint=fingerprint(graph), cluster="3xcpu")
    model: Any = autopar.compile(
        Attention(kind), plan=msgspec.structs.replace(found, structure=structure)
    )
    loss, expected = model(), reference()
    loss.backward()
    expected.backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(distance(loss, expected), *(distance(p.grad, q.grad) for p, q in pairs))
