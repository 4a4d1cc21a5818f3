"""What the processes of `test_processes.py` do. Each function returns what its rank saw."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import autopar
from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.errors import AutoparError
from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster, Level, Link
from autopar.runtime.program.sharded import ShardedOutput
from autopar.tracer import trace
from tests.codegen.random_plans import random_plan
from tests.device import device, there
from tests.grouped import grouped
from tests.planned import plan_for
from tests.redone import redecided
from tests.runtime.chunk_workers import chunks

STEPS = 10
BATCH, LENGTH = 8, 16
RANK = int(os.environ.get("RANK", "0"))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return there(GPT2LMHeadModel(config))


def llama(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return there(LlamaForCausalLM(config))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=8, vocab_size=96,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return there(MixtralForCausalLM(config))


def slow_devices(count: int = 4) -> Cluster:
    """Devices so slow, and links so fast, that it pays to divide all work."""
    cpus = parse_cluster(f"{count}xcpu")
    device = replace(cpus.device, flops_per_s=(("float32", 1e6),), launch_s=0.0)
    link = Link("fast", 1e12, 1e-9, 0.0, "made up")
    return replace(cpus, device=device, levels=(Level(count, link),))


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 96, (BATCH, LENGTH), generator=generator).to(device())
    return {"input_ids": ids, "labels": ids.clone()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    return float((whole(a).detach() - b.detach()).abs().max() / b.detach().abs().max())


Optimizer = Callable[[Any], torch.optim.Optimizer]


def train(
    make: Callable[[], nn.Module], optimizer: Optimizer, steps: int = STEPS, **options: Any
) -> dict[str, Any]:
    """Train compiled and plain side by side; the largest differences of anything."""
    reference = make()
    ours = copy.deepcopy(reference)
    if RANK:
        # Ranks start from other values: those of rank 0 are to hold.
        with torch.no_grad():
            for param in ours.parameters():
                param.add_(1.0)
    names = list(reference.state_dict())
    model = autopar.compile(ours, **grouped(**options))
    opt, ref_opt = optimizer(model.parameters()), optimizer(reference.parameters())
    ids = [id(p) for p in model.parameters()]
    seen: dict[str, Any] = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "param": 0.0}
    for step in range(steps):
        loss, expected = model(**batch(step)).loss, reference(**batch(step)).loss
        loss.backward()
        expected.backward()
        seen["loss"] = max(seen["loss"], distance(loss, expected))
        if step == 0:
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            seen["grad"] = max(distance(p.grad, q.grad) for p, q in pairs)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        ref_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        seen["norm"] = max(seen["norm"], distance(norm, ref_norm))
        for o in (opt, ref_opt):
            o.step()
            o.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    seen["param"] = max(distance(p, q) for p, q in pairs)
    seen["same objects"] = ids == [id(p) for p in model.parameters()]
    seen["same names"] = list(model.state_dict()) == names
    seen["tied"] = [n for n, _ in model.named_parameters()] == [
        n for n, _ in reference.named_parameters()
    ]
    seen["sharded"] = sum(
        any(not placement.is_replicate() for placement in p.placements)
        for p in model.parameters()
        if isinstance(p, DTensor)
    )
    seen["uneven"] = sum("C(" in p.storage for p in model.plans[0].structure.params.values())
    seen["mesh"] = [axis.size for axis in model.plans[0].structure.stages[0].mesh]
    return seen


def adamw(params: Any) -> torch.optim.Optimizer:
    # The gradient of a key's bias is rounding noise, and a small eps makes steps of it.
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-5)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


class Net(nn.Module):
    """Two layers with dropout between them, and a buffer that counts calls."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        h = self.down(self.dropout(torch.tanh(self.up(x))))
        return {"loss": ((h - y) ** 2).mean(), "h": h}


def net(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return there(Net(dropout))


def points(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, 16, generator=generator) for _ in range(2))
    return x.to(device()), y.to(device())


def stored_plan(model: nn.Module, inputs: dict[str, Tensor], mesh: str, seed: int) -> autopar.Plan:
    """Random decisions for `model`, as a plan of its own."""
    traced = trace(model, (), inputs)
    cluster = parse_cluster(f"{prod(map(int, mesh.split('x')))}xcpu")
    found = random_plan(traced.graph, parse_mesh(mesh, cluster), seed)
    return _as_stored(found, traced.graph, cluster)


def exchanging_plan(model: nn.Module, inputs: dict[str, Tensor], mesh: str) -> autopar.Plan:
    """The best plan for `model` that sends tokens to their experts."""
    traced = trace(model, (), inputs)
    found = plan_for(traced.graph, mesh, {".*:experts.*": "exchange"})
    return _as_stored(found, traced.graph, parse_cluster(f"{mesh}xcpu"))


