"""Faults in losses that are worked on in chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.codegen.ops import loss as emitters
from autopar.ir.graph import Node
from autopar.ir.own_ops import LINEAR, LINEAR_BACKWARD
from autopar.ir.passes import loss_chunks
from autopar.plans import passes
from autopar.runtime.ops import chunked_loss
from tests.codegen.test_loss_chunks import test_equal_to_eager, test_in_microbatches_too
from tests.faults.table import by_test, exchanged, fault

Patch = pytest.MonkeyPatch


@fault(exchanged(LINEAR, "2"))
def targets_elsewhere_scored_by_every_rank(patch: Patch) -> None:
    """As if they were of the first class that a rank has."""
    patch.setattr(emitters, "ELSEWHERE", 0)


@fault(exchanged(LINEAR_BACKWARD, "2"))
def ignored_targets_with_gradients(patch: Patch) -> None:
    original = emitters._targets_or_elsewhere
    patch.setattr(
        emitters,
        "_targets_or_elsewhere",
        lambda p, target, _, classes: original(p, target, -7, classes),
    )


@fault(by_test(test_equal_to_eager, "mean", (), 0))
def rows_behind_the_first_chunk_left_out(patch: Patch) -> None:
    """Of the gradients alone."""
    original = chunked_loss._Head.gradient

    def gradient(self: Any, at: slice, target: Any, *given: Any) -> Any:
        found = original(self, at, target, *given)
        return found.zero_() if at.start else found

    patch.setattr(chunked_loss._Head, "gradient", gradient)


@fault(by_test(test_in_microbatches_too, "mean", (2,)))
def ignored_targets_counted_as_well(patch: Patch) -> None:
    """In what the loss is divided by."""
    original = loss_chunks.count_of

    def count(loss: Node) -> Node:
        found = original(loss)
        return replace(found, args=(*found.args[:2], -7))

    patch.setattr(loss_chunks, "count_of", count)
    patch.setattr(passes, "_cache", lambda _: {})
