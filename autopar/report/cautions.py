"""What a person should know before relying on a plan, in sentences, and how it was searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from autopar.ir.graph import itemsize
from autopar.ir.grouping import grouped
from autopar.ir.mesh import HOST_LINKS
from autopar.ir.units import (
    format_bytes,
    format_bytes_per_s,
    format_count,
    format_ns,
    format_percent,
    format_ppm,
    format_share,
)
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.provenance import CLOSE, IN_STAGES, WORK_LIMIT, CandidateOutcome, Provenance
from autopar.plans.requests.options import STORED
from autopar.plans.structure import MAX_TENSOR_BYTES
from autopar.report.names import stages_text, tensor_name
from autopar.report.placed import REPLICATED, ParamGroup, param_groups, parsed, slowest_links
from autopar.report.records import above_records

# The candidates of the search, in words.


def searched_text(provenance: Provenance) -> str:
    """How many candidates there were, and their outcomes; empty if there was one."""
    count = Counter(each.result for each in provenance.candidates)
    looked = len(provenance.candidates) - count["skipped"]
    if looked < 2:
        return ""
    texts = [f"{n} {result}" for result, n in count.items() if result != "skipped"]
    whys = dict.fromkeys(e.reason for e in provenance.candidates if e.result == "skipped")
    left = f"; not looked at: {', '.join(whys)}" if whys else ""
    return f"{looked} candidates: {', '.join(texts)}{left}"


def searched_lines(provenance: Provenance) -> Iterator[str]:
    """The outcome of each candidate, if there were several."""
    if len(provenance.candidates) > 1:
        yield from map(_line, provenance.candidates)


def _line(each: CandidateOutcome) -> str:
    return f"{each.candidate}: {outcome_text(each)}"


def outcome_text(each: CandidateOutcome) -> str:
    """What became of a candidate: `planned, 1.28 s`."""
    match each.result:
        case "planned" | "estimated":
            so_far = f"; {each.reason}" if each.reason else ""
            return f"{each.result}, {format_ns(each.ns or 0)}{so_far}"
        case "not better":
            return f"not better, at least {format_ns(each.ns or 0)}"
        case "infeasible" | "skipped":
            return f"{each.result}: {each.reason}"


LARGE_SHARE = 0.01
"""Replicated tensors that take this share of the memory limit are worth a warning."""


MUCH_LONGER = 1.15
"""A simulated step is worth a warning from this multiple of the modelled step on. Models of one or
two layers, most of whose step is outside of layers, take up to a tenth longer."""


NEARLY_FULL = 0.95
"""A device whose memory is fuller than this may not have what libraries and fragmentation take."""

BUSY = 0.8
"""Links to the host that are busy for more of the step than this have little room for delays."""

LEANS = 0.5
"""A step leans on links between nodes that are busy for more of it than this: at half their speed
they would be busy for longer than the step."""


def cautions(plan: Plan) -> Iterator[str]:
    """Warnings, the gravest first: those of stages, each once with the stages it is of, and those
    of the whole plan."""
    warnings = grouped((text, each.number) for each in plan.stages for text in _of_decisions(each))
    several = plan.structure.is_pipeline
    for text, stages in warnings.items():
        yield f"{stages_text(stages)}: {text}" if several else text
    yield from _full(plan)
    yield from above_records(plan)
    yield from _on_hosts(plan)
    if not several:
        yield from _busy(plan)
        yield from _leaning(plan.stages[0])
        yield from _waiting(plan)
        yield from _simulated_longer(plan.stages[0])
        if not (plan.provenance.is_close or plan.provenance.is_limited):
            yield f"not proven optimal: {doubt(plan.provenance)}"
    yield from _limited(plan.provenance)
    yield from _fragile(plan.provenance)


def _limited(provenance: Provenance) -> Iterator[str]:
    """A warning if the search came to its limit of work."""
    if not provenance.is_limited:
        return
    search = provenance.options.search
    left = sum(each.reason == WORK_LIMIT for each in provenance.candidates)
    margin = ", and for a margin" if search.margin else ""
    yield (
        f"the search came to its limit of work ({search.work_limit}), so that another plan may be "
        f"better. Not looked at, or not to its end: {format_count(left, 'candidate')}. A larger "
        f"--search-work-limit, or 0 for none, looks for more{margin}"
    )


def _full(plan: Plan) -> Iterator[str]:
    """A warning if a plan leaves little of a device's memory, whatever its limit."""
    held, whole = plan.estimates.memory.total, plan.estimates.cluster.memory_bytes
    if held > NEARLY_FULL * whole > 0:
        yield (
            f"a device's memory is {format_share(held, whole)} full at the peak, without what "
            "libraries and fragmentation take: --memory-limit leaves room for them"
        )


