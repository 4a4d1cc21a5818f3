"""Why a plan is as it is, as far as the plan itself says: what was chosen for a parameter, a module
or an op, what that costs, part by part, and which limit binds.

Figures are per device and step, and of all blocks of a class together. Alternatives need the model
(`autopar.alternatives`); where they were asked for, they are part of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.plans.matching import general, matches, outer_names
from autopar.plans.plan import OpTotal, Plan
from autopar.report.costs import PARAM, WHOLE_MODEL, costs, maker, short_op, tensor_name
from autopar.report.decisions import Alike, Decision, alike, op_decision, param_decision
from autopar.report.limits import Limits, find_limits

if TYPE_CHECKING:
    # What a plan alone says starts without numpy.
    from autopar.plans.explanation import Benefit, Explanation

_TOP = 10


@dataclass(frozen=True, slots=True)
class Part:
    """`count` times `what`, at `where`: `time_ns` of all of them, which is the fraction `share` of
    the step, and the local bytes that are sent (0 where nothing is)."""

    what: str
    where: str
    phase: str
    count: int
    num_bytes: int
    time_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that a device holds of `what`."""

    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reasons:
    """What a plan says of `subject`: a parameter, a module, an op, or all of it (`kind` "plan").

    `parts` are what it costs, the largest first, `time_ns` of all of them. `limits` and what they
    say of the margin are the whole plan's. `alternatives` and `benefits` are empty unless the model
    was at hand.
    """

    subject: str
    kind: str
    model: str
    step_ns: int
    decisions: tuple[Decision, ...]
    parts: tuple[Part, ...]
    time_ns: int
    share: float
    holdings: tuple[Holding, ...]
    limits: Limits
    alternatives: tuple[Explanation, ...] = ()
    benefits: tuple[Benefit, ...] = ()

    def __str__(self) -> str:
        from autopar.report.plain import plain
        from autopar.report.reasons_text import page

        return plain(page(self))


def reasons(plan: Plan, name: str = "") -> Reasons:
    """What `plan` says of `name`: a parameter or a pattern of them, a module or what stands before
    the dots of one, an op's key; all of the plan if it is empty. AutoparError, with what comes
    close, if there is nothing of the name."""
    if not name:
        return _whole(plan)
    groups, kind = _params(plan, name), "parameter"
    ops: dict[str, OpTotal] = {}
    if not groups:
        ops, kind = _ops(plan, name), "op"
    if not groups and not ops:
        ops, kind = _inside(plan, name), "module"
        inside = tuple(n for n in plan.structure.params if _within(general(n), general(name)))
        groups = alike(plan.structure.params, inside)
    if not groups and not ops:
        raise AutoparError(_unknown(plan, name))
    keys = dict.fromkeys((*_param_keys(plan, groups), *ops))
    decisions = (
        *(param_decision(plan, group) for group in groups),
        *(op_decision(plan, key, op) for key, op in ops.items()),
    )
    return _reasons(plan, _subject(name, kind, groups), kind, decisions, groups, tuple(keys))


def knows(plan: Plan, name: str) -> bool:
    """Whether anything in the plan has that name."""
    return bool(_params(plan, name) or _ops(plan, name) or _inside(plan, name))


def _whole(plan: Plan) -> Reasons:
    estimates = plan.estimates
    parts = tuple(
        Part(c.what, c.where, c.phase, c.count, 0, c.time_ns, c.share)
        for c in costs(estimates)[:_TOP]
    )
    memory = estimates.memory
    holdings = (
        Holding("parameters", memory.params),
        Holding("gradients", memory.gradients),
        Holding("optimizer states", memory.optimizer),
        Holding("kept for backward", memory.kept),
        Holding("saved for backward", memory.saved),
        Holding("temporary", memory.transient),
    )
    return Reasons(
        "the whole plan", "plan", plan.structure.model, estimates.step_ns, (), parts,
        estimates.step_ns, 1.0, holdings, find_limits(plan),
    )  # fmt: skip


def _reasons(
    plan: Plan,
    subject: str,
    kind: str,
    decisions: tuple[Decision, ...],
    groups: Sequence[Alike],
    keys: tuple[str, ...],
) -> Reasons:
    estimates = plan.estimates
    senders = (*keys, *_gradient_keys(plan, (k for k in keys if k.startswith(PARAM))))
    parts = sorted(
        (*_computed(plan, keys), *_sent(plan, senders)),
        key=lambda part: (-part.time_ns, part.where, part.what, part.phase),
    )
    time_ns = sum(part.time_ns for part in parts)
    return Reasons(
        subject=subject,
        kind=kind,
        model=plan.structure.model,
        step_ns=estimates.step_ns,
        decisions=decisions,
        parts=tuple(parts),
        time_ns=time_ns,
        share=time_ns / max(1, estimates.step_ns),
        holdings=_holdings(plan, groups, keys),
        limits=find_limits(plan),
    )


