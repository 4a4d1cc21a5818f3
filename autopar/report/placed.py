"""Where tensors lie and ops work, in words of the mesh's axes. Texts from files that are none of
the notation are given back as they are: only shardings of parameters are checked when a plan is
read.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.choices import Choice
from autopar.ir.sharding import Sharding
from autopar.plans.plan import MeshAxis, Param
from autopar.report.param_groups import REPLICATED, on_axes


def sharding_text(text: str, mesh: Sequence[MeshAxis]) -> str:
    """`[S(1) on tp, S(0) on dp]` of `[S(0), S(1)]`."""
    try:
        return on_axes(Sharding.parse(text), mesh)
    except ValueError:
        return text


def param_text(param: Param, mesh: Sequence[MeshAxis]) -> str:
    """How a parameter is stored, and what else is kept of it for backward."""
    stored = sharding_text(param.storage, mesh)
    kept = "" if param.kept == param.storage else f", kept {sharding_text(param.kept, mesh)}"
    return stored + kept


def options_of(choice: str) -> tuple[str, ...]:
    """What the choice of an op is on each axis; nothing if it is none."""
    try:
        return Choice.parse(choice).options
    except ValueError:
        return ()


def choice_text(choice: str, mesh: Sequence[MeshAxis]) -> str:
    """`n on tp, b on dp` of `b,n`, the fastest axis first: what an op shards."""
    options = options_of(choice)
    if len(options) != len(mesh):
        return choice
    axes = [f"{o} on {axis.name}" for o, axis in zip(options, mesh) if o != "-"]
    return ", ".join(reversed(axes)) or REPLICATED


def route_text(arcs: Sequence[str], mesh: Sequence[MeshAxis]) -> str:
    """`[P on tp] to replicated; ...`: the steps of a route."""
    steps = (" to ".join(sharding_text(end, mesh) for end in arc.split(" -> ")) for arc in arcs)
    return "; ".join(steps)
