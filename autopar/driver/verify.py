"""Whether a planned model computes what the model computes: both are run side by side.

All ranks run in this process, one op after the other, with collectives done by hand. Neither the
devices nor the processes of the plan are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.compile import Compiled, ModelCall, compile_call
from autopar.driver.arguments import with_checked_options
from autopar.driver.planning import call_on, checked_plan, planned_gradients
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.plans.plan import Plan
from autopar.plans.requests.plan_options import OutputOptions
from autopar.plans.requests.read_options import make_options
from autopar.runtime.module.executable import external_tensors
from autopar.runtime.module.params import buffer_places
from autopar.runtime.program.externals import whole_external
from autopar.runtime.simulator.comparison import EXACT_TOLERANCE, Report, blank_note
from autopar.runtime.simulator.differences import (
    SimulatedStep,
    differences,
    tensor_distances,
    with_exact,
)
from autopar.runtime.simulator.eager_step import (
    TOLERANCES,
    computing_in,
    eager_step,
    in_dtype,
    own_externals,
    own_values,
    seeded,
    step_of,
    tangents,
    whole_tensors,
)
from autopar.runtime.simulator.spmd import StepResult, train_step
from autopar.runtime.simulator.stages import SimulatedStage, train_step_in_stages
from autopar.runtime.torch_private import map_tensors
from autopar.tracer import Traced
from autopar.tracer.capture import autocast_on_cpu
from autopar.tracer.stand_ins import replace_states
from autopar.tracer.watch import untouched

_FINE, _COARSE = "float64", "float32"


def compare_program(
    compiled: Compiled,
    call: ModelCall,
    *,
    dtype: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
    externals: Mapping[str, Tensor] | None = None,
) -> Report:
    """A compiled call beside the model as PyTorch alone runs it: an output, a buffer or a gradient
    that the compiler loses shows up as missing.

    A tensor may differ by more than its dtype explains. Then both sides run again with every op in
    float64, and what is equal there was rounding. `externals` has the values of all tensors of the
    script, if these do not hold them themselves.

    All steps draw their random numbers, if any, from a generator that starts from `seed`; the
    caller's is left as it was.
    """
    plan = compiled.plan
    own = dtype or _lowest_dtype(compiled.traced.graph)
    allowed = TOLERANCES[own] if tolerance is None else tolerance
    sides = _Sides(compiled, call, seed, externals)
    progress("running the model")
    eager = sides.eager(dtype)
    progress(f"running {plan.world_size} ranks")
    simulated = sides.simulated(dtype, allowed)
    measured = differences(simulated, eager)
    notes = blank_note(measured)
    if any(d.relative > allowed and not d.why for d in measured):
        progress(f"running both in {_FINE}: some tensors differ by more than {own} explains")
        try:
            other = sides.eager(_COARSE if own == _FINE else _FINE)
            noise = tensor_distances(eager, other)
            if own == _FINE:
                exact = differences(simulated, eager, noise)
            else:
                exact = differences(sides.simulated(_FINE, EXACT_TOLERANCE), other, noise)
        except (AutoparError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            notes += (f"the step could not be run in {_FINE} to tell rounding: {reason}",)
        else:
            measured = with_exact(measured, exact)
    return Report(
        model=plan.structure.model,
        plan=plan.digest,
        num_ranks=plan.world_size,
        dtype=own,
        tolerance=allowed,
        seed=seed,
        differences=measured,
        notes=notes,
    )


def eager(
    traced: Traced,
    call: ModelCall,
    seed: int = 0,
    dtype: str | None = None,
    externals: Mapping[str, Tensor] | None = None,
) -> SimulatedStep:
    """The step by PyTorch alone, with every op computing in `dtype` if one is given. The model is
    left as it was, and so are the script's tensors, whose values are `externals` if given."""
    model, args, kwargs = call.model, call.args, call.kwargs
    device = next((x.device for x in model.parameters()), None)
    directions = tangents(traced.graph, seed, device)
    if dtype is not None:
        args, kwargs = map_tensors(lambda x: in_dtype(x, dtype), (args, kwargs))
        directions = {k: in_dtype(x, dtype) for k, x in directions.items()}
    form = traced.out_spec, len(traced.outputs)
    real = external_tensors(model, traced.graph, traced.externals)
    values = externals or real
    if dtype is not None:
        values = {name: in_dtype(x.detach(), dtype) for name, x in values.items()}
    with (
        untouched(model.modules()),
        own_externals(model, real, values) as leaves,
        own_values(model, dtype),
        computing_in(dtype),
        seeded(seed),
    ):
        step = eager_step(model, args, kwargs, form, directions)
        more = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    step = replace(step, gradients={**step.gradients, **more})
    left_out = {str(k) for k, leaf in enumerate(traced.outputs) if leaf.is_left_out}
    return replace(step, outputs={k: x for k, x in step.outputs.items() if k not in left_out})


