"""What the processes of `test_microbatches.py` do: scripts whose model works in microbatches."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import NotImposedWarning
from tests.grouped import grouped
from tests.runtime.workers import distance, llama

SCALES = (1.0, 0.25, 1.0, 3.0, 0.25, 1.0, 1.0, 2.0, 1.0, 1.0)
"""What the script multiplies its loss by, step by step."""

SMALL = 5
"""The step whose batch is smaller."""


def batch(step: int, size: int) -> dict[str, Tensor]:
    """Tokens, of which some are ignored, in another number in each sample."""
    torch.manual_seed(step)
    ids = torch.randint(0, 96, (size, 16))
    labels = ids.clone()
    labels[0, :9] = -100
    labels[-1] = -100
    return {"input_ids": ids, "labels": labels}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def trained(model: nn.Module, **how: Any) -> dict[str, Any]:
    """Ten steps beside eager, with batches and scales that change; then what else scripts do."""
    plain = copy.deepcopy(model)
    compiled = autopar.compile(model, **grouped(**how))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (compiled, plain)]
    seen: dict[str, list[float]] = {"losses": [], "grads": [], "logits": []}
    for step, scale in enumerate(SCALES):
        given = batch(step, 6 if step == SMALL else 8)
        torch.manual_seed(step)
        found = compiled(**given)
        torch.manual_seed(step)
        expected = plain(**given)
        (found.loss * scale).backward()
        (expected.loss * scale).backward()
        seen["losses"].append(distance(found.loss, expected.loss))
        seen["logits"].append(distance(whole(found.logits), expected.logits))
        pairs = zip(compiled.parameters(), plain.parameters(), strict=True)
        seen["grads"].append(max(distance(whole(p.grad), q.grad) for p, q in pairs))
        if step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {name: max(found) for name, found in seen.items()} | _also(compiled, plain)


def _also(compiled: nn.Module, plain: nn.Module) -> dict[str, Any]:
    given = batch(99, 8)
    compiled.zero_grad()
    plain.zero_grad()
    with torch.no_grad():
        compiled.eval()
        plain.eval()
        inference = distance(compiled(**given).loss, plain(**given).loss)
        compiled.train()
        plain.train()
    loss = compiled(**given).loss
    loss.backward(retain_graph=True)
    once = [whole(p.grad).clone() for p in compiled.parameters()]
    loss.backward()
    twice = [whole(p.grad) for p in compiled.parameters()]
    retained = max(distance(b, 2 * a) for a, b in zip(once, twice, strict=True))
    compiled.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(7)
        whole(compiled(**given).logits).float().square().mean().backward()
    torch.manual_seed(7)
    plain(**given).logits.float().square().mean().backward()
    pairs = zip(compiled.parameters(), plain.parameters(), strict=True)
    of_logits = max(distance(whole(p.grad), q.grad) for p, q in pairs)
    told = [str(w.message) for w in caught if issubclass(w.category, NotImposedWarning)]
    return {"eval": inference, "retained": retained, "of logits": of_logits, "told": told}


def two() -> dict[str, Any]:
    return trained(llama(), microbatches=2, strategy="fsdp")
