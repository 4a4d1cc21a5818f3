"""A script trains as ever while its model works on its loss in chunks; it gets the logits, or says
beforehand that it does not want them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ArgumentError, ConstraintError, PlanMismatchError
from autopar.plans.compatibility import stored_options
from autopar.plans.requests.options import Options
from tests.grouped import grouped
from tests.runtime.loss_chunk_workers import without_logits
from tests.runtime.microbatch_workers import batch, trained
from tests.runtime.spawn import spawn
from tests.runtime.workers import llama

TOLERANCE = 2e-5
WHY = (
    "no loss that can be worked on in chunks",
    "no microbatches: the gradient of output 1 comes from the script",
)


def check(seen: dict[str, Any]) -> None:
    told = [text for key, texts in seen.items() if key.endswith("told") for text in texts]
    numbers = {k: v for k, v in seen.items() if not k.endswith(("told", "chunks"))}
    assert not {k: v for k, v in numbers.items() if not v <= TOLERANCE}
    assert all(n == 3 for k, n in seen.items() if k.endswith("chunks"))
    # A backward that goes through the logits needs gradients of all of them.
    assert all(any(why in text for why in WHY) for text in told)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_ten_steps_of_a_script(microbatches: int) -> None:
    check(trained(llama(), loss_chunks=3, microbatches=microbatches))


def test_logits_that_nobody_reads_are_not_there() -> None:
    check(without_logits(loss_chunks=3))
    check(without_logits(loss_chunks=3, verify=True))


@pytest.mark.processes
def test_two_processes() -> None:
    for seen in spawn("tests.runtime.loss_chunk_workers.two", 2):
        assert isinstance(seen, dict)
        check(seen)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("function", ["two_of_classes", "two_without_logits"])
def test_two_processes_in_other_ways(function: str) -> None:
    for seen in spawn(f"tests.runtime.loss_chunk_workers.{function}", 2):
        assert isinstance(seen, dict)
        check(seen)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("how", [{}, {"stages": 2, "microbatches": 2}], ids=["one", "staged"])
def test_a_stored_plan_decides(how: dict[str, Any]) -> None:
    """Later calls have as many chunks, and what says otherwise is refused."""
    cluster = f"{how.get('stages', 1)}xcpu"
    plan = autopar.plan(llama(), batch(0, 8), cluster=cluster, **grouped(loss_chunks=3, **how))
    open_ = Options(microbatches=None, stages=None)
    asked = stored_options(open_, plan.structure)
    assert (asked.loss_chunks, asked.microbatches) == (3, how.get("microbatches", 1))
    assert asked.stages == how.get("stages", 1)
    assert stored_options(asked, plan.structure) == asked
    others: list[dict[str, Any]] = [
        {"loss_chunks": 4},
        {"loss_chunks": 1},
        {"microbatches": 4},
        {"stages": 3},
        {"saved_dtype": "bfloat16"},
    ]
    for other in others:
        with pytest.raises(ArgumentError, match=r"the plan has .* is applied as it is"):
            autopar.compile(llama(), plan=plan, **grouped(**other))


@pytest.mark.nightly
def test_later_calls_of_a_stored_plan() -> None:
    plan = autopar.plan(llama(), batch(0, 8), cluster="1xcpu", memory={"loss_chunks": 3})
    compiled = autopar.compile(llama(), plan=plan)
    for size in (8, 4):
        compiled(**batch(0, size)).loss.backward()
    assert [each.structure.loss_chunks for each in compiled.plans] == [3, 3]


def test_a_stored_plan_whose_outputs_are_others() -> None:
    """It is for another graph, either way."""
    for made, asked in (("logits", ()), ((), "logits")):
        plan = autopar.plan(llama(), batch(0, 8), cluster="1xcpu", outputs={"unread": made})
        compiled = autopar.compile(llama(), plan=plan, outputs={"unread": asked})
        with pytest.raises(PlanMismatchError):
            compiled(**batch(0, 8))


def test_an_output_that_there_is_not() -> None:
    compiled = autopar.compile(llama(), outputs={"unread": "logit"})
    with pytest.raises(ConstraintError, match=r"outputs\.unread: .*logits"):
        compiled(**batch(0, 8))


class Scored(nn.Module):
    """Never asks in which mode it is."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def test_an_output_is_left_out_while_the_model_trains_alone() -> None:
    compiled = autopar.compile(Scored(), outputs={"unread": "logits"})
    x, y = torch.randn(4, 8), torch.arange(4)
    for training in (True, False, True, False):
        compiled.train(training)
        assert (compiled(x=x, y=y)["logits"] is None) == training
    assert len(compiled.plans) == 2
