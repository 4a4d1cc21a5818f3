"""The state of each tensor of a step in microbatches: a part of the batch, the same in every
microbatch, or a term of a sum.

Microbatches are like the ranks of a mesh axis over which the inputs are sharded, `S` on the batch,
and nothing is sent. What an op's factors and partial inputs say of such an axis holds of
microbatches too. Some ops cannot work on a microbatch, such as the one that counts the targets of a
loss. Such an op reads the whole batch, if its inputs depend on the model's inputs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.errors import MicrobatchError
from autopar.ir.choices import REPLICATE, Choice, shardings
from autopar.ir.graph import OUTPUT_ROLES, Graph, Node, Ref, Role
from autopar.ir.sharding import P, Placement, R, S

_UNREAD = {f"aten.new_{word}.default" for word in ("zeros", "ones", "empty", "full")}
"""Ops that read nothing of their input but its dtype and device."""

_ZEROS = {"aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"}
_FILLED = {"aten.scalar_tensor.default": 0, "aten.full.default": 1, "aten.full_like.default": 1}
"""The argument that ops fill what they make with."""


class MicrobatchStates:
    """Per tensor of `graph` its state, in `states`, and per op the states in which it reads its
    inputs, in `wants`. `batch` are the atoms that count samples. MicrobatchError if an op needs
    the whole batch."""

    def __init__(self, graph: Graph, batch: frozenset[int]) -> None:
        self.graph, self.batch = graph, batch
        self.states: dict[Ref, Placement] = {}
        self.wants: dict[int, tuple[Placement, ...]] = {}
        self._whole: set[int] = set()
        """The ops that work on the whole batch, in every microbatch."""
        self._known = self._learned()
        while (stuck := self._propagate()) is not None:
            self._widen(stuck)

    def _learned(self) -> frozenset[int]:
        """The nodes that depend on parameters or on incoming gradients."""
        dependent: set[int] = set()
        for node in self.graph.nodes:
            is_source = node.role in (Role.PARAM, Role.TANGENT)
            if is_source or any(ref.node in dependent for ref in node.inputs):
                dependent.add(node.index)
        return frozenset(dependent)

    def _propagate(self) -> Node | None:
        """Set the state of every tensor. Returns the first op that cannot read its inputs in their
        states; None if all can."""
        self.states.clear()
        for node in self.graph.nodes:
            given = [self.states[ref] for ref in node.inputs]
            if node.role in OUTPUT_ROLES:
                if node.role in (Role.MUTATION, Role.UPDATE) and given != [R]:
                    return node
                continue
            reading = _through(node, given[0]) if node.view else self._reading(node, given)
            if reading is None:
                return node
            self.wants[node.index], outputs = reading
            self.states.update(
                (Ref(node.index, output), state) for output, state in enumerate(outputs)
            )
        return None

    def _reading(
        self, node: Node, given: Sequence[Placement]
    ) -> tuple[tuple[Placement, ...], tuple[Placement, ...]] | None:
        """The states of an op's inputs and outputs: those of a microbatch if that is possible."""
        for inputs, outputs in self._readings(node):
            if P in inputs and P not in given:
                continue
            if node.op in _UNREAD:
                return tuple(given), outputs
            triples = zip(node.inputs, given, inputs, strict=True)
            if all(self._serves(*each) for each in triples):
                makers = (self.graph.nodes[ref.node] for ref in node.inputs)
                read = zip(given, inputs, makers, strict=True)
                # Zero is a term of any sum as it is.
                return tuple(h if w == P and _is_zero(m) else w for h, w, m in read), outputs
        return None

    def _serves(self, ref: Ref, have: Placement, want: Placement) -> bool:
        """Whether a tensor in the state `have` can be read in the state `want`: of a whole tensor,
        microbatches can read parts, or equal shares."""
        if have == R and want == P:
            return _is_zero(self.graph.nodes[ref.node]) or "float" in self.graph.type_of(ref).dtype
        return have == want or (have == R and want.kind == "S")

    def _readings(
        self, node: Node
    ) -> Iterator[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
        """The possible states of an op's inputs and outputs, best first."""
        if node.index not in self._whole:
            free = (f for f in node.factors if not (f.whole or f.exchanged or f.members))
            yield from (_read(node, f.name) for f in free if f.atom in self.batch)
            yield from (_read(node, f"+{k}") for k in range(len(node.partial)))
            for k, ref in enumerate(node.inputs if node.op in _MATMULS else ()):
                # Such as the gradient of a weight that is a matmul of others. What depends on the
                # model's inputs alone is read whole instead: ops behind it may not be linear.
                if ref.node in self._known:
                    yield ((P, R), (R, P))[k], (P,)
        yield _read(node, REPLICATE)

    def _widen(self, stuck: Node) -> None:
        """Have the inputs of `stuck` computed from the whole batch, where they depend on the
        model's inputs alone."""
        missing = [
            ref.node
            for ref in stuck.inputs
            if self.states[ref] != R and ref.node not in self._known
        ]
        if not missing:
            raise MicrobatchError(
                f"no microbatches: {stuck.op or stuck.role.value} in "
                f"{stuck.module or 'the model'} needs the whole batch at once"
                + (f" ({stuck.source_line})" if stuck.source_line else "")
            )
        while missing:
            index = missing.pop()
            if index not in self._whole:
                self._whole.add(index)
                missing += (ref.node for ref in self.graph.nodes[index].inputs)


def _read(node: Node, option: str) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """The placements of an op's inputs and outputs under `option`, as on one mesh axis."""
    inputs, outputs = shardings(node, Choice((option,)))
    return tuple(state[0] for state in inputs), tuple(state[0] for state in outputs)


_MATMULS = {"aten.mm.default", "aten.bmm.default"}
"""Ops that are linear in each of their inputs. On mesh axes these inputs are never partial."""


def is_proportional(graph: Graph) -> bool:
    """Whether every gradient is known to be proportional to the incoming one: only linear ops, by
    their partial inputs, lie between them. Never in float16, in which small gradients are zero
    unless a script scales its loss."""
    if any(tensor.dtype == "float16" for node in graph.nodes for tensor in node.outputs):
        return False
    dependent: set[Ref] = set()
    for node in graph.nodes:
        given = {k for k, ref in enumerate(node.inputs) if ref in dependent}
        if node.role is Role.GRAD and not given:
            return False
        if node.role is not Role.TANGENT and not given:
            continue
        if node.role is Role.OP and not node.view and not _is_linear(graph, node, given):
            return False
        dependent.update(Ref(node.index, output) for output in range(len(node.outputs)))
    return True


def _is_linear(graph: Graph, node: Node, given: set[int]) -> bool:
    """Whether an op is linear in the inputs `given` together."""
    if node.op in _MATMULS:
        return len(given) == 1
    return any(
        given <= set(entry)
        and all(_is_zero(graph.nodes[node.inputs[k].node]) for k in set(entry) - given)
        for entry in node.partial
    )


def _is_zero(node: Node) -> bool:
    """Whether an op makes zeros, whatever its inputs are."""
    return node.op in _ZEROS or (node.op in _FILLED and node.args[_FILLED[node.op]] == 0)


def _through(
    view: Node, given: Placement
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]] | None:
    """The states of a view's input and outputs, by that of its input; None if it has none."""
    outputs: list[Placement] = []
    for output in range(len(view.outputs)):
        if given.kind != "S":
            outputs.append(given)
            continue
        factor = next((f for f in view.factors if f.inputs[0] == given.slot), None)
        slot = None if factor is None or factor.whole else factor.outputs[output]
        if slot is None:
            return None
        outputs.append(S(*slot))
    return (given,), tuple(outputs)
