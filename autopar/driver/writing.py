"""A plan, put together of what was decided for its stages, and of how that was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster
from autopar.ir.version import __version__
from autopar.plans.compatibility import describe_inputs
from autopar.plans.estimates import Estimates
from autopar.plans.options import Options
from autopar.plans.pipeline_orders import ONE_AFTER_THE_OTHER
from autopar.plans.plan import SCHEMA_VERSION, Margin, Plan, Provenance
from autopar.plans.structure import Stage, Structure


@dataclass(frozen=True, slots=True)
class Proof:
    """How a plan was found, as `Provenance` has it."""

    solver: str
    status: str
    objective_ns: int
    bound_ns: int
    gap_ppm: int
    meshes_tried: tuple[str, ...]
    imposed: tuple[str, ...]
    margin: Margin | None = None
    statistics: dict[str, str] | None = None


def write_plan(
    graph: Graph,
    cluster: Cluster,
    options: Options,
    stages: Sequence[Stage],
    estimates: Estimates,
    proof: Proof,
    schedule: str = ONE_AFTER_THE_OTHER,
    table: Sequence[str] = (),
) -> Plan:
    """The plan for a graph on a cluster, whose ranks work in the order `schedule`, or `table`."""
    structure = Structure(
        model=graph.name,
        fingerprint=fingerprint(graph),
        cluster=cluster.name,
        optimizer=options.optimizer,
        inputs=describe_inputs(graph),
        stages=tuple(stages),
        schedule=schedule,
        table=tuple(table),
    )
    provenance = Provenance(
        autopar=__version__,
        torch=str(torch.__version__),
        solver=proof.solver,
        status=proof.status,
        objective_ns=proof.objective_ns,
        bound_ns=proof.bound_ns,
        gap_ppm=proof.gap_ppm,
        meshes_tried=proof.meshes_tried,
        imposed=proof.imposed,
        margin=proof.margin,
        statistics=proof.statistics or {},
        options=options.given,
    )
    return Plan(SCHEMA_VERSION, structure, estimates, provenance)
