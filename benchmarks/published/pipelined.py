"""A step in which microbatches go through stages one after the other, of one plan of all layers.

The plan is that of a microbatch on the ranks of one stage. Its blocks are shared out evenly; what
comes before them is the first stage's, what comes after them the last one's. A stage's passes are
played as `autopar.plans.pipelines` plays those of a plan of stages. Other than there

- a pass is over before the next thing is done, on the host too: Megatron's timers wait for the
  device where a pass starts and ends (`_Timer` in megatron/global_vars.py, `forward_step` and
  `backward_step` in megatron/schedules.py). So the host is ahead of its device, or behind, within a
  pass alone, and sends are not hidden (`p2p_communication.py` waits for the device after each);
- each stage makes a batch for each forward, whether it reads it or not (`trainers.batch_ns`);
- gradients are reduced when a rank's last pass is over, those of the words' embedding, of which the
  first and the last stage have a copy, once more between the two.

Megatron-core neither times passes nor waits: what a stage sends is on its way while it goes on, and
of a rank's gradients those of its last stage alone are reduced when nothing is left to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from autopar.cluster.mesh_shapes import axis_over, parse_mesh
from autopar.cost_model.collectives import collective_s
from autopar.ir.graph import Phase
from autopar.ir.mesh import Cluster
from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.estimates import Delay, MicrobatchTimes, OpTotal, StageEstimates
from autopar.plans.pipeline_orders import make_schedule
from autopar.plans.pipelines import simulate_pipeline
from benchmarks.published.decoder import STORED_PER_PLANNED
from benchmarks.published.runs import Run, arrangement
from benchmarks.published.trainers import batch_ns, exchange_ns, exposed_share, launch_ns

SENT_BYTES = 2
"""Of each number that stages send one another."""


@dataclass(frozen=True, slots=True)
class Step:
    """Where a step goes on the rank that is busiest: nanoseconds in which it computes, waits for
    what is sent, for its host and for other stages, and in which the optimizer steps."""

    compute_ns: int
    exposed_ns: int
    host_ns: int
    bubble_ns: int
    optimizer_ns: int

    @property
    def total_ns(self) -> int:
        waits_ns = self.exposed_ns + self.host_ns + self.bubble_ns
        return self.compute_ns + waits_ns + self.optimizer_ns


class _Part(StrEnum):
    FIRST = "before the blocks"
    BLOCKS = "the blocks"
    LAST = "after the blocks"


@dataclass(frozen=True, slots=True)
class _Work:
    """What is done, one after the other, and in which time the host launches it."""

    compute_ns: float = 0
    sent_ns: float = 0
    host_ns: float = 0

    def __add__(self, other: _Work) -> _Work:
        return _Work(
            self.compute_ns + other.compute_ns,
            self.sent_ns + other.sent_ns,
            self.host_ns + other.host_ns,
        )

    def __truediv__(self, count: int) -> _Work:
        return _Work(self.compute_ns / count, self.sent_ns / count, self.host_ns / count)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A microbatch goes through a stage: how long that takes, and what of it is not waiting."""

    length_ns: int
    work: _Work


