"""Steps found and priced many at a time are those found and priced one by one."""

from __future__ import annotations

import pytest

from autopar.buckets import Sharing
from autopar.cluster import parse_cluster
from autopar.cost_model.moves import move_ns
from autopar.cost_model.network import Networks
from autopar.graph import Atom, TensorType
from autopar.meshes import parse_mesh
from autopar.reshard import states, step

ATOMS = Atom(16, "b", False), Atom(64, "s", False), Atom(16, "k", True), Atom(32, "d", True)
TYPES = (
    TensorType("bfloat16", (16, 64, 512), ((0,), (1,), (2, 3))),
    TensorType("bfloat16", (1024, 512), ((0, 1), (2, 3))),
)


@pytest.mark.parametrize(
    ("cluster", "mesh"), [("H100", "1"), ("4x4xH100", "4x4"), ("16xH100", "4x2x2")]
)
@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("tensor", TYPES)
def test_every_step(tensor: TensorType, bucketed: bool, cluster: str, mesh: str) -> None:
    described = parse_cluster(cluster)
    laid, device = parse_mesh(mesh, described), described.device
    shares = Sharing(1 << 16, 4)
    ends = states(tensor, ATOMS, laid.sizes, partial=True)
    found = Networks(ATOMS, laid, device, shares).between(tensor, ends, bucketed=bucketed)
    arcs = zip(found.tails.tolist(), found.heads.tolist(), found.costs.tolist(), strict=True)
    priced = {(found.states[a], found.states[b]): ns for a, b, ns in arcs}
    moves = {(a, b): step(tensor, ATOMS, a, b) for a in ends for b in ends}
    assert priced == {
        (a, b): move_ns(
            tensor, ATOMS, a, b, move, laid, device, sharing=shares if bucketed else None
        )
        for (a, b), move in moves.items()
        if move is not None
    }
