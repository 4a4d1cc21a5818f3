"""What a step's time goes to, ops, collectives and the optimizer, the largest first; and what holds
its memory. Shares of time are of the step with nothing hidden, which these times add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.copies import original_key
from autopar.plans.estimates import Memory, StageEstimates
from autopar.report.names import WHOLE_MODEL, short_op, tensor_name

HOLDER_TITLES: Mapping[str, str] = {
    "params": "parameters",
    "gradients": "gradients",
    "accumulated": "sums over microbatches",
    "optimizer": "optimizer states",
    "kept": "parameters kept for backward",
    "saved": "activations saved for backward",
    "transient": "all else that is live",
}
"""By field of `plan.Memory`."""


@dataclass(frozen=True, slots=True)
class Cost:
    """`count` times `what` ("mm", "all_gather on tp", "optimizer") at `where`, a module, block or
    parameter by pattern; `time_ns` of all of them, which is the fraction `share` of the whole."""

    what: str
    where: str
    phase: str
    count: int
    time_ns: int
    share: float


def costs(estimates: StageEstimates) -> tuple[Cost, ...]:
    """All costs of a step that take time, added up by what they are and where."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for what, where, phase, count, time_ns in _rows(estimates):
        total = sums[what, where, phase]
        total[0], total[1] = total[0] + count, total[1] + time_ns
    whole_ns = max(1, estimates.added_up_ns)
    found = [
        Cost(what, where, phase, count, time_ns, time_ns / whole_ns)
        for (what, where, phase), (count, time_ns) in sums.items()
        if time_ns
    ]
    return tuple(sorted(found, key=lambda c: (-c.time_ns, c.where, c.what, c.phase)))


def _rows(estimates: StageEstimates) -> Iterator[tuple[str, str, str, int, int]]:
    for op in estimates.ops.values():
        yield short_op(op.op), op.module or WHOLE_MODEL, op.phase, op.count, op.compute_ns
    for key, sends in estimates.sends.items():
        for each in sends:
            what = f"{each.kind} on {each.axis}"
            yield what, tensor_name(estimates, key), each.phase, each.count, each.time_ns
    yield "optimizer", WHOLE_MODEL, "", 1, estimates.optimizer_ns


def held_by(memory: Memory) -> dict[str, int]:
    """Bytes by title; of sums over microbatches where there are any."""
    found = {title: getattr(memory, name) for name, title in HOLDER_TITLES.items()}
    if not memory.accumulated:
        del found[HOLDER_TITLES["accumulated"]]
    return found


def again_ns(estimates: StageEstimates) -> int:
    """What a step takes to make again for backward what is not saved."""
    return sum(op.compute_ns for key, op in estimates.ops.items() if original_key(key) != key)
