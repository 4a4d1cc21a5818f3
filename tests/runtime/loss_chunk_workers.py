"""What the processes of `test_loss_chunks.py` do: scripts whose model has its loss in chunks."""

from __future__ import annotations

import copy
from typing import Any

import torch

import autopar
from tests.grouped import grouped
from tests.runtime.microbatch_workers import batch, trained, whole
from tests.runtime.workers import distance, llama


def two() -> dict[str, Any]:
    """In three chunks, with logits that are looked at; tokens split over ranks."""
    return trained(llama(), loss_chunks=3, strategy="fsdp")


def two_of_classes() -> dict[str, Any]:
    """Classes split over ranks."""
    return trained(llama(), loss_chunks=3, strategy="megatron")


def without_logits(**how: Any) -> dict[str, Any]:
    """Some steps whose logits are not there; then evaluation, where they are."""
    model = llama()
    plain = copy.deepcopy(model)
    compiled = autopar.compile(model, **grouped(unread_outputs="logits", **how))
    found: dict[str, Any] = {"losses": 0.0, "grads": 0.0}
    for step in range(3):
        given = batch(step, 8)
        result, expected = compiled(**given), plain(**given)
        assert result.logits is None
        (result.loss * (step + 1)).backward()
        (expected.loss * (step + 1)).backward()
        found["losses"] = max(found["losses"], distance(result.loss, expected.loss))
        pairs = zip(compiled.parameters(), plain.parameters(), strict=True)
        worst = max(distance(whole(p.grad), q.grad) for p, q in pairs)
        found["grads"] = max(found["grads"], worst)
    found["chunks"] = compiled.plans[0].structure.loss_chunks
    with torch.no_grad():
        compiled.eval()
        plain.eval()
        given = batch(9, 8)
        found["logits"] = distance(whole(compiled(**given).logits), plain(**given).logits)
    return found


def two_without_logits() -> dict[str, Any]:
    return without_logits(loss_chunks=3, mesh="2")
