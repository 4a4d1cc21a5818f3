"""Faults in the stages of a pipeline: what they send to whom, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from autopar.ir import exchange
from autopar.ir.stages import StageLink
from autopar.runtime.program import mail, turns
from autopar.runtime.simulator import stages
from tests.faults.table import by_test, fault
from tests.ir.test_exchange import test_pieces_are_put_together_of_what_overlaps
from tests.runtime.test_pipelined import test_ranks_compute_together
from tests.zoo.test_stages import test_between_modules_in_every_schedule

Patch = pytest.MonkeyPatch

LLAMA = ("llama", 4, "1f1b", 3, 1)


@fault(by_test(test_pieces_are_put_together_of_what_overlaps, (2,), (2, 2)), silent=False)
def pieces_taken_from_the_first_device_alone(patch: Patch) -> None:
    def first(*given: Any) -> dict[Any, list[int]]:
        return {box: [0] for box in exchange.holders(*given)}

    patch.setattr("tests.ir.test_exchange.holders", first)


@fault(by_test(test_ranks_compute_together, *LLAMA))
def messages_asked_for_in_another_order(patch: Patch) -> None:
    """The first two from a rank are taken for each other."""
    original: Callable[[mail.Mail, int], Iterator[Any]] = mail.Mail._order

    def turned(self: mail.Mail, peer: int) -> Iterator[Any]:
        first, second, *rest = original(self, peer)
        return iter([second, first, *rest])

    patch.setattr(mail.Mail, "_order", turned)


@fault(by_test(test_ranks_compute_together, *LLAMA))
def sent_tensors_changed_before_they_are_read(patch: Patch) -> None:
    """Their memory is used again as soon as they are sent."""
    original = mail.Mail.give

    def give(self: mail.Mail, action: Any, sent: Mapping[StageLink, torch.Tensor]) -> None:
        original(self, action, {link: tensor.clone() for link, tensor in sent.items()})
        for under_way in self._under_way.values():
            for _, _, tensor in under_way:
                tensor.zero_()

    patch.setattr(mail.Mail, "give", give)


@fault(by_test(test_ranks_compute_together, *LLAMA))
def backward_of_the_microbatch_that_came_forward_last(patch: Patch) -> None:
    original = turns.TurnRun.backward

    def backward(self: turns.TurnRun, turn: int, *given: Any) -> Any:
        last = max(self.saved)
        self.saved[turn], self.saved[last] = self.saved[last], self.saved[turn]
        return original(self, turn, *given)

    patch.setattr(turns.TurnRun, "backward", backward)


@fault(by_test(test_between_modules_in_every_schedule, "gpt2", 4, "1f1b"))
def a_tied_weight_with_the_gradient_of_one_stage(patch: Patch) -> None:
    original = stages._Pipeline._joined

    def joined(self: Any) -> Any:
        first = self.runs[0].gradients
        for run in self.runs[1:]:
            for name in [name for name in run.gradients if name in first]:
                zeros: Sequence[Any] = [torch.zeros_like(x) for x in run.gradients[name]]
                run.gradients[name] = zeros
        return original(self)

    patch.setattr(stages._Pipeline, "_joined", joined)
