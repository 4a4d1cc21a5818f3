"""The best published runs beside what is predicted of them."""

from __future__ import annotations

from collections import Counter

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from autopar.cluster.devices import DEVICES
from benchmarks import records
from benchmarks.published.predict import cluster_of
from benchmarks.published.runs import reasons
from benchmarks.records import (
    Chosen,
    Predicted,
    Record,
    chosen_plan,
    main,
    memory_limit,
    row,
    without_trainer,
)

RECORDS = records.records()
ANY = next(each for each in RECORDS if each.run.name.startswith("mpt_3b"))
TINY = replace(
    ANY.run, name="tiny", layers=1, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512,
    sequence=64, gpus=2, gpus_per_node=2, dp=2, microbatch=2, global_batch=8, recompute="full",
)  # fmt: skip


def test_the_records_are_published_runs_in_bfloat16() -> None:
    assert Counter(each.kind for each in RECORDS) == {"given": 11, "held out": 7}
    assert len({each.run.name for each in RECORDS}) == len(RECORDS)
    assert not any(each.run.float8 != "no" for each in RECORDS)
    left_out = {each.run.name: reasons(each.run) for each in RECORDS if reasons(each.run)}
    assert set(left_out.values()) == {("a part is recomputed",)} and len(left_out) == 2


def test_the_plan_has_less_memory_as_much_more_is_stored() -> None:
    """A gigabyte of parameters in bfloat16 is one more in float32, four times, on two devices."""
    assert memory_limit(TINY, 2**29, 80 * 2**30) == 78 * 2**30


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.run.name)
def test_a_plan_is_chosen_with_the_kernels_of_autopar(record: Record) -> None:
    device = cluster_of(without_trainer(record.run)).device
    assert device.kernels == DEVICES[str(record.run.preset)].kernels


def test_a_plan_is_chosen_without_what_the_trainer_did() -> None:
    chosen = chosen_plan(TINY)
    assert not chosen.why and chosen.tokens_s_gpu > 0
    assert chosen.text.startswith("1 x dp=2, 1 microbatches")
    tight = chosen_plan(replace(TINY, hidden=1 << 17, heads=1 << 10, kv_heads=1 << 10, ffn=1 << 18))
    assert not tight.tokens_s_gpu and "memory" in tight.why


def predicted(own: float | None, chosen: float) -> tuple[Record, Predicted]:
    speed = ANY.run.tokens_s_gpu
    plan = Chosen(chosen * speed, text="a plan") if chosen else Chosen(why="too large")
    return ANY, Predicted(own and own * speed, plan)


@pytest.mark.parametrize(
    ("own", "chosen", "cells"),
    [(0.97, 1.1, ("0.970", "1.100", "a plan")), (None, 1.1, ("", "1.100", "a plan")),
     (1.03, 0.0, ("1.030", "none", "too large"))],
)  # fmt: skip
def test_a_row_has_both_in_parts_of_the_record(
    own: float | None, chosen: float, cells: tuple[str, ...]
) -> None:
    found = row(*predicted(own, chosen))
    assert len(found) == len(records.HEADER)
    assert (found[3], found[4], found[-1]) == cells


def test_the_summary_counts_what_is_near_the_record() -> None:
    pairs = [predicted(0.9, 0.95), predicted(1.04, 1.13), predicted(None, 1.0)]
    text = records.summary({f"{i}": pair for i, pair in enumerate(pairs)})
    assert text == ("held out: own within 7.0 % (median of 2), chosen within 0.95 to 1.12: 2 of 3")


def test_an_unknown_record_is_an_error() -> None:
    result = CliRunner().invoke(main, ["--only", "no such run"])
    assert result.exit_code == 1 and "no record has 'no such run' in its name" in result.output
