"""DTensor's shards beside ours, on real process groups."""

from __future__ import annotations

from itertools import product

import torch
from torch.distributed.tensor import distribute_tensor

from autopar.ir.graph import Atom, TensorType
from autopar.ir.redistribute import is_legal
from autopar.ir.uneven import chunked_axes, stored
from autopar.runtime.process import world
from autopar.runtime.simulator.shards import shard
from tests.codegen.meshes import mesh


def chunks(*sizes: int) -> dict[str, int]:
    """How many tensors are cut by DTensor otherwise than by autopar, and how many are cut at all,
    over every way to lay some on a mesh."""
    on = mesh(*sizes)
    groups = world.make_groups(on, world.join(torch.device("cpu")))
    seen = {"wrong": 0, "uneven": 0}
    for shape in ((7, 5), (3, 10), (9, 1), (2, 13)):
        atoms = tuple(Atom(size, str(size), True) for size in shape)
        parts = tuple((k,) if size > 1 else () for k, size in enumerate(shape))
        kind = TensorType("float32", shape, parts)
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
        for dims in product((None, *(d for d in (0, 1) if parts[d])), repeat=len(sizes)):
            sharding = stored(kind, atoms, dims, on.sizes)
            if is_legal(kind, atoms, sharding, on.sizes):
                places = world.param_placements(sharding)
                theirs = distribute_tensor(whole, groups.params, places).to_local()
                ours = shard(whole, kind, atoms, sharding, on, groups.coordinate)
                seen["wrong"] += not torch.equal(theirs, ours)
                seen["uneven"] += len(chunked_axes(sharding)) > 0
    return seen
