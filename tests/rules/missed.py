"""Prints what is valid and no rule offers: `python -m tests.rules.missed`. By execution, like the
tests; a line here is a choice that planning does without, not an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations

from autopar.rules.notation import Call, Rule
from autopar.rules.table import OPS, rule_for
from tests.rules import test_oracle as oracle
from tests.rules.execution import (
    assert_equal,
    call_op,
    letter_sizes,
    resolve,
    run_sharded,
    snapshot,
)
from tests.rules.samples import SAMPLES


def missed(op: str, index: int) -> Iterator[str]:
    """Whole letters that can be sharded, and sets of inputs that can be partial, in a sample. The
    backward of a loss does not check its class numbers: a class dim cut short is not tried."""
    args, kwargs = oracle.made(op, index)
    call, inputs = snapshot(op, args, kwargs)
    rule = rule_for(call)
    if rule is None or any(word in op for word in oracle.UNDEFINED):
        return
    expected = call_op(resolve(op), args, kwargs)
    sizes = letter_sizes(rule, call)
    for letter in () if "_backward" in op and "loss" in op else sorted(rule.whole):
        for n in (2, 3):
            if sizes[letter] and sizes[letter] % n == 0:
                try:
                    got = run_sharded(call, rule, args, kwargs, inputs, {letter: n})
                    assert_equal(got, expected, "")
                    yield f"letter {letter} {n} ways"
                except (AssertionError, RuntimeError, IndexError, ValueError, KeyError):
                    pass
    for members in _sets(call, rule):
        try:
            oracle.check_partial(call, replace(rule, partial=(members,)), args, kwargs, inputs)
            yield f"partial {members}"
        except (AssertionError, RuntimeError, IndexError, ValueError):
            pass


def _sets(call: Call, rule: Rule) -> Iterator[tuple[int, ...]]:
    if any(o.dtype == "bool" for o in call.outputs):
        return
    known = {tuple(members) for members in rule.partial}
    numbers = [k for k, i in enumerate(call.inputs) if i.dtype == "float64"]
    for members in chain.from_iterable(combinations(numbers, n) for n in (1, 2)):
        if members not in known:
            yield members


if __name__ == "__main__":
    for name in sorted(OPS):
        for position in range(len(SAMPLES[name])):
            for line in missed(name, position):
                print(f"{name} [{position}]: {line}")
