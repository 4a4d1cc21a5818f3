"""What the processes of `test_weights_processes.py` do, in the directory that FOLDER names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import autopar
from autopar.errors import AutoparError
from autopar.runtime.checkpoint import lazy
from autopar.runtime.checkpoint.initialise import Initialiser
from tests.runtime.workers import (
    adamw,
    batch,
    distance,
    error_of,
    llama,
    net,
    points,
    slow_devices,
    stored_plan,
    whole,
)

FOLDER = Path(os.environ.get("FOLDER", "."))
RANK = int(os.environ.get("RANK", "0"))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return llama(1)


def reference() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in FOLDER/pretrained, trained for two steps by eager."""
    model: nn.Module = type(llama(1)).from_pretrained(FOLDER / "pretrained")
    optimizer = adamw(model.parameters())
    for step in range(2):
        train(model, optimizer, step)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = model(**batch(step)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def save() -> dict[str, Any]:
    """From safetensors to shards, two steps, and into files of both kinds."""
    read: list[int] = []
    original = lazy.Stored.read

    def counted(self: lazy.Stored, place: lazy.Region) -> Tensor:
        piece = original(self, place)
        read.append(piece.nbytes)
        return piece

    lazy.Stored.read = counted
    plan = stored_plan(llama(1), batch(0), "2x2", 0)
    model = autopar.compile(on_meta(), weights=FOLDER / "pretrained", plan=plan)
    optimizer = adamw(model.parameters())
    before = sum(read)
    model.prepare(**batch(0))
    lazy.Stored.read = original
    locals_ = [p.to_local() for p in model.parameters()]
    seen: dict[str, Any] = {
        "read before planning": before,
        "read": sum(read),
        "stored": sum(x.nbytes for x in locals_),
        "held": sum(x.untyped_storage().nbytes() for x in locals_),
        "whole": sum(p.nbytes for p in model.parameters()),
        "names": list(model.state_dict()) == list(llama(1).state_dict()),
    }
    for step in range(2):
        train(model, optimizer, step)
    theirs, _ = reference()
    pairs = zip(model.parameters(), theirs.parameters(), strict=True)
    seen["param"] = max(distance(p, q) for p, q in pairs)
    state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optim_state}, checkpoint_id=FOLDER / "dcp")
    model.save_pretrained(FOLDER / "saved", max_shard_size="20KB")
    unwritable = FOLDER / "pretrained" / "config.json" / "under a file"
    try:
        model.save_pretrained(unwritable)
    except (AutoparError, OSError) as error:
        seen["unwritable"] = repr(error)
    return seen


def load(plan: autopar.Plan | None = None) -> dict[str, Any]:
    """The checkpoint of `save` on the processes there are: the third step is that of eager."""
    model = autopar.compile(on_meta(), seed=5, plan=plan)
    model.prepare(**batch(0))
    optimizer = adamw(model.parameters())
    state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optim_state}, checkpoint_id=FOLDER / "dcp")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim_state)
    theirs, their_optimizer = reference()
    seen = {"loaded": max(map(distance, model.parameters(), theirs.parameters()))}
    ours = [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]
    seen["state"] = max(
        distance(x, their_optimizer.state[q]["exp_avg_sq"])
        for x, q in zip(ours, theirs.parameters(), strict=True)
    )
    loss, expected = train(model, optimizer, 2), train(theirs, their_optimizer, 2)
    seen["loss"] = distance(loss, expected)
    seen["param"] = max(map(distance, model.parameters(), theirs.parameters()))
    return seen


def seeded(mesh: str) -> dict[str, Any]:
    """Initialised on a mesh: the same values as on any, each rank with its shard alone."""
    init = Initialiser(on_meta(), 5)
    plan = stored_plan(llama(1), batch(0), mesh, 1)
    model = autopar.compile(on_meta(), seed=5, plan=plan)
    model.prepare(**batch(0))
    pairs = dict(model.named_parameters())
    held = sum(p.to_local().untyped_storage().nbytes() for p in pairs.values())
    return {
        "equal": all(torch.equal(whole(p).detach(), init.whole(n)) for n, p in pairs.items()),
        "held": held / sum(p.nbytes for p in pairs.values()),
    }


