"""What the processes of `test_stages.py` do: models in the stages of a pipeline."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensor_private import dtensor_like, parameter_of
from autopar.runtime.program.sharded import whole_of
from tests.runtime.microbatch_workers import trained
from tests.runtime.stage_call_workers import other_calls, shared_at_end
from tests.runtime.unasked_workers import unasked, unasked_after_evaluation
from tests.runtime.workers import (
    RANK,
    adamw,
    batch,
    distance,
    gpt2,
    llama,
    most,
    points,
    sgd,
    slow_devices,
    staged,
    train,
)


def dropout(**how: Any) -> dict[str, float]:
    """What one process would draw, of the whole batch, stage after stage."""
    plain = gpt2()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    model = staged(copy.deepcopy(plain), microbatches=4, **how)
    torch.manual_seed(7)
    torch.rand(RANK)
    ours = [model(**batch(step)).loss for step in range(3)]
    torch.manual_seed(7)
    theirs = [plain(**batch(step)).loss for step in range(3)]
    ours[-1].backward()
    theirs[-1].backward()
    losses = [distance(a, b) for a, b in zip(ours, theirs, strict=True)]
    return {"loss": max(losses), "grad": most(model, plain, "grad")}


def scripts() -> dict[str, float]:
    """What scripts do with parameters, gradients and outputs, beside eager."""
    plain = llama()
    model = staged(copy.deepcopy(plain), microbatches=2)
    sides = [
        (m, sgd(m.parameters()), torch.optim.swa_utils.AveragedModel(m)) for m in (model, plain)
    ]
    norms: list[list[Tensor]] = [[], []]
    for step in range(3):
        for seen, (each, optimizer, average) in zip(norms, sides, strict=True):
            for part in range(2):
                (each(**batch(2 * step + part)).loss / 2).backward()
            grads = [p.grad for p in each.parameters() if p.grad is not None]
            seen.append(torch.nn.utils.get_total_norm(grads))
            seen.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5, norm_type=3.0))
            torch.nn.utils.clip_grad_value_(each.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))
            average.update_parameters(each)
    found = {
        "norm": max(distance(a, b) for a, b in zip(*norms, strict=True)),
        "param": most(model, plain),
        "average": most(sides[0][2], sides[1][2]),
    }
    for each, optimizer, _ in sides:
        optimizer.zero_grad()
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in each.parameters())
        sum(x.square().sum() for x in whole).backward()  # type: ignore[union-attr]
    found["of parameters"] = most(model, plain, "grad")
    ours, theirs = model(**batch(9)).logits, plain(**batch(9)).logits
    found["logits"] = distance(whole_of(ours), theirs)
    found["argmax"] = float((ours.argmax(-1) != theirs.argmax(-1)).sum())
    found["shifted"] = distance(ours[:, 1:].softmax(-1), theirs[:, 1:].softmax(-1))
    with torch.no_grad(), model.unsharded() as whole_model:
        found["unsharded"] = distance(whole_model(**batch(9)).loss, plain(**batch(9)).loss)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found["state"] = max(distance(state[n], x) for n, x in plain.state_dict().items() if state)
    model.load_state_dict({n: x * 2 for n, x in plain.state_dict().items()})
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
    found["loaded"] = most(model, plain)
    empty = [p for p in model.parameters() if not p.to_local().numel()]
    found["not here"] = float(len(empty))
    found["other device"] = float(sum(x.to_local().device.type != "meta" for x in _made(empty[0])))
    return found


def _made(one: Any) -> list[DTensor]:
    """What ops make of a tensor on the ranks that are not of its mesh, where it is on a device that
    is not the CPU."""
    there = dtensor_like(torch.empty(0, device="meta"), one)
    param: Any = parameter_of(there, requires_grad=True)
    assert isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad
    return [torch.zeros_like(there), there * 2, there.detach(), there.clone(), param]


def gradients_of_several_stages() -> dict[str, float]:
    """What torch does with many tensors at once, and with the numbers in them."""
    plain = llama()
    model = staged(copy.deepcopy(plain), microbatches=2)
    averaged, ema = torch.optim.swa_utils.AveragedModel, torch.optim.swa_utils.get_ema_multi_avg_fn
    averages = [averaged(each, multi_avg_fn=ema(0.9)) for each in (model, plain)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=True) for m in (model, plain)]
    for step in range(2):
        for each, optimizer, average in zip((model, plain), optimizers, averages, strict=True):
            optimizer.zero_grad(set_to_none=False)
            each(**batch(step)).loss.backward()
            optimizer.step()
            average.update_parameters(each)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    found = {"average": most(*averages), "grad": most(model, plain, "grad")}
    found["norms"] = max(abs(p.grad.norm().item() / float(q.grad.norm()) - 1) for p, q in pairs)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 99, 0.0) for m in (model, plain)]
    found["count"] = distance(*norms)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(**batch(0)).loss).backward()
    last = model.lm_head.weight.grad.to_local()
    last.view(-1)[:1] = torch.inf
    before = [p.full_tensor().clone() for p in model.parameters()]
    scaler.step(optimizers[0])
    scaler.update()
    found["stepped on inf"] = max(
        distance(p, q) for p, q in zip(model.parameters(), before, strict=True)
    )
    return found | {"scale": abs(scaler.get_scale() - 512)}


def frozen_and_made_again() -> dict[str, float]:
    """A stage without backward, and stages that make activations again."""
    found = {}
    for name, frozen, how in (
        ("first", ("model.embed_tokens", "model.layers.0"), {}),
        ("last", ("model.layers.1", "model.norm", "lm_head"), {}),
        ("recomputed", (), {"checkpoint": "as written"}),
    ):
        plain = llama()
        if how:
            plain.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        plain.train()
        for key, param in plain.named_parameters():
            param.requires_grad_(not key.startswith(frozen))
        ours = staged(copy.deepcopy(plain), cuts="model.layers.1", microbatches=2, **how)
        worst = 0.0
        for step in range(2):
            losses = [each(**batch(step)).loss for each in (ours, plain)]
            for loss in losses:
                loss.backward()
            worst = max(worst, distance(losses[0], losses[1].detach()))
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            worst = max(worst, 0.0 if q.grad is None else distance(p.grad, q.grad))
        found[name] = worst
    return found


OWN_TABLE = """
0F0 0F1 2F0 0F2 2B0 0B0 2F1 2W0 2B1 0W0 0B1 2F2 2B2 0B2 0W1 2W1 0W2 2W2
1F0 1F1 1B0 1F2 1W0 1B1 1B2 1W1 1W2
"""
"""Three stages on two ranks, two of them on the first."""


ANY_ORDER = """
0F2 0F0 0F3 0F1 0B3 0B1 0B2 0B0
1F0 1F2 1F1 1F3 1B1 1B3 1B0 1B2
"""
"""No stage takes microbatches as another one sends them."""


def backward_in_two_parts() -> dict[str, float]:
    """One microbatch, whose loss the script works on; the tables of a user; and later calls."""
    found = {}
    for name, how in (
        ("one", {"schedule": "zb-h1", "microbatches": 1}),
        ("v", {"schedule": "zb-v", "stages": 4, "microbatches": 2}),
        ("table", {"schedule": OWN_TABLE, "stages": 3}),
    ):
        plain = llama(4)
        model = staged(copy.deepcopy(plain), **how)
        worst = 0.0
        for step in range(2):
            given = {key: x[:6] if name == "table" else x for key, x in batch(step).items()}
            losses = [3 * each(**given).loss ** 2 for each in (model, plain)]
            for loss in losses:
                loss.backward()
            worst = max(worst, distance(*losses), most(model, plain, "grad"))
        found[name] = worst
        with torch.no_grad():
            for size in (8, 3) if name == "table" else (8,):
                given = {key: x[:size] for key, x in batch(5).items()}
                found[f"{name}: {size}"] = distance(model(**given).loss, plain(**given).loss)
    return found


class Skipping(nn.Module):
    """Dropout in every stage, and a tensor that skips two: the state of random numbers comes among
    others from the same rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        first = h = torch.where(x > 0, x, self.layers[0](x))
        for layer in self.layers:
            h = torch.where(h > 0, h, nn.functional.dropout(layer(h), 0.3))
        return {"loss": ((h + first - y) ** 2).mean()}


