"""What the processes of `test_stages.py` do with stages of any sizes under any plans."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import autopar
from autopar.driver.search.segments import segments
from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Role
from autopar.ir.input_sharding import describe_inputs
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.stages import cut_at, in_stages
from autopar.plans.plan import Plan
from autopar.plans.structure import Stage, Structure
from autopar.runtime.torch_private import flatten
from autopar.tracer import trace
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.codegen.test_offload import in_blocks
from tests.codegen.test_two_parts import ROWS, WIDTH, Deep, planned
from tests.runtime.workers import (
    RANK,
    adamw,
    batch,
    distance,
    gpt2,
    llama,
    most,
    slow_devices,
    staged,
    train,
)
from tests.zoo.cases import build


def stage_plan(
    model: nn.Module, inputs: dict[str, Any], sizes: Sequence[int], microbatches: int, seed: int,
    schedule: str = "1f1b", *, with_memory: bool = False,
) -> Plan:  # fmt: skip
    """Random decisions for as many stages as there are `sizes`, the devices of each, cut at
    modules; a weight that is tied is stored alike. `with_memory`: some is recomputed, offloaded,
    and at home on the host; backward then comes in two parts, and no weight is tied."""
    traced = trace(model, (), inputs)
    graph = in_microbatches(traced.graph, microbatches)
    parts = segments(graph)
    step = max(1, len(parts) // len(sizes))
    starts = [parts[k * step].module for k in range(1, len(sizes))]
    stages: list[Stage] = []
    stored: dict[str, str] = {}
    graphs = in_stages(graph, [cut_at(graph, start) for start in starts])
    firsts = [0, *accumulate(sizes)]
    for k, (each, size) in enumerate(zip(graphs, sizes, strict=True)):
        pins = {n.key: stored[n.target] for n in each.with_role(Role.PARAM) if n.target in stored}
        axes = [size][: size > 1]
        if with_memory:
            found = planned(each, in_blocks(*axes), microbatches, seed + k).structure.only
        else:
            found = random_plan(each, mesh(*axes), seed + k, pins, microbatches).structure.only
        stored |= {name: str(p.choice) for name, p in found.params.items()}
        start = ["", *starts][k]
        stages.append(msgspec.structs.replace(found, start=start, first_rank=firsts[k]))
    cluster = f"{sum(sizes)}xcpu"
    whole = random_plan(traced.graph, mesh(), seed)
    structure = Structure(
        model=traced.graph.name, fingerprint=fingerprint(traced.graph), cluster=cluster,
        optimizer="sgd", inputs=describe_inputs(traced.graph), stages=tuple(stages),
        schedule=schedule,
    )  # fmt: skip
    none = whole.estimates
    estimates = msgspec.structs.replace(none, stages=none.stages * len(stages))
    return msgspec.structs.replace(whole, structure=structure, estimates=estimates)


def any_plan(name: str, sizes: Sequence[int], microbatches: int, seed: int, schedule: str) -> float:
    """How far a model of the zoo is from eager, in float64."""
    model, inputs = build(name)
    return under(stage_plan(model, inputs, sizes, microbatches, seed, schedule), model, inputs)


def memory_choices(microbatches: int) -> dict[str, float]:
    """Stages of which each makes some again, offloads some, and has parameters on the host."""
    torch.manual_seed(0)
    model = Returning().double()
    inputs = {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64)}
    plan = stage_plan(
        model, inputs, (2, 2), microbatches, microbatches - 1, "zb-h1", with_memory=True
    )
    parts = plan.structure.stages
    assert any(part.recompute and part.offloaded for part in parts)
    assert any(p.choice.num_on_host for part in parts for p in part.params.values())
    return {f"{microbatches} microbatches": under(plan, model, inputs)}


class Returning(Deep):
    """A loss by its name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x)}


