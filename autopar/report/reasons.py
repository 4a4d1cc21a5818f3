"""Why a plan is as it is, as far as the plan itself says, as content and as a page. It shows what
was chosen for a parameter, a module or an op, the cost of that part by part, and which limit binds.

Figures are per device and step, and of all blocks of a class together. Parts of the time are those
of a step with nothing hidden. Alternatives need the model (`driver.explain.alternatives`). If
requested, they are part of the content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autopar.errors import AutoparError
from autopar.ir.units import format_bytes, format_ns, format_percent, format_share
from autopar.plans.estimates import Memory, OpTotal
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.provenance import FRAGILE, Provenance
from autopar.plans.requests.matching import general, matches, outer_names
from autopar.report.costs import costs, held_by
from autopar.report.decisions import (
    Alike,
    DecisionText,
    alike,
    alternatives_text,
    benefits_text,
    op_decision,
    param_decision,
)
from autopar.report.limits import Bottlenecks, find_limits, margin_text
from autopar.report.names import PARAM, WHOLE_MODEL, clean, maker, short_op, tensor_name
from autopar.report.pipeline_reasons import PipelineReasons, pipeline_reasons
from autopar.report.printed import Printed, section, with_rest
from autopar.report.printed import name as name_text
from autopar.report.printed import table as new_table
from autopar.report.timeline import timeline

if TYPE_CHECKING:
    # What a plan alone says starts without numpy.
    from autopar.plans.explanation import Benefit, Explanation

_TOP = 10
MAX_DECISIONS, MAX_PARTS = 30, 20
"""Rows that are printed; a last line counts the rest."""


@dataclass(frozen=True, slots=True)
class CostPart:
    """`count` times `what`, at `where`. `time_ns` is the time of all of them, which is the fraction
    `share` of the step with nothing hidden. `num_bytes` are the local bytes that are sent, 0 if
    none are."""

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
class Reasons(Printed):
    """What a plan says of `subject`: a parameter, a module, an op, or all of it (`kind` "plan").

    `parts` are what it costs, the largest first, `time_ns` of all of them. `limits` and the
    `margin` are the whole plan's; of several stages together `pipeline` says what limits them.
    `alternatives` and `benefits` are empty unless the model was at hand.
    """

    subject: str
    kind: str
    model: str
    step_ns: int
    decisions: tuple[DecisionText, ...]
    parts: tuple[CostPart, ...]
    time_ns: int
    share: float
    holdings: tuple[Holding, ...]
    limits: Bottlenecks | None
    margin: str
    is_fragile: bool | None
    pipeline: PipelineReasons | None = None
    alternatives: tuple[Explanation, ...] = ()
    benefits: tuple[Benefit, ...] = ()

    def page(self) -> RenderableType:
        """The choices, what they cost, which limit binds, and what else there could be."""
        title = Text(clean(f"{self.model or '(unnamed)'}: {self.subject}"), style="bold")
        sections: list[RenderableType] = [title]
        if self.decisions:
            sections += section("What was chosen", _decisions(self.decisions))
        for heading, content in self._sections():
            sections += section(heading, content)
        for each in self.alternatives:
            text = _lines(alternatives_text(each))
            sections += section("What else it could be, all else adapting", text)
        if self.benefits:
            sections += section("What more would buy", _lines(benefits_text(self.benefits)))
        return Group(*sections)

    def _sections(self) -> Iterator[tuple[str, RenderableType]]:
        if self.pipeline is not None:
            yield from self.pipeline.sections()
        if self.limits is None:
            yield "How far the next plan is", self._margin()
            return
        time, whole = format_ns(self.time_ns), "of a step with nothing hidden"
        what = f"What it costs: {time}, {format_percent(self.share)} {whole}"
        if self.kind == "plan":
            what = f"What a step goes to: {time} with nothing hidden"
        yield what, _parts(self.parts)
        if self.holdings:
            yield "What a device holds", _held(self, self.limits)
        yield "What limits the plan", Text("\n".join(map(clean_sentence, self.limits.binds)))
        yield "How far the next plan is", self._margin()

    def _margin(self) -> Text:
        margin = Text(clean_sentence(self.margin))
        if self.is_fragile:
            margin.append(f"\nfragile: that is less than {format_percent(FRAGILE)}", style="yellow")
        return margin


def reasons(plan: StagePlan, name: str = "") -> Reasons:
    """What `plan` says of `name`; of all of the plan if it is empty. A name is that of a parameter,
    or a pattern; of a module, or the first parts of one; or the key of an op. AutoparError, with
    what comes close, if there is nothing of the name."""
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
    keys = tuple(dict.fromkeys((*_param_keys(plan, groups), *ops)))
    # Of parameters, what is sent of their gradients too.
    read = (plan.estimates.ops[key].inputs for key in keys if key.startswith(PARAM))
    senders = (*keys, *(root for inputs in read for root, _ in inputs))
    parts = sorted(
        (*_computed(plan, keys), *_sent(plan, senders)),
        key=lambda part: (-part.time_ns, part.where, part.what, part.phase),
    )
    time_ns = sum(part.time_ns for part in parts)
    return Reasons(
        subject=_subject(name, kind, groups),
        kind=kind,
        model=plan.whole.structure.model,
        step_ns=plan.estimates.step_ns,
        decisions=(
            *(param_decision(plan, group) for group in groups),
            *(op_decision(plan, key, op) for key, op in ops.items()),
        ),
        parts=tuple(parts),
        time_ns=time_ns,
        share=_share(plan, time_ns),
        holdings=_holdings(plan, groups, keys),
        limits=find_limits(plan, timeline(plan)),
        margin=margin_text(plan.provenance),
        is_fragile=plan.provenance.is_fragile,
    )


def knows(plan: StagePlan, name: str) -> bool:
    """Whether anything in the plan has that name."""
    return bool(_params(plan, name) or _ops(plan, name) or _inside(plan, name))


def whole_reasons(plan: Plan) -> Reasons:
    """What all of a plan says of itself; of several stages, what limits them together."""
    pipeline = pipeline_reasons(plan)
    if pipeline is None:
        return _whole(plan.stages[0])
    what = "the whole plan", "plan", plan.structure.model, plan.estimates.step_ns
    time_ns, margin = plan.estimates.added_up_ns, _margin(plan.provenance)
    return Reasons(*what, (), (), time_ns, 1.0, (), None, *margin, pipeline)


def _margin(provenance: Provenance) -> tuple[str, bool | None]:
    return margin_text(provenance), provenance.is_fragile


def _whole(plan: StagePlan) -> Reasons:
    estimates = plan.estimates
    parts = tuple(
        CostPart(c.what, c.where, c.phase, c.count, 0, c.time_ns, c.share)
        for c in costs(estimates)[:_TOP]
    )
    holdings = tuple(Holding(*each) for each in held_by(estimates.memory).items())
    return Reasons(
        "the whole plan", "plan", plan.whole.structure.model, estimates.step_ns, (), parts,
        estimates.added_up_ns, 1.0, holdings, find_limits(plan, timeline(plan)),
        *_margin(plan.provenance),
    )  # fmt: skip


def _params(plan: StagePlan, name: str) -> tuple[Alike, ...]:
    """The parameters that `name` stands for, with all that are placed like one that is named, in
    groups."""
    name = name.removeprefix(PARAM)
    params = plan.structure.params
    if name in params:
        same = general(name), params[name]
        return alike(params, (n for n, param in params.items() if (general(n), param) == same))
    names = [each for each in params if general(each) == name]
    return alike(params, names or [n for n in params if "*" in name and matches(name, n)])


def _param_keys(plan: StagePlan, groups: Sequence[Alike]) -> tuple[str, ...]:
    """The keys of the classes that these parameters belong to."""
    classes = {(PARAM + group.pattern, group.param.type_text) for group in groups}
    return tuple(
        key
        for key, op in plan.estimates.ops.items()
        if any(key.partition("~")[0] == base and _type(op) in ("", kind) for base, kind in classes)
    )


def _type(op: OpTotal) -> str:
    return op.outputs[0][0] if op.outputs else ""


def _ops(plan: StagePlan, name: str) -> dict[str, OpTotal]:
    """The op whose key is `name`, which may have the number of a block where the key has a star."""
    module, colon, rest = name.partition(":")
    ops = plan.estimates.ops
    for key in (name, f"{general(module)}{colon}{rest}" if colon else name):
        if key in ops and not key.startswith(PARAM):
            return {key: ops[key]}
    return {}


def _inside(plan: StagePlan, name: str) -> dict[str, OpTotal]:
    """The ops of the module `name` and of its children."""
    outer = general("" if name == WHOLE_MODEL else name)
    return {
        key: op
        for key, op in plan.estimates.ops.items()
        if not key.startswith(PARAM)
        and (_within(general(op.module), outer) if outer else not op.module)
    }


def _within(name: str, outer: str) -> bool:
    return f"{name}.".startswith(f"{outer}.")


def _computed(plan: StagePlan, keys: Iterable[str]) -> Iterable[CostPart]:
    for key in keys:
        op = plan.estimates.ops[key]
        where = op.module or WHOLE_MODEL
        for what, phase, time_ns in (
            (short_op(op.op), op.phase, op.compute_ns),
            ("optimizer", "", op.optimizer_ns),
        ):
            if time_ns:
                yield CostPart(what, where, phase, op.count, 0, time_ns, _share(plan, time_ns))


def _sent(plan: StagePlan, keys: Iterable[str]) -> Iterable[CostPart]:
    makers = set(keys)
    for key, sends in plan.estimates.sends.items():
        if maker(key, makers):
            where = tensor_name(plan.estimates, key)
            for each in sends:
                what = f"{each.kind} on {each.axis}"
                share = _share(plan, each.time_ns)
                yield CostPart(
                    what, where, each.phase, each.count, each.num_bytes, each.time_ns, share
                )


def _share(plan: StagePlan, time_ns: int) -> float:
    return time_ns / max(1, plan.estimates.added_up_ns)


def _holdings(plan: StagePlan, groups: Sequence[Alike], keys: Sequence[str]) -> tuple[Holding, ...]:
    memory, mesh = plan.estimates.memory, plan.structure.mesh
    on_device = (group for group in groups if group.param.residency != "cpu")
    stored = sum(group.held_bytes(group.param.storage, mesh) for group in on_device)
    unsharded = sum(
        group.held_bytes(group.param.for_backward, mesh)
        for group in groups
        if group.param.for_backward != group.param.storage
    )
    ops = plan.estimates.ops
    is_trained = any(ops[key].optimizer_ns for key in keys)
    if not any(op.optimizer_ns for op in ops.values()):
        is_trained = memory.gradients > 0
    gradients = stored if is_trained else 0
    held = Memory(
        params=stored,
        gradients=gradients,
        optimizer=gradients * memory.optimizer // max(1, memory.gradients),
        unsharded=unsharded,
        saved=sum(ops[key].saved_bytes for key in keys),
        transient=0,
    )
    return tuple(Holding(*each) for each in held_by(held).items() if each[1])


def _subject(name: str, kind: str, groups: Sequence[Alike]) -> str:
    if kind == "parameter" and len(groups) == 1 and len(groups[0].names) > 1:
        count = len(groups[0].names)
        if name not in groups[0].names:
            return f"{name}, {count} identical ones"
        return f"{name}, one of {count} identical ones; figures are of all of them"
    return name


def _unknown(plan: StagePlan, name: str) -> str:
    modules = dict.fromkeys(general(op.module) for op in plan.estimates.ops.values() if op.module)
    outer = [each for module in modules for each in (module, *outer_names(module))]
    known = dict.fromkeys(
        (*map(general, plan.structure.params), *outer, *plan.structure.params, *plan.structure.ops)
    )
    inner = [each for each in known if each.endswith((f".{name}", f".{general(name)}"))]
    close = inner[:3] or get_close_matches(name, known, n=3, cutoff=0.5) or list(known)[:5]
    return (
        f"the plan of {plan.whole.structure.model} has no parameter, module or op {name}; close to "
        f"it are {', '.join(close)}"
    )


def clean_sentence(text: str) -> str:
    """Cleaned word by word, for sentences that hold several names."""
    return " ".join(map(clean, text.split(" ")))


def _lines(text: str) -> Text:
    return Text("\n".join(map(clean, text.splitlines())))


def _decisions(decisions: Sequence[DecisionText]) -> RenderableType:
    sections: list[RenderableType] = []
    for each in decisions[:MAX_DECISIONS]:
        phase = f" in {each.phase}" if each.phase else ""
        count = f", {each.count} times" if each.count > 1 else ""
        sections.append(Text(clean(f"{each.name}: {each.what}{phase}{count}"), style="cyan"))
        lines = (*each.choice, *each.reads, *each.makes)
        sections += [Padding(Text(clean_sentence(line)), (0, 0, 0, 2)) for line in lines]
    return with_rest(Group(*sections), len(decisions), MAX_DECISIONS)


def _parts(parts: Sequence[CostPart]) -> RenderableType:
    if not parts:
        return Text("nothing that takes time of its own")
    table = new_table(
        ("what", "where", "phase"),
        ("count", "local bytes", "time", "share"),
        (
            (
                *map(name_text, (part.what, part.where, part.phase)),
                str(part.count) if part.count else "",
                format_bytes(part.num_bytes) if part.num_bytes else "",
                format_ns(part.time_ns),
                format_percent(part.share),
            )
            for part in parts[:MAX_PARTS]
        ),
    )
    return with_rest(table, len(parts), MAX_PARTS)


def _held(reasons: Reasons, limits: Bottlenecks) -> RenderableType:
    limit = limits.memory_limit_bytes
    rows = (
        (each.what, format_bytes(each.num_bytes), format_share(each.num_bytes, limit))
        for each in reasons.holdings
    )
    return new_table(("held",), ("bytes", "of the limit"), rows)
