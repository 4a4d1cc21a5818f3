"""What a stored plan was asked for, to plan again: the options it records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster.parsing import is_cluster_file, parse_cluster
from autopar.errors import ClusterError, ConstraintError
from autopar.ir.mesh import Cluster
from autopar.plans.options import Options, make_options
from autopar.plans.plan import Plan

_PIN, _FORBID, _STRATEGY, _BACKEND = "pin ", "forbid ", "strategy ", "backend "
_SAVED, _WITHOUT, _HOST = "saved dtype ", "without outputs ", "host memory "


@dataclass(frozen=True, slots=True)
class Imposed:
    """What a user asked of a plan, as `options.make_options` takes it."""

    pins: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    strategy: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it asks for nothing."""
        return not (self.pins or self.forbid or self.strategy)


def read_imposed(lines: Sequence[str]) -> Imposed:
    """What `Provenance.imposed` lists, but for the backend, the dtype of what is saved, outputs
    that are left out and what a node has. ConstraintError on a line that no user can have asked
    for."""
    pins: list[str] = []
    forbid: list[str] = []
    strategy = ""
    for line in lines:
        if line.startswith((_BACKEND, _SAVED, _WITHOUT, _HOST)) or (
            strategy and line.startswith(f"{_STRATEGY}{strategy}: ")
        ):
            continue
        if line.startswith(_PIN):
            pins.append(line.removeprefix(_PIN))
        elif line.startswith(_FORBID):
            forbid.append(line.removeprefix(_FORBID))
        elif line.startswith(_STRATEGY) and not strategy:
            strategy = line.removeprefix(_STRATEGY)
        else:
            raise ConstraintError(
                f"the plan was made with {line!r}, which cannot be asked for again from here; say "
                "what is to be imposed (--pin, --forbid, --strategy), or plan again without it"
            )
    return Imposed(tuple(pins), tuple(forbid), strategy)


def options_of(plan: Plan, imposed: Imposed | None = None) -> Options:
    """The options that lead to `plan` again, on its own mesh; `imposed` in the place of what the
    plan says that was. ConstraintError if that cannot be read."""
    asked = imposed or read_imposed(plan.provenance.imposed)
    backend, without = _recorded(plan, _BACKEND), _recorded(plan, _WITHOUT)
    return make_options(
        plan.structure.mesh.text,
        plan.structure.optimizer,
        plan.estimates.memory_limit,
        None,
        False,
        asked.pins,
        asked.forbid,
        asked.strategy,
        backend=backend,
        microbatches=plan.structure.schedule.microbatches,
        loss_chunks=plan.structure.schedule.loss_chunks,
        unread_outputs=without.split(", ") if without else (),
        saved_dtype=plan.structure.saved_dtype,
        host_memory=_recorded(plan, _HOST) or None,
    )


def _recorded(plan: Plan, what: str) -> str:
    """What a plan was made with, of one kind; "" for nothing unusual."""
    lines = (x.removeprefix(what) for x in plan.provenance.imposed if x.startswith(what))
    return next(lines, "")


def cluster_of(plan: Plan) -> Cluster:
    """The cluster that a plan was made for, from its name. ClusterError if it was described in a
    file, which a plan does not hold."""
    name = plan.structure.cluster
    try:
        # A name may come from anyone's file: it is no path to be opened.
        if not is_cluster_file(name):
            return parse_cluster(name)
    except ClusterError:
        pass
    raise ClusterError(
        f"the plan was made for cluster {name!r}, which is no preset: give --cluster FILE (in "
        "Python cluster=), the description it was made for"
    )
