"""The judge of published runs: how they are predicted, and the statistics."""

from __future__ import annotations

from dataclasses import replace as changed
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace

from autopar.cluster.devices import DEVICES
from autopar.cost_model.roofline import attention_s, stream_s
from autopar.rules.op import Scores
from benchmarks.published import predict
from benchmarks.published.__main__ import chosen, main
from benchmarks.published.decoder import Decoder
from benchmarks.published.picture import scatter
from benchmarks.published.report import (
    Judged,
    choice_rows,
    group_rows,
    rank_rows,
    reason_rows,
    run_rows,
)
from benchmarks.published.runs import (
    FILES,
    Run,
    read,
)
from benchmarks.published.scores import (
    constant_utilisation,
    errors,
    regret,
    rule_of_thumb,
    spearman,
)
from benchmarks.published.trainers import handling_ns, wider_ns

PUBLISHED, VTRAIN = map(read, FILES)
RUNS = {run.name: run for run in (*PUBLISHED, *VTRAIN)}
MPT = RUNS["mpt_1b_s2048_h100_80gb_8_59"]
TINY = replace(
    MPT, name="tiny", layers=1, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, sequence=64,
    gpus=4, gpus_per_node=4, dp=4, microbatch=2, global_batch=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As llm-foundry's table counts them, and as Llama 2's and 3.1's cards have them.
        ("mpt_760m_s2048_h100_80gb_8_68", 760_470_528),
        ("mpt_1b_s32768_h100_80gb_8_52", 1_378_865_152),
        ("mpt_13b_s2048_h100_80gb_16_32", 12_853_954_560),
        ("fms_llama2_7b_A100-80GB", 6_738_415_616),
        ("tt2412_8b_fsdp8_c0_f0", 8_030_261_248),
    ],
)
def test_the_model_has_as_many_parameters_as_published(name: str, parameters: int) -> None:
    run = replace(RUNS[name], layers=1)
    with torch.device("meta"):
        model = Decoder(run)
    block = sum(p.numel() for p in model.blocks.parameters())
    rest = sum(p.numel() for p in model.parameters()) - block
    assert rest + block * RUNS[name].layers == parameters


def _sent(run: Run) -> set[tuple[str, str]]:
    found = predict._estimates(predict._what_is_planned(run))
    return {
        (each.kind, each.phase)
        for each in found.stages[0].collectives
        if each.kind != "slice" and each.num_bytes > 1000
    }


def test_runs_are_planned_as_they_were_arranged() -> None:
    forward, scatters = ("all_gather", "forward"), ("reduce_scatter", "backward")
    full = {forward, ("all_gather", "backward"), scatters}
    assert _sent(TINY) == _sent(replace(TINY, model="Llama-3.1-8B")) == full
    assert _sent(replace(TINY, data_parallel="FSDP1 SHARD_GRAD_OP")) == {forward, scatters}


def test_the_optimizer_steps_once_however_many_microbatches_there_are() -> None:
    one, four = (predict.predict(replace(TINY, accumulation=n, global_batch=8 * n)) for n in (1, 4))
    assert one.optimizer_s > 0
    assert four.optimizer_s == one.optimizer_s
    assert four.step_s - four.optimizer_s == pytest.approx(4 * (one.step_s - one.optimizer_s))
    assert one.tokens_s_gpu == pytest.approx(8 * 64 / one.step_s / 4)
    assert four.tokens_s_gpu == pytest.approx(4 * 8 * 64 / four.step_s / 4)
    assert predict._estimates.cache_info().hits > 0


