"""Published runs of Megatron's GPT, and in stages: what a stage does, how its passes are played."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autopar.cluster.devices import DEVICES
from autopar.cluster.kernels import SUSTAINED
from autopar.cost_model.collectives import collective_s
from autopar.ir.mesh import Cluster
from autopar.plans.estimates import CollectiveTotal, Estimates
from benchmarks.published import pipelined, predict
from benchmarks.published.pipelined import Step, played_step
from benchmarks.published.runs import FILES, Run, read, reasons
from benchmarks.published.trainers import (
    batch_ns,
    device_of,
    exchange_ns,
    exposed_share,
    launch_ns,
)

PUBLISHED, VTRAIN = map(read, FILES)
BY_NAME = {run.name: run for run in PUBLISHED}
ATTENTION = "blocks.*.attention"
WHOLE = replace(
    VTRAIN[0], name="tiny", layers=4, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512,
    sequence=64, gpus=2, gpus_per_node=4, dp=2, tp=1, pp=1, microbatch=2, global_batch=8,
)  # fmt: skip
STAGED = replace(WHOLE, pp=2, gpus=4)


def _planned(run: Run) -> tuple[Estimates, Cluster, Cluster]:
    inner = predict.cluster_of(replace(run, gpus=run.gpus // run.pp, pp=1))
    return predict._estimates(predict._what_is_planned(run)), predict.cluster_of(run), inner


def _step(run: Run) -> Step:
    found, cluster, inner = _planned(run)
    return played_step(run, found.stages[0], cluster, inner)


def _passes(run: Run) -> list[tuple[pipelined._Pass, pipelined._Pass]]:
    found, cluster, _ = _planned(run)
    return pipelined._passes(run, pipelined._parts(run, found.stages[0]), cluster)


def test_all_arrangements_of_the_workloads_are_expressed_and_share_plans() -> None:
    assert not any(reasons(run) for run in VTRAIN)
    assert {run.pp for run in VTRAIN} == {1, 2, 4, 8, 16, 32}
    assert len({predict._what_is_planned(run) for run in VTRAIN}) < len(VTRAIN) / 5
    assert predict._what_is_planned(STAGED) == predict._what_is_planned(WHOLE)


def test_stages_do_together_what_one_does_alone() -> None:
    """And each makes a batch; recompute does the forward of blocks again."""
    found, cluster, _ = _planned(WHOLE)
    (forward, backward) = _passes(WHOLE)[0]
    inside = [op for op in found.stages[0].ops.values() if op.module.startswith("blocks.")]
    recompute_ns = sum(op.compute_ns for op in inside if op.phase == "forward")
    assert recompute_ns > 0
    alone_ns = forward.work.compute_ns + backward.work.compute_ns
    assert alone_ns == pytest.approx(found.compute_ns + recompute_ns)
    staged = _passes(STAGED)
    assert sum(p.work.compute_ns for pair in staged for p in pair) == pytest.approx(alone_ns)
    launched = [
        sum(p.work.host_ns for pair in passes for p in pair)
        for passes in ([_passes(WHOLE)[0]], staged)
    ]
    more_ns = batch_ns(STAGED, cluster) + 2 * exchange_ns(STAGED, cluster)
    assert launched[1] - launched[0] == pytest.approx(more_ns)


def test_the_first_stage_has_the_words_and_the_last_one_the_loss() -> None:
    """Of equal blocks, so that what is more than theirs is what comes before and after."""
    passes = _passes(replace(STAGED, pp=4, gpus=8))
    first, second, third, last = (p[0].work.compute_ns + p[1].work.compute_ns for p in passes)
    assert second == pytest.approx(third)
    assert first > second and last > second


def test_one_microbatch_takes_all_passes_after_one_another() -> None:
    run = replace(STAGED, dp=1, gpus=2, global_batch=2)
    assert run.microbatches == 1
    step, passes = _step(run), _passes(run)
    lengths_ns = sum(p.length_ns for pair in passes for p in pair)
    found, cluster, inner = _planned(run)
    ends = [sum(pipelined._update(run, found.stages[0], rank, cluster, inner)) for rank in range(2)]
    assert step.total_ns == lengths_ns + ends[0]  # the first stage is over last
    assert step.bubble_ns > 0
    assert predict.predict(run).step_s == pytest.approx(step.total_ns / 1e9)


def test_nobody_waits_for_other_stages_where_there_are_none() -> None:
    step, (forward, backward) = _step(WHOLE), _passes(WHOLE)[0]
    assert step.bubble_ns == 0
    found, cluster, inner = _planned(WHOLE)
    reduced_ns, optimizer_ns = pipelined._update(WHOLE, found.stages[0], 0, cluster, inner)
    assert optimizer_ns == step.optimizer_ns == 2 * found.optimizer_ns
    assert reduced_ns == pipelined.reduction_ns(WHOLE, found.memory.gradients, inner) > 0
    assert step.total_ns == 2 * (forward.length_ns + backward.length_ns) + reduced_ns + optimizer_ns


def test_interleaved_stages_wait_less() -> None:
    many = replace(STAGED, global_batch=32, chunks=None)
    assert _step(replace(many, chunks=2)).bubble_ns < _step(many).bubble_ns


def test_a_pass_is_over_when_both_host_and_device_are() -> None:
    work, nothing = pipelined._Work, pipelined._Work()

    def paced(*chain: pipelined._Work, sent: pipelined._Work = nothing) -> int:
        return pipelined._paced(chain, sent).length_ns

    assert paced(work(10, 2, 1), work(1, 0, 2)) == 13  # the host is ahead
    assert paced(work(1, 0, 10), work(5, 0, 1)) == 15  # what comes late is not hidden
    assert paced(work(1, 0, 10), work(5, 0, 1), sent=work(0, 3, 4)) == 22
    assert paced(work(1, 0, 4), work(1, 0, 9)) == 13  # the device waits for all of it


def test_a_shared_embedding_is_on_both_ends_and_reduced_between_them() -> None:
    found, cluster, inner = _planned(STAGED)
    words, positions, norm, inside = (
        next(
            op
            for op in found.stages[0].ops.values()
            if op.optimizer_ns and op.module.startswith(name)
        )
        for name in ("words", "positions", "norm", "blocks.")
    )
    held = {op.module: [pipelined._held(STAGED, op, rank) for rank in (0, 1)]
            for op in (words, positions, norm, inside)}  # fmt: skip
    assert list(held.values()) == [[1, 1], [1, 0], [0, 1], [0.5, 0.5]]
    own_head = replace(STAGED, model="Llama-2-7B")
    assert [pipelined._held(own_head, words, rank) for rank in (0, 1)] == [1, 0]
    reduced_ns, _ = pipelined._update(STAGED, found.stages[0], 1, cluster, inner)
    alone_ns, _ = pipelined._update(own_head, found.stages[0], 1, cluster, inner)
    size = 512 * 64 * 2
    line = pipelined.axis_over("ends", 2, 2, cluster)
    assert reduced_ns - alone_ns > collective_s("all_reduce", size, size, line) * 1e9 * 0.9


def test_the_host_launches_at_the_pace_of_its_trainer() -> None:
    found, cluster, _ = _planned(STAGED)
    assert batch_ns(STAGED, cluster) == 14 * 48_000
    assert exchange_ns(STAGED, cluster) == 2 * 48_000
    op = next(op for op in found.stages[0].ops.values() if op.count > 1)
    assert launch_ns(STAGED, op) == op.count * 48_000
    other = replace(STAGED, source="another")
    assert launch_ns(other, op) == op.host_ns == op.count * 8_000
    assert exchange_ns(other, cluster) == pytest.approx(2 * 45_000, rel=0.01)
    assert batch_ns(other, cluster) == pytest.approx(2 * 45_000 + 12 * 8_000, rel=0.01)


@pytest.mark.nightly
def test_megatron_s_gpt_is_not_fused() -> None:
    """It writes the scores of attention, and its loss reads float32 logits op by op."""

    def ops(run: Run, module: str) -> set[str]:
        found = predict._estimates(predict._what_is_planned(run)).stages[0].ops.values()
        return {op.op for op in found if (op.phase, op.module) == ("forward", module)}

    other = replace(WHOLE, source="another")
    megatron = replace(other, source=BY_NAME["seqsel_22B_full"].source)
    assert megatron.is_megatron and WHOLE.is_megatron and not other.is_megatron
    assert ops(other, ATTENTION) == {"autopar.sdpa.default"}
    scores = {"aten.bmm.default", "aten._softmax.default"}
    loss = {"aten.amax.default", "aten.exp.default", "aten.sum.dim_IntList"}
    for run in (megatron, WHOLE):
        assert scores <= ops(run, ATTENTION) and loss <= ops(run, "")
    assert "aten._log_softmax.default" in ops(other, "") - ops(WHOLE, "")
    root = [op for op in _planned(WHOLE)[0].stages[0].ops.values() if op.module == ""]
    logits = [kind for op in root for kind, _ in op.outputs if kind == "float32[2, 64, 512]"]
    assert len(logits) >= 4


def test_scores_that_are_made_again_are_not_held() -> None:
    """Every other op is done as often; the product of queries and keys, and its softmax, twice."""
    whole = replace(WHOLE, source=BY_NAME["seqsel_22B_selective"].source, dp=1, gpus=1)
    again = replace(whole, recompute=BY_NAME["seqsel_22B_selective"].recompute)
    assert again.recomputes_scores and not again.recomputes
    found, plain = _planned(again)[0], _planned(whole)[0]

    def done(estimates: Estimates, op: str) -> int:
        return sum(each.count for each in estimates.stages[0].ops.values() if each.op == op)

    layers = WHOLE.layers
    for op in ("aten._softmax.default", "aten.bmm.default"):
        assert done(found, op) - done(plain, op) == layers
    assert done(found, "aten.mm.default") == done(plain, "aten.mm.default")
    scores_bytes = layers * WHOLE.microbatch * WHOLE.heads * WHOLE.sequence**2 * 2
    assert plain.memory.saved - found.memory.saved > scores_bytes


CORE = replace(STAGED, data_parallel="Megatron DDP + distributed optimizer", source="another",
               compiled="Megatron-core/TE kernels")  # fmt: skip


def test_megatron_core_waits_for_nothing_that_is_sent() -> None:
    """It goes on meanwhile, reduces gradients of all stages but a rank's last one while others
    compute, and each rank of the data-parallel group steps its part."""
    other = replace(CORE, compiled="1")
    found, cluster, inner = _planned(CORE)
    passes = pipelined._passes(CORE, pipelined._parts(CORE, found.stages[0]), cluster)
    assert not any(p.work.sent_ns for pair in passes for p in pair)
    later = pipelined._delays(CORE, cluster)
    assert [(d.source, d.target, d.phase) for d in later] == [(0, 1, "forward"), (1, 0, "backward")]
    assert later[0].time_ns > 0 and not pipelined._delays(other, cluster)
    many = replace(CORE, chunks=2)
    ends = [
        pipelined._update(run, found.stages[0], 1, cluster, inner) for run in (CORE, many, other)
    ]
    inside_ns = ends[0][0] - ends[1][0]
    assert inside_ns > 0 and ends[0][0] == ends[2][0]
    assert ends[0][1] == pytest.approx(ends[2][1] / CORE.dp, abs=1)


def test_gradients_of_parts_of_a_sequence_are_reduced_once() -> None:
    run = replace(
        CORE, sequence=8192, hidden=1024, heads=8, kv_heads=8, ffn=4096, layers=2, microbatch=1,
        cp=2, gpus=8,
    )  # fmt: skip
    found, _, _ = _planned(run)
    stage = found.stages[0]
    added = [each for each in stage.collectives if (each.axis, each.kind) == ("cp", "all_reduce")]
    later = [each for each in added if each.phase == "backward"]
    assert sum(each.time_ns for each in later) > 0
    assert not any(exposed_share(run, stage, "blocks.*", each) for each in later)
    size = 1 << 20

    def reduced_ns(dp: int, cp: int) -> int:
        part = replace(run, pp=1, dp=dp, cp=cp, gpus=dp * cp)
        return pipelined.reduction_ns(part, size, predict.cluster_of(part))

    assert reduced_ns(1, 1) == 0
    assert reduced_ns(1, 2) == reduced_ns(2, 1) > 0
    assert reduced_ns(2, 2) == pytest.approx(2 * reduced_ns(2, 1), abs=1)


def test_megatron_core_sends_between_tensors_within_their_products() -> None:
    """What is hidden slows what hides it, and of what is scattered forward the last split is not.
    What is sent beside no product of a block, or by another trainer, waits as in the plan."""
    run = replace(CORE, gpus=8, tp=4, dp=1, hidden=1024, heads=8, kv_heads=8, ffn=4096)
    stage = _planned(run)[0].stages[0]
    slowed = stage.contention["tp"] / 1000
    waits = stage.exposed_communication_ns / stage.communication_ns
    assert 0 < slowed < waits

    def share(kind: str, phase: str, run: Run = run, key: str = "blocks.*.up") -> float:
        sent = CollectiveTotal(kind, "tp", phase, count=1, num_bytes=8, time_ns=100)
        return exposed_share(run, stage, key, sent)

    assert share("all_gather", "forward") == share("all_gather", "backward") == slowed
    assert share("reduce_scatter", "backward") == slowed
    assert share("reduce_scatter", "forward") == pytest.approx((1 + 3 * slowed) / 4)
    assert share("all_gather", "forward", key="norm") == waits
    assert share("all_gather", "forward", replace(run, compiled="1")) == waits


def test_megatron_core_attends_with_the_kernels_of_cudnn_on_hopper() -> None:
    hopper, ampere = DEVICES["H100"], DEVICES["A100"]
    assert device_of(CORE, ampere) == ampere
    its = device_of(CORE, hopper).kernels
    assert its.attention > 1.9 * hopper.kernels.attention
    assert its.attention * its.attention_backward == pytest.approx(0.637 * SUSTAINED["H100"])
    ring = device_of(replace(CORE, cp=2), hopper).kernels
    assert ring.attention_tokens == 2 * its.attention_tokens, "a kernel for each part of a ring"
