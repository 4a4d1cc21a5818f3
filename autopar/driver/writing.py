"""A plan, put together of what was decided for its stages, and of how that was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster
from autopar.ir.version import __version__
from autopar.plans.compatibility import describe_inputs
from autopar.plans.estimates import Estimates
from autopar.plans.options import Options
from autopar.plans.pipeline_orders import ONE_AFTER_THE_OTHER
from autopar.plans.plan import SCHEMA_VERSION, Plan, Provenance
from autopar.plans.structure import Stage, Structure


def write_plan(
    graph: Graph,
    cluster: Cluster,
    options: Options,
    stages: Sequence[Stage],
    estimates: Estimates,
    found: Provenance,
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
    return Plan(SCHEMA_VERSION, structure, estimates, found)


def found_by(options: Options, **found: Any) -> Provenance:
    """How a plan came about, by this version of autopar: the fields of `Provenance`."""
    versions = {"autopar": __version__, "torch": str(torch.__version__)}
    return Provenance(**versions, options=options.given, **found)
