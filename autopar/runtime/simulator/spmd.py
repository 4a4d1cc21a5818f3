"""A step of a program on all ranks in one process, from whole tensors to whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.ir.graph import OUTPUT_ROLES, STORED_ROLES, Graph, Node, Role, TensorType
from autopar.ir.input_sharding import input_state
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.plans.structure import Stage
from autopar.runtime.program.microbatch_run import (
    Around,
    MicrobatchRun,
    TensorValues,
    at_once,
    replaying,
    run_microbatches,
)
from autopar.runtime.program.program import Program, Sum
from autopar.runtime.program.random import DefaultRandom, draws
from autopar.runtime.simulator.interpreter import run
from autopar.runtime.simulator.shards import shard, unshard


@dataclass(frozen=True, slots=True)
class StepResult:
    """Whole tensors: outputs by their name in `Program.forward_outputs` ("loss:0"), gradients by
    the name of the parameter."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def train_step(
    program: Program,
    mesh: Mesh,
    graph: Graph,
    structure: Stage,
    tensors: Mapping[str, Tensor],
    tangents: Mapping[int, Tensor] | None = None,
    *,
    tolerance: float = 0.0,
) -> StepResult:
    """One forward and backward on all ranks of `mesh`, from whole tensors to whole tensors.

    `tensors` are named as in `Program.forward_inputs` ("param:wte.weight", "input:0"), `tangents`
    by position of the output; 1 where a loss has none. VerificationError if ranks that should hold
    the same differ by more than `tolerance` (relative).
    """
    step = RankStep(mesh, graph, structure, tolerance, program.detached_shardings)
    if program.microbatches > 1:
        random = DefaultRandom(torch.device("cpu"))
        around = replaying(random) if draws(program.forward) else at_once
        step_run = rank_run(program, step, tensors, tangents or {}, around)
        run_microbatches(step_run)
        return step.joined(step_run)
    with torch.no_grad():
        forward = step.split(program.forward_inputs, tensors)
        results = run(program.forward, mesh, forward)
        held = [dict(zip(program.forward_outputs, values, strict=True)) for values in results]
        del results, forward
        outputs = {
            name: step.join(name, [values[name] for values in held])
            for name in program.forward_outputs
            if not name.startswith("saved:")
        }
        if program.backward is None:
            return StepResult(outputs, {})
        given = dict(tangents or {})
        inputs = [
            [
                values[name] if name.startswith("saved:") else _tangent(given, name, outputs)
                for name in program.backward_inputs
            ]
            for values in held
        ]
        del held
        results = run(program.backward, mesh, inputs)
        gradients = {
            name.partition(":")[2]: step.join(name, [values[k] for values in results])
            for k, name in enumerate(program.backward_outputs)
        }
    return StepResult(outputs, gradients)


