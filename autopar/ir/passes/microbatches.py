"""The step in microbatches, as another graph: its ops work on one microbatch after the other.

Microbatches are like the ranks of one more mesh axis: the batch is sharded over it, and nothing is
sent before the end. A tensor is a part of the batch, or the same in every microbatch, or one term
of a sum. An op's factors therefore say what it does with a microbatch too. A loss that is a mean
over the whole batch, ignored tokens left out, stays that: every microbatch computes the divisor
from all targets.

The graph has these ops more than the one it is made of. `MICROBATCH` cuts a microbatch out of a
tensor of the whole batch. `SHARE` is a microbatch's share of what is added to a sum. `ACCUMULATE`
adds up what microbatches make, in memory of its own. `COLLECT` puts their parts of a result
together. Sample `i` of the batch is in microbatch `i` modulo their number, so that a rank's samples
stay next to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import gcd, prod
from string import ascii_lowercase

from autopar.errors import MicrobatchError, listed
from autopar.ir.contractions import batch_atoms
from autopar.ir.graph import (
    OUTPUT_ROLES,
    Atom,
    Factor,
    Graph,
    Node,
    Phase,
    Ref,
    Role,
    Slot,
    TensorType,
    per_graph,
    transplanted,
)
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import ACCUMULATE, COLLECT, MICROBATCH, SHARE
from autopar.ir.passes.losses import LOSSES, count_of
from autopar.ir.passes.microbatch_states import MicrobatchStates
from autopar.ir.sharding import P, Placement, R
from autopar.ir.uses import Group


def in_microbatches(graph: Graph, microbatches: int) -> Graph:
    """A pass: takes a whole step, gives the one that works on its batch in so many `microbatches`.
    A step that does already stays as it is. Ops keep their keys and their order. MicrobatchError,
    naming what needs the whole batch, if the batch cannot be divided."""
    if microbatches == graph.microbatches:
        return graph
    _check(graph, microbatches)
    return in_other_microbatches(_in_fewest(graph), graph, microbatches)


@per_graph
def _in_fewest(graph: Graph) -> Graph:
    """`graph` in the least number of microbatches, above one, that divides its batch."""
    batch = gcd(*(graph.atoms[atom].size for atom in batch_atoms(graph)))
    fewest = next(count for count in range(2, batch + 1) if batch % count == 0)
    return _Splitter(_with_counts(graph), fewest).run()


def in_other_microbatches(graph: Graph, whole: Graph, microbatches: int) -> Graph:
    """`graph`, a step in microbatches or a stage of one, in another number of `microbatches`, which
    is above one and divides the batch. Only extents differ from those of `graph`. `whole` is the
    step that is not in microbatches."""
    batch, microbatch_atom = batch_atoms(whole), len(whole.atoms)
    if microbatches == graph.microbatches:
        return graph
    sizes = {atom: whole.atoms[atom].size // microbatches for atom in batch} | {
        microbatch_atom: microbatches
    }
    atoms = tuple(
        replace(atom, size=sizes.get(number, atom.size)) for number, atom in enumerate(graph.atoms)
    )

    def extent_of(extent: int, parts: Sequence[int]) -> int:
        before = prod(graph.atoms[part].size for part in parts)
        return extent * prod(atoms[part].size for part in parts) // before if before else extent

    @cache
    def resized(tensor: TensorType) -> TensorType:
        pairs = zip(tensor.shape, tensor.parts, strict=True)
        return replace(tensor, shape=tuple(extent_of(*pair) for pair in pairs))

    nodes = tuple(replace(node, outputs=tuple(map(resized, node.outputs))) for node in graph.nodes)
    return replace(graph, nodes=nodes, atoms=atoms, microbatches=microbatches)


def trains(graph: Graph) -> bool:
    """Whether a step has a backward. Without one it works on the whole batch at once."""
    return bool(graph.with_role(Role.GRAD))


def times(graph: Graph, group: Group) -> int:
    """How often a step redistributes a group's tensor: in every microbatch, or once where all uses
    are outputs of the graph."""
    roles = (graph.nodes[use.node].role for use in group.uses)
    return 1 if all(role in OUTPUT_ROLES for role in roles) else graph.microbatches


def _with_counts(graph: Graph) -> Graph:
    """`graph`, in which the divisors of losses are computed from the targets alone."""
    nodes: list[Node] = []
    place: dict[Ref, Ref] = {}
    for node in graph.nodes:
        if node.op in LOSSES:
            nodes.append(transplanted(count_of(node), len(nodes), lambda ref: place.get(ref, ref)))
        index = len(nodes)
        nodes.append(transplanted(node, index, lambda ref: place.get(ref, ref)))
        for output in range(len(node.outputs)):
            place[Ref(node.index, output)] = Ref(index, output)
        if node.op in LOSSES:
            place[Ref(node.index, 1)] = Ref(index - 1)
    return replace(graph, nodes=tuple(nodes))


def _check(graph: Graph, microbatches: int) -> None:
    batch = batch_atoms(graph)
    if not batch:
        raise MicrobatchError("no microbatches: no input has a batch, a dim 0 that it is led by")
    for size in sorted({graph.atoms[atom].size for atom in batch}):
        if size % microbatches:
            raise MicrobatchError(
                f"a batch of {size} is not divided by {microbatches} microbatches"
            )
    values = [node.target for node in graph.with_role(Role.VALUE)]
    if values:
        raise MicrobatchError(
            f"no microbatches: the gradient of output {listed(values)} comes from the script, "
            "which has to see the whole batch; let the model return its loss"
        )


class _Splitter:
    def __init__(self, graph: Graph, microbatches: int) -> None:
        self.graph, self.microbatches = graph, microbatches
        self.batch = batch_atoms(graph)
        states = MicrobatchStates(graph, self.batch)
        self.states, self.wants = states.states, states.wants
        self.microbatch_atom = len(graph.atoms)
        self.nodes: list[Node] = []
        self.place: dict[Ref, Ref] = {}
        self.cut: dict[tuple[Ref, Placement, Phase], Ref] = {}
        self.gathered: dict[Ref, Ref] = {}
        """The node that puts a result together from its microbatches."""

    def run(self) -> Graph:
        leaving = grouped((n.inputs[0], n) for n in self.graph.with_role(*OUTPUT_ROLES))
        for node in self.graph.nodes:
            self._put(node)
            for output in range(len(node.outputs)):
                ref = Ref(node.index, output)
                if ref in leaving:
                    self._send_out(ref, leaving[ref])
        atoms = [
            replace(atom, size=atom.size // self.microbatches) if number in self.batch else atom
            for number, atom in enumerate(self.graph.atoms)
        ]
        atoms.append(Atom(self.microbatches, "microbatch", in_param=False))
        graph = replace(
            self.graph, nodes=tuple(self.nodes), atoms=tuple(atoms), microbatches=self.microbatches
        )
        return _with_distinct_keys(graph)

    def _put(self, node: Node) -> None:
        """Add the node, which works on one microbatch."""
        wants = self.wants.get(node.index, tuple(self.states[ref] for ref in node.inputs))
        gathered = self.gathered if node.role in OUTPUT_ROLES else {}
        read = {
            ref: self._cut(ref, want, node.phase)
            if self.states[ref] != want
            else gathered.get(ref, self.place[ref])
            for ref, want in zip(node.inputs, wants, strict=True)
        }
        copy = transplanted(node, len(self.nodes), lambda ref: read[ref])
        states = [self.states[Ref(node.index, output)] for output in range(len(node.outputs))]
        outputs = [*zip(node.outputs, states, strict=True)]
        if node.role not in OUTPUT_ROLES:
            inputs = [*zip(self.graph.input_types(node), wants, strict=True)]
            copy = replace(copy, outputs=tuple(self._typed(*output) for output in outputs))
            if any(self._has_whole(*each) for each in (*inputs, *outputs)):
                refitted = (self._refitted(factor, inputs, outputs) for factor in node.factors)
                copy = replace(copy, factors=tuple(refitted))
        self.nodes.append(copy)
        for output in range(len(node.outputs)):
            self.place[Ref(node.index, output)] = Ref(copy.index, output)

    def _refitted(
        self,
        factor: Factor,
        inputs: Sequence[tuple[TensorType, Placement]],
        outputs: Sequence[tuple[TensorType, Placement]],
    ) -> Factor:
        """A factor where tensors of the whole batch have the microbatches as parts of their own."""

        def slots(
            given: Sequence[Slot | None], tensors: Sequence[tuple[TensorType, Placement]]
        ) -> tuple[Slot | None, ...]:
            pairs = zip(given, tensors, strict=True)
            return tuple(s if s is None else self._slot(*tensor, s) for s, tensor in pairs)

        return replace(
            factor, inputs=slots(factor.inputs, inputs), outputs=slots(factor.outputs, outputs)
        )

    def _slot(self, tensor: TensorType, state: Placement, slot: Slot) -> Slot:
        """Where a part stands now."""
        dim, part = slot
        before = tensor.parts[dim][:part]
        inserted = sum(self._is_whole(atom, state, (dim, k)) for k, atom in enumerate(before))
        return dim, part + inserted

    def _has_whole(self, tensor: TensorType, state: Placement) -> bool:
        """Whether any part of a tensor is that of the whole batch."""
        return any(self._is_whole(atom, state, slot) for slot, atom in tensor.slots())

    def _is_whole(self, atom: int, state: Placement, slot: Slot) -> bool:
        """Whether a part of a tensor is that of the whole batch."""
        return atom in self.batch and not (state.kind == "S" and state.slot == slot)

    def _typed(self, tensor: TensorType, state: Placement) -> TensorType:
        parts: list[tuple[int, ...]] = []
        shape = list(tensor.shape)
        for dim, atoms in enumerate(tensor.parts):
            dim_parts: list[int] = []
            for k, atom in enumerate(atoms):
                is_whole = self._is_whole(atom, state, (dim, k))
                dim_parts += (atom, self.microbatch_atom) if is_whole else (atom,)
                if atom in self.batch and not is_whole:
                    shape[dim] //= self.microbatches
            parts.append(tuple(dim_parts))
        return TensorType(tensor.dtype, tuple(shape), tuple(parts))

    def _cut(self, ref: Ref, state: Placement, phase: Phase) -> Ref:
        """A microbatch's part or share of a tensor of the whole batch."""
        key = ref, state, phase
        if key not in self.cut:
            op = SHARE if state == P else MICROBATCH
            self.cut[key] = self._own(op, ref, phase, self.place[ref], R, state)
        return self.cut[key]

    def _send_out(self, ref: Ref, leaving: Sequence[Node]) -> None:
        """Put a result together from its microbatches, right behind the op that makes it."""
        state, maker = self.states[ref], self.graph.nodes[ref.node]
        if state == R:
            return
        if state == P:
            op, typed = ACCUMULATE, P
        elif all(node.role is Role.DETACHED for node in leaving):
            op, typed = COLLECT, R
        else:
            raise MicrobatchError(
                f"no microbatches: {leaving[0].role.value} {leaving[0].target} is of a sample each"
            )
        self.gathered[ref] = self._own(op, ref, maker.phase, self.place[ref], state, typed)

    def _own(
        self, op: str, ref: Ref, phase: Phase, read: Ref, state: Placement, placement: Placement
    ) -> Ref:
        """Add an op of autopar's own, which takes `ref` from `state` to `placement`."""
        tensor, maker = self.graph.type_of(ref), self.graph.nodes[ref.node]
        index, word = len(self.nodes), op.split(".")[1]
        factors = (
            Factor(
                ascii_lowercase[k],
                atom,
                (self._slot(tensor, state, slot),),
                (self._slot(tensor, placement, slot),),
            )
            for k, (slot, atom) in enumerate(tensor.slots())
        )
        module, _, tail = (
            maker.key.rpartition(":") if maker.role is Role.OP else ("", "", maker.key)
        )
        which = f"{tail}.{ref.output}" if len(maker.outputs) > 1 else tail
        self.nodes.append(
            Node(
                index,
                f"{maker.name}_{ref.output}_{word}_{phase.value}_{index}",
                op,
                Role.OP,
                phase,
                args=(read,),
                inputs=(read,),
                outputs=(self._typed(tensor, placement),),
                module=maker.module,
                key=f"{module.partition(':')[0]}:{phase.value}:{word}.{which}.{placement}",
                factors=tuple(factors),
                partial=((0,),),
                source_line=maker.source_line,
            )
        )
        return Ref(index)


def _with_distinct_keys(graph: Graph) -> Graph:
    """`graph`, in which ops of one key have equal tensors. Of several identical layers the first
    may read tensors of the whole batch, the others those of a microbatch."""
    kinds: dict[str, dict[object, str]] = defaultdict(dict)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.role is Role.OP:
            known = kinds[node.key]
            tensors = (*graph.input_types(node), *node.outputs)
            kind = tuple((t.shape, *map(len, t.parts)) for t in tensors)
            key = known.setdefault(kind, f"{node.key}~other{len(known)}" if known else node.key)
            node = node if key == node.key else replace(node, key=key)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
