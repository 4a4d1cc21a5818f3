"""Plans of which nobody has said how many stages they have: one, unless its devices wait for each
other, or do the same work, for long, and several take less."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from autopar.compile import Say
from autopar.driver.margin import find_margin
from autopar.driver.pipelining import search_stages
from autopar.driver.search import planned, survey
from autopar.errors import InfeasibleError, SolverError, StageError
from autopar.ir.microbatches import trains
from autopar.ir.units import format_ns
from autopar.plans.estimates import LARGE_WAIT
from autopar.plans.fitting import Candidate
from autopar.plans.plan import FRAGILE, IN_STAGES, Plan
from autopar.plans.request import Asked

WORTH_LOOKING_NS = 10_000_000
"""To look for stages takes seconds to minutes: a step that loses less has hardly that to win in
thousands of them."""

PRICES_ERR = 0.2
"""What steps take is known to about this part, and scripts may do less in stages: those that nobody
asked for are to win more. Of emulated clusters (`benchmarks.emulated`), stages that were thought to
win a tenth took longer, and those that were thought to win a quarter or more won."""


def search_one_or_several(asked: Asked, say: Say) -> Plan:
    """The best plan in one stage, or one in several if that is hindered and they take less by more
    than prices err. InfeasibleError if there is none in one stage."""
    # With a margin, meshes are not cut off before they are known to make the plan no fragile one.
    found = survey(asked, say, margin=FRAGILE if asked.margin else 0.0)
    plain = planned(found)
    told = ""
    is_open = asked.options.stages_if_waiting and trains(asked.graph)
    if is_open and is_hindered(found.best):
        say("devices wait, or do the same work, for long; looking for stages, which send less")
        try:
            staged, told = _in_stages(asked, say, plain), "none is better"
        except SolverError as error:
            say(f"{error}")
            staged, told = None, "what they take is not known"
        if staged is not None:
            if _step_ns(staged) < (1 - PRICES_ERR) * _step_ns(plain):
                return staged
            told = f"the best take {format_ns(_step_ns(staged))}"
    if asked.margin:
        plain = planned(found, find_margin(found, say))
    if not told:
        return plain
    statistics = {**plain.provenance.statistics, IN_STAGES: told}
    provenance = msgspec.structs.replace(plain.provenance, statistics=statistics)
    return msgspec.structs.replace(plain, provenance=provenance)


def is_hindered(found: Candidate) -> bool:
    """Whether a plan loses much of its step, for long enough: beyond what its ops take where each
    is shared in the way that is best for it alone, and nothing is sent."""
    step_ns = found.estimates.step_ns
    lost_ns = step_ns - sum(int(costs.min()) for costs in found.problem.costs)
    return lost_ns > max(LARGE_WAIT * step_ns, WORTH_LOOKING_NS)


def _step_ns(plan: Plan) -> int:
    """Nanoseconds of a step, as predicted."""
    return plan.estimates.step_ns


def _in_stages(asked: Asked, say: Say, plain: Plan) -> Plan | None:
    """The best plan in several stages, if that of one is not as good."""
    options = replace(asked.options, stages=None, microbatches=None, stages_if_waiting=False)
    try:
        found = search_stages(replace(asked, options=options), say, plain)
    except (InfeasibleError, StageError) as error:
        say(f"{error}")
        return None
    return None if found is plain else found
