"""Losses, found in a graph: the heads that make their scores, and how many targets they count.

    scores = x @ w.T -> views, casts -> log_softmax -> nll_loss, summed, no weights of classes
    nll_loss_backward -> log_softmax's -> views, casts -> the matmuls with x and with w

A head is this and no more: nothing else stands between, and nothing else has gradients of the
scores. All casts are between two dtypes, as in the ops in chunks: the matmul's, and the one that
rows are summed in. The latter is float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.ir.graph import FactorType, Graph, Node, Phase, Ref, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import COUNT

_SUM = 2  # at::Reduction
_MATMUL, _SOFTMAX = "aten.mm.default", "aten._log_softmax.default"
_LOSS, _LOSS_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"
LOSSES = frozenset({_LOSS, "aten.nll_loss2d_forward.default"})
_SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"

_SAME = {f"aten.{word}.default" for word in ("view", "_unsafe_view", "reshape", "detach", "alias")}
"""Views that leave the elements in order."""
_CAST = {"aten._to_copy.default", "aten.clone.default"}
_TRANSPOSE = "aten.t.default"

_Users = Mapping[Ref, Sequence[Node]]


@dataclass(frozen=True, slots=True)
class Head:
    """The scores [N, V] are `x` [N, D] times `w` [V, D] transposed. `matmul`, `loss` and `backward`
    are the ops. `of_x` is the gradient of x; each of `of_w` is that of w. `unread` are the ops that
    nothing but the loss and these gradients depends on. The matmul is among them unless something
    else reads the scores."""

    x: Ref
    w: Ref
    matmul: Node
    loss: Node
    backward: Node
    of_x: Ref
    of_w: tuple[Ref, ...]
    unread: frozenset[int]

    @property
    def is_read(self) -> bool:
        """Whether something else reads the scores."""
        return self.matmul.index not in self.unread


@per_graph
def heads_of(graph: Graph) -> tuple[Head, ...]:
    """The heads of a step that have a backward."""
    users = grouped((ref, node) for node in graph.nodes for ref in dict.fromkeys(node.inputs))
    heads: list[Head] = []
    for loss in graph.with_role(Role.OP):
        if loss.op == _LOSS:
            with suppress(_Differs):
                heads.append(_Finder(graph, users, loss).head())
    return tuple(heads)


def other_losses(graph: Graph) -> tuple[Node, ...]:
    """The losses over classes that have no head."""
    known = {head.loss.index for head in heads_of(graph)}
    losses = (node for node in graph.with_role(Role.OP) if node.op in LOSSES)
    return tuple(node for node in losses if node.index not in known and node.phase is Phase.FORWARD)


class _Differs(Exception):
    """The loss has no head."""


def _check(holds: bool) -> None:
    if not holds:
        raise _Differs


class _Finder:
    def __init__(self, graph: Graph, users: _Users, loss: Node) -> None:
        self.graph, self.users, self.loss = graph, users, loss
        self.dtypes = frozenset[str]()

    def head(self) -> Head:
        """The head of the loss; _Differs if it has none."""
        loss = self.loss
        softmax = self._maker(loss.inputs[0], _SOFTMAX, _SAME)
        matmul = self._maker(softmax.inputs[0], _MATMUL, _SAME | _CAST)
        scores, sums = matmul.outputs[0].dtype, softmax.outputs[0].dtype
        _check(sums == ("float64" if scores == "float64" else "float32"))
        self.dtypes = frozenset({scores, sums})
        self._maker(softmax.inputs[0], _MATMUL, _SAME | _CAST, self.dtypes)
        x, (w, is_transposed) = matmul.inputs[0], self._matrix(matmul.inputs[1])
        _check(is_transposed and loss.args[2:4] == (None, _SUM) and softmax.args[1] in (1, -1))
        self._check_types(matmul, softmax, w)
        backward, of_softmax = self._backward(softmax)
        of_x, of_w = self._gradients(Ref(of_softmax.index), x, w)
        ends = (
            loss,
            softmax,
            backward,
            of_softmax,
            *(self.graph.nodes[r.node] for r in (of_x, *of_w)),
        )
        needed = {
            ref.node for ref in (x, w, loss.inputs[1], backward.inputs[0], backward.inputs[2])
        }
        return Head(x, w, matmul, loss, backward, of_x, of_w, self._unread(ends, needed))

    def _maker(
        self, ref: Ref, op: str, between: set[str], dtypes: frozenset[str] | None = None
    ) -> Node:
        """The op that makes a tensor, behind ops that are in `between`, all of them in `dtypes`.
        _Differs if it is no `op`."""
        node = self.graph.nodes[ref.node]
        while node.op in between:
            _check(dtypes is None or node.outputs[0].dtype in dtypes)
            node = self.graph.nodes[node.inputs[0].node]
        _check(node.op == op)
        return node

    def _source(self, ref: Ref) -> Ref:
        """The tensor that `ref` has the elements of, in the same order."""
        while (node := self.graph.nodes[ref.node]).op in _SAME:
            ref = node.inputs[0]
        return ref

    def _matrix(self, ref: Ref) -> tuple[Ref, bool]:
        """The matrix that `ref` is a view of, and whether the view is transposed."""
        is_transposed = False
        while (node := self.graph.nodes[ref.node]).op == _TRANSPOSE or self._is_alike(node):
            is_transposed ^= node.op == _TRANSPOSE
            ref = node.inputs[0]
        return ref, is_transposed

    def _is_alike(self, node: Node) -> bool:
        shapes = (tensor.shape for tensor in (*self.graph.input_types(node), *node.outputs))
        return node.op in _SAME and len(set(shapes)) == 1

    def _check_types(self, matmul: Node, softmax: Node, w: Ref) -> None:
        """Check that the dims of all tensors have the same atoms, and classes only one."""
        x, scores, logs = matmul.inputs[0], matmul.outputs[0], softmax.outputs[0]
        left, right, target = map(self.graph.type_of, (x, w, self.loss.inputs[1]))
        _check(logs.shape == scores.shape and target.dtype == "int64")
        _check(scores.parts == (left.parts[0], right.parts[0]) and left.dtype == right.dtype)
        _check(left.parts[1] == right.parts[1] and target.parts == left.parts[:1])
        _check(len(right.parts[0]) == 1)

    def _readers(self, ref: Ref, between: set[str]) -> Iterator[tuple[Node, int]]:
        """(op, input) of all that reads a tensor, behind ops that are in `between`."""
        for user in self.users.get(ref, ()):
            if user.op in between:
                _check(user.outputs[0].dtype in self.dtypes)
                yield from self._readers(Ref(user.index), between)
            else:
                yield from ((user, k) for k, read in enumerate(user.inputs) if read == ref)

    def _backward(self, softmax: Node) -> tuple[Node, Node]:
        """The backward of the loss, and that of the softmax. _Differs if anything else reads the
        softmax or its gradient."""
        known = {(self.loss.op, 0): self.loss}
        for reader, position in self._readers(Ref(softmax.index), _SAME):
            _check(known.setdefault((reader.op, position), reader) is reader)
        _check(set(known) == {(_LOSS, 0), (_LOSS_BACKWARD, 1), (_SOFTMAX_BACKWARD, 1)})
        backward, of_softmax = known[_LOSS_BACKWARD, 1], known[_SOFTMAX_BACKWARD, 1]
        _check(backward.args[3:6] == self.loss.args[2:])
        _check(self._is_same(backward.inputs[2], self.loss.inputs[1]))
        _check([*self._readers(Ref(backward.index), _SAME)] == [(of_softmax, 0)])
        return backward, of_softmax

    def _is_same(self, one: Ref, other: Ref) -> bool:
        """Whether two tensors are one, or the same op with the same inputs makes them: each phase
        may cut the microbatch of a tensor by itself."""
        first, second = self.graph.nodes[one.node], self.graph.nodes[other.node]
        alike = (first.op, first.args, first.kwargs) == (second.op, second.args, second.kwargs)
        is_deterministic = first.role is Role.OP and not first.random and one.output == other.output
        return one == other or (alike and is_deterministic)

    def _gradients(self, of_scores: Ref, x: Ref, w: Ref) -> tuple[Ref, tuple[Ref, ...]]:
        """The gradients of x and of w. _Differs if anything else reads that of the scores."""
        of_x: list[Ref] = []
        of_w: list[tuple[Ref, ...]] = []
        for reader, position in self._readers(of_scores, _SAME | _CAST):
            if reader.op == _TRANSPOSE:
                for matmul, at in self._readers(Ref(reader.index), _SAME):
                    _check(matmul.op == _MATMUL and at == 0)
                    _check(self._source(matmul.inputs[1]) == self._source(x))
                    of_w.append((Ref(matmul.index),))
            elif position == 0:
                _check(reader.op == _MATMUL and self._matrix(reader.inputs[1]) == (w, False))
                of_x.append(Ref(reader.index))
            else:
                _check(reader.op == _MATMUL)
                _check(self._transposed_source(reader.inputs[0]) == self._source(x))
                transposes = self.users.get(Ref(reader.index), ())
                _check(all(transpose.op == _TRANSPOSE for transpose in transposes))
                of_w.append(tuple(Ref(transpose.index) for transpose in transposes))
        _check(len(of_x) == len(of_w) == 1)
        return of_x[0], of_w[0]

    def _transposed_source(self, ref: Ref) -> Ref:
        """The `_source` of the tensor whose transpose is `ref`."""
        node = self.graph.nodes[self._source(ref).node]
        _check(node.op == _TRANSPOSE)
        return self._source(node.inputs[0])

    def _unread(self, ends: Sequence[Node], needed: set[int]) -> frozenset[int]:
        """The `ends`, and every op that only unread ops read, but for those that are `needed`."""
        unread = {node.index for node in ends}
        for node in reversed(self.graph.nodes):
            users = [
                u for k in range(len(node.outputs)) for u in self.users.get(Ref(node.index, k), ())
            ]
            is_free = node.role is Role.OP and not node.random and node.index not in needed
            if is_free and users and all(user.index in unread for user in users):
                unread.add(node.index)
        return frozenset(unread)


# The number of targets that a loss counts, from the targets alone.


def count_of(loss: Node) -> Node:
    """The op that counts the targets of a loss; it reads the loss's targets and weights."""
    _, target, weight, _, ignored = loss.args
    read = tuple(ref for ref in loss.inputs[1:] if ref in (target, weight))
    kept = slice(1, 1 + len(read))
    return replace(
        loss,
        op=COUNT,
        args=(target, weight, ignored),
        kwargs=(),
        inputs=read,
        outputs=loss.outputs[1:],
        key=f"{loss.key}.count",
        factors=tuple(
            replace(factor, type=FactorType.REDUCTION, inputs=factor.inputs[kept], outputs=(None,))
            for factor in loss.factors
            if factor.inputs[1] is not None
        ),
        partial=(),
        mean=False,
    )
