"""Chunks that are joined and cut: every step, on all ranks, some of which hold nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, fx

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.codegen import bind
from autopar.codegen.collectives import ChunkPacking
from autopar.codegen.passes import apply_passes
from autopar.compile import best_on
from autopar.ir.graph import Atom, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import Collective, buffer_bytes, is_legal, step
from autopar.ir.sharding import P, R
from autopar.ir.uneven import chunked_axes, stored
from autopar.plans.layout import Move
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.program.symbols import SYMBOLS
from autopar.runtime.simulator import spmd
from autopar.runtime.simulator.shards import shard, unshard
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import as_plan, random_plan
from tests.codegen.test_collectives import moved
from tests.codegen.test_random_plans import difference
from tests.codegen.uneven_models import uneven
from tests.layouts import program_of

ATOMS = (Atom(9, "a", True), Atom(3, "h", True), Atom(4, "w", True), Atom(2, "c", True))
TYPES = {
    "a": TensorType("float64", (9,), ((0,),)),
    "c a": TensorType("float64", (2, 9), ((3,), (0,))),
    "(h w) c": TensorType("float64", (12, 2), ((1, 2), (3,))),
    "1 (h w) c": TensorType("float64", (1, 12, 2), ((), (1, 2), (3,))),
}
COMMUNICATING = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
MESHES = ((2,), (4,), (8,), (2, 3), (3, 2), (2, 2, 2))


def chunk_moves(kind: TensorType, on: Mesh) -> Iterator[tuple[Move, Collective]]:
    """Every step into or out of a state of the tensor in chunks."""
    dims = (None, *(dim for dim, size in enumerate(kind.shape) if size > 1))
    for some in product(dims, repeat=len(on.sizes)):
        state = stored(kind, ATOMS, some, on.sizes)
        if not chunked_axes(state) or not is_legal(kind, ATOMS, state, on.sizes):
            continue
        for axis in chunked_axes(state):
            for move in (
                Move(state, state.with_axis(axis, R)),
                Move(state.with_axis(axis, R), state),
                Move(state.with_axis(axis, P), state),
            ):
                found = step(kind, ATOMS, *move)
                if found is not None:
                    yield move, found


def pieces(whole: Tensor, kind: TensorType, move: Move, step: Collective, on: Mesh) -> list[Tensor]:
    """One per rank; what is partial along the axis adds up to the whole."""
    ways = on.sizes[step.axis]
    terms = [torch.randn_like(whole) for _ in range(ways - 1)]
    terms.append(whole - sum(terms, torch.zeros_like(whole)))
    partial = step.source == P
    state = move.source.with_axis(step.axis, R) if partial else move.source
    return [
        shard(terms[at[step.axis]] if partial else whole, kind, ATOMS, state, on, at)
        for at in map(on.coordinate, range(on.num_devices))
    ]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_every_step(name: str, sizes: Sequence[int]) -> None:
    torch.manual_seed(0)
    kind, on = TYPES[name], mesh(*sizes)
    whole = torch.randn(kind.shape, dtype=torch.float64)
    kinds: set[str] = set()
    for move, found in chunk_moves(kind, on):
        kinds.add(found.kind)
        graph = LeanGraph()
        x = graph.placeholder("x")
        packing = ChunkPacking.of(graph, kind, ATOMS, on, move, found)
        axis = on[found.axis]
        result = moved(packing, x, found, axis.size, axis.name)
        sent = [node.args[0] for node in graph.nodes if node.target in COMMUNICATING]
        graph.output((result, *sent))
        gm = fx.GraphModule({}, apply_passes(graph))
        given = pieces(whole, kind, move, found, on)
        ran = spmd.run(gm, on, [[piece] for piece in given])
        assert len(sent) == (found.kind != "slice")
        if sent:
            priced, _ = buffer_bytes(kind, ATOMS, *move, found, on.sizes)
            assert max(buffer.nbytes for _, buffer in ran) == priced
        results = [result for result, *_ in ran]
        back = unshard(results, kind, ATOMS, move.target, on, name=f"{move}")
        torch.testing.assert_close(back, whole, rtol=0, atol=1e-12)
        for rank, result in enumerate(results):
            expected = shard(whole, kind, ATOMS, move.target, on, on.coordinate(rank))
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
            assert found.kind == "slice" or result.is_contiguous()
    assert kinds == {"all_gather", "reduce_scatter", "slice"}


UNEVEN_MESHES = ((2,), (3,), (4,), (6,), (2, 3), (2, 2, 2))


def worst_error(plan: Plan, on: Mesh) -> float:
    """The largest relative difference to eager of the loss and any gradient."""
    found = uneven()
    graph = found.traced.graph
    program = program_of(found.traced, plan.structure.only, graph)
    step = spmd.train_step(program, on, graph, plan.structure.only, found.tensors, tolerance=1e-12)
    (loss,) = (value for name, value in step.outputs.items() if name.startswith("loss:"))
    assert step.gradients.keys() == found.gradients.keys()
    pairs = [(step.gradients[name], grad) for name, grad in found.gradients.items()]
    return max(difference(a, b) for a, b in [(loss, found.loss), *pairs])


def num_chunked(plan: Plan) -> int:
    return sum("C(" in param.storage for param in plan.structure.params.values())


@pytest.mark.breadth(3)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sizes", UNEVEN_MESHES, ids=str)
def test_random_plans_of_uneven_sizes_equal_eager(sizes: Sequence[int], seed: int) -> None:
    on = mesh(*sizes)
    plan = random_plan(uneven().traced.graph, on, seed)
    assert num_chunked(plan) >= 2
    assert worst_error(plan, on) < 1e-12


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ((4,), 800_000),
        ((2, 4), 800_000),
        pytest.param((2, 2, 2), 760_000, marks=pytest.mark.nightly),
    ],
)
def test_plans_for_little_memory_equal_eager(sizes: Sequence[int], limit: int) -> None:
    """Less than the cheapest plan takes, and little more than the leanest."""
    graph = uneven().traced.graph
    cluster = parse_cluster(f"{mesh(*sizes).num_devices}xH100")
    on = parse_mesh(",".join(f"ax{k}={size}" for k, size in enumerate(sizes)), cluster)
    options = Options(memory_limit_bytes=limit)
    found = best_on(make_graph_request(graph, cluster, options).on(on), lambda _: None)
    plan = as_plan(found.structure)
    assert num_chunked(plan)
    assert worst_error(plan, on) < 1e-12


def test_bound_graphs_have_no_symbols() -> None:
    on = mesh(2, 3)
    plan = random_plan(uneven().traced.graph, on, 0)
    program = program_of(uneven().traced, plan.structure.only)
    codes: set[str] = set()
    for rank in range(6):
        groups = {"ax0": "zero", "ax1": "one"}
        bound = bind(program, groups, plan.structure.only.mesh, on.coordinate(rank))
        for gm in (bound.forward, bound.backward):
            assert gm is not None
            assert not any(node.target in SYMBOLS for node in gm.graph.nodes)
        codes.add(bound.forward.code)
    assert len(codes) == 6
