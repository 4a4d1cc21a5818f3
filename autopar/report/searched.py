"""What the search looked at on the way to a plan, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.ir.units import format_ns
from autopar.plans.provenance import CandidateOutcome, Provenance


def searched_text(provenance: Provenance) -> str:
    """How many candidates there were, and what became of them; nothing of one."""
    count = Counter(each.result for each in provenance.candidates)
    looked = len(provenance.candidates) - count["skipped"]
    if looked < 2:
        return ""
    told = [f"{n} {result}" for result, n in count.items() if result != "skipped"]
    whys = dict.fromkeys(e.reason for e in provenance.candidates if e.result == "skipped")
    left = f"; not looked at: {', '.join(whys)}" if whys else ""
    return f"{looked} candidates: {', '.join(told)}{left}"


def searched_lines(provenance: Provenance) -> Iterator[str]:
    """What became of each candidate, where there were several."""
    if len(provenance.candidates) > 1:
        yield from map(_line, provenance.candidates)


def _line(each: CandidateOutcome) -> str:
    match each.result:
        case "planned" | "estimated":
            told = f"{each.result}, {format_ns(each.ns or 0)}"
        case "not better":
            told = f"not better, at least {format_ns(each.ns or 0)}"
        case "infeasible" | "skipped":
            told = f"{each.result}: {each.reason}"
    return f"{each.candidate}: {told}"
