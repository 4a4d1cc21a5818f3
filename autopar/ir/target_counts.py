"""How many targets a loss counts, told of the targets alone."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import FactorType, Node

COUNT = "autopar.count_targets.default"
"""How many targets a loss counts, or the sum of their weights: the last output of the loss itself,
of the targets alone. Its arguments are the targets, the weights of classes and what is ignored."""


def count_of(loss: Node) -> Node:
    """What counts the targets of a loss; it reads what the loss reads."""
    _, target, weight, _, ignored = loss.args
    read = [ref for ref in loss.inputs[1:] if ref in (target, weight)]
    factors = (
        replace(factor, type=FactorType.REDUCTION, inputs=factor.inputs[1:], outputs=(None,))
        for factor in loss.factors
        if factor.inputs[1] is not None
    )
    return replace(
        loss,
        op=COUNT,
        args=(target, weight, ignored),
        kwargs=(),
        inputs=tuple(read),
        outputs=loss.outputs[1:],
        key=f"{loss.key}.count",
        factors=tuple(replace(f, inputs=f.inputs[: len(read)]) for f in factors),
        partial=(),
        mean=False,
    )