def _params(plan: Plan, name: str) -> tuple[Alike, ...]:
    """The parameters that `name` stands for, and all that lie like one that is named, grouped as
    they lie."""
    name = name.removeprefix(PARAM)
    params = plan.structure.params
    if name in params:
        same = general(name), params[name]
        return alike(params, (n for n, param in params.items() if (general(n), param) == same))
    found = [each for each in params if general(each) == name]
    return alike(params, found or [n for n in params if "*" in name and matches(name, n)])


def _param_keys(plan: Plan, groups: Sequence[Alike]) -> tuple[str, ...]:
    """The keys of the classes that these parameters belong to."""
    wanted = {(PARAM + group.pattern, group.param.type_text) for group in groups}
    return tuple(
        key
        for key, op in plan.estimates.ops.items()
        if any(key.partition("~")[0] == base and _type(op) in ("", kind) for base, kind in wanted)
    )


def _type(op: OpTotal) -> str:
    return op.outputs[0][0] if op.outputs else ""


def _gradient_keys(plan: Plan, keys: Iterable[str]) -> tuple[str, ...]:
    """The ops that make the gradients of these parameters."""
    return tuple(root for key in keys for root, _ in plan.estimates.ops[key].inputs)


def _ops(plan: Plan, name: str) -> dict[str, OpTotal]:
    """The op whose key is `name`, which may have the number of a block where the key has a star."""
    module, colon, rest = name.partition(":")
    ops = plan.estimates.ops
    for key in (name, f"{general(module)}{colon}{rest}" if colon else name):
        if key in ops and not key.startswith(PARAM):
            return {key: ops[key]}
    return {}


def _inside(plan: Plan, name: str) -> dict[str, OpTotal]:
    """The ops of the module `name` and of those in it."""
    wanted = general("" if name == WHOLE_MODEL else name)
    return {
        key: op
        for key, op in plan.estimates.ops.items()
        if not key.startswith(PARAM)
        and (_within(general(op.module), wanted) if wanted else not op.module)
    }


def _within(name: str, outer: str) -> bool:
    return f"{name}.".startswith(f"{outer}.")


def _computed(plan: Plan, keys: Iterable[str]) -> Iterable[Part]:
    for key in keys:
        op = plan.estimates.ops[key]
        where = op.module or WHOLE_MODEL
        for what, phase, time_ns in (
            (short_op(op.op), op.phase, op.compute_ns),
            ("optimizer", "", op.optimizer_ns),
        ):
            if time_ns:
                yield Part(what, where, phase, op.count, 0, time_ns, _share(plan, time_ns))


def _sent(plan: Plan, keys: Iterable[str]) -> Iterable[Part]:
    wanted = set(keys)
    for key, sends in plan.estimates.sends.items():
        if maker(key, wanted):
            where = tensor_name(plan.estimates, key)
            for each in sends:
                what = f"{each.kind} on {each.axis}"
                share = _share(plan, each.time_ns)
                yield Part(what, where, each.phase, each.count, each.num_bytes, each.time_ns, share)


def _share(plan: Plan, time_ns: int) -> float:
    return time_ns / max(1, plan.estimates.step_ns)


def _holdings(plan: Plan, groups: Sequence[Alike], keys: Sequence[str]) -> tuple[Holding, ...]:
    memory, mesh = plan.estimates.memory, plan.structure.mesh
    stored = sum(group.held_bytes(group.param.storage, mesh) for group in groups)
    kept = sum(
        group.held_bytes(group.param.kept, mesh)
        for group in groups
        if group.param.kept != group.param.storage
    )
    found = [
        Holding("parameters", stored),
        Holding("gradients", stored * memory.gradients // max(1, memory.params)),
        Holding("optimizer states", stored * memory.optimizer // max(1, memory.params)),
        Holding("kept for backward", kept),
        Holding("saved for backward", sum(plan.estimates.ops[key].saved_bytes for key in keys)),
    ]
    return tuple(holding for holding in found if holding.num_bytes)


def _subject(name: str, kind: str, groups: Sequence[Alike]) -> str:
    if kind == "parameter" and len(groups) == 1 and len(groups[0].names) > 1:
        count = len(groups[0].names)
        if name not in groups[0].names:
            return f"{name}, {count} that lie alike"
        return f"{name}, one of {count} that lie alike; figures are of all of them"
    return name


def _unknown(plan: Plan, name: str) -> str:
    modules = dict.fromkeys(general(op.module) for op in plan.estimates.ops.values() if op.module)
    outer = [found for module in modules for found in (module, *outer_names(module))]
    known = dict.fromkeys(
        (*map(general, plan.structure.params), *outer, *plan.structure.params, *plan.structure.ops)
    )
    inner = [each for each in known if each.endswith((f".{name}", f".{general(name)}"))]
    close = inner[:3] or get_close_matches(name, known, n=3, cutoff=0.5) or list(known)[:5]
    return (
        f"the plan of {plan.structure.model} has no parameter, module or op {name}; close to it "
        f"are {', '.join(close)}"
    )
