"""`autopar.run_report`: measured steps beside the predicted one."""

from __future__ import annotations

import atexit
import os
import sys
from itertools import count

from torch import nn

from autopar.errors import AutoparError
from autopar.plans.run_record import RUN_VERSION, PredictedStep, RunRecord
from autopar.report.run import RunReport
from autopar.runtime.module.module import CompiledModule, runner_of

_VARIABLE = "AUTOPAR_REPORT"
_PRINTED = ("1", "true", "yes")
_numbers = count(1)


def run_report(model: nn.Module) -> RunReport:
    """The measured steps of a compiled model on this rank, beside the prediction of its plan. They
    are medians of the last 64 steps of the program that ran most, without its first step. Printed,
    it is one table; `write(path)` stores it for `autopar profile --learn`.

    AutoparError if the model is not compiled, or if no step but the first was taken.
    """
    if not isinstance(model, CompiledModule):
        raise AutoparError("autopar.run_report takes the model that autopar.compile returned")
    runner = runner_of(model)
    executable = max(runner.programs, key=lambda each: each.meter.num_steps, default=None)
    measured = executable.meter.measured() if executable else None
    if executable is None or measured is None:
        raise AutoparError(
            "no step was measured: report after a second forward and backward, the first prepares"
        )
    plan, estimates = executable.plan, executable.plan.estimates
    return RunReport(
        RunRecord(
            schema=RUN_VERSION,
            model=plan.structure.model,
            plan=plan.digest,
            cluster=plan.structure.cluster,
            mesh=plan.structure.mesh_text,
            source=estimates.cluster.source,
            backend=executable.backend,
            rank=runner.world.rank,
            steps=executable.meter.num_steps,
            predicted=PredictedStep(
                step_ns=estimates.step_ns,
                passes_ns=estimates.step_ns - estimates.optimizer_ns,
                exposed_ns=estimates.exposed_communication_ns,
                communication_ns=estimates.communication_ns,
                peak_bytes=estimates.memory.total,
            ),
            measured=measured,
        )
    )


def report_at_exit(model: CompiledModule) -> None:
    """On rank 0, if `AUTOPAR_REPORT` is set: print the report of `model` when the process ends. If
    it is a path, write the report there too, that of a second model with `.2` appended."""
    setting = os.environ.get(_VARIABLE, "")
    if setting in ("", "0") or runner_of(model).world.rank:
        return
    number = next(_numbers)

    def tell() -> None:
        try:
            report = run_report(model)
            sys.stderr.write(f"{report}\n")
            if setting.lower() not in _PRINTED:
                report.write(setting if number == 1 else f"{setting}.{number}")
        except AutoparError as error:
            sys.stderr.write(f"autopar: no report: {error}\n")

    atexit.register(tell)
