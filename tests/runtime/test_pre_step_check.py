"""Ranks that meet, as threads over gloo and one Store; `test_failures.py` has them as processes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.codegen.bind import bind
from autopar.errors import PlanMismatchError, RankError
from autopar.ir.mesh import Axis, Mesh
from autopar.runtime.process import pre_step_check as meetings
from autopar.runtime.process.brought import NEW
from autopar.runtime.process.digests import BatchDigest
from autopar.runtime.process.pre_step_check import PreStepCheck
from autopar.runtime.process.rank_registry import RankRegistry, StoreKeeper
from autopar.runtime.process.stack_lines import AXIS, FOR, of_error, waiting_collective
from autopar.runtime.process.waits import BoundedStore
from autopar.runtime.program.program import Program

Work = Callable[[PreStepCheck, int], object]


def gather(work: Work, size: int = 2, timeout_s: float = 20.0) -> list[Any]:
    """What `work` returns, or the error it raises, per rank."""
    outcomes: list[Any] = [None] * size
    rolls: list[RankRegistry] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        prefixed = dist.PrefixStore("gloo", store)
        group: Any = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=timeout_s))
        own = BoundedStore(dist.PrefixStore("roll", store), timeout_s)
        roll = RankRegistry(own, rank, size, keeper=StoreKeeper(""))
        rolls.append(roll)
        try:
            bounded, cpu = BoundedStore(store, timeout_s), torch.device("cpu")
            outcomes[rank] = work(PreStepCheck(group, bounded, roll, cpu), rank)
        except Exception as error:
            outcomes[rank] = error
            if not isinstance(error, RankError | PlanMismatchError):
                roll.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for roll in rolls:
        roll.close()
    return outcomes


def values(rank: int) -> list[Tensor]:
    return [torch.arange(6) + rank, torch.ones(3)]


def test_ranks_with_the_same_go_on_together_and_wait_for_late_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meetings, "PATIENCE_S", 0.1)

    def work(pre_step_check: PreStepCheck, rank: int) -> int:
        for call in range(3):
            time.sleep(0.3 * (rank == call))
            pre_step_check.meet(0, values(0), dict)
        return 0

    assert gather(work, 3) == [0, 0, 0]


@pytest.mark.parametrize("odd", ["batch", "program", "gradients"])
def test_what_differs_is_told_to_all_and_they_can_go_on(odd: str) -> None:
    def work(pre_step_check: PreStepCheck, rank: int) -> str:
        is_odd = rank == 1
        with torch.set_grad_enabled(not (is_odd and odd == "gradients")):
            program = NEW if is_odd and odd == "program" else 0
            batch = values(int(is_odd and odd == "batch"))
            told = ""
            try:
                pre_step_check.meet(program, batch, lambda: {"inputs": "int64[6]"})
            except PlanMismatchError as error:
                told = str(error)
        pre_step_check.meet(0, values(0), dict)
        return told

    first, *others = gather(work, 3)
    assert others == [first] * 2
    assert re.match(
        rf"the ranks do not agree on call 1 of a compiled model: rank 1 differs from ranks 0, 2 in "
        rf"{odd}[^;]*; every rank calls a compiled model at the same time",
        first,
    )


def test_a_rank_that_has_ended_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "PATIENCE_S", 0.1)

    def work(pre_step_check: PreStepCheck, rank: int) -> object:
        pre_step_check.meet(0, values(0), dict)
        if rank == 1:
            raise ValueError("the end")
        with pytest.raises(RankError) as caught:
            pre_step_check.meet(0, values(0), dict)
        with pytest.raises(RankError, match="rank 1 has ended"):
            pre_step_check.meet(0, values(0), dict)
        return str(caught.value)

    text, error = gather(work)
    assert isinstance(error, ValueError)
    assert re.match(
        r"rank 0 waited in the start of call 2, at test_pre_step_check\.py:\d+ in work, and rank 1 "
        r"has ended after 1 calls; every rank calls a compiled model at the same time",
        text,
    )


def test_a_rank_that_stays_away_is_named_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "PATIENCE_S", 0.1)

    def work(pre_step_check: PreStepCheck, rank: int) -> object:
        pre_step_check.meet(0, values(0), dict)
        if rank == 1:
            time.sleep(4.0)
            return None
        with pytest.raises(RankError) as caught:
            pre_step_check.meet(0, values(0), dict)
        assert "Timed out" in str(caught.value.__cause__)
        return str(caught.value)

    text, _ = gather(work, timeout_s=2.0)
    assert re.search(r"and rank 1 is at test_pre_step_check\.py:\d+ in work$", text)


def test_a_collective_that_fails_says_what_it_was_of() -> None:
    """By the line of the graph that the error came through, once bound to a rank."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    c10d = torch.ops._c10d_functional
    sent = graph.call_function(c10d.all_reduce.default, (x, "sum", "dp"))
    sent.meta[FOR] = "the gradient of w"
    graph.output((graph.call_function(c10d.wait_tensor.default, (sent,)),))
    program = Program(fx.GraphModule({}, graph), None, ("input:0",), ("loss:0",))
    axes = Mesh((Axis("dp", 2),))
    gm = bind(program, {"dp": "no such group"}, axes, (0,)).forward
    with pytest.raises(Exception, match=r"no such group|not found|resolve") as caught:
        gm.forward([torch.ones(2)])
    assert waiting_collective(of_error(caught.value), gm) == (
        "all_reduce over mesh axis dp of the gradient of w"
    )
    assert next(node for node in gm.graph.nodes if FOR in node.meta).meta[AXIS] == "dp"


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128],
)
@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (40_001,), (130, 129)])
def test_a_digest_sees_every_value_and_its_place(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    digest = BatchDigest()
    generator = torch.Generator().manual_seed(0)
    made = torch.randint(0, 2, shape, generator=generator)
    made.view(-1)[0] = 0
    seen = {digest([made.to(dtype)])}
    assert digest([made.to(dtype).clone()]) in seen
    for place in {0, made.numel() - 1, made.numel() // 2}:
        changed = made.clone()
        changed.view(-1)[place] = 1 - changed.view(-1)[place]
        seen.add(digest([changed.to(dtype)]))
    places = {0, made.numel() - 1, made.numel() // 2}
    assert len(seen) == 1 + len(places)
    if made.dim() and made.numel() > 5:
        turned = made.flip(0).roll(1, 0)
        assert torch.equal(turned, made) or digest([turned.to(dtype)]) not in seen
    assert digest([made[..., ::2].to(dtype) if shape else made.to(dtype)]) is not None
    assert digest([]) == 0


def test_reads_in_which_not_all_took_part_are_told_at_the_next_call() -> None:
    """Though ranks have met for a step of an optimizer, or to tell their rows, in between."""

    def work(pre_step_check: PreStepCheck, rank: int) -> None:
        pre_step_check.meet(0, values(0), dict)
        pre_step_check.read_unasked(7)
        if rank == 1:
            pre_step_check.read_unasked(8)
        pre_step_check.step()
        pre_step_check.exchange([rank])
        pre_step_check.meet(0, values(0), dict)

    for error in gather(work):
        assert isinstance(error, PlanMismatchError)
        assert "differs from rank 0 in reads: digest" in str(error)
        assert "may be read on one rank alone" in str(error)


def test_a_call_that_failed_before_it_met_is_counted_as_one() -> None:
    def work(pre_step_check: PreStepCheck, rank: int) -> list[int]:
        pre_step_check.exchange([rank])
        rows = pre_step_check.exchange([rank, 7])
        pre_step_check.meet(0, values(0), dict)
        return [pre_step_check.registry.calls, *rows.flatten().tolist()]

    assert gather(work) == [[2, 0, 7, 1, 7]] * 2
