"""The choices of every class of nodes: equal nodes (same key) take one decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autopar.cost_model.limits import Limits
from autopar.ir.choices import Decision, ParamChoice, all_shardings, choices
from autopar.ir.graph import STORED_ROLES, Graph, Node, Role, TensorType
from autopar.ir.grouping import grouped
from autopar.ir.input_sharding import input_state
from autopar.ir.mesh import Mesh
from autopar.ir.own_ops import RECEIVE
from autopar.ir.redistribute import is_legal, states, step
from autopar.ir.sharding import R, Sharding
from autopar.ir.uneven import chunkable_dim, chunked_axes, chunked_dim, stored
from autopar.ir.uses import Group, Use, read_in_forward, requirement


@dataclass(frozen=True, slots=True)
class NodeClass:
    """The nodes of one key, of which `node` is the first, and what they may choose.

    `inputs[c]` and `outputs[c]` are the shardings under choice `c`. For a parameter `outputs[c]` is
    (storage, sharding for backward); for an output item `inputs[c]` is the sharding it needs.
    """

    key: str
    node: Node
    count: int
    choices: tuple[Decision, ...]
    inputs: tuple[tuple[Sharding, ...], ...]
    outputs: tuple[tuple[Sharding, ...], ...]

    def only(self, labels: Collection[str]) -> NodeClass:
        """The class with those of its choices whose text is in `labels`."""
        return self.taking([c for c, each in enumerate(self.choices) if str(each) in labels])

    def taking(self, kept: Sequence[int]) -> NodeClass:
        """The class with the choices at the indices `kept`."""
        return replace(
            self,
            choices=tuple(self.choices[c] for c in kept),
            inputs=tuple(self.inputs[c] for c in kept),
            outputs=tuple(self.outputs[c] for c in kept),
        )

    def input_states(self, arg: int) -> tuple[Sharding | None, ...]:
        """The sharding it needs input `arg` in, per choice; None where it does not read it."""
        return tuple(states[arg] if states else None for states in self.inputs)

    def output_states(self, output: int) -> tuple[Sharding | None, ...]:
        """The sharding it makes output `output` in, per choice; None where it makes none."""
        return tuple(states[output] if states else None for states in self.outputs)


def classes(
    graph: Graph,
    mesh: Mesh,
    groups: Sequence[Group],
    limits: Limits,
    on_host_counts: Mapping[str, Sequence[int]],
) -> dict[str, NodeClass]:
    """Every class that takes a decision, in order of the first node: no views, and no outputs that
    leave the graph in a parameter's storage.

    A choice is left out if a root cannot reach the sharding of an input, if a gradient cannot reach
    the storage, or if `limits` forbid it. `on_host_counts` are the numbers of parameters that may
    be on the host, by class (by default 0). InfeasibleError if no choice is left.
    """
    deciding = (n for n in graph.nodes if not n.view and n.role not in STORED_ROLES)
    members = grouped((node.key, node) for node in deciding)
    constant = _constants(graph)
    owners = {node.target: node.key for node in graph.with_role(Role.PARAM)}
    uses: dict[str, dict[tuple[int, tuple[str, ...]], tuple[Use, TensorType]]] = {}
    for group in groups:
        tensor = graph.type_of(group.root)
        for use in group.uses:
            chain = tuple(graph.nodes[view].key for view in use.chain)
            user = graph.nodes[use.node]
            key = owners[user.target] if user.role in STORED_ROLES else user.key
            distinct = uses.setdefault(key, {})
            distinct.setdefault((use.arg, chain), (use, tensor))
    table: dict[str, NodeClass] = {}
    for key, nodes in members.items():
        reads = tuple(uses.get(key, {}).values())
        if nodes[0].role is Role.PARAM:
            counts, given = on_host_counts.get(key, (0,)), limits.storages.get(key)
            in_forward = key in read_in_forward(graph)
            entry = _param_class(graph, mesh, nodes, reads, given, counts, in_forward=in_forward)
        else:
            entry = _node_class(graph, mesh, nodes, reads, nodes[0].index in constant)
        table[key] = limits.filtered(entry)
    return table


def _node_class(
    graph: Graph,
    mesh: Mesh,
    nodes: Sequence[Node],
    reads: Sequence[tuple[Use, TensorType]],
    is_constant: bool,
) -> NodeClass:
    node = nodes[0]
    replicated = Sharding.replicated(len(mesh.axes))
    if node.role is Role.DETACHED:
        states = _expressible(graph, graph.type_of(node.inputs[0]), mesh)
        return _feasible(graph, mesh, reads, nodes, [(s, (s,), ()) for s in states])
    if node.role is not Role.OP:
        state = input_state(node, graph.atoms, mesh.sizes)
        inputs = ((replicated,) * len(node.inputs),)
        return NodeClass(
            node.key, node, len(nodes), (state,), inputs, ((state,) * len(node.outputs),)
        )
    offered = choices(node, graph.atoms, mesh.sizes)
    if is_constant:
        offered = offered[:1]
    pairs = zip(offered, all_shardings(node, offered), strict=True)
    return _feasible(
        graph, mesh, reads, nodes, [(choice, *shardings) for choice, shardings in pairs]
    )


def _feasible(
    graph: Graph,
    mesh: Mesh,
    reads: Sequence[tuple[Use, TensorType]],
    nodes: Sequence[Node],
    offered: Sequence[tuple[Decision, tuple[Sharding, ...], tuple[Sharding, ...]]],
) -> NodeClass:
    """The class with those of the offered (choice, input shardings, output shardings) whose inputs
    every root can reach."""
    kept = offered
    for use, tensor in reads:
        targets = {inputs[use.arg] for _, inputs, _ in kept}
        reached = {each for each in targets if _reaches(graph, mesh.sizes, use, tensor, each)}
        kept = [each for each in kept if each[1][use.arg] in reached]
    return NodeClass(
        nodes[0].key,
        nodes[0],
        len(nodes),
        tuple(choice for choice, _, _ in kept),
        tuple(inputs for _, inputs, _ in kept),
        tuple(outputs for _, _, outputs in kept),
    )


def _reaches(
    graph: Graph, sizes: Sequence[int], use: Use, tensor: TensorType, target: Sharding
) -> bool:
    """Whether the root, of type `tensor`, can reach a sharding that gives the use `target`."""
    needed = requirement(graph, use, target)
    return needed is not None and is_legal(tensor, graph.atoms, needed, sizes)


def _constants(graph: Graph) -> frozenset[int]:
    """Nodes that depend on no input of the step: positions, masks, tables. They are cheap, and
    every rank computes them whole."""
    constants: set[int] = set()
    for node in graph.nodes:
        if node.role is Role.CONSTANT or (
            node.role is Role.OP
            and node.op != RECEIVE
            and all(ref.node in constants for ref in node.inputs)
        ):
            constants.add(node.index)
    return frozenset(constants)


def _expressible(graph: Graph, tensor: TensorType, mesh: Mesh) -> tuple[Sharding, ...]:
    """The shardings DTensor can express: no partial sums, and only leading parts sharded."""
    candidates = states(tensor, graph.atoms, mesh.sizes, partial=False)
    return tuple(s for s in candidates if all(p.kind == "R" or p.part == 0 for p in s))


def _stored(graph: Graph, tensor: TensorType, mesh: Mesh) -> tuple[Sharding, ...]:
    """The storages of a parameter: all shardings that DTensor can express. Uneven chunks are only
    of a dim that the axis does not divide, and of one dim only. That saves as much memory as
    another dim would, and the space stays as large as if all dims divided."""
    even = _expressible(graph, tensor, mesh)
    dim = chunkable_dim(tensor, mesh.sizes)
    dims = (None, *(d for d, parts in enumerate(tensor.parts) if parts))
    per_axis = product(dims, repeat=len(mesh.axes))
    candidates = (stored(tensor, graph.atoms, some, mesh.sizes) for some in per_axis)
    uneven = (s for s in candidates if chunked_axes(s) and chunked_dim(s) == dim)
    return (*even, *(s for s in uneven if is_legal(tensor, graph.atoms, s, mesh.sizes)))


def _param_class(
    graph: Graph,
    mesh: Mesh,
    nodes: Sequence[Node],
    gradients: Sequence[tuple[Use, TensorType]],
    given: Sequence[Sharding] | None,
    counts: Sequence[int],
    *,
    in_forward: bool,
) -> NodeClass:
    """Choices are pairs (storage, sharding for backward). The latter is the storage or, if forward
    reads the parameter, the storage gathered over some axes; with parameters on the host, whose
    number is one of `counts`, it is the storage. Storages are those in `given`, if that is not
    None, and whole for an external parameter."""
    node, tensor = nodes[0], nodes[0].outputs[0]
    options: list[ParamChoice] = []
    if node.external:
        given = [Sharding.replicated(len(mesh))]
    for storage in _stored(graph, tensor, mesh) if given is None else given:
        if not all(_reaches(graph, mesh.sizes, use, kind, storage) for use, kind in gradients):
            continue
        gathered: list[Sharding] = [storage]
        for state in gathered if in_forward else ():
            for axis in range(len(mesh.axes)):
                target = state.with_axis(axis, R)
                if target not in gathered and step(tensor, graph.atoms, state, target):
                    gathered.append(target)
        if 0 in counts:
            options.extend(ParamChoice(storage, kept) for kept in gathered)
        options.extend(ParamChoice(storage, storage, count) for count in counts if count)
    pairs = tuple((choice.storage, choice.for_backward) for choice in options)
    return NodeClass(node.key, node, len(nodes), tuple(options), ((),) * len(pairs), pairs)
