"""Faults in what surrounds the graphs: placement of parameters, binding, prices."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.codegen import bind
from autopar.cost_model import account
from autopar.runtime import world
from tests.codegen.test_generate import test_bind_leaves_no_symbol_and_the_program_as_it_was
from tests.cost_model.test_price import test_the_bill_of_any_plan_is_what_the_problem_says
from tests.faults.table import by_test, fault
from tests.runtime.test_world import test_placements_of_parameters_are_in_reversed_order

Patch = pytest.MonkeyPatch


@fault(by_test(test_placements_of_parameters_are_in_reversed_order))
def parameters_cut_by_the_slow_axis_first(patch: Patch) -> None:
    patch.setattr(
        "tests.runtime.test_world.param_placements", lambda s: tuple(world.placements(s))
    )


@fault(by_test(test_bind_leaves_no_symbol_and_the_program_as_it_was))
def rank_bound_to_the_piece_of_another(patch: Patch) -> None:
    original: Any = bind.__globals__["on_rank"]

    def shifted(symbol: Any, args: Any, index: Any) -> Any:
        return original(symbol, args, {name: at + 1 for name, at in index.items()})

    patch.setitem(bind.__globals__, "on_rank", shifted)


@fault(by_test(test_the_bill_of_any_plan_is_what_the_problem_says, seed=1, mesh="2x2"))
def bill_that_leaves_copies_out(patch: Patch) -> None:
    original = account.move_ns

    def cheaper(*args: Any) -> int:
        return original(*args) * 9 // 10

    patch.setattr(account, "move_ns", cheaper)

