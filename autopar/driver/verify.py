"""Whether what a plan makes of a model computes what the model computes.

All ranks run in this process, one op after the other, with collectives done by hand; neither the
devices nor the processes of the plan are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from autopar.compile import compile_call
from autopar.driver.arguments import told
from autopar.driver.asking import call_on, checked_plan, planned_gradients
from autopar.driver.comparing import compare_program
from autopar.plans.plan import Plan
from autopar.plans.plan_options import OutputOptions
from autopar.plans.read_options import make_options
from autopar.runtime.simulator.comparison import Report

if TYPE_CHECKING:
    from torch import nn


@told
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

    Compared are the outputs, the buffers that change, and the gradient of every parameter that has
    one, for the weights that the model has and the whole batch `inputs` (as for `autopar.plan`).
    `outputs` are those options of a plan, by default as it records them.
    `tolerance` is relative; by default it is what rounding in the least precise dtype of the step
    explains. What differs by more, but not in float64, is equal.

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
    """What `verify` finds, whether equal or not. With `dtype` ("float64"), every op computes in
    that dtype on both sides, so that rounding hides less."""
    progress("tracing the model")
    recorded = plan.provenance.options.outputs
    options = make_options(outputs=recorded if outputs is None else outputs)
    call = call_on(model, inputs, options, planned_gradients(plan.structure))
    compiled = compile_call(call, partial(checked_plan, plan))
    return compare_program(
        compiled, call, dtype=dtype, seed=seed, tolerance=tolerance, progress=progress
    )