FEW = ("local on 2x2", "mapping", "2-D", "replicated")
"""Pieces and DTensors of each kind."""


def handed_in_pieces(*, few: bool) -> dict[str, Any]:
    """The same step from the global batch, local pieces, and DTensors of several kinds: of `FEW`,
    or of all others."""
    seen: dict[str, Any] = {}
    theirs = net()
    expected = theirs(*points())["loss"]
    expected.backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,))
    x, y = (whole[2 * RANK : 2 * RANK + 2] for whole in points())

    def dtensors(where: DeviceMesh, *placements: Placement) -> tuple[Tensor, ...]:
        return tuple(distribute_tensor(tensor, where, placements) for tensor in points())

    ways: dict[str, tuple[Any, str, tuple[Tensor, ...]]] = {
        "local on 2x2": ("local", "2x2", (x, y)),
        "mapping": ({"x": "local"}, "2x2", (x, points()[1])),
        "1-D": ("global", "2x2", dtensors(line, Shard(0))),
        "2-D": ("global", "2x2", dtensors(mesh, Shard(0), Replicate())),
        "2-D, other dim": ("global", "2x2", dtensors(mesh, Replicate(), Shard(1))),
        "2-D on 4": ("global", "4", dtensors(mesh, Shard(0), Shard(1))),
        "replicated": ("global", "4", dtensors(line, Replicate())),
    }
    for name in ways:
        if (name in FEW) != few:
            continue
        inputs, shape, args = ways[name]
        model = autopar.compile(net(), inputs=inputs, cluster=slow_devices(), mesh=shape)
        loss = model(*args)["loss"]
        loss.backward()
        pairs = zip(model.parameters(), theirs.parameters(), strict=True)
        seen[name] = max(distance(loss, expected), *(distance(p.grad, q.grad) for p, q in pairs))
        seen[f"{name} input"] = model.plans[0].structure.inputs[0]
    return seen


def loaded() -> dict[str, Any]:
    """What ranks load, put together, is what one process loads."""
    rows = torch.arange(20)
    ours: list[list[int]] = []
    for _ in range(2):
        loader = autopar.dataloader(rows, 8, shuffle=True, drop_last=True, seed=3)  # pyright: ignore[reportArgumentType]
        for piece in loader:
            pieces = [torch.empty_like(piece) for _ in range(4)]
            dist.all_gather(pieces, piece)
            ours.append(torch.cat(pieces).tolist())
    wrong = error_of(lambda: autopar.dataloader(rows, 6))  # pyright: ignore[reportArgumentType]
    return {"batches": ours, "wrong": wrong}


def random() -> dict[str, Any]:
    """Dropout with a fixed seed, twice, by ranks that have drawn more or less before."""
    losses: list[list[float]] = []
    for seed in (7, 7, 8):
        model = autopar.compile(net(0.5), cluster=slow_devices(), mesh="4")
        torch.manual_seed(seed)
        torch.rand(100 * RANK)
        losses.append([float(model(*points())["loss"]) for _ in range(2)])
    return {"losses": losses}


def four() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "save": save(),
        "load": load(stored_plan(llama(1), batch(0), "4", 2)),
        "seeded": seeded("2x2"),
        "pieces": handed_in_pieces(few=True),
        "loaded": loaded(),
    }


def four_more() -> dict[str, Any]:
    """On another mesh, from other pieces, and with dropout."""
    torch.set_num_threads(1)
    pieces = handed_in_pieces(few=False)
    return {"seeded": seeded("4"), "pieces": pieces, "random": random()}


def two() -> dict[str, Any]:
    torch.set_num_threads(1)
    return load()
