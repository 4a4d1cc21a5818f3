"""What the processes of `test_processes.py` do with models other than decoders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.grouped import grouped
from tests.runtime import workers
from tests.runtime.workers import distance, sgd, slow_devices, stored_plan, whole
from tests.zoo import calls, convolutions, decoders

Inputs = dict[str, Tensor]
STEPS = 3


def opt() -> tuple[nn.Module, list[Inputs]]:
    torch.manual_seed(0)
    model, first = decoders.opt()
    return model, [first, *({**first, **decoders.tokens()} for _ in range(STEPS - 1))]


def resnet() -> tuple[nn.Module, list[Inputs]]:
    """In float64: what batch norm divides by is small."""
    torch.manual_seed(0)
    model, first = convolutions.resnet()
    batches = [first, *(convolutions.images() for _ in range(STEPS - 1))]
    return model.double(), [{**b, "images": b["images"].double()} for b in batches]


def compare(reference: nn.Module, batches: Sequence[Inputs], **options: Any) -> dict[str, Any]:
    """Train compiled and plain side by side, then evaluate; the largest differences."""
    model = autopar.compile(copy.deepcopy(reference), **grouped(**options))
    optimizers = [sgd(m.parameters()) for m in (model, reference)]
    seen: dict[str, Any] = {"loss": 0.0, "grad": 0.0, "buffer": 0.0}
    for batch in batches:
        ours, theirs = model(**batch)["loss"], reference(**batch)["loss"]
        ours.backward()
        theirs.backward()
        seen["loss"] = max(seen["loss"], distance(ours, theirs))
        seen["grad"] = max(seen["grad"], furthest(model, reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.buffers(), reference.buffers(), strict=True)
    seen["buffer"] = max((float((whole(a) - b).abs().max()) for a, b in pairs), default=0.0)
    model.eval()
    reference.eval()
    with torch.no_grad():
        ours, theirs = (m(**batches[0])["logits"] for m in (model, reference))
    seen["eval"] = distance(ours, theirs)
    storage = [param.storage for param in model.plans[0].structure.params.values()]
    seen["sharded"] = sum("S(" in text or "C(" in text for text in storage)
    seen["buffers"] = len(list(reference.buffers()))
    return seen


def furthest(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of a gradient, relative to the largest one of all."""
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    assert all((p.grad is None) == (q.grad is None) for p, q in pairs)
    grads = [(whole(p.grad), q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]
    scale = max(float(b.abs().max()) for _, b in grads)
    return max(float((a - b).abs().max()) for a, b in grads) / scale


def trained(make: Callable[[], tuple[nn.Module, list[Inputs]]], seed: int | None) -> dict[str, Any]:
    """Under the plan chosen for one axis of four, or under a random one on two by two."""
    model, batches = make()
    if seed is None:
        return compare(model, batches, cluster=slow_devices(), mesh="4")
    plan = stored_plan(model, dict(sorted(batches[0].items())), "2x2", seed)
    return compare(model, batches, plan=plan)


def every_sort_of_call() -> dict[str, Any]:
    """Gradients accumulate over calls of two shapes, one of them under autocast; both losses."""
    reference = calls.everything()
    model = autopar.compile(copy.deepcopy(reference), cluster=slow_devices(), mesh="4")
    seen: dict[str, Any] = {"loss": 0.0, "grad": 0.0}
    for rows in (8, 4, 8):
        args, kwargs = calls.call(rows, seed=rows)
        ours, theirs = model(*args, **kwargs), reference(*args, **kwargs)
        calls.losses(ours).backward()
        calls.losses(theirs).backward()
        for a, b in ((ours["loss"], theirs["loss"]), (calls.losses(ours), calls.losses(theirs))):
            seen["loss"] = max(seen["loss"], distance(a, b))
        hidden, *rest = ours["more"][1]
        seen["rest"] = [ours["more"][0]["rows"], *rest]
        seen["hidden"] = distance(hidden, theirs["more"][1][0])
    seen["grad"] = furthest(model, reference)
    seen["buffer"] = distance(model.seen, reference.seen)
    seen["programs"] = len(model.plans)
    args, kwargs = calls.call(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = model(*args, **kwargs), reference(*args, **kwargs)
    seen["autocast"] = distance(ours["loss"], theirs["loss"])
    return seen


def four() -> dict[str, Any]:
    """Everything that four processes are needed for, in one start."""
    return {
        **workers.four(),
        "resnet": trained(resnet, None),
    }


def four_more() -> dict[str, Any]:
    """Other models, plans at random, and calls of every sort."""
    torch.set_num_threads(1)
    return {
        "llama": workers.train(workers.llama, workers.adamw, mesh="2x2"),
        "opt": trained(opt, None),
        "opt at random": trained(opt, 0),
        "resnet at random": trained(resnet, 0),
        "calls": every_sort_of_call(),
    }
