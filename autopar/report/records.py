"""How much published training runs made of their devices, beside what a plan is predicted to.

The runs are of whole dense models in bfloat16 (`benchmarks/data/published.csv`: float8, experts and
models with some of their layers are left out). Of their FLOPs those of products count, and of
causal attention the half that is not masked, as for plans (`cost_model.rates.utilisation_ppm`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autopar.ir.units import format_percent, format_ppm
from autopar.plans.plan import Plan


class BestRun(NamedTuple):
    """The largest share of a device's peak FLOPs that a run had, and who published it."""

    utilisation: float
    source: str


_MEGATRON = "NVIDIA/dgxc-benchmarking, Llama 3.1"
_FOUNDRY = "mosaicml/llm-foundry, MPT"

RECORDS = {
    "A100": BestRun(0.627, _FOUNDRY),
    "A100-40G": BestRun(0.585, _FOUNDRY),
    "H100": BestRun(0.533, _MEGATRON),
}
"""By preset."""

MUCH_MORE = 1.12
"""A plan that is predicted to do more than this part of the record is worth a warning."""


def above_records(plan: Plan) -> Iterator[str]:
    """A warning if nobody has published a run that makes as much of these devices."""
    estimates = plan.estimates
    record = RECORDS.get(estimates.cluster.device)
    if record is None or not (_trains(plan) and _is_in_bfloat16(plan)):
        return
    if estimates.mfu_ppm > MUCH_MORE * record.utilisation * 1e6:
        yield (
            f"model FLOPs utilisation is predicted to be {format_ppm(estimates.mfu_ppm)}. The most "
            f"that is published for dense models in bfloat16 on {estimates.cluster.device} is "
            f"{format_percent(record.utilisation)} ({record.source}): expect a longer step"
        )


def _is_in_bfloat16(plan: Plan) -> bool:
    """Whether the ops that take most of the time are in bfloat16."""
    ops = (op for stage in plan.stages for op in stage.estimates.ops.values() if op.outputs)
    longest = max(ops, key=lambda op: op.compute_ns, default=None)
    return longest is not None and longest.outputs[0][0].startswith("bfloat16")


def _trains(plan: Plan) -> bool:
    return any(op.phase == "backward" for each in plan.stages for op in each.estimates.ops.values())
