"""Whether what a plan makes of a model computes what the model computes.

All ranks run in this process, one op after the other, with collectives done by hand; neither the
devices nor the processes of the plan are needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from autopar.codegen import generate
from autopar.driver.asking import trace_for_training
from autopar.errors import PlanMismatchError
from autopar.fingerprint import fingerprint
from autopar.fit import check_fit, describe_inputs
from autopar.graph import Graph, Role
from autopar.mesh import Axis, Link, Mesh
from autopar.options import Options
from autopar.plan import Param, Plan, Structure
from autopar.runtime.building import cast, split_inputs
from autopar.runtime.comparison import Report
from autopar.runtime.lockstep import train_step
from autopar.runtime.program import Program
from autopar.runtime.verify import (
    TOLERANCES,
    Step,
    differences,
    eager_step,
    seeded,
    tangents,
    whole_tensors,
)

if TYPE_CHECKING:
    from torch import nn


def verify(
    plan: Plan,
    model: nn.Module,
    inputs: Any,
    *,
    seed: int = 0,
    tolerance: float | None = None,
) -> Report:
    """Run `plan` on all its ranks in this process, and compare with `model` run by PyTorch alone.

    Compared are the outputs, new values of buffers, and the gradient of every parameter, for the
    weights that the model has and the whole batch `inputs` (as for `autopar.plan`). `tolerance` is
    relative; by default it is what rounding in the least precise dtype of the step explains.

    VerificationError names the tensors that differ; PlanMismatchError says how plan and model do
    not fit. The model is left as it was.
    """
    report = compare(plan, model, inputs, seed=seed, tolerance=tolerance)
    report.check()
    return report


def compare(
    plan: Plan,
    model: nn.Module,
    inputs: Any,
    *,
    dtype: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """What `verify` finds, whether equal or not. With `dtype` ("float64"), a copy of the model is
    cast before it runs, so that rounding hides less; the plan must fit the model as it is."""
    args, kwargs = split_inputs(inputs)
    progress("tracing the model")
    traced = trace_for_training(model, args, kwargs, Options())
    check_fit(plan.structure, traced.graph, fingerprint(traced.graph))
    if dtype is not None:
        model, args, kwargs = cast(copy.deepcopy(model), args, kwargs, dtype)
        traced = trace_for_training(model, args, kwargs, Options())
        plan = _in_dtype_of(plan, traced.graph)
    return compare_program(
        generate(traced.gm, traced.graph, plan),
        traced.graph,
        plan,
        model,
        args,
        kwargs,
        seed=seed,
        tolerance=tolerance,
        progress=progress,
    )


def compare_program(
    program: Program,
    graph: Graph,
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    seed: int = 0,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """`compare` for what `plan` was made into, `graph` being the model traced for (args, kwargs).

    Both steps draw their random numbers, if any, from a generator that starts from `seed`; the
    caller's is left as it was.
    """
    lowest = _lowest_dtype(graph)
    allowed = TOLERANCES[lowest] if tolerance is None else tolerance
    tensors = whole_tensors(model, args, kwargs)
    device = next((tensor.device for tensor in tensors.values()), None)
    directions = tangents(graph, seed, device)
    progress("running the model")
    with seeded(seed):
        eager = eager_step(model, args, kwargs, graph, directions)
    progress(f"running {plan.world_size} ranks")
    with seeded(seed):
        result = train_step(
            program,
            _mesh(plan.structure),
            graph,
            plan.structure,
            tensors,
            directions,
            tolerance=allowed,
        )
    return Report(
        model=plan.structure.model,
        plan=plan.digest,
        num_ranks=plan.world_size,
        dtype=lowest,
        tolerance=allowed,
        seed=seed,
        differences=differences(Step(result.outputs, result.gradients), eager),
    )


def _in_dtype_of(plan: Plan, graph: Graph) -> Plan:
    """The same decisions for a graph that differs from the plan's in dtypes alone.
    PlanMismatchError, naming the ops, if a dtype changes more than that."""
    keys = {node.key for node in graph.with_role(Role.OP) if not node.view}
    differing = sorted(keys ^ set(plan.structure.ops))
    if differing:
        raise PlanMismatchError(
            f"in another dtype the model is another graph: {len(differing)} ops differ, such as "
            f"{differing[0]}; verify it in its own dtype"
        )
    params = {
        name: Param(stored.shape, dtype, stored.storage, stored.kept)
        for name, dtype, stored in (
            (node.target, node.outputs[0].dtype, plan.structure.params[node.target])
            for node in graph.with_role(Role.PARAM)
        )
    }
    structure = msgspec.structs.replace(
        plan.structure,
        fingerprint=fingerprint(graph),
        params=params,
        inputs=describe_inputs(graph),
    )
    return msgspec.structs.replace(plan, structure=structure)


def _lowest_dtype(graph: Graph) -> str:
    """The least precise floating dtype that the step computes in."""
    order = list(TOLERANCES)
    used = {tensor.dtype for node in graph.nodes for tensor in node.outputs}
    return max(used & set(order), key=order.index, default="float32")


def _mesh(structure: Structure) -> Mesh:
    """The plan's mesh; its links matter to prices alone."""
    link = Link("none", 0.0, 0.0, 0.0, "simulated")
    return Mesh(tuple(Axis(axis.name, axis.size, link) for axis in structure.mesh))