def under(plan: Plan, model: nn.Module, inputs: dict[str, Any]) -> float:
    """How far a model of float64 is from eager in stages."""
    ours = autopar.compile(copy.deepcopy(model), plan=plan)
    worst = 0.0
    for _ in range(2):
        losses = []
        for each in (ours, model):
            leaves = [x for x in flatten(dict(each(**inputs)))[0] if isinstance(x, Tensor)]
            losses.append(sum(x for x in leaves if not x.dim() and x.requires_grad))
            losses[-1].backward()
        worst = max(worst, distance(losses[0], losses[1].detach()))
    for (_, a), (_, b) in zip(ours.named_buffers(), model.named_buffers(), strict=True):
        worst = max(worst, float((a - b).abs().max()) if a.numel() else 0.0)
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        if q.grad is not None:
            scale = max(float(q.grad.abs().max()), 1e-6)
            worst = max(worst, float((p.grad.full_tensor() - q.grad).abs().max()) / scale)
    with torch.no_grad():
        # Planned anew, with parameters as each stage has them.
        more = {key: torch.cat((x, x)) for key, x in inputs.items()}
        left, right = (flatten(dict(each.eval()(**more)))[0] for each in (ours, model))
    pairs = zip(left, right, strict=True)
    scalars = [(a, b) for a, b in pairs if isinstance(b, Tensor) and not b.dim()]
    return max(worst, *(distance(a, b) for a, b in scalars))


def four() -> dict[str, Any]:
    """Four stages, and what saves memory in stages of two processes."""
    torch.set_num_threads(1)
    how = {"cluster": slow_devices(4), "microbatches": 4}
    return {
        "llama": train(lambda: llama(4), adamw, 4, **how, stages=4),
        "memory": memory_choices(2),
    }


def four_more() -> dict[str, Any]:
    """Stages of two processes that share out parameters, ranks that differ in their meshes, and
    what saves memory without microbatches."""
    torch.set_num_threads(1)
    how = {"cluster": slow_devices(4), "microbatches": 4}
    return {
        "llama by tensors": train(llama, adamw, 4, **how, stages=2, strategy="megatron"),
        "gpt2": train(gpt2, adamw, 4, **how, stages=2, strategy="fsdp"),
        "unequal": train(lambda: llama(4), adamw, 4, **how, mesh="1/2/1", schedule="zb-h1"),
        "other calls": unequal_ranks(),
        "memory": memory_choices(1),
    }


def unequal_ranks() -> dict[str, float]:
    """Calls of other sizes, in evaluation too, of a model whose ranks differ in their meshes, with
    dropout, what is saved of it, and what is loaded into others."""
    plain = gpt2()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    model = staged(copy.deepcopy(plain), 4, stages=3, mesh="1/2/1", microbatches=2)
    found: dict[str, float] = {}
    losses: list[list[Tensor]] = []
    for each in (model, plain):
        torch.manual_seed(7)
        losses.append([])
        for size in (8, 6, 5):
            loss = each(**{name: x[:size] for name, x in batch(size).items()}).loss
            loss.backward()
            losses[-1].append(loss)
    found["losses"] = max(distance(a, b) for a, b in zip(*losses, strict=True))
    found["gradients"] = most(model, plain, "grad")
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        found["evaluation"] = distance(model(**batch(1)).loss, plain(**batch(1)).loss)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if RANK == 0:
        theirs = plain.state_dict()
        found["saved"] = max(distance(whole[name], theirs[name]) for name in theirs)
    folder = [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    other = staged(gpt2(), 4, stages=2, microbatches=2)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    other.eval()
    other.prepare(**batch(1))
    loaded = get_model_state_dict(other)
    dcp.load(loaded, checkpoint_id=folder[0])
    set_model_state_dict(other, loaded)
    with torch.no_grad():
        found["loaded"] = distance(other(**batch(1)).loss, plain(**batch(1)).loss)
    return found


def any_stages() -> dict[str, float]:
    """Stages of any sizes under any plans."""
    torch.set_num_threads(1)
    return {
        f"{name} {sizes} {schedule} {microbatches}": any_plan(
            name, sizes, microbatches, seed, schedule
        )
        for seed, (name, sizes, microbatches, schedule) in enumerate(ANY)
    }


ANY = (
    ("llama", (1, 2, 1), 2, "1f1b"),
    ("gemma", (2, 2), 2, "1f1b"),
    ("llama", (3, 1), 2, "gpipe"),
    ("gpt2", (2, 2), 4, "1f1b"),
    ("t5", (2, 2), 2, "gpipe"),
    ("mixtral", (2, 2), 1, "1f1b"),
    ("resnet", (2, 2), 1, "1f1b"),
    ("gemma", (1, 1, 1, 1), 2, "1f1b"),
)
