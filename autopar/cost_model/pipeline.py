"""The bill of a pipeline, from those of its stages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autopar.cost_model.rates import cluster_rates
from autopar.ir.mesh import Cluster
from autopar.ir.pipeline import ActionTable
from autopar.plans.estimates import (
    NOTHING_ON_HOST,
    Delay,
    Estimates,
    HostMemory,
    Memory,
    Shared,
    StageEstimates,
)
from autopar.plans.pipelines import play_pipeline


def add_up(
    table: ActionTable,
    stages: Sequence[StageEstimates],
    devices: Sequence[int],
    sends: Sequence[Delay],
    shared: Sequence[Shared],
    held: Sequence[Memory],
    cluster: Cluster,
) -> Estimates:
    """The estimates of a pipeline on `cluster` whose stages have so many devices each, of which
    those of a rank hold what `held` says. What ranks share at the end is communication that nothing
    hides."""
    played = play_pipeline(table, stages, sends, shared)
    step_ns = played.step_ns
    rank = played.busy_ns.index(max(played.busy_ns))
    own = [stages[s] for s, at in table.ranks.items() if at == rank]
    total = {name: sum(getattr(each, name) for each in own) for name in _ADDED}
    total["exposed_host_ns"] += sum(stages[a.stage].turn.action_ns for a in table.rows[rank])
    shared_ns = played.shared_ns[rank]
    total["communication_ns"] += shared_ns
    total["exposed_communication_ns"] += shared_ns
    useful = sum(
        each.mfu_ppm * each.step_ns * size for each, size in zip(stages, devices, strict=True)
    )
    everywhere = sum({at: devices[s] for s, at in table.ranks.items()}.values())
    tokens = max(each.tokens for each in stages)
    on_host = _on_host(table, stages, cluster)
    return Estimates(
        **total,
        memory_limit=own[0].memory_limit,
        step_ns=step_ns,
        bubble_ns=step_ns - played.busy_ns[rank] - shared_ns,
        cluster=cluster_rates(cluster),
        flops=sum(each.flops for each in stages),
        memory=max(held, key=lambda each: each.total),
        host_bytes=on_host.total,
        host_memory=on_host,
        tokens=tokens,
        tokens_per_s=tokens * 10**9 // step_ns if step_ns else 0,
        samples=0 if tokens else stages[0].samples,
        mfu_ppm=useful // (step_ns * everywhere) if step_ns else 0,
        stages=tuple(stages),
        delays=tuple(sends),
        shared=tuple(shared),
        devices=tuple(held),
    )


def _on_host(table: ActionTable, stages: Sequence[StageEstimates], cluster: Cluster) -> HostMemory:
    """What a device has on its host, of the rank that has most there: of all its stages."""
    ranks: list[HostMemory] = []
    for rank in range(len(table.rows)):
        own = [stages[stage].host_memory for stage in table.stages_of(rank)]
        sums = {name: sum(getattr(each, name) for each in own) for name in _ON_HOST}
        ranks.append(HostMemory(**sums, limit=cluster.host.memory_bytes))
    most = max(ranks, key=lambda each: each.total)
    if not most.total:
        return NOTHING_ON_HOST
    return msgspec.structs.replace(most, devices=cluster.devices_of_node)


_ON_HOST = "params", "gradients", "optimizer", "offloaded"

_ADDED = (
    "compute_ns",
    "communication_ns",
    "optimizer_ns",
    "exposed_communication_ns",
    "hidden_communication_ns",
    "host_ns",
    "exposed_host_ns",
)
"""What a rank does is the sum of what it does for each of its stages."""
