"""The schedules with names: how long they take and what they hold by their papers, and row by row
what torch's own generators make."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count, permutations, product
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from autopar.errors import StageError
from autopar.ir.pipeline import Action, Pass, PipelineSchedule, simulate_actions
from autopar.plans.pipeline_orders import IN_CHUNKS, SCHEDULES, has_order, make_schedule

RANKS, MICROBATCHES = range(1, 9), range(1, 17)
CASES = list(product(RANKS, MICROBATCHES))
PAIRS = [(1, 1), (1, 2), (3, 2)]
TRIPLES = [(1, 1, 1), *permutations((1, 2, 3))]
"""Lengths of a forward, of a backward, and of the gradients of parameters if they come apart."""


def each_takes(forward: int, backward: int, weights: int = 0) -> Callable[[Action], int]:
    lengths = {Pass.FORWARD: forward, Pass.BACKWARD: backward, Pass.WEIGHTS: weights}
    return lambda action: lengths[action.kind]


def time(table: PipelineSchedule, length: Callable[[Action], int]) -> int:
    """Of a step whose messages take none."""
    return max(span.end for span in simulate_actions(table, length).values())


def idle(table: PipelineSchedule, length: Callable[[Action], int]) -> list[int]:
    """Of each rank between its first action and its last."""
    spans = simulate_actions(table, length)
    return [spans[r[-1]].end - spans[r[0]].start - sum(map(length, r)) for r in table.rows]


def held(table: PipelineSchedule) -> list[int]:
    """How many forwards whose backward is not over each rank has at most, of all its stages."""
    ends = Pass.WEIGHTS if table.is_split else Pass.BACKWARD
    found: list[int] = []
    for row in table.rows:
        steps = [(a.kind is Pass.FORWARD) - (a.kind is ends) for a in row]
        found.append(max(sum(steps[:end]) for end in range(len(steps) + 1)))
    return found


def rounds(ranks: int, microbatches: int) -> int:
    return max(1, microbatches // ranks)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_are_valid_and_have_each_stage_where_it_belongs(name: str, ranks: int) -> None:
    """Interleaved are those microbatches that rounds share evenly."""
    for microbatches, chunks in product(MICROBATCHES, (1, 3) if name in IN_CHUNKS else (1,)):
        if name in IN_CHUNKS and microbatches % (even := rounds(ranks, microbatches)):
            assert not has_order(name, ranks, microbatches)
            with pytest.raises(StageError, match=f"not interleaved on {ranks} ranks.* by {even}"):
                make_schedule(name, ranks, microbatches, chunks)
            continue
        table = make_schedule(name, ranks, microbatches, chunks)
        assert has_order(name, ranks, microbatches)
        assert PipelineSchedule.parse(str(table)) == table
        down = list(range(ranks))
        assignment = [*down, *reversed(down)] if name == "zb-v" else down * chunks
        assert table.ranks == dict(enumerate(assignment))
        assert table.microbatches == microbatches
        assert table.is_split == name.startswith("zb")


def test_what_is_no_schedule_is_said() -> None:
    with pytest.raises(StageError, match=f"'dapple': there are {', '.join(SCHEDULES)}"):
        make_schedule("dapple", 2, 4)
    for name in SCHEDULES.keys() - {*IN_CHUNKS}:
        with pytest.raises(StageError, match=f"{name} has a number of stages per rank"):
            make_schedule(name, 2, 4, 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_a_pipeline_fills_and_drains_once(name: str) -> None:
    for (ranks, microbatches), (f, b) in product(CASES, PAIRS):
        table = make_schedule(name, ranks, microbatches)
        assert time(table, each_takes(f, b)) == (microbatches + ranks - 1) * (f + b)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b"])
def test_eager_forwards_hide_sends_of_half_a_turn(name: str) -> None:
    """Once it has begun the last rank never stands still; in 1F1B it waits for every send."""
    for (ranks, more), (f, b) in product(product(range(2, 9), (0, 1, 7)), [(1, 2), (2, 2), (3, 5)]):
        table, sent = make_schedule(name, ranks, ranks + more), (f + b) // 2
        spans = simulate_actions(table, each_takes(f, b), delay=lambda _, sent=sent: sent)
        last = [spans[action] for action in table.rows[-1]]
        stands = last[-1].end - last[0].start - (ranks + more) * (f + b)
        assert stands == 0 if name == "eager-1f1b" else stands > 0 or ranks + more < 3


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaving_divides_the_idle_time_by_the_number_of_chunks(chunks: int) -> None:
    """f and b are of a chunk, so that those of a rank are `chunks` times as long."""
    cases = [(p, m) for p, m in CASES if m % p == 0]
    for (ranks, microbatches), (f, b) in product(cases, PAIRS):
        table = make_schedule("interleaved", ranks, microbatches, chunks)
        assert time(table, each_takes(f, b)) == (microbatches * chunks + ranks - 1) * (f + b)


@pytest.mark.parametrize("lengths", TRIPLES)
def test_zb_h1_fills_as_much_of_the_idle_time_as_gradients_of_weights_can(
    lengths: tuple[int, int, int],
) -> None:
    """Of 1F1B's f + b + w for each rank but one, f + b - w are left, as arXiv:2401.10241 has it.
    That holds where w is no longer than f or b; what is longer pushes back what follows it."""
    f, b, w = lengths
    for ranks, more in product(RANKS, (0, 1, 7)):
        microbatches = ranks + more
        found = time(make_schedule("zb-h1", ranks, microbatches), each_takes(*lengths))
        assert found == microbatches * (f + b + w) + (ranks - 1) * (f + b - min(lengths))


def test_zb_v_is_never_idle_once_there_are_enough_microbatches() -> None:
    """Rank r starts r forwards after the first, and ends as much later. With one microbatch less
    than it takes to fill the V, some rank waits."""
    length = each_takes(3, 3, 3)
    for ranks, microbatches in CASES:
        table = make_schedule("zb-v", ranks, microbatches)
        assert (not any(idle(table, length))) == (microbatches >= 2 * ranks - 1)
        if microbatches >= 2 * ranks - 1:
            assert time(table, length) == (6 * microbatches + ranks - 1) * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", lambda p, m, _: m),
        ("1f1b", lambda p, m, rank: min(m, p - rank)),
        ("eager-1f1b", lambda p, m, rank: min(m, 2 * (p - rank) - 1)),
        ("zb-h1", lambda p, m, _: min(m, p)),
    ],
)
def test_what_each_rank_holds(name: str, expected: Callable[[int, int, int], int]) -> None:
    for p, m in CASES:
        table = make_schedule(name, p, m)
        assert held(table) == [expected(p, m, rank) for rank in range(p)]
        assert held(table) == [table.in_flight(stage) for stage in range(p)]


def test_the_two_stages_of_a_rank_hold_as_much_in_zb_v_as_the_first_rank_in_1f1b() -> None:
    """Each of them half of it; on every rank, once there are enough microbatches."""
    for p, m in CASES:
        found = held(make_schedule("zb-v", p, m))
        assert max(found) == 2 * min(m, p)
        if m >= 2 * p - 1:
            assert found == [2 * p] * p


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_what_each_rank_holds_interleaved(chunks: int) -> None:
    """In chunks: a round of each but the last, two for each later rank, and the one at work."""
    for p, m in CASES:
        if m % rounds(p, m) == 0:
            most = (chunks - 1) * m // rounds(p, m) + 1
            expected = [min(m * chunks, most + 2 * (p - 1 - rank)) for rank in range(p)]
            assert held(make_schedule("interleaved", p, m, chunks)) == expected


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_zero_bubble_interleaved_waits_and_holds_as_little(chunks: int) -> None:
    """As long as `zb-h1` waits, in chunks, which are parts of a rank's stage there; and no more
    microbatches in flight."""
    for ranks, times in product(RANKS, (1, 2)):
        microbatches = times * ranks
        table = make_schedule("zb", ranks, microbatches, chunks)
        assert held(table) == [ranks * chunks] * ranks
        for lengths in [(1, 1, 1), (2, 2, 1), (1, 2, 1)]:
            f, b, w = lengths
            expected = microbatches * chunks * (f + b + w) + (ranks - 1) * (f + b - w)
            assert time(table, each_takes(*lengths)) == expected


def stages(ranks: int, chunks: int = 1) -> list[Any]:
    """What torch's constructors read of a rank's stages, without any process."""
    world = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0}
    return [
        SimpleNamespace(stage_index=k * ranks, submod=nn.Identity(), **world) for k in range(chunks)
    ]


def torch_rows(schedule: Any) -> list[str]:
    """Without empty slots and without where gradients of microbatches are summed up."""
    order: dict[int, Sequence[Any]] = schedule.pipeline_order
    rows = ([a for a in order[rank] if a and a.is_compute_op] for rank in sorted(order))
    return [" ".join(map(str, row)) for row in rows]


def by_torch(schedule: Any) -> PipelineSchedule:
    return PipelineSchedule.parse("\n".join(torch_rows(schedule)))


@pytest.mark.parametrize("ranks", RANKS)
def test_torch_orders_gpipe_and_zb_v_alike(ranks: int) -> None:
    for m in MICROBATCHES:
        (stage,) = stages(ranks)
        assert by_torch(ScheduleGPipe(stage, m)) == make_schedule("gpipe", ranks, m)
        v = ScheduleZBVZeroBubble(stages(ranks, 2), m)
        assert by_torch(v) == make_schedule("zb-v", ranks, m)


@pytest.mark.parametrize("ranks", RANKS)
def test_torch_orders_1f1b_alike(ranks: int) -> None:
    """Up to the number of a forward: torch's table has the last rank begin with microbatch 1, which
    its run does not. Fewer microbatches than ranks torch refuses."""
    for m in MICROBATCHES:
        (stage,) = stages(ranks)
        if m < ranks:
            with pytest.raises(ValueError, match="greater than or equal to the number of stages"):
                Schedule1F1B(stage, m)
            continue
        rows: list[str] = []
        for row in torch_rows(Schedule1F1B(stage, m)):
            number = count()
            rows.append(re.sub(r"(?<=F)\d+", lambda _, n=number: str(next(n)), row))
        assert "\n".join(rows) == str(make_schedule("1f1b", ranks, m))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("ranks", RANKS)
def test_torch_interleaves_alike(ranks: int) -> None:
    """And refuses as many microbatches."""
    for m, chunks in product(MICROBATCHES, (1, 2, 3)):
        of_rank = stages(ranks, chunks)
        if m % rounds(ranks, m):
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                ScheduleInterleaved1F1B(of_rank, m)
            continue
        table = make_schedule("interleaved", ranks, m, chunks)
        assert by_torch(ScheduleInterleaved1F1B(of_rank, m)) == table


@pytest.mark.parametrize("ranks", RANKS)
def test_torch_orders_interleaved_zero_bubbles_alike(ranks: int) -> None:
    """And `zb-h1`, which is that of one stage per rank. Torch refuses microbatches that rounds do
    not share evenly there too, although without chunks there are no rounds."""
    for m, chunks in product(MICROBATCHES, (1, 2, 3)):
        of_rank = stages(ranks, chunks)
        if m % rounds(ranks, m):
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                ScheduleInterleavedZeroBubble(of_rank, m)
            continue
        table = by_torch(ScheduleInterleavedZeroBubble(of_rank, m))
        assert table == make_schedule("zb", ranks, m, chunks)
        assert chunks > 1 or table == make_schedule("zb-h1", ranks, m)


@pytest.mark.parametrize("ranks", RANKS)
def test_other_tables_of_torch_are_read(ranks: int) -> None:
    """Backwards that begin with the last microbatch; and whole ones among some in two parts, or
    overlapped with forwards. What is no pass of a microbatch is left out."""
    for m in MICROBATCHES:
        looped = by_torch(ScheduleLoopedBFS(stages(ranks, 2), m))
        assert looped.microbatches == m and not looped.is_split
        backward = [a.microbatch for a in looped.rows[0] if a.kind is Pass.BACKWARD]
        assert backward == 2 * [*reversed(range(m))]
        if m < 2 * ranks:
            continue
        order: dict[int, Sequence[Any]] = ScheduleDualPipeV(stages(ranks, 2), m).pipeline_order
        text = "\n".join(",".join(str(a or "") for a in order[rank]) for rank in range(ranks))
        assert "OVERLAP_F_B" in text and "I" in text and "B" in text.replace("F_B", "")
        dual = PipelineSchedule.parse(text)
        assert dual.is_split and dual.num_stages == 2 * ranks and dual.microbatches == m
        whole = [a.removesuffix(")OVERLAP_F_B") for a in text.split(",") if "0B0" in a]
        row = str(dual).splitlines()[0].split()
        assert not whole or row[row.index("0B0") + 1] == "0W0"


def test_the_actions_of_a_table_with_messages() -> None:
    """As torch's runtime writes it once it has added what it does beside."""
    first = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD"
    lowered = f"{first}\n1RECV_F0,1F0,1I0,1SEND_B0,1W0"
    assert str(PipelineSchedule.parse(lowered)) == "0F0 0B0 0W0\n1F0 1B0 1W0"
