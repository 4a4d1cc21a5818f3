"""The schemes of the literature as constraints of each strategy on a graph and a mesh.

    ddp       every axis: the batch; parameters whole
    fsdp      every axis: the batch; parameters sharded, in storage and for backward (ZeRO-3)
    megatron  innermost axis: every matmul with a weight in columns or rows, no parameter moved;
              other axes: the batch
    2d        q x q (SUMMA): the batch by rows, output features by columns, weights in q x q blocks
    2.5d      d x q x q: 2d on two axes of equal size, the batch also over the third
    3d        q x q x q: the batch on the outermost axis; of each matmul the input features on one
              of the others and the output features on the other

What they leave open is the solver's. 2d, 2.5d and 3d also divide all work among all devices where
sizes allow it, and 2d and 2.5d what is saved for backward; 3d may save what it gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from autopar.errors import UndividedBatchError, UnsuitedMeshError
from autopar.ir.contractions import IN, OUT, MatmulRoles, batch_atoms, find_matmuls
from autopar.ir.graph import Atom, Graph, Node, Ref, Role, Slot
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Axis, Mesh
from autopar.plans.requests.constraints import Constraint
from autopar.plans.requests.matching import general, matches, names

MAX_AXES = {"ddp": 2, "fsdp": 2, "megatron": 2, "2d": 2, "2.5d": 3, "3d": 3}
"""The most axes in a search for a mesh; megatron takes three if a mesh has them."""


def expand_strategy(strategy: str, graph: Graph, mesh: Mesh) -> tuple[Constraint, ...]:
    """The constraints of `strategy` on `graph` and `mesh`; none on a single device.

    UnsuitedMeshError, with what it needs, if it makes no sense there.
    """
    if not strategy or not mesh.axes:
        return ()
    origin = f"strategy {strategy}"
    lines = _LINES[strategy](graph, mesh)
    return tuple(Constraint.parse(line, origin) for line in lines)


def _ddp(graph: Graph, mesh: Mesh) -> Iterator[str]:
    _check_batch("ddp", graph, mesh, mesh.axes)
    yield "param:* = R"
    yield "batched:* = batch on *"
    yield "unbatched:* = R on *"
    yield "casts:* = R on *"


def _fsdp(graph: Graph, mesh: Mesh) -> Iterator[str]:
    _check_batch("fsdp", graph, mesh, mesh.axes)
    yield "param:* = S on *"
    yield "for_backward:* = S on *"
    yield "batched:* = batch on *"
    yield "unbatched:* = R on *"


def _megatron(graph: Graph, mesh: Mesh) -> Iterator[str]:
    *outer, inner = mesh.axes
    _check_batch("megatron", graph, mesh, outer)
    matmuls = find_matmuls(graph)
    cut, free = _weight_storage("megatron", graph, matmuls, mesh)
    _check_weights("megatron", cut, mesh, inner, matmuls, free)
    yield from (f"batched:* = batch on {axis.name}" for axis in outer)
    yield f"batched:* = not batch on {inner.name}"
    yield f"matmul:* = out on {inner.name} or in on {inner.name}"
    yield from _lines(graph, cut, "param")
    unmoved = f"unmoved on {inner.name}"
    if free:
        others = (n for n in names(graph, "param") if n not in free)
        yield from _lines(graph, dict.fromkeys(others, unmoved), "param")
    else:
        yield f"param:* = {unmoved}"


def _two(graph: Graph, mesh: Mesh) -> Iterator[str]:
    if len(mesh.axes) != 2 or len(set(mesh.sizes)) != 1:
        raise _unsuited("2d", mesh, "two axes of the same size, such as 4x4")
    yield from _summa("2d", graph, mesh, mesh.axes, ())


def _two_and_a_half(graph: Graph, mesh: Mesh) -> Iterator[str]:
    if len(mesh.axes) != 3 or not (grid := _grid(mesh.axes)):
        raise _unsuited("2.5d", mesh, "three axes, two of them of the same size, such as 2x4x4")
    yield from _summa("2.5d", graph, mesh, grid, [axis for axis in mesh.axes if axis not in grid])


def _grid(axes: Sequence[Axis]) -> tuple[Axis, Axis] | None:
    """Two axes of the same size, the innermost ones that are."""
    pairs = ((axes[1], axes[2]), (axes[0], axes[1]), (axes[0], axes[2]))
    return next((pair for pair in pairs if pair[0].size == pair[1].size), None)


def _summa(
    strategy: str, graph: Graph, mesh: Mesh, grid: Sequence[Axis], depth: Sequence[Axis]
) -> Iterator[str]:
    rows, columns = grid
    _check_batch(strategy, graph, mesh, (rows, *depth))
    matmuls = find_matmuls(graph)
    blocks, free = _weight_storage(strategy, graph, matmuls, mesh)
    _check_weights(strategy, blocks, mesh, columns, matmuls, free)
    yield from (f"batched:* = batch on {axis.name}" for axis in (*depth, rows))
    yield f"batched:* = not batch on {columns.name}"
    yield f"matmul:* = out on {columns.name}"
    yield from _lines(graph, blocks, "param")
    yield from _lines(graph, blocks, "for_backward")
    yield "ops:* = S on *"
    yield "saved:* = S on *"


def _three(graph: Graph, mesh: Mesh) -> Iterator[str]:
    if len(mesh.axes) != 3 or len(set(mesh.sizes)) != 1:
        raise _unsuited("3d", mesh, "three axes of the same size, such as 2x2x2")
    first, second, third = mesh.axes
    _check_batch("3d", graph, mesh, (first,))
    matmuls = find_matmuls(graph)
    cut, free = _weight_storage("3d", graph, matmuls, mesh)
    _check_weights("3d", cut, mesh, third, matmuls, free)
    one, other = second.name, third.name
    yield f"batched:* = batch on {first.name}"
    yield f"matmul:* = out on {one}, in on {other} or in on {one}, out on {other}"
    yield from _lines(graph, cut, "param")
    yield "ops:* = S on *"


_LINES = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "megatron": _megatron,
    "2d": _two,
    "2.5d": _two_and_a_half,
    "3d": _three,
}


def _lines(graph: Graph, shardings: Mapping[str, str], kind: str) -> Iterator[str]:
    """A line per parameter, or one for all parameters whose names differ in numbers, if it is the
    same for all that its pattern matches."""
    groups = grouped(((general(name), text), name) for name, text in shardings.items())
    for (pattern, text), members in groups.items():
        reached = [name for name in names(graph, kind) if matches(pattern, name)]
        for name in [pattern] if reached == members else members:
            yield f"{kind}:{name} = {text}"


def _unsuited(strategy: str, mesh: Mesh, needs: str) -> UnsuitedMeshError:
    return UnsuitedMeshError(f"strategy {strategy} needs a mesh of {needs}; this one is {mesh}")


def _check_batch(strategy: str, graph: Graph, mesh: Mesh, axes: Sequence[Axis]) -> None:
    """UnsuitedMeshError if the batch cannot be sharded on `axes`."""
    num_parts = prod(axis.size for axis in axes)
    if num_parts == 1:
        return
    sizes = sorted(graph.atoms[atom].size for atom in batch_atoms(graph))
    odd = next((size for size in sizes if size % num_parts), None)
    if sizes and odd is None:
        return
    names = " and ".join(axis.name for axis in axes)
    # What has one row has no dim of it.
    why = f"{odd} samples do not divide by {num_parts}"
    if not sizes:
        why = f"no input of {graph.name} has a dim of several samples"
    alone = ", ".join(_quoted(line) for line in STORAGE.get(strategy, ()))
    raise UndividedBatchError(
        f"strategy {strategy} cuts the batch on {names} of mesh {mesh}, and {why}: give it a batch "
        "that does (drop_last=True leaves out a last one that does not), or a mesh of fewer devices"
        + (f"; constraints.pins={{{alone}}} stores parameters as it does" if alone else "")
    )


def _quoted(line: str) -> str:
    pattern, sharding = line.split(" = ")
    return f'"{pattern}": "{sharding}"'


STORAGE: Mapping[str, tuple[str, ...]] = {
    "ddp": ("param:* = R",),
    "fsdp": ("param:* = S on *", "for_backward:* = S on *"),
}
"""How a strategy stores parameters, whatever is computed with them."""


def _check_weights(
    strategy: str,
    cut: Collection[str],
    mesh: Mesh,
    axis: Axis,
    matmuls: MatmulRoles,
    free: Collection[str],
) -> None:
    if not cut and not free and matmuls.weights:
        raise UnsuitedMeshError(
            f"strategy {strategy}: no layer has a weight whose features divide by {axis.size}, "
            f"the size of axis {axis.name} of mesh {mesh}"
        )


def left_free(strategy: str, graph: Graph, mesh: Mesh) -> tuple[str, ...]:
    """The parameters that `strategy` has no rule for and does not constrain on `mesh`."""
    if not mesh.axes or strategy not in _PLACEMENTS:
        return ()
    return tuple(_weight_storage(strategy, graph, find_matmuls(graph), mesh)[1])


def _weight_storage(
    strategy: str, graph: Graph, matmuls: MatmulRoles, mesh: Mesh
) -> tuple[Mapping[str, str], Collection[str]]:
    """How a strategy stores weights, by name, and the parameters without a rule, in order. There is
    no rule for parameters such as these:

    * those used by an op that cannot work on shards of them;
    * those of which the mesh divides a part of a dim, but no outermost one;
    * those planned as one with others that the strategy would store otherwise.
    """
    placements, axes = _PLACEMENTS[strategy](graph, matmuls, mesh)
    nodes = [node for node in graph.with_role(Role.PARAM) if not node.external]
    weights = {node.target for node in nodes if len(node.outputs[0].shape) > 1}
    free = {
        name
        for ref, name in matmuls.derived.items()
        if name in weights
        for node in _users(graph, ref)
        if not _can_shard(node, ref)
    }
    inner = {n.target for n in nodes if not all(_leads(graph, n, axis.size) for axis in axes)}
    free |= inner if inner & weights else set()
    by_key = grouped(
        (n.key, None if n.target in free else placements.get(n.target, "")) for n in nodes
    )
    ruled = {key for key, texts in by_key.items() if len({*texts}) == 1 and None not in texts}
    others = dict.fromkeys(node.target for node in nodes if node.key not in ruled)
    return {name: text for name, text in placements.items() if name not in others}, others


_WeightPlacements = tuple[dict[str, str], Sequence[Axis]]
"""The placements of weights, by name, and the axes that shard what is computed with them."""


def _in_columns_or_rows(graph: Graph, matmuls: MatmulRoles, mesh: Mesh) -> _WeightPlacements:
    inner = mesh.axes[-1]
    cut = _divided(graph, matmuls, (IN, OUT), inner.size)
    return dict.fromkeys(cut, f"S on {inner.name}"), [inner]


def _in_blocks(graph: Graph, matmuls: MatmulRoles, mesh: Mesh) -> _WeightPlacements:
    grid = mesh.axes if len(mesh.axes) == 2 else _grid(mesh.axes)
    assert grid is not None
    rows, columns = grid
    whole = "".join(f", R on {axis.name}" for axis in mesh.axes if axis not in grid)
    blocks = {
        name: f"{where}{whole}"
        for name in _divided(graph, matmuls, (OUT,), columns.size)
        if (where := _block(graph, matmuls, name, rows, columns))
    }
    return blocks, [columns]


def _in_cubes(graph: Graph, matmuls: MatmulRoles, mesh: Mesh) -> _WeightPlacements:
    axes = mesh.axes[1:]
    by_out = _divided(graph, matmuls, (OUT,), axes[0].size)
    cut = [name for name in _divided(graph, matmuls, (IN,), axes[0].size) if name in by_out]
    return dict.fromkeys(cut, "S on *"), axes


_PLACEMENTS = {
    "megatron": _in_columns_or_rows, "2d": _in_blocks, "2.5d": _in_blocks, "3d": _in_cubes,
}  # fmt: skip


def _users(graph: Graph, ref: Ref) -> Iterator[Node]:
    """The ops that compute with a tensor, other than by a view or a cast of it."""
    for node in graph.with_role(Role.OP):
        if ref in node.inputs and not node.view and len(node.inputs) > 1:
            yield node


def _can_shard(node: Node, ref: Ref) -> bool:
    """Whether `node` can work on shards of `ref`, if a size divides."""
    at = node.inputs.index(ref)
    return any(factor.inputs[at] and not factor.whole for factor in node.factors)


def _leads(graph: Graph, node: Node, size: int) -> bool:
    """Whether `size` divides the outermost part of some dim of a parameter, which can then be
    sharded, or no part of any."""
    dims = [[graph.atoms[k].size % size == 0 for k in parts] for parts in node.outputs[0].parts]
    return any(divides[0] for divides in dims if divides) or not any(map(any, dims))


def _divided(graph: Graph, matmuls: MatmulRoles, roles: Sequence[str], size: int) -> list[str]:
    """The weights that have a dim of one of `roles` that `size` divides."""
    return [
        node.target
        for node in graph.with_role(Role.PARAM)
        if any(
            role in roles and _divides(graph.atoms, node.outputs[0].parts, slot, size)
            for slot, role in matmuls.weights.get(node.target, {}).items()
        )
    ]


def _divides(atoms: Sequence[Atom], parts: Sequence[Sequence[int]], slot: Slot, size: int) -> bool:
    return atoms[parts[slot[0]][slot[1]]].size % size == 0


def _block(graph: Graph, matmuls: MatmulRoles, name: str, rows: Axis, columns: Axis) -> str:
    """The placement of a weight on a grid: input features on its rows, output features on its
    columns; empty if it does not divide so."""
    roles = matmuls.weights[name]
    node = next(n for n in graph.with_role(Role.PARAM) if n.target == name)
    parts = node.outputs[0].parts

    def dim(role: str, size: int) -> int | None:
        slots = (s for s, r in roles.items() if r == role and s[1] == 0)
        return next((s[0] for s in slots if _divides(graph.atoms, parts, s, size)), None)

    by_rows, by_columns = dim(IN, rows.size), dim(OUT, columns.size)
    if by_rows is None or by_columns is None:
        return ""
    return f"S({by_rows}) on {rows.name}, S({by_columns}) on {columns.name}"