def _on_hosts(plan: Plan) -> Iterator[str]:
    """A warning if parameters live on hosts that nobody asked to be there."""
    params = [each for stage in plan.structure.stages for each in stage.params.values()]
    on_host = sum(each.residency == "cpu" for each in params)
    provenance = plan.provenance
    is_given = provenance.options.memory.residency is not None or STORED in provenance.imposed
    if on_host and not is_given:
        yield (
            f"{on_host} of {format_count(len(params), 'parameter')} live in the host's memory: no "
            "plan with all of them on devices was found to fit"
        )


def _busy(plan: Plan) -> Iterator[str]:
    """A warning for each link to the host that is busy for most of a step in one stage."""
    times = Counter[str]()
    for total in plan.stages[0].estimates.collectives:
        times[total.axis] += total.time_ns
    step_ns = max(1, plan.estimates.step_ns)
    for link in HOST_LINKS:
        if times[link] > BUSY * step_ns:
            yield (
                f"copies {link} take {format_share(times[link], step_ns)} of the step: if the host "
                "has other work, or devices share its links, the step is longer"
            )


def _leaning(plan: StagePlan) -> Iterator[str]:
    """A warning if a step in one stage takes links between nodes to be fast. In a node links are
    those of its devices; between nodes there may be fewer than a preset takes."""
    across, slowest = plan.estimates.cluster.links[:-1], slowest_links(plan)
    step_ns = max(1, plan.estimates.step_ns)
    for link in across:
        axes = {axis for axis, own in slowest.items() if own == link}
        busy_ns = sum(each.time_ns for each in plan.estimates.collectives if each.axis in axes)
        if busy_ns > LEANS * step_ns:
            yield (
                f"{link.name} is busy for {format_share(busy_ns, step_ns)} of the step, at "
                f"{format_bytes_per_s(link.bytes_per_s)} for each device: if there is less between "
                "nodes, the step is longer. A cluster file or a profile says what there is"
            )


def _waiting(plan: Plan) -> Iterator[str]:
    """A warning if a model in one stage mostly waits for communication."""
    step_ns, waits_ns = plan.estimates.step_ns, plan.estimates.exposed_communication_ns
    if plan.estimates.waits_above_all:
        in_stages = plan.provenance.statistics.get(IN_STAGES)
        yield (
            f"devices wait for communication in {format_share(waits_ns, step_ns)} of the step: "
            "stages of a pipeline send less "
            + (
                "(--pipeline-stages auto looks for them)"
                if in_stages is None
                else f"(looked for: {in_stages})"
            )
        )


def _simulated_longer(plan: StagePlan) -> Iterator[str]:
    """A warning if a step in one stage is much longer as simulated than as modelled, which the
    solver minimizes."""
    step_ns, modelled_ns = plan.estimates.step_ns, plan.estimates.modelled_ns
    if step_ns > MUCH_LONGER * modelled_ns > 0:
        longer = format_percent(step_ns / modelled_ns - 1)
        yield (
            f"event by event the step takes {longer} longer than as modelled "
            f"({format_ns(modelled_ns)}), by which plans are chosen: another one may be faster"
        )