def test_what_is_recomputed_takes_the_forward_of_the_blocks_once_more() -> None:
    run = replace(TINY, layers=2, dp=2, tp=2, global_batch=4)
    plain, again = (predict.predict(replace(run, recompute=kind)) for kind in ("none", "full"))
    planned = predict._estimates(predict._what_is_planned(run))
    forward = [op for op in planned.stages[0].ops.values() if op.phase == "forward"]
    inside = sum(op.compute_ns for op in forward if op.module.startswith("blocks."))
    assert 0 < inside < sum(op.compute_ns for op in forward)
    assert again.compute_s - plain.compute_s == pytest.approx(inside / 1e9)
    sent = sum(
        each.time_ns
        for each in planned.stages[0].collectives
        if (each.axis, each.phase) == ("tp", "forward") and each.kind != "slice"
    )
    # The embedding and the loss talk too, and are not done again.
    assert 0 < again.exposed_communication_s - plain.exposed_communication_s < sent / 1e9
    assert again.optimizer_s == plain.optimizer_s
    assert again.peak_bytes is None and plain.peak_bytes


def test_ddp_reduces_gradients_once_after_the_last_microbatch() -> None:
    alone = predict.predict(replace(TINY, data_parallel="none", dp=1, gpus=1, gpus_per_node=1))
    many = {
        n: predict.predict(replace(TINY, data_parallel="DDP", accumulation=n, global_batch=8 * n))
        for n in (1, 3)
    }
    reduction_s = many[1].step_s - alone.step_s
    assert reduction_s > 0
    assert many[3].exposed_communication_s == pytest.approx(reduction_s)
    assert many[3].compute_s == pytest.approx(3 * alone.compute_s)
    assert many[1].tokens_s_gpu == pytest.approx(8 * 64 / many[1].step_s / 4)


