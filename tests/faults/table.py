"""Faults: each breaks one thing, and says what must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.cases import made_once, make, verify
from tests.rules.samples import SAMPLES
from tests.rules.test_exchange import test_ranks_compute_together_what_the_op_computes_whole
from tests.rules.test_oracle import (
    test_partial_inputs_give_partial_outputs,
    test_shards_put_together_are_the_whole,
)

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Detector:
    """A check by name, that fails where something is wrong. `prepare` makes, before anything is
    broken, what it keeps."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Fault:
    """`inject` breaks something; `detector` must fail then. A `silent` fault leaves every shape as
    it is: nothing but wrong numbers would come of it."""

    name: str
    inject: Break
    detector: Detector
    silent: bool


FAULTS: dict[str, Fault] = {}


def verified(case: str) -> Detector:
    """`verify` with the graph and the plans that were made without the fault."""
    return Detector(f"verify {case}", lambda: verify(made_once(case)), lambda: made_once(case))


def retraced(case: str) -> Detector:
    """`verify` with graph and plans made under the fault."""
    return Detector(f"trace, plan and verify {case}", lambda: verify(make(case)))


def by_test(function: Callable[..., object], *args: Any, **kwargs: Any) -> Detector:
    """A test of another file."""
    inner = getattr(function, "hypothesis", None)
    call = function if inner is None else inner.inner_test
    given = ", ".join([*map(_text, args), *(f"{k}={_text(v)}" for k, v in kwargs.items())])
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    name += f"({given})" if given else ""
    return Detector(name, lambda: call(*args, **kwargs))


def proved(op: str) -> Detector:
    """The proof of an op's rule, sharded and partial, on all of its samples."""

    def run() -> None:
        for index in range(len(SAMPLES[op])):
            test_shards_put_together_are_the_whole(op, index)
            test_partial_inputs_give_partial_outputs(op, index)

    return Detector(f"test_oracle on {op}", run)


def exchanged(op: str, mesh: str) -> Detector:
    """The proof of an op whose ranks talk, on all of its samples."""

    def run() -> None:
        for index in range(len(SAMPLES[op])):
            test_ranks_compute_together_what_the_op_computes_whole(op, index, mesh)

    return Detector(f"test_exchange on {op}, {mesh}", run)


def fault(detector: Detector, *, silent: bool = True) -> Callable[[Break], Break]:
    """Enters a function that injects a fault, named by its docstring."""

    def enter(inject: Break) -> Break:
        name = inject.__name__
        assert name not in FAULTS
        FAULTS[name] = Fault(name, inject, detector, silent)
        return inject

    return enter


def _text(value: object) -> str:
    """The name of a function, whose text has an address in it."""
    return getattr(value, "__name__", str(value))