def gap_text(bound_ns: int, gap: float, *, is_limited: bool) -> str:
    """The bound that no plan beats, and how near the plan is to it. If the search came to its limit
    of work, it is one on plans of some candidates."""
    if not bound_ns:
        return _UNKNOWN
    if is_limited:
        share = format_percent(gap)
        return f"of the candidates looked at, at most {share} faster ({format_ns(bound_ns)})"
    if gap > CLOSE:
        return f"proven bound {format_ns(bound_ns)}, gap {format_percent(gap)}"
    return f"within {format_percent(gap)} of the best possible ({format_ns(bound_ns)})"


_UNKNOWN = "nothing is known of how good the best plan is"


def doubt(provenance: Provenance) -> str:
    """How much better another plan may be than one that is not proven to be the best."""
    if not provenance.bound_ns:
        return _UNKNOWN
    gap = format_ppm(provenance.gap_ppm)
    return f"as modelled, a plan up to {gap} faster may exist"


def _of_decisions(plan: StagePlan) -> Iterator[str]:
    """Warnings about the decisions of a stage."""
    unknown = plan.structure.replicated_unknown_ops
    if unknown:
        yield (
            f"{', '.join(unknown)}: no sharding rule, so every device computes all of it; "
            "a record in autopar/rules describes an op"
        )
    if plan.structure.num_devices > 1 and plan.estimates.memory_limit:
        yield from _whole(plan, param_groups(plan.structure.params, plan.structure.mesh))


def _whole(plan: StagePlan, params: Sequence[ParamGroup]) -> Iterator[str]:
    """Large tensors that no axis shards: parameters together, and the largest output of an op."""
    least = LARGE_SHARE * plan.estimates.memory_limit
    whole = [group for group in params if group.storage == REPLICATED]
    whole_bytes = sum(group.local_bytes for group in whole)
    if whole_bytes >= least:
        yield (
            f"every device holds {format_bytes(whole_bytes)} of parameters whole, "
            f"{whole[0].name} the largest ({format_bytes(whole[0].local_bytes)})"
        )
    num_bytes, key = max(_replicated(plan), default=(0, ""))
    if num_bytes >= least:
        name = tensor_name(plan.estimates, key)
        yield f"every device makes all of {name}, {format_bytes(num_bytes)}"


def _replicated(plan: StagePlan) -> Iterator[tuple[int, str]]:
    """(bytes, key) of outputs that every device makes as a whole."""
    for key, op in sorted(plan.estimates.ops.items()):
        for text, state in op.outputs if op.count else ():
            placed = parsed(state, plan.structure.mesh)
            if placed is not None and placed.is_replicated:
                yield type_bytes(text), key


def type_bytes(text: str) -> int:
    """Bytes of a tensor of a type such as `bfloat16[64, 4096]`; 0 if no tensor can be of it."""
    dtype, bracket, dims = text.rstrip("]").partition("[")
    sizes = [size.strip() for size in dims.split(",")] if dims else []
    try:
        num_bytes = prod(map(int, sizes)) * itemsize(dtype) if bracket else 0
    except (ValueError, KeyError):
        return 0
    return num_bytes if 0 <= num_bytes <= MAX_TENSOR_BYTES else 0


def _fragile(provenance: Provenance) -> Iterator[str]:
    """A warning if a plan of another structure is, or may be, nearly as good as modelled."""
    margin, is_fragile = provenance.margin, provenance.is_fragile
    if margin is None or is_fragile is False:
        return
    least = max(1, provenance.objective_ns)
    if is_fragile and margin.step_ns is not None:
        more = 100 * (margin.step_ns - least) / least
        yield (
            "fragile: as modelled, a plan of another structure is "
            f"{abs(more):.2g} % {'slower' if more >= 0 else 'faster'}: {margin.rival}"
        )
        return
    more = 100 * max(0, margin.bound_ns - least) / least
    yield (
        "may be fragile: as modelled, plans of another structure are only proven to be "
        f"{more:.2g} % slower"
    )
