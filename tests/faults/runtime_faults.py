"""Faults in what surrounds the graphs: where parameters lie, what a rank's piece is, prices."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from itertools import count
from operator import itemgetter
from typing import Any

import pytest
import torch

from autopar.cost_model import step_simulation
from autopar.ir import uneven
from autopar.runtime import generators
from autopar.runtime.checkpoint import initialise
from autopar.runtime.ops import draws
from autopar.runtime.process import beside, digests, world
from autopar.runtime.program import function, random, symbols
from tests.codegen.test_chunks import test_every_step
from tests.codegen.test_draws import test_equal_to_eager
from tests.cost_model.test_price import test_the_bill_of_any_plan_is_what_the_problem_says
from tests.faults.table import by_test, fault, verified
from tests.runtime.test_beside import (
    test_each_draw_moves_the_place_and_a_seed_takes_it_back,
    test_what_differs_is_told,
)
from tests.runtime.test_draws import (
    test_the_very_same_is_drawn_and_the_generator_left_as_it_was,
)
from tests.runtime.test_gradients import test_gradients_through_any_output_are_those_of_eager
from tests.runtime.test_helpers import test_random_numbers_have_a_state_of_their_own
from tests.runtime.test_pre_step_check import (
    test_a_digest_sees_every_value_and_its_place,
    test_what_differs_is_told_to_all_and_they_can_go_on,
)
from tests.runtime.test_weights import test_a_seed_decides_by_name_alone
from tests.runtime.test_world import test_placements_of_parameters_are_in_reversed_order

Patch = pytest.MonkeyPatch


@fault(by_test(test_placements_of_parameters_are_in_reversed_order))
def parameters_cut_by_the_slow_axis_first(patch: Patch) -> None:
    patch.setattr("tests.runtime.test_world.param_placements", world.dtensor_placements)


@fault(by_test(test_random_numbers_have_a_state_of_their_own))
def random_numbers_that_repeat(patch: Patch) -> None:
    """The state after a step is not kept: every step draws the same."""
    original = random.SharedRandom.drawn_from

    @contextmanager
    def again(self: random.SharedRandom) -> Generator[None, None, None]:
        before = self._state
        with original(self):
            yield
        self._state = before

    patch.setattr(random.SharedRandom, "drawn_from", again)


def draw_one() -> torch.Tensor:
    return torch.rand(1)


@fault(by_test(test_each_draw_moves_the_place_and_a_seed_takes_it_back, draw_one))
def draws_of_one_rank_overlooked(patch: Patch) -> None:
    patch.setattr(generators, "_MOVED", {"cpu": itemgetter(0, 0)})


@fault(by_test(test_what_differs_is_told, torch.arange(1.0, 9), torch.arange(1.0, 9).flip(0)))
def values_beside_outputs_compared_by_their_length(patch: Patch) -> None:
    patch.setattr(beside, "signed_sum", torch.Tensor.sum)


@fault(by_test(test_gradients_through_any_output_are_those_of_eager, "both", ()))
def gradients_through_an_output_beside_the_loss_dropped(patch: Patch) -> None:
    patch.setattr(function.Step, "cut_positions", frozenset())


@fault(by_test(test_gradients_through_any_output_are_those_of_eager, "both", ()))
def forward_done_again_with_other_random_numbers(patch: Patch) -> None:
    patch.setattr(random.DefaultRandom, "replayed", lambda *_: nullcontext())


@fault(by_test(test_equal_to_eager, (2,), 1, 1.0, 1))
def masks_drawn_again_from_wherever_the_generator_is(patch: Patch) -> None:
    patch.setattr(draws, "replayed", lambda *_: nullcontext())


@fault(by_test(test_the_very_same_is_drawn_and_the_generator_left_as_it_was, "aten.bernoulli.p"))
def generator_left_behind_what_was_drawn_again(patch: Patch) -> None:
    """What the script or the next step draws is not what it would be."""

    @contextmanager
    def started(state: torch.Tensor, device: torch.device) -> Generator[None, None, None]:
        generators.go_on_from(state, device)
        yield

    patch.setattr(draws, "replayed", started)


@fault(by_test(test_a_seed_decides_by_name_alone))
def initial_values_by_order_of_reading(patch: Patch) -> None:
    """The seed of a parameter moves on with every one that is read."""
    original = initialise._seeded
    read = count()
    patch.setattr(initialise, "_seeded", lambda seed, name: original(seed + next(read), name))


@fault(by_test(test_a_seed_decides_by_name_alone))
def initial_values_alike_under_every_name(patch: Patch) -> None:
    original = initialise._seeded
    patch.setattr(initialise, "_seeded", lambda seed, name: original(seed, ""))


def resolved(patch: Patch, symbol: Any, change: Callable[[tuple[Any, ...]], Any]) -> None:
    """The arguments of what `symbol` is on a rank go through `change`."""
    original = symbols._ON_A_RANK[symbol]

    def changed(*args: Any) -> Any:
        op, found = original(*args)
        return op, change(found)

    patch.setitem(symbols._ON_A_RANK, symbol, changed)


@fault(verified("vocabulary"))
def positions_counted_from_one_row_further(patch: Patch) -> None:
    resolved(patch, symbols.local_position, lambda args: (args[0] + 1,))


@fault(verified("layers"))
def every_rank_takes_the_first_piece(patch: Patch) -> None:
    resolved(patch, symbols.local_chunk, lambda args: (args[0], 0, args[2] - args[1]))


@fault(by_test(test_every_step, "a", (2,)), silent=False)
def uneven_chunks_rounded_down(patch: Patch) -> None:
    patch.setattr(symbols, "chunk_length", lambda size, ways: size // ways)


def padded_in_front(patch: Patch, symbol: Any) -> None:
    def turned(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return ([*args[0][:-2], args[0][-1], args[0][-2]],) if args else args

    resolved(patch, symbol, turned)


@fault(by_test(test_every_step, "a", (2,)))
def zeros_before_a_chunk_that_is_gathered(patch: Patch) -> None:
    padded_in_front(patch, symbols.padded_shard)


@fault(by_test(test_every_step, "c a", (4,)))
def zeros_before_chunks_that_are_scattered(patch: Patch) -> None:
    padded_in_front(patch, symbols.padded_whole)


@fault(by_test(test_every_step, "(h w) c", (2, 3)), silent=False)
def rows_of_chunks_counted_by_all_cuts_but_one(patch: Patch) -> None:
    original = uneven.held
    patch.setattr(symbols, "held", lambda size, cuts: original(size, list(cuts)[:1]))


@fault(by_test(test_the_bill_of_any_plan_is_what_the_problem_says, seed=1, mesh="2x2"))
def bill_that_leaves_some_out(patch: Patch) -> None:
    original = step_simulation.move_ns

    def cheaper(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        ns, host_ns = original(*args, **kwargs)
        return ns * 9 // 10, host_ns

    patch.setattr(step_simulation, "move_ns", cheaper)


@fault(by_test(test_the_bill_of_any_plan_is_what_the_problem_says, seed=1, mesh="2x2"))
def bill_that_forgets_the_optimizer(patch: Patch) -> None:
    patch.setattr(step_simulation, "update_s", lambda *_: 0.0)


@fault(by_test(test_a_digest_sees_every_value_and_its_place, torch.int64, (5, 3)))
def digest_of_a_batch_in_any_order(patch: Patch) -> None:
    patch.setattr(digests, "_weights", lambda device: torch.ones(1 << 14, dtype=torch.int64))


@fault(by_test(test_what_differs_is_told_to_all_and_they_can_go_on, "batch"))
def batches_that_are_not_compared(patch: Patch) -> None:
    patch.setattr(digests.BatchDigest, "__call__", lambda self, tensors: 0)
