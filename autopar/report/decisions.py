"""What a plan decided for one class of parameters or ops, in words, and what else could be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.ir.grouping import grouped
from autopar.ir.mesh import Mesh
from autopar.ir.patterns import compress
from autopar.ir.sharding import Placement, Sharding
from autopar.ir.units import format_bytes, format_ns, format_share
from autopar.plans.estimates import OpTotal
from autopar.plans.plan import StagePlan
from autopar.plans.requests.matching import general
from autopar.plans.structure import Param
from autopar.report.names import PARAM, short_op, tensor_name
from autopar.report.placed import on_axes, options_by_axis, parsed, shard_bytes, sharding_text
from autopar.report.printed import Row, columns

if TYPE_CHECKING:
    # It brings numpy, which a page of a stored plan does without.
    from autopar.plans.explanation import Alternative, Benefit, Explanation

# Explanations as plain text. All steps are as modelled (`Estimates.modelled_ns`).


def alternatives_text(explanation: Explanation) -> str:
    """The step with each alternative of a tensor, beside what the plan takes."""
    now_ns = explanation.modelled_ns
    rows = [
        (sharding_text(each.sharding, explanation.mesh), *_figures(each, now_ns))
        for each in explanation.alternatives
    ]
    head = f"{explanation.subject}: {format_ns(now_ns)} as modelled"
    return "\n".join((head, *columns(rows))) + "\n"


def benefits_text(benefits: Sequence[Benefit]) -> str:
    """The step before and after each change; the estimate is that of `Benefit`."""
    rows = [
        (
            each.change,
            format_ns(each.modelled_ns),
            _more(each.modelled_ns - each.before_ns, each.before_ns),
            "" if each.estimate_ns is None else f"estimate {format_ns(each.estimate_ns)}",
        )
        for each in benefits
    ]
    head = f"now: {format_ns(benefits[0].before_ns)} as modelled"
    return "\n".join((head, *columns(rows))) + "\n"


def _figures(alternative: Alternative, now_ns: int) -> Row:
    from autopar.ir.problem import Status

    if alternative.is_chosen:
        return format_ns(now_ns), "chosen"
    if alternative.status is Status.INFEASIBLE:
        return "", "does not fit in memory"
    bound = f"at least {_more(alternative.bound_ns - now_ns, now_ns)}"
    if alternative.modelled_ns is None:
        return format_ns(alternative.bound_ns), bound
    more = _more(alternative.modelled_ns - now_ns, now_ns)
    is_best = alternative.status is Status.OPTIMAL
    return format_ns(alternative.modelled_ns), more if is_best else f"{more}, {bound}"


def _more(ns: int, of_ns: int) -> str:
    """`+1.5 ms (+2 %)`"""
    if ns == 0:
        return "the same"
    sign = "+" if ns > 0 else "-"
    return f"{sign}{format_ns(abs(ns))} ({sign}{format_share(abs(ns), of_ns)})"


@dataclass(frozen=True, slots=True)
class DecisionText:
    """`what` is a type of parameter or an op, `count` how many are alike. `choice` says what was
    chosen, a line per thing. Of an op, `reads` and `makes` are tensors with their shardings; of
    parameters, `reads` says by which ops they are read."""

    name: str
    what: str
    phase: str
    count: int
    choice: tuple[str, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alike:
    """Identical parameters of one pattern: `name` is one text for all `names`."""

    name: str
    pattern: str
    names: tuple[str, ...]
    param: Param

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them in the whole model."""
        return len(self.names) * self.param.num_bytes

    def held_bytes(self, sharding: str, mesh: Mesh) -> int:
        """Bytes of all of them on one device, in that sharding."""
        state = Sharding.parse(sharding)
        return len(self.names) * shard_bytes(self.param.shape, self.param.dtype, state, mesh)