def _as_stored(found: autopar.Plan, graph: Graph, cluster: Cluster) -> autopar.Plan:
    structure = redecided(found.structure, fingerprint=fingerprint(graph), cluster=cluster.name)
    return msgspec.structs.replace(found, structure=structure)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_shapes_and_modes() -> dict[str, Any]:
    """One model, called with two batch sizes, in training and in evaluation."""
    reference = net()
    model = autopar.compile(copy.deepcopy(reference), cluster=slow_devices(), mesh="2x2")
    seen: dict[str, Any] = {"loss": 0.0, "h": 0.0, "grad": 0.0}
    for n in (8, 4, 8):
        ours, theirs = model(*points(n)), reference(*points(n))
        ours["loss"].backward()
        theirs["loss"].backward()
        seen["loss"] = max(seen["loss"], distance(ours["loss"], theirs["loss"]))
        seen["h"] = max(seen["h"], distance(ours["h"], theirs["h"]))
        seen["h is in shards"] = isinstance(ours["h"], ShardedOutput)
    model.eval()
    reference.eval()
    with torch.no_grad():
        ours = model(*points(8, seed=1))
    seen["eval"] = distance(ours["loss"], reference(*points(8, seed=1))["loss"])
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    seen["grad"] = max(distance(p.grad, q.grad) for p, q in pairs)
    seen["programs"] = len(model.plans)
    seen["calls"] = float(model.calls)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    seen["full state"] = RANK > 0 or all(
        torch.equal(full[name], value) for name, value in reference.state_dict().items()
    )
    return seen


def dropout() -> dict[str, Any]:
    """Ranks that have drawn more or less drop the same, and the numbers of rank 0."""
    reference = net(0.5)
    model = autopar.compile(copy.deepcopy(reference), cluster=slow_devices(), mesh="4")
    torch.manual_seed(7)
    torch.rand(RANK)
    losses = [float(model(*points())["loss"]) for _ in range(2)]
    torch.manual_seed(7)
    expected = [float(reference(*points())["loss"]) for _ in range(2)]
    return {"losses": losses, "expected": expected}


def mistakes() -> dict[str, str]:
    """What each rank is told when ranks do not go together."""
    odd = RANK == 2
    seen: dict[str, str] = {}
    seen["options"] = error_of(lambda: autopar.compile(net(), optimizer="sgd" if odd else "adamw"))
    model = autopar.compile(net(), mesh="4")
    seen["batch"] = error_of(lambda: model(*points(8, seed=int(odd))))
    seen["shape"] = error_of(lambda: model(*points(4 if odd else 8)))
    seen["arguments"] = error_of(lambda: model(points()[0]) if odd else model(*points()))
    broken = net()
    if odd:
        broken.down.forward = broken.up.forward  # type: ignore[method-assign]
    failing = autopar.compile(broken, mesh="4")
    seen["one fails"] = error_of(lambda: failing(*points()))
    seen["right after wrong"] = error_of(lambda: model(*points()))
    tight = autopar.compile(net(), mesh="4", memory={"limit": "1KiB"})
    seen["memory"] = error_of(lambda: tight(*points()))
    seen["cluster"] = error_of(lambda: autopar.compile(net(), cluster="8xcpu"))
    plan = stored_plan(gpt2(), batch(0), "4", 0)
    seen["other model"] = error_of(lambda: autopar.compile(net(), plan=plan))
    return seen


def four() -> dict[str, Any]:
    """Everything that four processes are needed for, in one start."""
    torch.set_num_threads(1)
    plan = stored_plan(llama(1), batch(0), "2x2", 0)
    return {
        "mistakes": mistakes(),
        "modes": other_shapes_and_modes(),
        "chunks": chunks(2, 2),
        "dropout": dropout(),
        "gpt2": train(gpt2, adamw, cluster=slow_devices(), mesh="4"),
        "random": train(lambda: llama(1), sgd, 2, plan=plan),
        "mixtral": train(mixtral, sgd, 3, plan=exchanging_plan(mixtral(), batch(0), "4")),
    }


def staged(model: nn.Module, ranks: int = 2, **how: Any) -> Any:
    if "cuts" not in how:
        how = {"stages": 2} | how
    return autopar.compile(model, cluster=slow_devices(ranks), **grouped(**how))


def most(ours: nn.Module, theirs: nn.Module, of: str = "") -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(distance(p.grad, q.grad) if of == "grad" else distance(p, q) for p, q in pairs)