def test_what_is_stored_has_four_bytes() -> None:
    planned, found = predict._estimates(predict._what_is_planned(TINY)), predict.predict(TINY)
    with torch.device("meta"):
        pieces = [2 * p.numel() // 4 for p in Decoder(TINY).parameters()]
    # In multiples of what the allocator hands out.
    stored = sum(-(-piece // 512) * 512 for piece in pieces) // 2
    held = planned.memory
    # Parameter, gradient, and AdamW's two states: 2 bytes each by the plan.
    assert held.params + held.gradients + held.optimizer == pytest.approx(8 * stored, rel=0.01)
    assert found.peak_bytes is not None
    assert found.peak_bytes - held.total == pytest.approx(8 * stored, rel=0.01)
    assert found.optimizer_s == 2 * planned.optimizer_ns / 1e9


def test_mpt_has_the_kernels_of_its_trainer() -> None:
    """Attention in Triton, a loss of one kernel, and biases that the products add."""
    triton, other = (
        predict.cluster_of(replace(TINY, model=model)).device for model in ("MPT-1b", "Llama-2-7B")
    )
    assert other == DEVICES["H100"]
    of = {
        backward: [
            attention_s(1e15, Scores(1, 2048, 128, 4.0, True, backward), 0, "bfloat16", device)
            for device in (other, triton)
        ]
        for backward in (False, True)
    }
    assert of[False][1] / of[False][0] == pytest.approx(1.4)
    assert of[True][1] / of[True][0] == pytest.approx(2.0)
    mpt = predict._estimates(predict._what_is_planned(TINY)).stages[0].ops.values()
    gpt = (
        predict._estimates(predict._what_is_planned(replace(TINY, model="GPT-1")))
        .stages[0]
        .ops.values()
    )
    assert "aten._log_softmax.default" not in {op.op for op in mpt}
    assert "aten._log_softmax.default" in {op.op for op in gpt}
    adds = [op for op in mpt if op.op == "aten.add.Tensor" and op.phase == "forward"]
    assert sum(op.count for op in adds) == 3  # positions, attention, the layer behind it


def test_fsdp1_handles_gradients_before_it_sends_them() -> None:
    """Concatenated and divided, two bytes read and two written each time; in float32 divided is
    four and four, and cast before, two and four."""
    stated = {dtype: replace(TINY, reduced_in=dtype) for dtype in ("bfloat16", "float32")}
    found, cluster = predict._estimates(predict._what_is_planned(TINY)), predict.cluster_of(TINY)
    elements = 4 * found.memory.gradients // 2
    for dtype, num_bytes in (("bfloat16", 8), ("float32", 18)):
        expected_ns = 1e9 * stream_s(num_bytes * elements, cluster.device)
        assert handling_ns(stated[dtype], found, cluster) == pytest.approx(expected_ns, abs=1)
    assert handling_ns(replace(TINY, data_parallel="FSDP2"), found, cluster) == 0
    assert wider_ns(stated["bfloat16"], found, cluster) == 0
    # A tiny model computes for no time: nothing is hidden, and what starts takes as long as before.
    scattered = [each for each in found.stages[0].collectives if each.kind == "reduce_scatter"]
    assert 0 < wider_ns(stated["float32"], found, cluster) < sum(e.time_ns for e in scattered)
    assert predict.predict(stated["float32"]).step_s > predict.predict(stated["bfloat16"]).step_s


def test_flops_are_those_of_the_products() -> None:
    # A layer of 12 x 64 x 64 weights, a head of 512 x 64, and attention.
    assert TINY.flops_per_token == 6 * (12 * 64 * 64 + 512 * 64) + 12 * 64 * 64
    gated = replace(TINY, model="Llama-3.1-8B", kv_heads=2, layers=2)
    # Two keys and values of 16 for four queries; gate, up and down.
    block = 64 * (64 + 64 + 2 * 2 * 16) + 3 * 64 * 256
    assert gated.flops_per_token == 6 * (2 * block + 512 * 64) + 12 * 2 * 64 * 64
    again = replace(gated, recompute="full").flops_per_token - gated.flops_per_token
    assert again == 2 * (2 * block + 2 * 2 * 64 * 64)


def test_statistics() -> None:
    assert errors([1.5, 8.0], [1.0, 10.0]) == pytest.approx([0.5, 0.2])
    assert spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [9, 8, 7]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4.
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert np.isnan(spearman([1, 1], [1, 2]))
    with pytest.raises(ValueError, match="2 and 1"):
        spearman([1, 2], [1])


def test_the_constant_is_fitted_on_the_other_runs_of_the_device() -> None:
    runs = [replace(MPT, tokens_s_gpu=speed) for speed in (100.0, 200.0, 400.0)]
    assert constant_utilisation(runs) == pytest.approx([300, 250, 150])
    long = replace(MPT, sequence=4096)
    ratio = MPT.flops_per_token / long.flops_per_token
    assert constant_utilisation([MPT, long])[1] == pytest.approx(MPT.tokens_s_gpu * ratio)
    assert constant_utilisation([MPT, replace(MPT, gpu="A100-80GB")]) == [None, None]
    workload = replace(MPT, source=VTRAIN[0].source)
    assert constant_utilisation([MPT, workload]) == [None, None]


def test_who_picks_what_is_not_the_best_loses_the_difference() -> None:
    assert regret([1, 3, 2], [10, 30, 20]) == 0
    assert regret([3, 1, 3], [20, 30, 10]) == 0.5
    more, less, wide = (
        replace(MPT, dp=dp, tp=tp, microbatch=size)
        for dp, tp, size in ((4, 2, 1), (2, 2, 8), (4, 1, 1))
    )
    assert rule_of_thumb([more, less, wide, replace(more, microbatch=2)]) == [1, 0, 3, 2]


def _judged(count: int) -> list[Judged]:
    told = predict.Prediction(
        tokens_s_gpu=0.0, step_s=2.0, compute_s=0.9, exposed_communication_s=0.3, host_s=0.2,
        bubble_s=0.1, optimizer_s=0.5, peak_bytes=2**31, memory_bytes=2**32,
    )  # fmt: skip
    return [
        Judged(
            replace(MPT, name=f"run {k}", tokens_s_gpu=100.0 * k),
            changed(told, tokens_s_gpu=100.0 * k + 50),
            100.0,
        )
        for k in range(1, count + 1)
    ]


def test_tables() -> None:
    judged = _judged(4)
    apart = "yes" if MPT.kept_apart else ""
    assert run_rows(judged)[1] == [
        "run 2", apart, "14x1", "200", "250", "1.25", "0.50", "45%", "15%", "10%", "5%", "25%",
        "2.0", "4.0", "",
    ]  # fmt: skip
    empty, full = ["0", "", "", "", ""], ["4", "20.8%", "42.5%", "58.3%", "72.5%"]
    halves = [*empty, *full] if MPT.kept_apart else [*full, *empty]
    rows = {row[0]: row[1:] for row in group_rows(judged)}
    assert rows["no recompute"] == rows["of them H100"] == rows["of them one node"] == halves
    assert "of them A100" not in rows and "recompute" not in rows
    again = [each._replace(run=replace(each.run, recompute="full")) for each in judged]
    assert dict.fromkeys(row[0] for row in group_rows(again)) == {"recompute": None}
    assert rank_rows(again) == []
    assert rank_rows(judged) == [["MPT-1b, H100", "4", "1.00", "nan"]]
    assert rank_rows(_judged(3)) == []
    two = [replace(MPT, pp=2), replace(MPT, pp=2, cp=2)]
    sharded = "stages with sharded parameters"
    context = "context parallelism with sharded parameters"
    assert reason_rows(two) == [[sharded, "2", "1"], [context, "1", "0"]]


def test_picks_of_workloads() -> None:
    # Predicted in the order measured; the rule of thumb takes the first, and lags behind the last.
    shared = {"source": VTRAIN[0].source, "model": VTRAIN[0].model, "recompute": "full"}
    judged = [
        each._replace(run=replace(each.run, dp=8 - k, **shared))
        for k, each in enumerate(_judged(4))
    ]
    where = "kept apart" if judged[0].run.kept_apart else "given"
    lines = [
        ["autopar", "all", "1", "100%", "0.0%", "0.0%", "1.00", "1.00"],
        ["rule of thumb", "all", "1", "0%", "300.0%", "300.0%", "-1.00", "-1.00"],
    ]
    rows = [[f"{who}, {side}", *rest] for side in (where, "both") for who, *rest in lines]
    assert choice_rows([*judged, *_judged(4)]) == rows
    staged = [each._replace(run=replace(each.run, pp=2)) for each in judged[:3]]
    of_stages = [row for row in choice_rows([*staged, judged[3]]) if row[1] == "stages"]
    assert [row[0] for row in of_stages] == [row[0] for row in rows]
    assert of_stages[1][3:5] == ["0%", "200.0%"]
    assert choice_rows(judged[:2]) == []


def test_the_picture_has_every_run_where_it_belongs() -> None:
    judged = _judged(3)
    root = ElementTree.fromstring(scatter(judged))
    space = "{http://www.w3.org/2000/svg}"
    dots = [c for c in root.iter(f"{space}circle") if c.find(f"{space}title") is not None]
    assert len(dots) == 3
    across = [float(dot.attrib["cx"]) for dot in dots]
    up = [float(dot.attrib["cy"]) for dot in dots]
    assert across == sorted(across) and up == sorted(up, reverse=True)
    for dot in dots:  # predicted above measured: above the diagonal from lower left
        frame = next(r for r in root.iter(f"{space}rect") if r.attrib.get("fill") == "none")
        left, top, side = (float(frame.attrib[k]) for k in ("x", "y", "width"))
        assert float(dot.attrib["cx"]) - left < top + side - float(dot.attrib["cy"])


def test_rows_are_spread_over_the_table_and_only_those_asked_for() -> None:
    runs = (*PUBLISHED, *VTRAIN)
    everything = chosen(runs, None, "")
    few = chosen(runs, 10, "")
    assert len(few) == 10 and few[0] == everything[0] and few[5] == everything[len(everything) // 2]
    assert {run.model for run in chosen(runs, None, "fms_")} == {"Llama-2-7B"}
    done = CliRunner().invoke(main, ["--only", "nothing like it"])
    assert done.exit_code == 1 and "nothing like it" in done.output
