"""Losses in chunks of their rows, as another graph.

A language model's head makes a score for every token and class. The scores, what the loss computes
from them and the gradients of all that are often the largest tensors of a step. None is needed
whole: a row is scored, goes into the loss, and from there into the gradients of the head's input
and weight. So two ops replace all ops between.

`LINEAR` and its backward both compute the scores, a chunk at a time. `SCORES` and its backward read
scores that exist because something else reads them, as where a model returns its logits. The number
of targets that count is computed from the targets alone.

What is no head (`losses`) stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import LossChunksError
from autopar.ir.graph import (
    Arg,
    Factor,
    FactorType,
    Graph,
    Node,
    Ref,
    Slot,
    TensorType,
    transplanted,
)
from autopar.ir.own_ops import LINEAR, LINEAR_BACKWARD, SCORES, SCORES_BACKWARD
from autopar.ir.passes.losses import Head, count_of, heads_of

SUITED = (
    "a cross-entropy, its mean or sum, of what a head without bias makes whose weight is trained, "
    "in float32 (of float64 in float64), where nothing else has gradients of the scores"
)
"""Which losses can be computed in chunks."""


def chunk_rows(rows: int, chunks: int) -> int:
    """The rows of the largest of `chunks` chunks."""
    return max(1, -(-rows // chunks))


def in_loss_chunks(graph: Graph, chunks: int) -> Graph:
    """A pass: takes a step or a stage of one, gives the one whose losses are computed in so many
    `chunks` of a rank's rows. All but the heads and their losses stays. LossChunksError if there is
    no such loss."""
    if chunks == 1:
        return graph
    if not heads_of(graph):
        raise LossChunksError(
            f"memory.loss_chunks={chunks}: the step has no loss that can be worked on in chunks: "
            f"{SUITED}"
        )
    return _Writer(graph, chunks).run()


@dataclass(frozen=True, slots=True)
class _Form:
    """An op: the letters of its inputs and outputs, a word each (`_` for a scalar). `types` has the
    factor types of letters that do not follow from the outputs."""

    op: str
    inputs: str
    outputs: str
    types: Mapping[str, FactorType]


_CLASSES, _WHOLE = FactorType.PERMUTATION, FactorType.NEEDS_REPLICATION
_LINEAR = _Form(LINEAR, "nd vd n", "_ n", {"v": _CLASSES, "d": _WHOLE})
_LINEAR_BACKWARD = _Form(LINEAR_BACKWARD, "nd vd n n _", "nd vd", {"d": _WHOLE})
_SCORES = _Form(SCORES, "nv n", "_ n", {"v": _CLASSES})
_SCORES_BACKWARD = _Form(SCORES_BACKWARD, "nv nd vd n n _", "nd vd", {})


class _Writer:
    def __init__(self, graph: Graph, chunks: int) -> None:
        self.graph, self.chunks = graph, chunks
        heads = heads_of(graph)
        self.losses = {head.loss.index: head for head in heads}
        self.backwards = {head.backward.index: head for head in heads}
        self.gone = frozenset[int]().union(*(head.unread for head in heads))
        kept = (node for node in graph.nodes if node.index not in self.gone)
        self.read = {ref for node in kept for ref in node.inputs}
        self.nodes: list[Node] = []
        self.place: dict[Ref, Ref] = {}
        self.keys: dict[str, int] = {}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.index in self.losses:
                self._put_loss(self.losses[node.index])
            elif node.index in self.backwards:
                self._put_backward(self.backwards[node.index])
            elif node.index not in self.gone:
                index = self._put(transplanted(node, len(self.nodes), self.place.__getitem__))
                for output in range(len(node.outputs)):
                    self.place[Ref(node.index, output)] = Ref(index, output)
        return replace(self.graph, nodes=tuple(self.nodes))

    def _put(self, node: Node) -> int:
        """Add a node. Returns its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _put_loss(self, head: Head) -> None:
        loss, scores = head.loss, head.matmul.outputs[0]
        if Ref(loss.index, 1) in self.read:
            count = transplanted(count_of(loss), len(self.nodes), self.place.__getitem__)
            self.place[Ref(loss.index, 1)] = Ref(self._put(count))
        rows = TensorType(loss.outputs[0].dtype, scores.shape[:1], scores.parts[:1])
        read = (Ref(head.matmul.index),) if head.is_read else (head.x, head.w)
        here = self._write(
            _SCORES if head.is_read else _LINEAR, loss, head,
            [*map(self.place.__getitem__, (*read, loss.inputs[1]))],
            (loss.outputs[0], rows), loss.args[4],
        )  # fmt: skip
        self.place[Ref(loss.index)] = Ref(here)
        self.place[Ref(head.matmul.index, 1)] = Ref(here, 1)

    def _put_backward(self, head: Head) -> None:
        backward, matmul = head.backward, Ref(head.matmul.index)
        read = (matmul,) if head.is_read else ()
        given = *read, head.x, head.w, backward.inputs[2], replace(matmul, output=1)
        here = self._write(
            _SCORES_BACKWARD if head.is_read else _LINEAR_BACKWARD, backward, head,
            [*map(self.place.__getitem__, (*given, backward.inputs[0]))],
            (self.graph.type_of(head.x), self.graph.type_of(head.w)), backward.args[5],
        )  # fmt: skip
        self.place[head.of_x] = Ref(here)
        self.place.update(dict.fromkeys(head.of_w, Ref(here, 1)))

    def _write(
        self,
        form: _Form,
        source: Node,
        head: Head,
        read: Sequence[Ref],
        outputs: tuple[TensorType, ...],
        ignored: Arg,
    ) -> int:
        """Put the op of `form` in the place of `source`, as an op of the head's module, whose
        weight it uses. Returns its index."""
        module = head.matmul.key.partition(":")[0]
        key = f"{module}:{source.phase.value}:{form.op.split('.')[1]}"
        number = self.keys[key] = self.keys.get(key, -1) + 1
        types = [self.nodes[ref.node].outputs[ref.output] for ref in read]
        return self._put(
            replace(
                source,
                index=len(self.nodes),
                name=f"{source.name}_in_chunks",
                op=form.op,
                args=(*read, ignored, self.chunks),
                kwargs=(),
                inputs=tuple(read),
                outputs=outputs,
                module=head.matmul.module,
                key=f"{key}.{number}",
                factors=tuple(_factors(form, types, outputs)),
                partial=((len(read) - 1,),) if source is head.backward else (),
                mean=False,
            )
        )


def _factors(
    form: _Form, inputs: Sequence[TensorType], outputs: Sequence[TensorType]
) -> list[Factor]:
    """One for each part of the dim of each letter, as the op's rule has them."""
    words = [*form.inputs.split(), *form.outputs.split()]
    slots: dict[tuple[str, int], list[Slot | None]] = {}
    atoms: dict[tuple[str, int], int] = {}
    for t, (word, tensor) in enumerate(zip(words, (*inputs, *outputs), strict=True)):
        for dim, parts in enumerate(tensor.parts):
            for part, atom in enumerate(parts):
                known = word[dim], part
                atoms[known] = atom
                slots.setdefault(known, [None] * len(words))[t] = dim, part
    count = len(inputs)
    factors: list[Factor] = []
    for (letter, part), places in slots.items():
        kind = FactorType.REDUCTION if None in places[count:] else FactorType.PASS_THROUGH
        name = f"{letter}.{part}" if (letter, 1) in slots else letter
        factors.append(
            Factor(
                name,
                atoms[letter, part],
                tuple(places[:count]),
                tuple(places[count:]),
                form.types.get(letter, kind),
                positional=letter == "v",
            )
        )
    return factors
