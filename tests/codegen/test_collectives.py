"""Every legal step between two states of small tensors, emitted and run on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, fx

from autopar.cluster.devices import DEVICES
from autopar.codegen.collectives import WAIT, Packing, collective_call, parts_of
from autopar.codegen.passes import apply_passes
from autopar.cost_model.collectives import collective_s
from autopar.cost_model.moves import move_ns, to_ns
from autopar.cost_model.roofline import stream_s
from autopar.ir.graph import Atom, TensorType
from autopar.ir.mesh import Link, Mesh
from autopar.ir.redistribute import Collective, local_bytes, local_shape, states, step
from autopar.ir.sharding import R, Sharding
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.simulator import spmd
from autopar.runtime.simulator.shards import shard, unshard
from tests.codegen.meshes import mesh

ATOMS = (
    Atom(12, "a", True),
    Atom(12, "b", False),
    Atom(4, "c", True),
    Atom(3, "d", False),
    Atom(24, "e", False),
)
TYPES = {
    "a": TensorType("float64", (12,), ((0,),)),
    "b c": TensorType("float64", (12, 4), ((1,), (2,))),
    "(c a)": TensorType("float64", (48,), ((2, 0),)),
    "d (b c) a": TensorType("float64", (3, 48, 12), ((3,), (1, 2), (0,))),
    "1 a 1 (d e)": TensorType("float64", (1, 12, 1, 72), ((), (0,), (), (3, 4))),
}
MESHES = ((2,), (4,), (2, 2), (2, 3))


def steps(kind: TensorType, on: Mesh) -> Iterator[tuple[Sharding, Sharding, Collective]]:
    found = states(kind, ATOMS, on.sizes, partial=True)
    for source in found:
        for target in found:
            move = step(kind, ATOMS, source, target)
            if move is not None:
                yield source, target, move


def pieces_of(whole: Tensor, kind: TensorType, sharding: Sharding, on: Mesh) -> list[Tensor]:
    """One piece per rank; partial ones are random numbers that add up to the whole."""
    partial = [k for k, p in enumerate(sharding) if p.kind == "P"]
    rest = Sharding(tuple(R if p.kind == "P" else p for p in sharding))
    indices = list(product(*(range(on.sizes[k]) for k in partial)))
    terms = {index: torch.randn_like(whole) for index in indices[1:]}
    terms[indices[0]] = whole - sum(terms.values())
    found: list[Tensor] = []
    for rank in range(on.num_devices):
        at = on.coordinate(rank)
        found.append(shard(terms[tuple(at[k] for k in partial)], kind, ATOMS, rest, on, at))
    return found


def moved(packing, x: fx.Node, move: Collective, num: int, axis: str) -> fx.Node:
    """`x` after a step, sent on its own."""
    if move.kind == "slice":
        return packing.cut(x)
    target, behind = collective_call(move.kind, num, axis)
    issued = packing.graph.call_function(target, (packing.pack(x), *behind))
    return packing.unpack(packing.graph.call_function(WAIT, (issued,)))


def emitted(
    kind: TensorType, source: Sharding, target: Sharding, move: Collective, on: Mesh
) -> fx.GraphModule:
    graph = LeanGraph()
    x = graph.placeholder("x")
    axis = on.axes[move.axis]
    before, after = (parts_of(kind, ATOMS, s, on.sizes) for s in (source, target))
    packing = Packing(graph, axis.name, axis.size, before, after, move)
    graph.output((moved(packing, x, move, axis.size, axis.name),))
    return fx.GraphModule({}, apply_passes(graph))


def names(gm: fx.GraphModule) -> list[str]:
    """The ops called, without namespace and overload."""
    called = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    return [t.__name__.partition(".")[0] for t in called]


COMMUNICATING = {
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "all_to_all_single",
}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_every_step(name: str, sizes: Sequence[int]) -> None:
    torch.manual_seed(0)
    kind, on = TYPES[name], mesh(*sizes)
    whole = torch.randn(kind.shape, dtype=torch.float64)
    kinds: set[str] = set()
    for source, target, move in steps(kind, on):
        kinds.add(move.kind)
        gm = emitted(kind, source, target, move, on)
        assert sum(n in COMMUNICATING for n in names(gm)) == (move.kind != "slice"), (
            source,
            target,
        )
        given = pieces_of(whole, kind, source, on)
        results = [r[0] for r in spmd.run(gm, on, [[piece] for piece in given])]
        assert tuple(results[0].shape) == local_shape(kind, ATOMS, target, on.sizes)
        assert move.kind == "slice" or all(r.is_contiguous() for r in results)
        found = unshard(results, kind, ATOMS, target, on, name=f"{source} -> {target}")
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
        if not target.has_partial:
            for rank, result in enumerate(results):
                expected = shard(whole, kind, ATOMS, target, on, on.coordinate(rank))
                torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    assert kinds >= {"all_reduce", "reduce_scatter", "all_gather", "slice"}


@pytest.mark.parametrize(
    ("name", "source", "target", "expected"),
    [
        ("b c", "[S(0)]", "[R]", "contiguous all_gather_into_tensor wait_tensor"),
        ("b c", "[P]", "[S(0)]", "contiguous reduce_scatter_tensor wait_tensor"),
        ("b c", "[P]", "[R]", "contiguous all_reduce wait_tensor"),
        ("b c", "[R]", "[S(0)]", "local_chunk"),
        ("b c", "[R]", "[S(1)]", "local_chunk"),
        (
            "b c",
            "[S(1)]",
            "[R]",
            "contiguous all_gather_into_tensor wait_tensor reshape permute contiguous reshape",
        ),
        (
            "1 a 1 (d e)",
            "[S(1)]",
            "[R]",
            "contiguous all_gather_into_tensor wait_tensor reshape",
        ),
    ],
)
def test_no_layout_op_without_need(name: str, source: str, target: str, expected: str) -> None:
    kind, on = TYPES[name], mesh(2)
    states_ = Sharding.parse(source), Sharding.parse(target)
    move = step(kind, ATOMS, *states_)
    assert move is not None
    gm = emitted(kind, *states_, move, on)
    assert " ".join(names(gm)) == expected


def laid_over(on: Mesh) -> Mesh:
    """The same mesh over links."""
    link = Link("made up", 1e10, 1e-6, 0.0, "made up")
    return Mesh(tuple(replace(axis, link=link) for axis in on.axes))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_the_copies_priced_are_those_emitted(name: str, sizes: Sequence[int]) -> None:
    kind, on = TYPES[name], laid_over(mesh(*sizes))
    slow = replace(DEVICES["cpu"], memory_bytes_per_s=1e3)
    for source, target, move in steps(kind, on):
        if move.kind != "slice":
            given, got = (local_bytes(kind, ATOMS, s, on.sizes) for s in (source, target))
            copies = names(emitted(kind, source, target, move, on)).count("permute")
            sent_s = collective_s(move.kind, given, got, on.axes[move.axis])
            copied_s = copies * stream_s(2 * max(given, got), slow)
            expected = to_ns(sent_s + copied_s)
            found, _ = move_ns(kind, ATOMS, source, target, move, on, slow, sharing=None)
            assert found == expected, (source, target)
