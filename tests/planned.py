"""Plans with some decisions forced, for tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import msgspec
import numpy as np
from torch import fx

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.codegen.local_graph import MEMBERS
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import price
from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph
from autopar.ir.input_sharding import describe_inputs
from autopar.ir.mesh import BUCKET_BYTES, Cluster, Mesh
from autopar.ir.problem import FORBIDDEN, Problem, Solution
from autopar.plans.decisions import make_stage
from autopar.plans.estimates import StageEstimates, of_one_stage
from autopar.plans.plan import SCHEMA_VERSION, Plan
from autopar.plans.provenance import Provenance
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.plans.structure import Stage, Structure
from autopar.runtime.program.symbols import mirror, permute
from autopar.solver import solve

LIMIT = 80 << 30


def hostless(text: str) -> Cluster:
    """A cluster of presets whose hosts take no time, and whose memory is handed out by the byte:
    the tensors of tests are tiny."""
    cluster = parse_cluster(text)
    return replace(cluster, device=replace(cluster.device, launch_s=0.0, granule_bytes=1))


def whatever_asked(plan: Plan) -> bytes:
    """The file of a plan, without what was asked for."""
    provenance = msgspec.structs.replace(plan.provenance, options=PlanOptions())
    return msgspec.structs.replace(plan, provenance=provenance).to_bytes()


def on_h100(mesh: str, bucket_bytes: int = BUCKET_BYTES) -> tuple[Cluster, Mesh]:
    """A mesh of H100s whose axes are the cluster's levels ("2x4"); three axes are in one node. Its
    buckets hold `bucket_bytes`. `hostless`."""
    sizes = [int(size) for size in mesh.split("x")]
    cluster = hostless(f"{mesh if len(sizes) < 3 else prod(sizes)}xH100")
    laid = parse_mesh(mesh, cluster)
    return cluster, Mesh(tuple(replace(axis, bucket_bytes=bucket_bytes) for axis in laid))


def pinned(problem: Problem, pins: Mapping[str, str]) -> Problem:
    """`problem` with only those choices left, for nodes whose key a pattern of `pins` matches,
    whose label is the pattern's. Every pattern must match some node, and leave it a choice."""
    costs = list(problem.costs)
    for pattern, label in pins.items():
        found = [i for i, key in enumerate(problem.keys) if re.fullmatch(pattern, key)]
        assert found, f"{pattern} matches none of {problem.keys}"
        for i in found:
            wanted = np.array([str(each) == label for each in problem.labels[i]])
            assert wanted.any(), f"{problem.keys[i]} has no {label}: {problem.labels[i]}"
            costs[i] = np.where(wanted, costs[i], FORBIDDEN)
    return replace(problem, costs=tuple(costs))


def plan_for(
    graph: Graph,
    mesh: str,
    pins: Mapping[str, str] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """The best plan on `mesh` (`on_h100`) among those with the decisions `pins`."""
    cluster, laid = on_h100(mesh, bucket_bytes)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(laid)
    problem = pinned(price(request), pins or {})
    solution = solve(problem)
    assert solution.choice, solution.status
    stage = make_stage(request, problem, solution)
    return as_planned(request, stage, cost_breakdown(request, stage).estimates, solution)


def as_planned(
    request: PlanRequest, stage: Stage, estimates: StageEstimates, solution: Solution | None = None
) -> Plan:
    """The plan of what is known of one stage."""
    objective_ns, bound_ns = (0, 0) if solution is None else (solution.objective, solution.bound)
    found = Provenance("", "", "", "optimal", objective_ns, bound_ns, 0)
    structure = Structure(
        model=request.graph.name,
        fingerprint=fingerprint(request.graph),
        cluster=request.cluster.name,
        optimizer=request.options.given.optimizer,
        inputs=describe_inputs(request.graph),
        stages=(stage,),
    )
    return Plan(SCHEMA_VERSION, structure, of_one_stage(estimates), found)


def collectives(gm: fx.GraphModule | None) -> Counter[tuple[str, str]]:
    """How many collectives of each kind a graph has on each axis, where each tensor of a bucket
    counts as one."""
    assert gm is not None
    found: Counter[tuple[str, str]] = Counter()
    for node in gm.graph.nodes:
        if kind := kind_of(node):
            found[kind, node.args[-1]] += node.meta.get(MEMBERS, 1)
    return found


def kind_of(node: fx.Node) -> str:
    """The kind of a collective, as `redistribute.KINDS` has it; empty for any other node."""
    if node.target in (permute, mirror):
        return "permute"
    name = str(node.target)
    if not name.startswith("_c10d_functional.") or "wait" in name:
        return ""
    kind = name.split(".")[1]
    return kind.replace("_into_tensor", "").replace("_tensor", "").replace("_single", "")