def random_numbers_among_others() -> dict[str, float]:
    plain, found = Skipping(), {}
    cuts = [f"layers.{k}" for k in (1, 2, 3)]
    for schedule, ours in (("interleaved:2", cuts), ("1f1b", cuts[1:2])):
        model = staged(copy.deepcopy(plain), cuts=ours, schedule=schedule, microbatches=2)
        torch.manual_seed(3)
        losses = [model(*points(8, k))["loss"] for k in range(2)]
        torch.manual_seed(3)
        expected = [plain(*points(8, k))["loss"] for k in range(2)]
        found[schedule] = max(distance(a, b) for a, b in zip(losses, expected, strict=True))
    return found


def optimizers() -> dict[str, float]:
    found = {}
    makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": sgd,
        "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    }
    for name, make in makes.items():
        found[name] = train(llama, make, 3, cluster=slow_devices(2), stages=2, microbatches=2)[
            "param"
        ]
    plain = llama()
    model = staged(copy.deepcopy(plain))
    for each in (model, plain):
        optimizer = torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=3)
        for step in range(2):

            def closure(each: Any = each, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = each(**batch(step)).loss
                loss.backward()
                return loss

            optimizer.step(closure)
    return found | {"lbfgs": most(model, plain)}


LOADED: tuple[dict[str, Any], ...] = (
    {"cuts": "model.layers.1", "microbatches": 4},
    {"stages": 4, "schedule": "interleaved:2", "microbatches": 2},
    {"stages": 1, "strategy": "fsdp"},
)


def checkpoints(ways: Sequence[dict[str, Any]] = LOADED) -> dict[str, float]:
    """Saved with two stages, and loaded with others, or none: training goes on alike."""
    folder = [tempfile.mkdtemp() if RANK == 0 else ""]
    model = staged(llama(4), microbatches=2)
    optimizer = adamw(model.parameters())

    def steps(each: Any, by: torch.optim.Optimizer, numbers: Sequence[int]) -> list[float]:
        losses = []
        for step in numbers:
            loss = each(**batch(step)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            by.step()
            by.zero_grad()
            losses.append(loss.item())
        return losses

    steps(model, optimizer, range(2))
    dist.broadcast_object_list(folder)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder[0])
    expected = steps(model, optimizer, range(2, 5))
    found: dict[str, float] = {}
    for how in ways:
        other = llama(4)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other = staged(other, **how)
        other.prepare(**batch(0))
        again = adamw(other.parameters())
        states = get_state_dict(other, again)
        loaded = {"model": states[0], "optimizer": states[1]}
        dcp.load(loaded, checkpoint_id=folder[0])
        set_state_dict(
            other, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        losses = steps(other, again, range(2, 5))
        found[str(how)] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return found


def from_files() -> dict[str, Any]:
    """Each rank reads the weights of its stages alone, and none of others'."""
    folder = [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(folder)
    plain = llama()
    if RANK == 0:
        plain.save_pretrained(folder[0])  # type: ignore[operator]
    dist.barrier()
    with torch.device("meta"):
        model = llama()
    model = staged(model, weights=folder[0], microbatches=2)
    loss = distance(model(**batch(0)).loss, plain(**batch(0)).loss)
    target = Path(folder[0]) / "again"
    model.save_pretrained(target)
    dist.barrier()
    again = type(plain).from_pretrained(target)  # type: ignore[attr-defined]
    return {"loss": loss, "saved": most(again, plain)}


def two() -> dict[str, Any]:
    """What two processes are enough for, in one start."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "script": trained(llama(), cluster=slow_devices(2), stages=2, microbatches=2),
        "zero bubble": train(
            gpt2, adamw, 3, cluster=slow_devices(2), stages=2, microbatches=4,
            schedule="zb-h1", verify=True,
        ),
        "dropout": dropout(),
        "any order": dropout(schedule=ANY_ORDER),
        "scripts": scripts(),
        "checkpoints": checkpoints(LOADED[:1]),
        "files": from_files(),
        "random": random_numbers_among_others(),
        "shared": shared_at_end(),
        "unasked": unasked(),
    }  # fmt: skip
    return found


def two_more() -> dict[str, Any]:
    """What else two processes are enough for."""
    torch.set_num_threads(1)
    return {
        "interleaved": train(
            lambda: llama(4), adamw, 3, cluster=slow_devices(2), stages=4, microbatches=4,
            schedule="interleaved:2", verify=True,
        ),
        "checkpoints": checkpoints(LOADED[1:]),
        "two parts": backward_in_two_parts(),
        "dropout in two parts": dropout(schedule="zb-h1"),
        "optimizers": optimizers(),
        "many at once": gradients_of_several_stages(),
        "frozen": frozen_and_made_again(),
        "other calls": other_calls(),
        "unasked": unasked_after_evaluation(),
    }  # fmt: skip
