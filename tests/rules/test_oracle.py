"""Every rule is proved by running it: whatever it lets be sharded or left partial gives, put
together, what the op gives whole."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from autopar.rules.notation import Call, Rule
from autopar.rules.table import OPS, rule_for
from tests.rules.execution import (
    assert_equal,
    call_op,
    letter_sizes,
    resolve,
    run_sharded,
    snapshot,
    substitute,
)
from tests.rules.making import make
from tests.rules.samples import SAMPLES

UNDEFINED = ("bernoulli", "empty", "rand", "dropout.")
"""Ops whose results have no values to compare."""

CASES = [
    pytest.param(op, index, id=f"{op}-{index}")
    for op in sorted(OPS)
    for index in range(max(1, len(SAMPLES.get(op, ()))))
]


def made(op: str, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = SAMPLES[op][index]
    generator = torch.Generator().manual_seed(index)
    return make(args, generator), make(kwargs, generator)


def ruled(call: Call) -> Rule:
    rule = rule_for(call)
    assert rule is not None, f"no rule for {call}"
    return rule


@pytest.mark.parametrize(("op", "index"), CASES)
def test_shards_put_together_are_the_whole(op: str, index: int) -> None:
    assert op in SAMPLES, f"{op} has a rule and no sample in tests/rules/samples.py"
    args, kwargs = made(op, index)
    call, inputs = snapshot(op, args, kwargs)
    rule = ruled(call)
    expected = call_op(resolve(op), args, kwargs)
    sizes = letter_sizes(rule, call)
    free = [a for a in rule.letters if a not in rule.whole | rule.exchanged]
    single = [{a: n} for a in free for n in (2, 3) if sizes[a] % n == 0]
    double = [{a: 2, b: 2} for a, b in combinations(free, 2) if sizes[a] % 2 == sizes[b] % 2 == 0]
    for ways in single + double:
        got = run_sharded(call, rule, args, kwargs, inputs, ways)
        if not any(word in op for word in UNDEFINED):
            assert_equal(got, expected, f"{rule} sharded by {ways}")


@pytest.mark.parametrize(("op", "index"), CASES)
def test_partial_inputs_give_partial_outputs(op: str, index: int) -> None:
    args, kwargs = made(op, index)
    call, inputs = snapshot(op, args, kwargs)
    check_partial(call, ruled(call), args, kwargs, inputs)


def check_partial(
    call: Call,
    rule: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[torch.Tensor],
) -> None:
    """For every set of `rule.partial`: random summands of those inputs give summands of outputs."""
    expected = call_op(resolve(call.op), args, kwargs)
    # A seed that made none of the inputs: a summand equal to one proves nothing.
    generator = torch.Generator().manual_seed(1000)
    for together in rule.partial:
        summands = [list(inputs), list(inputs), list(inputs)]
        for k in together:
            first, second = (_like(inputs[k], generator) for _ in range(2))
            last = inputs[k] - first - second
            for parts, value in zip(summands, (first, second, last), strict=True):
                parts[k] = value
        results = [
            call_op(resolve(call.op), *substitute(args, kwargs, parts)) for parts in summands
        ]
        if not any(word in call.op for word in UNDEFINED):
            sums = [sum(column[1:], start=column[0]) for column in zip(*results, strict=True)]
            assert_equal(sums, expected, f"{rule} partial in {together}")


def _like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return torch.randint(-9, 9, x.shape, generator=generator, dtype=x.dtype)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype)


def test_no_sample_lacks_a_rule() -> None:
    assert set(SAMPLES) <= set(OPS)
