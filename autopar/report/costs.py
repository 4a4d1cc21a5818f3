"""What a step's time goes to: ops, collectives and the optimizer, the largest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass

from autopar.plans.plan import Estimates

WHOLE_MODEL = "(model)"
PARAM = "param:"
"""Before the name of a parameter, in its key."""


@dataclass(frozen=True, slots=True)
class Cost:
    """`count` times `what` ("mm", "all_gather on tp", "optimizer") at `where`, a module or
    parameter by pattern; `time_ns` of all of them, which is the fraction `share` of the step."""

    what: str
    where: str
    phase: str
    count: int
    time_ns: int
    share: float


def costs(estimates: Estimates) -> tuple[Cost, ...]:
    """All costs of a step that take time, added up by what they are and where."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for what, where, phase, count, time_ns in _rows(estimates):
        total = sums[what, where, phase]
        total[0], total[1] = total[0] + count, total[1] + time_ns
    step_ns = max(1, estimates.step_ns)
    found = [
        Cost(what, where, phase, count, time_ns, time_ns / step_ns)
        for (what, where, phase), (count, time_ns) in sums.items()
        if time_ns
    ]
    return tuple(sorted(found, key=lambda c: (-c.time_ns, c.where, c.what, c.phase)))


def _rows(estimates: Estimates) -> Iterator[tuple[str, str, str, int, int]]:
    for op in estimates.ops.values():
        yield short_op(op.op), op.module or WHOLE_MODEL, op.phase, op.count, op.compute_ns
    for key, sends in estimates.sends.items():
        for each in sends:
            what = f"{each.kind} on {each.axis}"
            yield what, tensor_name(estimates, key), each.phase, each.count, each.time_ns
    yield "optimizer", WHOLE_MODEL, "", 1, estimates.optimizer_ns


def short_op(op: str) -> str:
    """`mm` of `aten.mm.default`."""
    return "".join(op.split(".")[1:2]) or op


def tensor_name(estimates: Estimates, key: str) -> str:
    """In words, which tensor has the key that is sent: a parameter's pattern, or the module and op
    that make it. A key may have the phase behind it, and which of several ways it takes."""
    root = key.partition("@")[0]
    if root.startswith(PARAM):
        return root.removeprefix(PARAM)
    op = estimates.ops.get(maker(key, estimates.ops))
    return root if op is None else f"{op.module or WHOLE_MODEL}: {short_op(op.op)}"


def maker(key: str, ops: Container[str]) -> str:
    """The key in `ops` of what makes the tensor of `key`; empty for what no op makes."""
    base = key.partition("@")[0]
    for candidate in (base, base.rpartition(".")[0]):
        if candidate in ops:
            return candidate
    return ""