def played_step(run: Run, found: StageEstimates, cluster: Cluster, inner: Cluster) -> Step:
    """The step of a run on `cluster`, whose stages have the devices `inner` each, and `found` the
    estimates of a microbatch through all of them."""
    name = "1f1b" if run.stages == run.pp else "interleaved"
    table = make_schedule(name, run.pp, run.microbatches, run.stages // run.pp)
    passes = _passes(run, _parts(run, found), cluster)
    ends = [_update(run, found, rank, cluster, inner) for rank in range(run.pp)]
    timed = [
        msgspec.structs.replace(
            found, microbatch=_microbatch(*passes[s], sum(ends[s]) if s < run.pp else 0)
        )
        for s in range(run.stages)
    ]
    total_ns = simulate_pipeline(table, timed, _delays(run, cluster), ()).step_ns
    return max(
        (_of_rank(table, passes, ends[rank], total_ns, rank) for rank in range(run.pp)),
        key=lambda step: total_ns - step.bubble_ns,
    )


def reduction_ns(run: Run, num_bytes: float, inner: Cluster) -> int:
    """Of so many bytes of gradients of a rank, of which each of the `inner` devices has as many;
    none where they are reduced in every microbatch."""
    if not run.reduces_once:
        return 0
    axes = [axis for axis in parse_mesh(arrangement(run).mesh, inner) if axis.name != "tp"]
    size = round(num_bytes)
    return round(sum(collective_s("all_reduce", size, size, axis) for axis in axes) * 1e9)


def _parts(run: Run, found: StageEstimates) -> Mapping[tuple[_Part, str], _Work]:
    """The work of a plan by part and phase. What is sent belongs to the op that makes it."""
    where: dict[str, tuple[_Part, str]] = {}
    work: dict[tuple[_Part, str], _Work] = defaultdict(_Work)
    part = _Part.FIRST
    for key, op in found.ops.items():
        if op.module.startswith("blocks."):
            part = _Part.BLOCKS
        elif part is _Part.BLOCKS:
            part = _Part.LAST if op.phase == Phase.FORWARD else _Part.FIRST
        where[key] = part, op.phase
        work[where[key]] += _Work(op.compute_ns, host_ns=launch_ns(run, op))
    for key, sent in found.sends.items():
        made = key.partition("@")[0]
        made = made if made in where else made.rpartition(".")[0]
        for each in sent:
            waited_ns = each.time_ns * exposed_share(run, found, made, each)
            work[where[made]] += _Work(sent_ns=waited_ns, host_ns=launch_ns(run, each))
    return work


def _passes(
    run: Run, work: Mapping[tuple[_Part, str], _Work], cluster: Cluster
) -> list[tuple[_Pass, _Pass]]:
    """Forward and backward of each stage."""
    first, blocks, last = (
        tuple(work.get((part, phase), _Work()) for phase in (Phase.FORWARD, Phase.BACKWARD))
        for part in _Part
    )
    batch = _Work(host_ns=batch_ns(run, cluster))
    sent = _Work() if run.is_megatron_core else _sent(run, cluster)
    there, back = (each / run.stages for each in blocks)
    back = there + back if run.recomputes else back
    found: list[tuple[_Pass, _Pass]] = []
    for stage in range(run.stages):
        opens, closes = stage == 0, stage == run.stages - 1
        forward = [batch, *[first[0]] * opens, there, *[last[0]] * closes]
        backward = [*[last[1]] * closes, back, *[first[1]] * opens]
        found.append((
            _paced(forward, _Work() if closes else sent),
            _paced(backward, _Work() if opens else sent),
        ))  # fmt: skip
    return found


def _paced(chain: Iterable[_Work], sent: _Work) -> _Pass:
    """A pass of what is in `chain`, none of which is over before the host has launched it, and then
    of what is `sent`, when the host has nothing else to do."""
    launched_ns = ended_ns = 0.0
    done = sent
    for each in chain:
        done += each
        launched_ns += each.host_ns
        ended_ns = max(ended_ns + each.compute_ns + each.sent_ns, launched_ns)
    return _Pass(round(ended_ns + sent.sent_ns + sent.host_ns), done)


def _sent(run: Run, cluster: Cluster) -> _Work:
    """What a stage sends the next one in a pass: the hidden states of a microbatch."""
    if run.pp == 1:
        return _Work()
    line = axis_over("stage", run.pp, run.gpus // run.pp, cluster)
    size = run.microbatch * run.sequence * run.hidden * SENT_BYTES // run.cp
    if run.is_megatron_core:
        size //= run.tp  # Between blocks a sequence is cut over the ranks of tensor parallelism.
    return _Work(
        sent_ns=collective_s("permute", size, size, line) * 1e9,
        host_ns=exchange_ns(run, cluster),
    )


def _delays(run: Run, cluster: Cluster) -> list[Delay]:
    """What is on its way while stages go on."""
    if not run.is_megatron_core:
        return []
    last, ns = run.stages - 1, round(_sent(run, cluster).sent_ns)
    forth = [Delay(s, s + 1, Phase.FORWARD.value, 0, ns) for s in range(last)]
    back = [Delay(s + 1, s, Phase.BACKWARD.value, 0, ns) for s in range(last)]
    return [*forth, *back]


def _update(
    run: Run, found: StageEstimates, rank: int, cluster: Cluster, inner: Cluster
) -> tuple[int, int]:
    """What a rank does when its last pass is over: nanoseconds in which gradients are reduced, and
    in which the optimizer steps."""
    parameters = [op for op in found.ops.values() if op.optimizer_ns]
    total_ns = sum(op.optimizer_ns for op in parameters)
    held_ns = sum(op.optimizer_ns * _held(run, op, rank) for op in parameters)
    words_ns = sum(op.optimizer_ns for op in parameters if op.module == "words")
    gradients = found.memory.gradients / total_ns
    tied_ns = 0.0
    if run.pp > 1 and not run.gated and rank in (0, run.pp - 1):
        ends = axis_over("ends", 2, run.gpus // 2, cluster)
        size = round(gradients * words_ns)
        tied_ns = collective_s("all_reduce", size, size, ends) * 1e9
    reduced_ns = reduction_ns(run, gradients * held_ns, inner)
    stepped_ns = STORED_PER_PLANNED * held_ns
    if run.is_megatron_core:
        reduced_ns *= run.pp / run.stages
        stepped_ns /= run.dp
    return round(reduced_ns + tied_ns), round(stepped_ns)


def _held(run: Run, parameter: OpTotal, rank: int) -> float:
    """The part of a parameter that a rank of the pipeline has."""
    if parameter.module.startswith("blocks."):
        return 1 / run.pp
    assignment = {"words": {0} if run.gated else {0, run.pp - 1}, "positions": {0}}
    return float(rank in assignment.get(parameter.module, {run.pp - 1}))


def _microbatch(forward: _Pass, backward: _Pass, update_ns: int) -> MicrobatchTimes:
    there, back = forward.length_ns, backward.length_ns
    return MicrobatchTimes(there, back, there, back, update_ns)


def _of_rank(
    table: PipelineSchedule,
    passes: list[tuple[_Pass, _Pass]],
    ends: tuple[int, int],
    total_ns: int,
    rank: int,
) -> Step:
    """Where the step goes on a rank."""
    own = [each for s, at in table.ranks.items() if at == rank for each in passes[s]]
    times = table.microbatches
    compute_ns = round(times * sum(each.work.compute_ns for each in own))
    exposed_ns = round(times * sum(each.work.sent_ns for each in own))
    length_ns = times * sum(each.length_ns for each in own)
    reduced_ns, optimizer_ns = ends
    return Step(
        compute_ns=compute_ns,
        exposed_ns=exposed_ns + reduced_ns,
        host_ns=length_ns - compute_ns - exposed_ns,
        bubble_ns=total_ns - length_ns - reduced_ns - optimizer_ns,
        optimizer_ns=optimizer_ns,
    )
