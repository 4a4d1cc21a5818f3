"""What devices of one mesh hand to those of another is each one's piece, every element once."""

from __future__ import annotations

from math import prod

import pytest
import torch

from autopar.errors import PlanError
from autopar.ir.graph import Atom, TensorType
from autopar.ir.redistribute import OnMesh, holders, local_part_sizes, shard_pieces, states
from autopar.ir.sharding import Sharding
from autopar.runtime.simulator.shards import shard
from tests.codegen.meshes import mesh

ATOMS = tuple(Atom(size, name, in_param=False) for size, name in ((4, "b"), (6, "h"), (2, "w")))
TENSOR = TensorType("float32", (4, 12), ((0,), (1, 2)))
MESHES = [(), (2,), (3,), (2, 2), (2, 3)]


@pytest.mark.parametrize("target_sizes", MESHES)
@pytest.mark.parametrize("source_sizes", MESHES)
def test_pieces_are_put_together_of_what_overlaps(
    source_sizes: tuple[int, ...], target_sizes: tuple[int, ...]
) -> None:
    whole = torch.arange(48.0).reshape(TENSOR.shape)
    source_mesh, target_mesh = mesh(*source_sizes), mesh(*target_sizes)

    def piece(on: OnMesh, device: int) -> torch.Tensor:
        coordinate = on.mesh.coordinate(device)
        found = shard(whole, TENSOR, ATOMS, on.sharding, on.mesh, coordinate)
        sizes = local_part_sizes(TENSOR, ATOMS, on.sharding, on.mesh.sizes)
        return found.reshape([size for parts in sizes for size in parts])

    for given in states(TENSOR, ATOMS, source_sizes, partial=False):
        source = OnMesh(source_mesh, given)
        held = holders(TENSOR, ATOMS, source)
        for wanted in states(TENSOR, ATOMS, target_sizes, partial=False):
            target = OnMesh(target_mesh, wanted)
            for device in range(target_mesh.num_devices):
                box = target.box(TENSOR, ATOMS, device)
                expected = piece(target, device)
                made = torch.full_like(expected, -1)
                for sender, part in shard_pieces(held, box, device):
                    own = source.box(TENSOR, ATOMS, sender)
                    into = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(part, box))
                    outof = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(part, own))
                    assert (made[into] == -1).all(), "an element came twice"
                    made[into] = piece(source, sender)[outof]
                assert torch.equal(made, expected), (str(given), str(wanted), device)


def test_on_equal_meshes_a_device_sends_to_its_like() -> None:
    on = OnMesh(mesh(2, 2), Sharding.parse("[R, S(0)]"))
    held = holders(TENSOR, ATOMS, on)
    for device in range(4):
        (only,) = shard_pieces(held, on.box(TENSOR, ATOMS, device), device)
        assert only.source == device
        assert prod(b - a for a, b in only.box) == 24


def test_what_is_partial_is_not_handed_on() -> None:
    with pytest.raises(PlanError, match="no way to hand a tensor on"):
        OnMesh(mesh(2), Sharding.parse("[P]")).box(TENSOR, ATOMS, 0)