def alike(params: Mapping[str, Param], names: Iterable[str]) -> tuple[Alike, ...]:
    """`names` of `params`, by pattern and by placement."""
    groups = grouped(((general(name), params[name]), name) for name in names)
    patterns = Counter(map(general, params))
    return tuple(
        Alike(_one_text(pattern, some, patterns[pattern]), pattern, tuple(some), param)
        for (pattern, param), some in groups.items()
    )


def _one_text(pattern: str, names: Sequence[str], num_of_pattern: int) -> str:
    if len(names) == 1:
        return names[0]
    return pattern if len(names) == num_of_pattern else ", ".join(compress(names))


def param_decision(plan: StagePlan, params: Alike) -> DecisionText:
    """How parameters are stored, how they are held for backward, and what each mesh axis does to
    them."""
    mesh, readers, param = plan.structure.mesh, _readers(plan, params), params.param
    count, placed = len(params.names), param.choice
    whole = format_bytes(params.total_bytes // count)
    stored = format_bytes(params.held_bytes(param.storage, mesh) // count)
    where = "in the memory of each device's host" if placed.num_on_host else "on each device"
    for_backward = (
        f"for backward: {on_axes(placed.for_backward, mesh)}"
        if placed.for_backward != placed.storage
        else "for backward: as it is stored, no copy"
    )
    forward = [state for op, state in readers if op.phase == "forward"]
    taken = parsed(forward[0], mesh) if forward else None
    roles = [
        f"{axis.name}: {_role(placement, taken[k] if taken else None)}"
        for k, (axis, placement) in enumerate(zip(mesh, placed.storage, strict=True))
    ]
    return DecisionText(
        name=params.name,
        what=param.type_text,
        phase="",
        count=count,
        choice=(
            f"stored {on_axes(placed.storage, mesh)}: {stored} of {whole} {where}",
            for_backward,
        )
        + tuple(roles),
        reads=tuple(
            f"read by {short_op(op.op)} in {op.phase} as {sharding_text(state, mesh)}"
            for op, state in readers
        ),
        makes=(),
    )


def op_decision(plan: StagePlan, key: str, op: OpTotal) -> DecisionText:
    """What each mesh axis does to an op, and how its tensors are sharded."""
    mesh, options = plan.structure.mesh, options_by_axis(plan.structure.ops.get(key, ""))
    outputs = [sharding for _, state in op.outputs if (sharding := parsed(state, mesh)) is not None]
    return DecisionText(
        name=key,
        what=short_op(op.op),
        phase=op.phase,
        count=op.count,
        choice=tuple(
            f"{axis.name}: {_option(option, any(state[k].kind == 'P' for state in outputs))}"
            for k, (axis, option) in enumerate(zip(mesh, options, strict=False))
        ),
        reads=tuple(
            f"reads {tensor_name(plan.estimates, name)} {sharding_text(state, mesh)}"
            for name, state in op.inputs
        ),
        makes=tuple(f"makes {kind} {sharding_text(state, mesh)}" for kind, state in op.outputs),
    )


def _readers(plan: StagePlan, params: Alike) -> list[tuple[OpTotal, str]]:
    """The ops that read these parameters, each with the state in which it does."""
    base = PARAM + params.pattern
    return [
        (op, state)
        for op in plan.estimates.ops.values()
        for name, state in op.inputs
        if name.partition("~")[0] == base
    ]


def _role(stored: Placement, taken: Placement | None) -> str:
    """What one axis does to a parameter."""
    if taken is None:
        return "replicated" if stored.kind == "R" else f"stored in shards, {stored}"
    if taken.kind != "R":
        return f"each rank computes with its shard, {taken}"
    if stored.kind == "R":
        return "replicated: every rank stores and computes with all of it"
    return f"stored in shards, {stored}, and gathered to compute (ZeRO)"


def _option(option: str, is_partial: bool) -> str:
    if option == "-":
        return "every rank computes all of it"
    if option.startswith("+"):
        return "computes on partial sums, which are added up later"
    text = f"each rank computes its part of {option}"
    return f"{text}, which leaves partial sums" if is_partial else text
