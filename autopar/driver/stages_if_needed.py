"""Plans of which nobody has said how many microbatches or stages they have: one, unless that does
not fit in memory, or its devices wait for each other, or do the same work, for long, and several
stages take less."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import msgspec

from autopar.compile import Say
from autopar.driver.margin import find_margin
from autopar.driver.microbatching import possible_counts
from autopar.driver.pipelining import search_stages
from autopar.driver.search import Survey, explaining, planned, survey
from autopar.errors import ClusterError, InfeasibleError, SolverError, StageError
from autopar.ir.microbatches import trains
from autopar.ir.units import format_ns
from autopar.plans.estimates import LARGE_WAIT
from autopar.plans.fitting import Candidate
from autopar.plans.options import Options
from autopar.plans.plan import FRAGILE, IN_STAGES, Plan
from autopar.plans.request import Asked

WORTH_LOOKING_NS = 10_000_000
"""To look for stages takes seconds to minutes: a step that loses less has hardly that to win in
thousands of them."""

PRICES_ERR = 0.1
"""Scripts may do less in stages, and what steps take is not known exactly: stages that nobody asked
for are to win more than this part. Of emulated clusters (`benchmarks.emulated`) those that were
thought to win 14 % took 3 to 9 % longer, and those that were thought to win 15 % or more won."""


def search_one_or_several(asked: Asked, say: Say) -> Plan:
    """The best plan in one stage, in microbatches only if it does not fit in memory else, or one in
    several stages: where their number is open, if that takes less; where nobody asks for stages, if
    one does not fit, or is hindered and they take less by more than prices err. InfeasibleError,
    with what would do, if none fits.

    What is looked at where nobody asks for stages is looked at where their number is open: to ask
    for more never gives a longer step.
    """
    is_asked = asked.options.stages is None
    one = replace(asked, options=_of_one_stage(asked.options)) if is_asked else asked
    is_open = is_asked or one.options.stages_if_needed
    is_open = is_open and trains(asked.graph) and asked.cluster.num_devices > 1
    try:
        found = _in_one(one, say)
    except (InfeasibleError, ClusterError) as why:
        if is_open:
            say(f"{why}; looking for stages, each of which holds its own part")
            staged, _ = _in_stages(asked, say)
            if staged is not None:
                return staged
        with explaining(one, say):
            raise
    plain, told = planned(found), ""
    if is_open and (is_asked or is_hindered(found.best)):
        if not is_asked:
            say("devices wait, or do the same work, for long; looking for stages, which send less")
        staged, told = _in_stages(asked, say, plain)
        worth = 1 if is_asked else 1 - PRICES_ERR
        if staged is not None and _step_ns(staged) < worth * _step_ns(plain):
            return staged
        if staged is not None:
            told = f"the best take {format_ns(_step_ns(staged))}"
    if one.options.margin:
        plain = planned(found, find_margin(found, say))
    if not told:
        return plain
    statistics = {**plain.provenance.statistics, IN_STAGES: told}
    provenance = msgspec.structs.replace(plain.provenance, statistics=statistics)
    return msgspec.structs.replace(plain, provenance=provenance)


def _of_one_stage(options: Options) -> Options:
    """What is asked, of one stage: of microbatches as where nobody asks for stages."""
    unsaid = options.given.microbatches is None
    count = 1 if unsaid else options.microbatches
    return replace(options, stages=1, microbatches=count, microbatches_if_needed=unsaid)


def is_hindered(found: Candidate) -> bool:
    """Whether a plan loses much of its step, for long enough: beyond what its ops take where each
    is shared in the way that is best for it alone, and nothing is sent."""
    step_ns = found.estimates.step_ns
    lost_ns = step_ns - sum(int(costs.min()) for costs in found.problem.costs)
    return lost_ns > max(LARGE_WAIT * step_ns, WORTH_LOOKING_NS)


def _step_ns(plan: Plan) -> int:
    """Nanoseconds of a step, as predicted."""
    return plan.estimates.step_ns


def _in_one(asked: Asked, say: Say) -> Survey:
    """What is known of one stage: at once, or in microbatches if that does not fit and nobody has
    said how many; or if it fits only with parameters on the host, which may take longer.
    InfeasibleError if there is no plan."""
    options = asked.options
    # With a margin, meshes are not cut off before they are known to make the plan no fragile one.
    margin = FRAGILE if options.margin else 0.0
    can_be_more = options.microbatches_if_needed and len(possible_counts(asked.graph)) > 1
    more = replace(asked, options=replace(options, microbatches=None))
    try:
        found = survey(asked, say, margin=margin)
    except InfeasibleError as why:
        if not can_be_more:
            raise
        say(f"{why}; looking for microbatches, which take less memory")
        return survey(more, say, margin=margin)
    if can_be_more and options.residency == "auto" and found.best.request.hosted:
        say("parameters are on the host; looking for microbatches, which take less memory")
        with suppress(InfeasibleError):
            other = survey(more, say, margin=margin)
            return min(found, other, key=lambda each: each.best.estimates.step_ns)
    return found


def _in_stages(asked: Asked, say: Say, plain: Plan | None = None) -> tuple[Plan | None, str]:
    """The best plan in several stages, if there is one and the `plain` one is not as good; else why
    there is not."""
    count = asked.options.microbatches if asked.options.stages is None else None
    options = replace(asked.options, stages=None, microbatches=count, stages_if_needed=False)
    try:
        found = search_stages(replace(asked, options=options), say, plain, only_several=True)
    except (ClusterError, InfeasibleError, StageError, SolverError) as error:
        say(f"{error}")
        unknown = isinstance(error, SolverError)
        return None, "what they take is not known" if unknown else "none is better"
    return None if found is plain else found, "none is better"
