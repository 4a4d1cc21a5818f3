"""Decisions of a stage, parsed for its step."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.codegen import generate
from autopar.compile import Compiled
from autopar.ir.graph import Graph
from autopar.plans.layout import Layout, parse_layout
from autopar.plans.passes import StepForm, step_graph
from autopar.plans.plan import Plan
from autopar.plans.structure import Stage
from autopar.runtime.program.program import Program
from autopar.runtime.simulator.stages import SimulatedStage
from autopar.tracer import Traced


def laid_out(graph: Graph, stage: Stage) -> Layout:
    """The decisions of `stage` for its `graph`, after the passes that it asks for."""
    return parse_layout(step_graph(graph, StepForm.of(stage)), stage)


def program_of(traced: Traced, stage: Stage, graph: Graph | None = None) -> Program:
    """The program of a stage of what was `traced`, whose graph is `graph` if that is another."""
    layout = laid_out(traced.graph if graph is None else graph, stage)
    return generate(traced.gm, traced.graph, layout)


def simulated(traced: Traced, stage: Stage, graph: Graph) -> SimulatedStage:
    """A stage of what was `traced`, whose graph is `graph`, to be run."""
    return SimulatedStage(laid_out(graph, stage), stage, program_of(traced, stage, graph))


def compiled_from(traced: Traced, plan: Plan, stages: Sequence[SimulatedStage]) -> Compiled:
    """What was traced, with stages that begin anywhere."""
    programs, found = (each.program for each in stages), (each.layout for each in stages)
    return Compiled(traced, plan, tuple(programs), tuple(found))
