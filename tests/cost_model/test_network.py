"""Steps found and priced many at a time are those found and priced one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.moves import move_ns
from autopar.cost_model.network import MoveRequest, networks
from autopar.errors import ClusterError
from autopar.ir.buckets import Sharing
from autopar.ir.graph import Atom, TensorType
from autopar.ir.redistribute import states, step
from autopar.ir.uneven import chunkable_dim, stored

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
    wanted = MoveRequest(tensor, frozenset(ends), bucketed)
    (found,) = networks([wanted], ATOMS, laid, device, shares)
    arcs = zip(found.tails.tolist(), found.heads.tolist(), found.costs.tolist(), strict=True)
    priced = {(found.states[a], found.states[b]): ns for a, b, ns in arcs}
    moves = {(a, b): step(tensor, ATOMS, a, b) for a in ends for b in ends}
    assert priced == {
        (a, b): move_ns(
            tensor, ATOMS, a, b, move, laid, device, sharing=shares if bucketed else None
        )[0]
        for (a, b), move in moves.items()
        if move is not None
    }


def test_what_is_remembered_is_of_the_same_tensors_mesh_and_device() -> None:
    """Atoms that are numbered otherwise are the same, those of another size and links are not."""
    described = parse_cluster("4x4xH100")
    laid, device = parse_mesh("4x4", described), described.device
    ends = frozenset(states(TYPES[0], ATOMS, laid.sizes, partial=True))
    wanted, shares = MoveRequest(TYPES[0], ends, bucketed=True), Sharing(1 << 16, 4)
    (found,) = networks([wanted], ATOMS, laid, device, shares)
    turned = replace(TYPES[0], parts=((3,), (2,), (1, 0)))
    (same,) = networks([replace(wanted, tensor=turned)], ATOMS[::-1], laid, device, shares)
    assert same is found
    axis = laid.axes[0]
    slower = replace(axis, link=replace(axis.crossed, bytes_per_s=axis.crossed.bytes_per_s / 2))
    slow = replace(laid, axes=(slower, laid.axes[1]))
    wider = (*ATOMS[:3], replace(ATOMS[3], size=64))
    wide = replace(TYPES[0], shape=(16, 64, 1024))
    for tensor, atoms, mesh, sharing in (
        (TYPES[0], ATOMS, slow, shares),
        (TYPES[0], ATOMS, laid, Sharing(1 << 30, 400)),
        (wide, wider, laid, shares),
        (replace(TYPES[0], dtype="float32"), ATOMS, laid, shares),
    ):
        (other,) = networks([replace(wanted, tensor=tensor)], atoms, mesh, device, sharing)
        assert other.states == found.states
        assert (other.costs != found.costs).any()


def test_times_that_are_none_are_refused() -> None:
    """Of one tensor and of many at once: sums of them would leave 64 bits."""
    described = parse_cluster("8xH100")
    laid, link = parse_mesh("8", described), described.levels[0].link
    slow = replace(
        laid, axes=(replace(laid.axes[0], link=replace(link, latency_s=1e300, curves=())),)
    )
    ends = frozenset(states(TYPES[0], ATOMS, laid.sizes, partial=True))
    longer = TensorType("bfloat16", (16, 128, 512), ((0,), (4,), (2, 3)))
    both = [MoveRequest(tensor, ends, bucketed=False) for tensor in (TYPES[0], longer)]
    atoms = (*ATOMS, Atom(128, "s", False))
    for wanted in (both[:1], both):
        with pytest.raises(ClusterError, match=r"takes [\d.]+e\+30\d s: raise the"):
            networks(wanted, atoms, slow, described.device, Sharing(1, 1))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("mesh", ["8", "4x2"])
@pytest.mark.parametrize("bucketed", [False, True])
def test_many_sizes_at_once(bucketed: bool, mesh: str) -> None:
    """Tensors alike but for their sizes are priced together as each is alone: those that divide,
    those that do not, which are cut into uneven chunks, and those of which nothing is left."""
    described = parse_cluster("8xH100")
    laid, device = parse_mesh(mesh, described), described.device
    shares = Sharing(1 << 16, 4)
    atoms = tuple(Atom(n, f"n{n}", True) for n in (2, 4, 7, 8, 9, 16, 64, 65, 66, 96, 4096, 40_000))
    wanted: list[MoveRequest] = []
    for rows, columns in product(range(len(atoms)), repeat=2):
        shape = atoms[rows].size, atoms[columns].size
        tensor = TensorType("float32", shape, ((rows,), (columns,)))
        dims = product((None, chunkable_dim(tensor, laid.sizes)), repeat=len(laid.axes))
        uneven = {stored(tensor, atoms, some, laid.sizes) for some in dims}
        ends = {*states(tensor, atoms, laid.sizes, partial=True), *uneven}
        wanted.append(MoveRequest(tensor, frozenset(ends), bucketed))
    together = networks(wanted, atoms, laid, device, shares)
    assert any(any("C" in name for name in network.names) for network in together)
    for each, found in zip(wanted, together, strict=True):
        (alone,) = networks([each], atoms, laid, device, shares)
        assert found.states == alone.states
        for ours, theirs in (
            (found.tails, alone.tails), (found.heads, alone.heads), (found.costs, alone.costs),
        ):  # fmt: skip
            assert ours.tolist() == theirs.tolist()
