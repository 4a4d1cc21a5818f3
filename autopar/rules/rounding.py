"""Which activations may be saved in fewer bits.

These are float32 tensors that depend on both inputs and parameters, made by ops whose results are
of a usual size (`_OF_USUAL_SIZE`). Statistics are not among them: one value stands for many
elements, and its error would be that of all of them. Statistics are sums, outputs behind an op's
first, and what is computed from these alone. Nor are masks, noise and tables, which do not depend
on inputs and parameters, and tensors that depend on parameters alone.

Backward must read them in a way that keeps an error as small as it was (`exact_keys`): as a factor
of a product, as the argument of a smooth gate, or only to move it. Differences of like numbers
(norms, variances, distances), periodic functions, poles, exponents and decisions amplify errors. An
unknown op may too (`_KEEPS_ERRORS_SMALL`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from autopar.ir.graph import Graph, Node, Phase, Ref, Role, per_graph
from autopar.ir.own_ops import RECEIVE, original_key
from autopar.rules.table import record_of
from autopar.rules.work import is_contraction

DTYPE = "float32"


def roundable(graph: Graph, exact: Collection[str]) -> frozenset[Ref]:
    """The activations of `graph` that may be rounded, each the first output of an op of forward.
    Ops with keys in `exact` are left out."""
    return frozenset(r for r in _activations(graph) if graph.nodes[r.node].key not in exact)


@per_graph
def exact_keys(graph: Graph) -> frozenset[str]:
    """The keys of ops of forward whose results backward must have unrounded: some op there may
    amplify an error, directly or through what backward computes, recomputes, or may recompute. Ops
    that are linear in tangents keep errors small."""
    tangents = _of_tangents(graph)
    exact, keys = set[int](), set[str]()
    for node in reversed(graph.nodes):
        if node.role is not Role.OP:
            continue
        if node.index in exact and not node.view:
            # An optional copy stands for its original, which is saved where there is no copy.
            keys.add(original_key(node.key))
        if node.phase is Phase.BACKWARD:
            read = node.inputs if node.index in exact else _read_exactly(node)
            exact.update(ref.node for ref in read if ref.node not in tangents)
        elif node.index in exact and node.view:
            exact.update(ref.node for ref in node.inputs)
    return frozenset(keys)


def _of_tangents(graph: Graph) -> frozenset[int]:
    """The nodes of backward that depend on tangents: backward is linear in these."""
    linear = set[int]()
    for node in graph.nodes:
        is_sent = node.op == RECEIVE and node.phase is Phase.BACKWARD
        if node.role is Role.TANGENT or is_sent or any(ref.node in linear for ref in node.inputs):
            linear.add(node.index)
    return frozenset(linear)


def _read_exactly(node: Node) -> tuple[Ref, ...]:
    """The inputs whose errors the op may amplify."""
    name = _name(node)
    if node.view:
        return ()
    if name in _BY_NUMBERS and not _is_mild(node):
        return node.inputs
    small = _KEEPS_ERRORS_SMALL.get(name, ())
    return tuple(ref for at, ref in enumerate(node.inputs) if small is not _ALL and at not in small)


def _is_mild(node: Node) -> bool:
    """Whether a power, or a threshold, is one that keeps errors small."""
    numbers = [x for x in node.args if isinstance(x, int | float) and not isinstance(x, bool)]
    if node.op.startswith("aten.pow."):
        return len(numbers) == 1 and 1 <= numbers[0] <= 4
    return numbers == [0]  # the sign, which rounding leaves as it is


def _name(node: Node) -> str:
    return node.op.removeprefix("aten.").removesuffix(".default")


_ALL = (-1,)
_MATMULS = (
    "mm bmm addmm baddbmm mv dot convolution convolution_backward _grouped_mm "
    "transformers.grouped_mm_fallback transformers.grouped_mm_fallback_backward"
)
_SCALED = "mul.Tensor mul.Scalar div.Scalar neg abs square"
_SMOOTH = "gelu silu mish relu leaky_relu"
_MOVED = (
    "clone contiguous copy _to_copy cat stack constant_pad_nd flip roll repeat gather index.Tensor "
    "where.self masked_fill.Scalar select_backward slice_backward lift_fresh_copy "
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward"
)
_GATES = (
    "gelu_backward silu_backward leaky_relu_backward threshold_backward _fused_rms_norm_backward"
)
_BY_NUMBERS = frozenset({"pow.Tensor_Scalar", "threshold_backward"})
_KEEPS_ERRORS_SMALL: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(f"{_MATMULS} {_SCALED} {_SMOOTH} {_MOVED}".split(), _ALL),
    **dict.fromkeys(_GATES.split(), (1,)),
    "pow.Tensor_Scalar": _ALL,
    "div.Tensor": (0,),
}
"""The inputs, by position among an op's tensors, whose errors the op does not amplify: neither
relative to the result, nor in absolute terms among numbers of the size of one."""

_OF_USUAL_SIZE = frozenset(
    f"{_MATMULS} {_SMOOTH} {_MOVED} add.Tensor mul.Tensor native_layer_norm native_batch_norm "
    "_native_batch_norm_legit_functional native_group_norm _fused_rms_norm embedding "
    "native_dropout".split()
)
"""Ops that make activations of the size of one in usual models. Near a pole a few elements are much
larger than all others, and a sum in which these cancel has their error. float16 has few digits
below 6e-5, and none below 3e-8, where squares and logarithms easily are."""


@per_graph
def _activations(graph: Graph) -> frozenset[Ref]:
    """The first outputs of ops of forward that are activations."""
    given, trained, statistics = set[int](), set[int](), set[int]()
    activations = set[Ref]()
    for node in graph.nodes:
        sources = {ref.node for ref in node.inputs}
        if node.role is Role.INPUT or node.op == RECEIVE or sources & given:
            given.add(node.index)
        if node.role is Role.PARAM or node.op == RECEIVE or sources & trained:
            trained.add(node.index)
        if node.role is not Role.OP or node.phase is not Phase.FORWARD:
            continue
        if _is_statistic(graph, node, given & trained, statistics):
            statistics.add(node.index)
        elif node.index in given & trained and _is_activation(node):
            activations.add(Ref(node.index))
    return frozenset(activations)


def _is_activation(node: Node) -> bool:
    """Whether an op makes a tensor of which each element is one of many."""
    is_computed = not (node.view or node.random or node.op == RECEIVE)
    tensor = node.outputs[0] if node.outputs else None
    if not is_computed or tensor is None or _name(node) not in _OF_USUAL_SIZE:
        return False
    return tensor.dtype == DTYPE and prod(tensor.shape) > 1


def _is_statistic(graph: Graph, node: Node, activations: set[int], known: set[int]) -> bool:
    """Whether an op makes a statistic: it reduces dims and adds no others, or all activations that
    it reads are `known` statistics."""
    if node.view:
        source = node.inputs[0]
        return source.node in known or bool(source.output and not graph.nodes[source.node].view)
    if is_contraction(node.op) or record_of(node.op).embedding_lookup:
        return False
    factors = [factor for factor in node.factors if not factor.members]
    dropped = any(any(f.inputs) and f.outputs and f.outputs[0] is None for f in factors)
    others = any(f.outputs and f.outputs[0] is not None and not any(f.inputs) for f in factors)
    read = [ref.node for ref in node.inputs if ref.node in activations]
    return (dropped and not others) or (bool(read) and all(place in known for place in read))
