"""What the processes of `test_draws.py` do: scripts whose model draws its masks again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.grouped import grouped
from tests.runtime.microbatch_workers import batch, whole
from tests.runtime.workers import distance, gpt2, slow_devices

STEPS, EVALUATED, RETAINED = 10, 3, 4
"""Steps; that before which the model is evaluated; that whose backward is done twice."""


def dropped() -> nn.Module:
    """Layers in checkpoints, with dropout in all places that there are."""
    model = gpt2().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    how = {"use_reentrant": False}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)  # pyright: ignore[reportCallIssue]
    return model


def script(model: nn.Module) -> list[tuple[Tensor, list[Tensor]]]:
    """The loss and gradients of each step; every other step adds to the gradients of the one before
    it. Between the phases the script draws for itself."""
    batches = [batch(step, 8) for step in range(STEPS)]
    torch.manual_seed(7)
    found: list[tuple[Tensor, list[Tensor]]] = []
    for step, given in enumerate(batches):
        if step == EVALUATED:
            model.eval()
            with torch.no_grad():
                model(**given)
            model.train()
        loss = model(**given).loss
        torch.rand(1000)
        if step == RETAINED:
            loss.backward(retain_graph=True)
        loss.backward()
        gradients = [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        found.append((loss.detach().clone(), gradients))
        if step % 2:
            model.zero_grad()
    return found


def compared(**how: Any) -> dict[str, Any]:
    """How far a compiled model's steps are from eager's, and which draws are recomputed."""
    plain = dropped()
    model: Any = autopar.compile(copy.deepcopy(plain), **grouped(checkpoint="as written", **how))
    ours, theirs = script(model), script(plain)
    worst = 0.0
    for (loss, gradients), (expected, others) in zip(ours, theirs, strict=True):
        pairs = [(loss, expected), *zip(gradients, others, strict=True)]
        worst = max(worst, *(distance(a, b) for a, b in pairs))
    again = {key for part in model.plans[0].structure.stages for key in part.recompute}
    return {"worst": worst, "drawn": sorted(k for k in again if ":native_dropout." in k)}


def fsdp() -> dict[str, Any]:
    return compared(strategy="fsdp", cluster=slow_devices(2))


def microbatches() -> dict[str, Any]:
    return compared(strategy="ddp", microbatches=2, cluster=slow_devices(2))


def rounded() -> dict[str, Any]:
    """What two processes save in bfloat16, beside eager."""
    plain = dropped()
    model: Any = autopar.compile(
        copy.deepcopy(plain),
        memory={"saved_dtype": "bfloat16"},
        constraints={"strategy": "fsdp"},
        cluster=slow_devices(2),
    )
    ours, theirs = script(model), script(plain)
    losses = max(distance(a, b) for (a, _), (b, _) in zip(ours, theirs, strict=True))
    pairs = [p for (_, a), (_, b) in zip(ours, theirs, strict=True) for p in zip(a, b, strict=True)]
    return {"loss": losses, "grad": max(distance(a, b) for a, b in pairs)}


def stages() -> dict[str, Any]:
    return compared(stages=2, microbatches=4, cluster=slow_devices(2))
