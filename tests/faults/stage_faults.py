"""Faults in the stages of a pipeline: what they send to whom, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost_model import cost_breakdown
from autopar.driver.search import pipelining
from autopar.ir import redistribute
from autopar.ir.cutting import RankMeshes
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.passes import stages as backward_parts
from autopar.ir.passes.stages import StageLink
from autopar.ir.pipeline import Waiting
from autopar.runtime.program import microbatch_run, stage_messages
from autopar.runtime.simulator import stages
from autopar.solver import cutting
from tests.driver.test_split_pipelines import test_what_waits_for_either_part_is_held
from tests.driver.test_unequal_ranks import test_any_number_of_stages_shares_the_devices
from tests.faults.table import Detector, by_test, fault
from tests.ir.test_backward_parts import test_the_first_part_is_what_other_stages_wait_for
from tests.ir.test_exchange import test_pieces_are_put_together_of_what_overlaps
from tests.runtime.test_pipelined import test_ranks_compute_together
from tests.solver.test_cutting import best_of_all, on_meshes, test_no_cuts_are_better
from tests.zoo.test_stages import test_between_modules_in_every_schedule
from tests.zoo.test_two_parts import (
    test_zero_bubble_is_eager,
)

Patch = pytest.MonkeyPatch

LLAMA = ("llama", 4, "1f1b", 3, 1)


@fault(by_test(test_pieces_are_put_together_of_what_overlaps, (2,), (2, 2)), silent=False)
def pieces_taken_from_the_first_device_alone(patch: Patch) -> None:
    def first(*given: Any) -> dict[Any, list[int]]:
        return {box: [0] for box in redistribute.holders(*given)}

    patch.setattr("tests.ir.test_exchange.holders", first)


@fault(by_test(test_ranks_compute_together, *LLAMA))
def messages_asked_for_in_another_order(patch: Patch) -> None:
    """The first two from a rank are taken for each other."""
    original: Callable[[stage_messages.Exchanges, int], Iterator[Any]] = (
        stage_messages.Exchanges._order
    )

    def turned(self: stage_messages.Exchanges, peer: int) -> Iterator[Any]:
        first, second, *rest = original(self, peer)
        return iter([second, first, *rest])

    patch.setattr(stage_messages.Exchanges, "_order", turned)


@fault(by_test(test_ranks_compute_together, *LLAMA))
def sent_tensors_changed_before_they_are_read(patch: Patch) -> None:
    """Their memory is used again as soon as they are sent."""
    original = stage_messages.StageMessages.give

    def give(
        self: stage_messages.StageMessages, action: Any, sent: Mapping[StageLink, torch.Tensor]
    ) -> None:
        original(self, action, {link: tensor.clone() for link, tensor in sent.items()})
        for under_way in self._under_way.values():
            for _, _, tensor in under_way:
                tensor.zero_()

    patch.setattr(stage_messages.StageMessages, "give", give)


@fault(by_test(test_ranks_compute_together, *LLAMA))
def backward_of_the_microbatch_that_came_forward_last(patch: Patch) -> None:
    original = microbatch_run.MicrobatchRun.backward

    def backward(self: microbatch_run.MicrobatchRun, microbatch: int, *given: Any) -> Any:
        last = max(self.saved)
        self.saved[microbatch], self.saved[last] = self.saved[last], self.saved[microbatch]
        return original(self, microbatch, *given)

    patch.setattr(microbatch_run.MicrobatchRun, "backward", backward)


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


SPLIT = ("gpt2", 4, "zb-h1")


@fault(by_test(test_the_first_part_is_what_other_stages_wait_for, 1), silent=False)
def gradients_of_weights_in_the_first_part(patch: Patch) -> None:
    """Other stages wait for all of backward."""

    def all_of_it(graph: Graph) -> frozenset[int]:
        return frozenset(n.index for n in graph.with_role(Role.OP) if n.phase is Phase.BACKWARD)

    patch.setattr(backward_parts, "waited_for", all_of_it)


@fault(by_test(test_between_modules_in_every_schedule, *SPLIT))
def weights_of_the_microbatch_that_came_back_last(patch: Patch) -> None:
    original = microbatch_run.MicrobatchRun.weights

    def weights(self: microbatch_run.MicrobatchRun, microbatch: int) -> None:
        names = self.saved[microbatch].keys()
        last = max(k for k, saved in self.saved.items() if saved.keys() == names)
        self.saved[microbatch] = dict(self.saved[last])
        original(self, microbatch)

    patch.setattr(microbatch_run.MicrobatchRun, "weights", weights)


@fault(by_test(test_zero_bubble_is_eager, "gpt2", 1, 2, "zb-h1"))
def what_waits_for_weights_overwritten(patch: Patch) -> None:
    """Their memory is used again once the first part of backward is over."""
    original = microbatch_run.MicrobatchRun.backward

    def backward(self: microbatch_run.MicrobatchRun, microbatch: int, *given: Any) -> Any:
        sent = original(self, microbatch, *given)
        for name, pieces in self.saved[microbatch].items():
            self.saved[microbatch][name] = [torch.zeros_like(piece) for piece in pieces]
        return sent

    patch.setattr(microbatch_run.MicrobatchRun, "backward", backward)


@fault(by_test(test_what_waits_for_either_part_is_held))
def what_waits_for_weights_not_counted(patch: Patch) -> None:
    original = cost_breakdown.waiting_bytes

    def waiting(scheduled: Any, prices: Any, others: Sequence[Waiting]) -> Any:
        return original(scheduled, prices, [Waiting(each.backward) for each in others])

    patch.setattr(cost_breakdown, "waiting_bytes", waiting)


def _cut_on_meshes() -> None:
    for problem in map(on_meshes, range(40)):
        if problem is not None and best_of_all(problem) is not None:
            test_no_cuts_are_better(problem)


CUT_ON_MESHES = Detector("test_cutting.test_no_cuts_are_better, ranks that differ", _cut_on_meshes)


@fault(CUT_ON_MESHES)
def more_devices_than_there_are(patch: Patch) -> None:
    """Each rank has the mesh that is best for it."""
    original = cutting._Program._on_meshes

    def on(self: Any, meshes: RankMeshes) -> None:
        sizes, devices = meshes.sizes, len(set(self.problem.ranks))
        is_given = bool(meshes.given)
        original(
            self, meshes if is_given else replace(meshes, sizes=(1,) * len(sizes), devices=devices)
        )

    patch.setattr(cutting._Program, "_on_meshes", on)


@fault(CUT_ON_MESHES)
def a_shared_weight_on_two_meshes(patch: Patch) -> None:
    original = cutting._Program._on_meshes

    def on(self: Any, meshes: RankMeshes) -> None:
        original(self, replace(meshes, alike=()))

    patch.setattr(cutting._Program, "_on_meshes", on)


@fault(by_test(test_any_number_of_stages_shares_the_devices, 5, 2), silent=False)
def ranks_that_begin_where_equal_ones_would(patch: Patch) -> None:
    def evenly(cluster: Any, sizes: Sequence[int]) -> tuple[int, ...]:
        each = cluster.num_devices // len(sizes)
        return tuple(range(0, each * len(sizes), each))

    patch.setattr(pipelining, "place_parts", evenly)
