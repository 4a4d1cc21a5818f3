"""How inputs are passed: the global batch to every rank, or its local batch to each.

`Node.input_sharding` says which shard a rank has. A plan whose mesh cuts the input in the same way
starts from the shards; otherwise the input is put together before the program runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from autopar.ir.graph import Atom, Graph, Node, Role
from autopar.ir.redistribute import nesting
from autopar.ir.sharding import InputSharding, Sharding


def with_input_shardings(graph: Graph, shardings: Mapping[str, InputSharding]) -> Graph:
    """`graph` with the `shardings` in which its inputs, by target, are passed to the ranks."""
    return replace(
        graph,
        nodes=tuple(
            replace(node, input_sharding=shardings[node.target])
            if node.role is Role.INPUT and node.target in shardings
            else node
            for node in graph.nodes
        ),
    )


def input_state(node: Node, atoms: Sequence[Atom], sizes: Sequence[int]) -> Sharding:
    """The state of an input when a program on a mesh of `sizes` starts."""
    whole = Sharding.replicated(len(sizes))
    input_sharding = node.input_sharding
    if input_sharding is None:
        return whole
    if input_sharding.sizes == tuple(sizes):
        state = input_sharding.sharding
    elif len(input_sharding.sizes) == 1:
        state = Sharding(input_sharding.sharding * len(sizes))
    else:
        return whole
    return state if _is_cut_so(node, atoms, state, sizes) else whole


def _is_cut_so(node: Node, atoms: Sequence[Atom], state: Sharding, sizes: Sequence[int]) -> bool:
    """Whether `state` of the node's tensor gives each rank the shard that it is passed: an even
    part of a dim's outermost atom, cut by the slowest axis first, as ranks are counted."""
    if state.has_partial:
        return False
    for dim, parts in enumerate(node.outputs[0].parts):
        axes = state.axes_on((dim, 0))
        if axes and not parts:
            return False
        if axes:
            atom = atoms[parts[0]]
            if nesting(atom, axes) != axes or atom.size % prod(sizes[k] for k in axes):
                return False
    return True


def describe_inputs(graph: Graph) -> tuple[str, ...]:
    """`0: int64[8, 128]` for every tensor input, as in `Structure.inputs`. Where ranks are passed
    shards, their sharding follows: `0: int64[8, 128] [S(0)] on 4`."""
    inputs = ((n, n.outputs[0]) for n in graph.with_role(Role.INPUT))
    return tuple(
        f"{n.target}: {tensor.dtype}{list(tensor.shape)} {n.input_sharding or ''}".strip()
        for n, tensor in inputs
    )
