"""Processes that share attention, each with its piece of queries, keys and values."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

import autopar
from autopar.ir.fingerprint import fingerprint
from autopar.runtime.ops.operators import function_of
from autopar.runtime.torch_private import TorchDispatchMode
from autopar.tracer import trace
from tests.codegen.test_attention_forms import FORMS, Attention, pins
from tests.planned import plan_for
from tests.redone import redecided
from tests.runtime.workers import distance


class Scores(TorchDispatchMode):
    """Counts the scores that kernels of attention compute: under a causal mask, those it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("aten._scaled_dot_product_flash_attention_for_cpu"):
            is_forward = "backward" not in name
            queries, keys = (x.shape[2] for x in (args[:2] if is_forward else args[1:3]))
            # Arguments that are as by default are not given.
            causal = any(each is True for each in args)
            scores = sum(min(row + 1, keys) if causal else keys for row in range(queries))
            self.forward += scores * is_forward
            self.backward += scores * (not is_forward)
        function = function_of(func)
        if function is not None:
            # What it calls is counted.
            with self:
                return function(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def three() -> dict[str, Any]:
    """By form and mask, how far loss and gradients are from one process's; and the scores that
    this process computed, forward and backward."""
    torch.set_num_threads(1)
    forms = [("ring", "full"), *((name, "causal") for name in FORMS if name in CONTEXT)]
    return {f"{name}, {kind}": worst(name, kind) for name, kind in forms}


CONTEXT = ("gathered", "ring", "gathered, zig-zag", "ring, zig-zag")


def worst(form: str, kind: str) -> tuple[float, tuple[int, int]]:
    reference = Attention(kind)
    graph = trace(reference, (), {}).graph
    found = plan_for(graph, "3", pins(FORMS[form]))
    structure = redecided(found.structure, fingerprint=fingerprint(graph), cluster="3xcpu")
    model: Any = autopar.compile(
        Attention(kind), plan=msgspec.structs.replace(found, structure=structure)
    )
    # The first call traces.
    model().backward()
    model.zero_grad()
    with Scores() as scores:
        loss = model()
        loss.backward()
    expected = reference()
    expected.backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    off = max(distance(loss, expected), *(distance(p.grad, q.grad) for p, q in pairs))
    return off, (scores.forward, scores.backward)
