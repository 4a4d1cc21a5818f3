"""All ranks of a pipeline in one process: each stage on its own mesh, in the order of a pipeline
schedule."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Node, Phase
from autopar.ir.own_ops import RECEIVE, SEND
from autopar.ir.passes.stages import StageLink, link_of
from autopar.ir.pipeline import Pass, PipelineSchedule, hops_in_sequence, simulate_actions
from autopar.plans.layout import Layout
from autopar.plans.structure import Stage
from autopar.runtime.program.program import Program
from autopar.runtime.program.random import DefaultRandom
from autopar.runtime.simulator.shards import shard, unshard
from autopar.runtime.simulator.spmd import RankStep, StepResult, rank_run


@dataclass(frozen=True)
class SimulatedStage:
    """A stage: the layout of its step, its decisions, and its program."""

    layout: Layout
    structure: Stage
    program: Program


def train_step_in_stages(
    stages: Sequence[SimulatedStage],
    actions: PipelineSchedule,
    graph: Graph,
    tensors: Mapping[str, Tensor],
    tangents: Mapping[int, Tensor] | None = None,
    *,
    tolerance: float = 0.0,
) -> StepResult:
    """One forward and backward of the step `graph`, which is cut into `stages`, from whole tensors
    to whole tensors (`spmd.train_step`). The actions are done in the order in which they start."""
    return _Pipeline(stages, actions, graph, tensors, tangents or {}, tolerance).run()


class _Pipeline:
    def __init__(
        self,
        stages: Sequence[SimulatedStage],
        actions: PipelineSchedule,
        graph: Graph,
        tensors: Mapping[str, Tensor],
        tangents: Mapping[int, Tensor],
        tolerance: float,
    ) -> None:
        self.stages, self.actions = stages, actions
        self.random = _RandomInMicrobatch(len(stages))
        self.steps = [
            RankStep(s.layout.mesh, graph, s.structure, tolerance, s.program.detached_shardings)
            for s in stages
        ]
        self.runs = [
            rank_run(
                stage.program,
                step,
                tensors,
                tangents,
                self.random.around(k),
                actions.last_microbatches(k),
            )
            for k, (stage, step) in enumerate(zip(stages, self.steps, strict=True))
        ]
        self.ends = {
            (link_of(node, k), node.op): node
            for k, stage in enumerate(stages)
            for node in stage.layout.graph.nodes
            if node.op in (SEND, RECEIVE)
        }
        self.under_way: dict[tuple[StageLink, int], list[Tensor]] = {}

    def run(self) -> StepResult:
        table = self.actions
        hops = {(link.source, link.target, link.phase) for link, _ in self.ends}
        # Random numbers are drawn stage by stage.
        hops |= hops_in_sequence(len(self.stages))
        table.check(hops)
        spans = simulate_actions(table, lambda _: 1, hops)
        with torch.no_grad():
            for action in sorted(spans, key=lambda action: (spans[action].start, action)):
                stage, kind, microbatch = action
                run = self.runs[stage]
                if kind is Pass.FORWARD:
                    received = self._received(stage, Phase.FORWARD, microbatch)
                    self._send(stage, microbatch, run.forward(microbatch, received))
                elif kind is Pass.BACKWARD and run.has_backward:
                    received = self._received(stage, Phase.BACKWARD, microbatch)
                    self._send(stage, microbatch, run.backward(microbatch, received))
                elif run.has_backward:
                    run.weights(microbatch)
        if self.under_way:
            raise AutoparError(f"never received: {next(iter(self.under_way))}")
        return self._joined()

    def _send(self, stage: int, microbatch: int, sent: Mapping[str, list[Tensor]]) -> None:
        """Bring the tensors that a stage sends to the ranks of others, in their sharding."""
        for (link, op), node in self.ends.items():
            name = f"sent:{link.target}:{link.name}"
            if op == SEND and link.source == stage and name in sent:
                arrives = self.ends[link, RECEIVE]
                whole = self._whole(stage, node, sent[name])
                self.under_way[link, microbatch] = self._shards(link.target, arrives, whole)

    def _whole(self, stage: int, node: Node, shards: Sequence[Tensor]) -> Tensor:
        at = self.stages[stage].layout
        kind, state = at.graph.type_of(node.inputs[0]), at.pair(node)[0][0]
        return unshard(shards, kind, at.graph.atoms, state, at.mesh, tolerance=1e-5)

    def _shards(self, stage: int, node: Node, whole: Tensor) -> list[Tensor]:
        at = self.stages[stage].layout
        (kind,), ((), (state,)) = node.outputs, at.pair(node)
        ranks = map(at.mesh.coordinate, range(at.mesh.num_devices))
        return [shard(whole, kind, at.graph.atoms, state, at.mesh, rank) for rank in ranks]

    def _received(self, stage: int, phase: Phase, microbatch: int) -> dict[str, list[Tensor]]:
        coming = [(link, m) for link, m in self.under_way if link.target == stage]
        return {
            f"received:{link.name}": self.under_way.pop((link, m))
            for link, m in coming
            if link.phase is phase and m == microbatch
        }

    def _joined(self) -> StepResult:
        """The results of all stages. Gradients of a parameter on several stages are added up."""
        outputs: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        for step, run in zip(self.steps, self.runs, strict=True):
            result = step.joined(run)
            outputs |= result.outputs
            for name, gradient in result.gradients.items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return StepResult(outputs, gradients)


class _RandomInMicrobatch:
    """Random numbers as if one process drew them. A stage starts from the random state of the stage
    before it after that one's first microbatch. Every microbatch draws as the whole batch would."""

    def __init__(self, stages: int) -> None:
        self._random = DefaultRandom(torch.device("cpu"))
        self._starts: dict[int, Tensor] = {0: self._random.now()}

    def around(self, stage: int):
        """The context of the graphs of a stage."""

        @contextmanager
        def inside(_: bool) -> Generator[None, None, None]:
            with self._random.replayed(self._starts[stage]):
                yield
                self._starts.setdefault(stage + 1, self._random.now())

        return inside