class _RankValues:
    """Values of all ranks of a mesh, in lists."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._one = TensorValues(torch.device("cpu"))

    def zeros(self, total: Sum) -> list[Tensor]:
        return [self._one.zeros(total) for _ in range(self.num_ranks)]

    def microbatch(self, number: int) -> list[Tensor]:
        return [self._one.microbatch(number)] * self.num_ranks

    def put(self, rows: Sequence[Tensor], microbatch: int, shard: Sequence[Tensor]) -> None:
        for pair in zip(rows, shard, strict=True):
            self._one.put(pair[0], microbatch, pair[1])


def rank_run(
    program: Program,
    step: RankStep,
    tensors: Mapping[str, Tensor],
    tangents: Mapping[int, Tensor],
    around: Around,
    last_microbatches: tuple[int, int] | None = None,
) -> MicrobatchRun:
    """A run, not yet started, of `program` in microbatches on all ranks: each of its values is a
    list of one tensor per rank. The `last_microbatches` are those of `MicrobatchRun`."""
    mesh, given = step.mesh, dict[str, Any]()
    for part in reversed(program.parts):
        names = [name for name in part.forward_inputs if name in tensors]
        if names:
            given |= zip(names, zip(*step.split(names, tensors), strict=True), strict=True)
    ranks = mesh.num_devices

    def runs(gm: fx.GraphModule) -> Callable[[list[Any]], list[list[Tensor]]]:
        def run_graph(inputs: list[Any]) -> list[list[Tensor]]:
            per_rank = [[values[rank] for values in inputs] for rank in range(ranks)]
            return [list(each) for each in zip(*run(gm, mesh, per_rank), strict=True)]

        return run_graph

    graphs = {where: runs(gm) for where, gm in program.graphs.items()}
    arriving = {
        name: [
            tangents.get(int(name.partition(":")[2]), torch.ones((), dtype=getattr(torch, dtype)))
        ]
        * ranks
        for name, dtype in program.tangent_dtypes.items()
    }
    values = _RankValues(ranks)
    return MicrobatchRun(program, graphs, values, given, arriving, around, last_microbatches)


def _tangent(given: dict[int, Tensor], name: str, outputs: Mapping[str, Tensor]) -> Tensor:
    position = name.partition(":")[2]
    if int(position) not in given:
        if f"loss:{position}" not in outputs:
            raise AutoparError(f"output {position} is no loss: train_step needs its tangent")
        given[int(position)] = torch.ones_like(outputs[f"loss:{position}"])
    return given[int(position)]


class RankStep:
    """Converts between whole tensors and those of ranks, for the inputs and outputs of a
    program."""

    def __init__(
        self,
        mesh: Mesh,
        graph: Graph,
        structure: Stage,
        tolerance: float,
        detached: Mapping[int, Sharding],
    ) -> None:
        self.mesh, self.graph, self.tolerance = mesh, graph, tolerance
        self.storage = {name: param.choice.storage for name, param in structure.params.items()}
        self.detached = detached
        self.params = {node.target: node for node in graph.with_role(Role.PARAM)}
        self.inputs = {node.target: node for node in graph.with_role(Role.INPUT)}
        self.leaving = {
            f"{node.role.value}:{node.target}": node for node in graph.with_role(*OUTPUT_ROLES)
        }

    def split(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Per rank, the inputs called `names`: shards of parameters and of sharded inputs, all
        others whole. Ranks that hold the same shard share the tensor."""
        per_rank: list[list[Tensor]] = [[] for _ in range(self.mesh.num_devices)]
        for name in names:
            kind, _, target = name.partition(":")
            shards: Iterable[Tensor] = [tensors[name]] * self.mesh.num_devices
            if kind == "param":
                shards = self._shards(self.params[target], self.storage[target], tensors[name])
            elif kind == "input":
                node = self.inputs[target]
                state = input_state(node, self.graph.atoms, self.mesh.sizes)
                shards = self._shards(node, state, tensors[name])
            for inputs, local in zip(per_rank, shards, strict=True):
                inputs.append(local)
        return per_rank

    def _shards(self, node: Node, sharding: Sharding, tensor: Tensor) -> Iterator[Tensor]:
        cut: dict[tuple[int, ...], Tensor] = {}
        for rank in range(self.mesh.num_devices):
            coordinate = self.mesh.coordinate(rank)
            key = tuple(at for at, p in zip(coordinate, sharding, strict=True) if p.kind != "R")
            if key not in cut:
                cut[key] = shard(
                    tensor, node.outputs[0], self.graph.atoms, sharding, self.mesh, coordinate
                )
            yield cut[key]

    def joined(self, run: MicrobatchRun) -> StepResult:
        """The results of all microbatches, as whole tensors."""
        outputs = {name: self.join(name, each) for name, each in run.results.items()}
        gradients = {
            name.partition(":")[2]: self.join(name, each) for name, each in run.gradients.items()
        }
        return StepResult(outputs, gradients)

    def join(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """The whole output called `name`; VerificationError if ranks disagree on it."""
        node = self.leaving[name]
        kind: TensorType = self.graph.type_of(node.inputs[0])
        sharding = Sharding.replicated(len(self.mesh.axes))
        if node.role in STORED_ROLES:
            sharding = self.storage[node.target]
        elif node.role is Role.DETACHED:
            sharding = self.detached[int(node.target)]
        return unshard(
            shards, kind, self.graph.atoms, sharding, self.mesh,
            tolerance=self.tolerance, name=name,
        )  # fmt: skip