@dataclass(frozen=True, slots=True)
class _Sides:
    """The two sides of the comparison, each of which can run in several dtypes."""

    compiled: Compiled
    call: ModelCall
    seed: int
    externals: Mapping[str, Tensor] | None

    def eager(self, dtype: str | None) -> SimulatedStep:
        """The step of the model."""
        return eager(self.compiled.traced, self.call, self.seed, dtype, self.externals)

    def simulated(self, dtype: str | None, tolerance: float) -> SimulatedStep:
        """The step of the ranks."""
        call, traced = self.call, self.compiled.traced
        graph, tensors = traced.graph, whole_tensors(call.model, call.args, call.kwargs)
        externals = self.externals or external_tensors(call.model, graph, traced.externals)
        tensors |= {f"param:{name}": x.detach().clone() for name, x in externals.items()}
        device = next((tensor.device for tensor in tensors.values()), None)
        directions = tangents(graph, self.seed, device)
        if dtype is not None:
            tensors = {name: in_dtype(x, dtype) for name, x in tensors.items()}
            directions = {k: in_dtype(x, dtype) for k, x in directions.items()}
        uncast = torch.autocast("cpu", enabled=False)  # the casts of autocast are in the graph
        with computing_in(dtype), seeded(self.seed), uncast:
            result = simulate(self.compiled, tensors, directions, tolerance)
        return step_of(result)


def simulate(
    compiled: Compiled,
    tensors: Mapping[str, Tensor],
    directions: Mapping[int, Tensor],
    tolerance: float,
) -> StepResult:
    """A step of a compiled call, on all ranks in this process."""
    graph, structure = compiled.traced.graph, compiled.plan.structure
    if not structure.is_pipeline:
        where = structure.only.mesh, graph, structure.only
        return train_step(compiled.program, *where, tensors, directions, tolerance=tolerance)
    stages = [
        SimulatedStage(*each)
        for each in zip(compiled.layouts, structure.stages, compiled.programs, strict=True)
    ]
    table = structure.actions
    return train_step_in_stages(stages, table, graph, tensors, directions, tolerance=tolerance)


def _lowest_dtype(graph: Graph) -> str:
    """The least precise floating dtype that the step computes in."""
    order = list(TOLERANCES)
    used = {tensor.dtype for node in graph.nodes for tensor in node.outputs}
    return max(used & set(order), key=order.index, default="float32")


def check_call(
    compiled: Compiled,
    call: ModelCall,
    rank: int,
    share: Callable[[str, Callable[[], bytes]], bytes],
) -> None:
    """VerificationError on all ranks if the program for a call is not equal to eager.

    Rank 0 runs both on its CPU, from whole values; the others send theirs, a tensor at a time.
    """
    traced = compiled.traced
    externals = external_tensors(call.model, traced.graph, traced.externals)
    buffers = (buffer for *_, buffer in buffer_places(call.model))
    states = (*call.model.parameters(), *buffers, *externals.values())
    whole = {id(x): _whole(x, keep=rank == 0) for x in states}
    values = {name: whole[id(x)] for name, x in externals.items()}

    def work() -> bytes:
        args, kwargs = map_tensors(Tensor.cpu, (call.args, call.kwargs))
        with untouched(call.model.modules()), torch.inference_mode(False), autocast_on_cpu():
            replace_states(call.model, lambda x: whole.get(id(x), x))
            own = replace(call, args=args, kwargs=kwargs)
            compare_program(compiled, own, externals=values).check()
        return b"equal"

    share("comparison with eager", work)


def _whole(state: Tensor, *, keep: bool) -> Tensor:
    """A parameter or buffer with the values of all ranks; an empty one unless `keep`. A collective
    call if it is sharded."""
    values = state.detach()
    values = whole_external(values, values.device)
    values = values.cpu() if keep else values.new_empty(0)
    return nn.Parameter(values, state.requires_grad) if isinstance(state, nn.Parameter) else values


@with_checked_options
def verify(
    plan: Plan,
    model: nn.Module,
    inputs: Any,
    *,
    seed: int = 0,
    tolerance: float | None = None,
    outputs: OutputOptions | Mapping[str, Any] | None = None,
) -> Report:
    """Run `plan` on all its ranks in this process, and compare with `model` run by PyTorch alone.

    The outputs are compared, the buffers that change, and the gradient of every parameter that has
    one. They are computed with the weights of the model and the whole batch `inputs` (as for
    `autopar.plan`). `outputs` are those options of a plan, by default as it records them.
    `tolerance` is relative; by default it is what rounding in the least precise dtype of the step
    explains. A tensor that differs by more, but not in float64, is equal.

    VerificationError names the tensors that differ; PlanMismatchError says how plan and model do
    not fit. The model is left as it was.
    """
    report = compare_with_eager(
        plan, model, inputs, seed=seed, tolerance=tolerance, outputs=outputs
    )
    report.check()
    return report


def compare_with_eager(
    plan: Plan,
    model: nn.Module,
    inputs: Any,
    *,
    dtype: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    outputs: OutputOptions | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """The report of `verify`, whether equal or not. With `dtype` ("float64"), every op computes in
    that dtype on both sides, so that rounding hides less."""
    progress("tracing the model")
    recorded = plan.provenance.options.outputs
    options = make_options(outputs=recorded if outputs is None else outputs)
    call = call_on(model, inputs, options, planned_gradients(plan.structure))
    compiled = compile_call(call, partial(checked_plan, plan))
    return compare_program(
        compiled, call, dtype=dtype, seed=seed, tolerance=tolerance, progress=progress
    )
