"""The options that a stored plan records, to plan again."""

from __future__ import annotations

from msgspec.structs import asdict, replace

from autopar.cluster.parsing import is_cluster_file, parse_cluster
from autopar.errors import ClusterError, ConstraintError
from autopar.ir.mesh import Cluster
from autopar.plans.plan import Plan
from autopar.plans.requests.options import STORED, Options
from autopar.plans.requests.plan_options import ConstraintOptions, PipelineOptions
from autopar.plans.requests.read_options import make_options


def options_of(plan: Plan, imposed: ConstraintOptions | None = None) -> Options:
    """The options that lead to `plan` again, on its own mesh and without a time limit. `imposed`
    replaces the constraints that the plan records. ConstraintError if those are not known, or
    cannot be requested by options."""
    structure, given = plan.structure, plan.provenance.options
    if imposed is None and STORED in plan.provenance.imposed:
        raise ConstraintError(
            f"the plan was made with {STORED!r}, which cannot be asked for again from here; say "
            "what is to be imposed (--constraints-pin, --constraints-forbid, "
            "--constraints-strategy), or plan again without it"
        )
    pipeline = _pipeline_of(plan)
    params = (param for stage in structure.stages for param in stage.params.values())
    on_host = any(param.residency == "cpu" for param in params)
    memory = replace(
        given.memory,
        limit=plan.estimates.memory_limit,
        residency=given.memory.residency or ("auto" if on_host else "cuda"),
        # With several stages, each has its own best number.
        loss_chunks=structure.loss_chunks if pipeline.stages == 1 else given.memory.loss_chunks,
        saved_dtype=structure.stages[0].saved_dtype,
    )
    options = replace(
        given,
        mesh=structure.mesh_text,
        optimizer=structure.optimizer,
        microbatches=structure.microbatches,
        memory=memory,
        pipeline=pipeline,
        constraints=imposed or given.constraints,
        search=replace(given.search, time_limit=None),
    )
    # A file may come from anyone: its options are checked as if a user had written them.
    return make_options(**asdict(options))


def _pipeline_of(plan: Plan) -> PipelineOptions:
    """The same stages, in the same order."""
    structure = plan.structure
    if not structure.is_pipeline:
        return PipelineOptions(stages=1)
    cuts = tuple(stage.start for stage in structure.stages[1:])
    return PipelineOptions(
        cuts=cuts, schedule="\n".join(structure.schedule_rows) or structure.schedule
    )


def cluster_of(plan: Plan) -> Cluster:
    """The cluster that a plan was made for, from its name. ClusterError if it was described in a
    file, which a plan does not hold."""
    cluster, name = planned_cluster(plan), plan.structure.cluster
    if cluster is None:
        raise ClusterError(
            f"the plan was made for cluster {name!r}, which is no preset: give --cluster FILE (in "
            "Python cluster=), the description it was made for"
        )
    return cluster


def planned_cluster(plan: Plan | None) -> Cluster | None:
    """The cluster a plan is for; None if that was described in a file."""
    # A name may come from anyone's file: it is no path to be opened.
    if plan is None or is_cluster_file(plan.structure.cluster):
        return None
    try:
        return parse_cluster(plan.structure.cluster)
    except ClusterError:
        return None
