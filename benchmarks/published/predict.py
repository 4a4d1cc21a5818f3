"""What autopar says of a run: its plan for one microbatch, and a step made of that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import msgspec
import torch

import autopar
from autopar.cluster.parsing import parse_cluster
from autopar.ir.mesh import Cluster
from autopar.plans.estimates import Estimates
from benchmarks.published.decoder import STORED_PER_PLANNED, Decoder
from benchmarks.published.pipelined import Step, played_step, reduction_ns
from benchmarks.published.runs import MEGATRON_CORE, Run, arrangement
from benchmarks.published.trainers import device_of, handling_ns, wider_ns

NO_LIMIT_BYTES = 2**44
"""The runs ran: what does not fit by autopar's count is a finding, not the end."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a run's step: tokens per second and device, where the time goes (of a pipeline
    on its busiest rank), and memory per device,
    `peak_bytes` of `memory_bytes` (None of a pipeline, of a run whose optimizer is shared out by
    Megatron-core, and of one that recomputes and does not say what it held)."""

    tokens_s_gpu: float
    step_s: float
    compute_s: float
    exposed_communication_s: float
    host_s: float
    bubble_s: float
    optimizer_s: float
    peak_bytes: int | None
    memory_bytes: int


def predict(run: Run) -> Prediction:
    """The prediction for a run that `runs.reasons` has nothing against. Those of Megatron's
    trainers are played as in stages, be there only one (`pipelined`)."""
    found, cluster = _estimates(_what_is_planned(run)), cluster_of(run)
    if run.pp > 1 or run.workload is not None or run.is_megatron_core:
        inner = cluster_of(msgspec.structs.replace(run, gpus=run.gpus // run.pp, pp=1))
        step = played_step(run, found.stages[0], cluster, inner)
    else:
        step = _added_up(run, found, cluster)
    step_s = step.total_ns / 1e9
    tokens = run.microbatches * run.microbatch * run.dp * run.sequence
    return Prediction(
        tokens_s_gpu=tokens / step_s / run.gpus,
        step_s=step_s,
        compute_s=step.compute_ns / 1e9,
        exposed_communication_s=step.exposed_ns / 1e9,
        host_s=step.host_ns / 1e9,
        bubble_s=step.bubble_ns / 1e9,
        optimizer_s=step.optimizer_ns / 1e9,
        peak_bytes=_peak_bytes(run),
        memory_bytes=found.cluster.memory_bytes,
    )


def _added_up(run: Run, found: Estimates, cluster: Cluster) -> Step:
    """The step of a run without stages.

    A trainer that recomputes does the whole forward of a block again, its last product and what is
    sent there too, of which a plan, whose memory is predicted, leaves out what nothing reads.

    Every microbatch gathers parameters and scatters gradients as the step of the plan does, or
    none where gradients are reduced once, of which nothing is hidden. What is recomputed takes as
    long as it took, and is sent again over the axis of tensor parallelism. The optimizer, whose
    time is that of its memory traffic, steps once, on float32. What the trainer did with gradients
    before it sent them counts (`trainers`); adding them up does not.
    """
    times = run.microbatches
    again = _again(found) if run.recomputes else (0, 0)
    once_ns = found.exposed_communication_ns + again[1] + wider_ns(run, found, cluster)
    return Step(
        compute_ns=times * (found.compute_ns + again[0] + handling_ns(run, found, cluster)),
        exposed_ns=times * once_ns + reduction_ns(run, found.memory.gradients, cluster),
        host_ns=times * found.exposed_host_ns,
        bubble_ns=0,
        optimizer_ns=STORED_PER_PLANNED * found.optimizer_ns,
    )


def _peak_bytes(run: Run) -> int | None:
    if run.pp > 1 or run.is_megatron_core or (run.recomputes and run.peak_gib is None):
        return None
    recompute = "full" if run.recomputes else "none"
    planned = msgspec.structs.replace(_what_is_planned(run), recompute=recompute)
    held = _estimates(planned).memory
    stored_bytes = held.params + held.gradients + held.optimizer
    return held.total + (STORED_PER_PLANNED - 1) * stored_bytes


def _again(found: Estimates) -> tuple[int, int]:
    """Nanoseconds of compute and of communication in the forward of all blocks. Parameters are not
    gathered again: those that backward gathers serve."""
    computed = [op for op in found.stages[0].ops.values() if op.module.startswith("blocks.")]
    sent = [
        each
        for key, sent in found.stages[0].sends.items()
        if key.startswith("blocks.")
        for each in sent
    ]
    return (
        sum(op.compute_ns for op in computed if op.phase == "forward"),
        sum(each.time_ns for each in sent if (each.axis, each.phase) == ("tp", "forward")),
    )


def _what_is_planned(run: Run) -> Run:
    """The run without what its plan does not depend on, so that equal ones are planned once: a
    microbatch through all stages, on the ranks that share one where gradients are reduced
    elsewhere."""
    if run.reduces_once or run.dp == 1:
        size = run.tp * run.cp
        inner = min(size, run.gpus_per_node)
        run = msgspec.structs.replace(run, dp=1, pp=1, gpus=size, gpus_per_node=inner)
    return msgspec.structs.replace(
        run, name="", tokens_s_gpu=0.0, step_s=None, peak_gib=None, reduced_in="", chunks=None,
        accumulation=1, global_batch=run.dp * run.microbatch,
        recompute=run.recompute if run.recomputes_scores else "none",
        compiled=MEGATRON_CORE if run.is_megatron_core else "1" if run.is_compiled else "",
    )  # fmt: skip


@cache
def _estimates(run: Run) -> Estimates:
    with torch.device("meta"):
        model = Decoder(run)
        tokens = torch.empty(run.dp * run.microbatch, run.sequence, dtype=torch.int64)
    mesh, strategy, pins = arrangement(run)
    return autopar.plan(
        model,
        (tokens, tokens),
        cluster=cluster_of(run),
        mesh=mesh,
        constraints={"strategy": strategy or None, "pins": pins},
        optimizer=run.optimizer,
        memory={"limit": NO_LIMIT_BYTES, "checkpoint": "as written"},
        backend="inductor" if run.is_compiled else "eager",
    ).estimates


def cluster_of(run: Run) -> Cluster:
    """The cluster of a run: its device's preset, with the kernels of its trainer and the network
    that the source states."""
    nodes = run.gpus // run.gpus_per_node
    sizes = f"{nodes}x{run.gpus_per_node}" if nodes > 1 else f"{run.gpus}"
    found = parse_cluster(f"{sizes}x{run.preset}")
    found = replace(found, device=device_of(run, found.device))
    rate = run.network_bytes_per_s
    if rate is None or nodes <= 1:
        return found
    network, *inner = found.levels
    link = replace(network.link, bytes_per_s=rate, source=f"{run.network}, as published")
    return replace(found, levels=(replace(network, link=link), *inner))
