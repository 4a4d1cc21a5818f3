"""The record of every op, and the rule of every call.

To add an op, write its record into the file of its family, and a sample of its arguments into
`tests/rules/samples.py`; the test there proves the rule by running it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from autopar.rules.algebra import ALGEBRA
from autopar.rules.attention import ATTENTION
from autopar.rules.creation import CREATION
from autopar.rules.embedding import EMBEDDING
from autopar.rules.experts import EXPERTS
from autopar.rules.images import IMAGES
from autopar.rules.index import INDEX
from autopar.rules.loss import CHUNKED_LOSS, LOSS
from autopar.rules.matmuls import MATMULS
from autopar.rules.norm import NORM
from autopar.rules.notation import Call, Dims, Rule, all_whole, parse_rule
from autopar.rules.op import Family, Op
from autopar.rules.pointwise import POINTWISE
from autopar.rules.recurrent import RECURRENT
from autopar.rules.reductions import REDUCTIONS
from autopar.rules.shape import SHAPE
from autopar.rules.softmax import SOFTMAX
from autopar.rules.split_cat import SPLIT_CAT

FAMILIES: tuple[Family, ...] = (
    ALGEBRA, ATTENTION, CHUNKED_LOSS, CREATION, EXPERTS, IMAGES, INDEX, EMBEDDING, LOSS, NORM,
    SPLIT_CAT, POINTWISE, MATMULS, RECURRENT, REDUCTIONS, SHAPE, SOFTMAX,
)  # fmt: skip


def records(families: Iterable[Family]) -> dict[str, Op]:
    """Each op's record; ValueError on an op that has two."""
    ops: dict[str, Op] = {}
    for record, names in (entry for family in families for entry in family):
        for name in map(_full_name, names.split()):
            if name in ops:
                raise ValueError(f"{name} has two records")
            ops[name] = record
    return ops


def _full_name(name: str) -> str:
    """`aten.mm.default` of `mm`, `aten.sum.dim` of `sum.dim`."""
    if name == "getitem" or name.count(".") == 2:
        return name
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


OPS: dict[str, Op] = records(FAMILIES)
"""Op name, as in `graph.Node.op`, to its record."""

_UNKNOWN = Op(all_whole)


def record_of(op: str) -> Op:
    """The record of an op; for an op without one, a record that only replicates."""
    return OPS.get(op, _UNKNOWN)


def rule_for(call: Call) -> Rule | None:
    """The rule of a call; None if the op has none, or none for such arguments. The rule fits the
    call: ranks and sizes agree, dims of size 1 have no letters, and `sizes` has the letters of
    groups."""
    record = OPS.get(call.op)
    if record is None:
        return None
    rule = parse_rule(record.rule) if isinstance(record.rule, str) else record.rule(call)
    return None if rule is None else _fitted(rule, call)


def _fitted(rule: Rule, call: Call) -> Rule | None:
    sizes = _sizes(rule, call)
    if sizes is None:
        return None

    def kept(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(a for a in dim if sizes[a] != 1) for dim in dims) for dims in tensors
        )

    fitted = replace(rule, inputs=kept(rule.inputs), outputs=kept(rule.outputs))
    letters = frozenset(fitted.letters)
    grouped = {
        a for dims in (*fitted.inputs, *fitted.outputs) for dim in dims if len(dim) > 1 for a in dim
    }
    return replace(
        fitted,
        whole=(rule.whole & letters) | {a for a in letters if sizes[a] == 0},
        permuted=rule.permuted & letters,
        positional=rule.positional & letters,
        joint=tuple(j for j in rule.joint if letters.issuperset(j[1])),
        sizes=tuple((a, sizes[a]) for a in sorted(grouped)),
    )


def _sizes(rule: Rule, call: Call) -> dict[str, int] | None:
    """The size of every letter; None if the rule does not fit the call."""
    sides = (rule.inputs, call.inputs), (rule.outputs, call.outputs)
    if any(list(map(len, dims)) != [len(t.shape) for t in tensors] for dims, tensors in sides):
        return None
    pairs = [
        pair
        for side in sides
        for dims, tensor in zip(*side, strict=True)
        for pair in zip(dims, tensor.shape, strict=True)
    ]
    sizes = dict(rule.sizes)
    for dim, size in pairs:
        if len(dim) == 1:
            sizes.setdefault(dim[0], size)
    fits = all(
        all(a in sizes for a in dim) and prod(sizes[a] for a in dim) == size for dim, size in pairs
    )
    return sizes if fits else None
