"""What a search looked at, as a plan records it."""

from __future__ import annotations

from autopar.plans.plan import Plan


def named(*meshes: str) -> set[str]:
    """Candidates in one stage, on these meshes."""
    return {f"mesh {mesh}" for mesh in meshes}


def looked_at(plan: Plan) -> set[str]:
    """The candidates that were not skipped."""
    return {each.candidate for each in plan.provenance.candidates if each.result != "skipped"}
