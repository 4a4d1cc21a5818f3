"""All ranks of a program in one process, one node after the other.

The interpreter knows what collectives mean and does them by hand, on the list of all ranks' values.
Nothing of torch.distributed runs, so that any mesh can be simulated anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.errors import AutoparError
from autopar.ir.graph import OUTPUT_ROLES, STORED_ROLES, Graph, Node, Role, TensorType
from autopar.ir.input_sharding import input_state
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.plans.plan import Structure
from autopar.runtime.ops.ragged_all_to_all import RAGGED_OPS, together
from autopar.runtime.program.program import Program, Sum
from autopar.runtime.program.random import DefaultRandom, draws
from autopar.runtime.program.symbols import SYMBOLS, on_rank, permute
from autopar.runtime.program.turns import TensorValues, at_once, replaying, run_turns
from autopar.runtime.simulator.shards import shard, unshard

c10d = torch.ops._c10d_functional


def run(
    gm: fx.GraphModule, mesh: Mesh, inputs_per_rank: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """The outputs of unbound graph `gm` on every rank of `mesh`, in order of rank.

    Ranks whose arguments of an op are the same tensors share its result, so that what is replicated
    is computed (and, for random ops, drawn) once. Values are freed at their last use.
    """
    ranks = range(mesh.num_devices)
    if len(inputs_per_rank) != len(ranks):
        raise AutoparError(f"{len(inputs_per_rank)} lists of inputs for {len(ranks)} ranks")
    last_use = _last_uses(gm)
    values: dict[fx.Node, list[Any]] = {}
    place = 0
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = [inputs[place] for inputs in inputs_per_rank]
                place += 1
            elif node.op == "get_attr":
                values[node] = [_attribute(gm, node.target)] * len(ranks)
            elif node.op == "output":
                return [_at(node.args[0], values, rank) for rank in ranks]
            else:
                values[node] = _call(node, mesh, values)
            for dead in last_use.get(node, ()):
                del values[dead]
    raise AssertionError("a graph ends in its output")


def _last_uses(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Per node, the values that nothing uses after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for node, at in last.items():
        found.setdefault(at, []).append(node)
    return found


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _at(arg: Any, values: Mapping[fx.Node, list[Any]], rank: int) -> Any:
    return map_arg(arg, lambda node: values[node][rank])


def _call(node: fx.Node, mesh: Mesh, values: Mapping[fx.Node, list[Any]]) -> list[Any]:
    collective = _COLLECTIVES.get(node.target)
    if collective is not None:
        (source,) = node.all_input_nodes
        if node.args[1] == "max":
            collective = _all_reduce_max
        return _by_group(collective, values[source], mesh, node.args[-1])
    if node.target is c10d.wait_tensor.default:
        return values[node.all_input_nodes[0]]
    if node.target in RAGGED_OPS:
        return _talked(node, mesh, values)
    done: dict[tuple[Any, ...], Any] = {}
    results: list[Any] = []
    for rank in range(mesh.num_devices):
        op, given, resolved = node.target, node.args, ""
        if op in SYMBOLS:
            index = dict(zip(mesh.names, mesh.coordinate(rank), strict=True))
            op, behind = on_rank(op, given[1:], index)
            given, resolved = (given[0], *behind), f"{op}{behind}"
        key = resolved, *(id(values[source][rank]) for source in node.all_input_nodes)
        if key not in done:
            args, kwargs = _at((given, node.kwargs), values, rank)
            done[key] = op(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        results.append(done[key])
    return results


def _talked(node: fx.Node, mesh: Mesh, values: Mapping[fx.Node, list[Any]]) -> list[Any]:
    """An op whose ranks along an axis talk to one another."""
    *args, axis = node.args

    def run(ranks: list[tuple[Any, ...]]) -> list[Any]:
        return together([RAGGED_OPS[node.target](*given) for given in ranks])

    given = [tuple(_at(args, values, rank)) for rank in range(mesh.num_devices)]
    return _by_group(run, given, mesh, axis, lambda given: tuple(map(id, given)))


def _by_group(
    collective: Callable[[list[Any]], list[Any]],
    pieces: Sequence[Any],
    mesh: Mesh,
    axis: Any,
    identity: Callable[[Any], Any] = id,
) -> list[Any]:
    """`collective` on the ranks of each group along the axis; once, where groups hold the same."""
    at = mesh.names.index(axis)
    results: list[Any] = [None] * mesh.num_devices
    done: dict[tuple[Any, ...], list[Any]] = {}
    for rank in range(mesh.num_devices):
        if results[rank] is None:
            group = mesh.group(rank, at)
            given = [pieces[peer] for peer in group]
            key = tuple(map(identity, given))
            if key not in done:
                done[key] = collective(given)
            for peer, result in zip(group, done[key], strict=True):
                results[peer] = result
    return results


def _all_gather(pieces: list[Tensor]) -> list[Tensor]:
    return [torch.cat(pieces)] * len(pieces)


def _all_reduce(pieces: list[Tensor]) -> list[Tensor]:
    return [torch.stack(pieces).sum(0, dtype=pieces[0].dtype)] * len(pieces)


def _all_reduce_max(pieces: list[Tensor]) -> list[Tensor]:
    return [torch.stack(pieces).amax(0)] * len(pieces)


def _reduce_scatter(pieces: list[Tensor]) -> list[Tensor]:
    return [chunk.clone() for chunk in _all_reduce(pieces)[0].chunk(len(pieces))]


def _all_to_all(pieces: list[Tensor]) -> list[Tensor]:
    sent = [piece.chunk(len(pieces)) for piece in pieces]
    return [torch.cat([chunks[k] for chunks in sent]) for k in range(len(pieces))]


def _permute(pieces: list[Tensor]) -> list[Tensor]:
    return [piece.clone() for piece in (pieces[-1], *pieces[:-1])]


_COLLECTIVES: Mapping[Any, Callable[[list[Tensor]], list[Tensor]]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_reduce.default: _all_reduce,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
    permute: _permute,
}


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
    structure: Structure,
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
    step = _Step(mesh, graph, structure, tolerance, program.detached_shardings)
    if program.turns > 1:
        return _in_turns(program, step, tensors, tangents or {})
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

    def zeros(self, found: Sum) -> list[Tensor]:
        return [self._one.zeros(found) for _ in range(self.num_ranks)]

    def turn(self, number: int) -> list[Tensor]:
        return [self._one.turn(number)] * self.num_ranks

    def put(self, rows: Sequence[Tensor], turn: int, piece: Sequence[Tensor]) -> None:
        for pair in zip(rows, piece, strict=True):
            self._one.put(pair[0], turn, pair[1])


def _in_turns(
    program: Program, step: _Step, tensors: Mapping[str, Tensor], tangents: Mapping[int, Tensor]
) -> StepResult:
    """`train_step` of a program in microbatches."""
    mesh, given = step.mesh, dict[str, Any]()
    for part in reversed(program.parts):
        names = [name for name in part.forward_inputs if name in tensors]
        given |= zip(names, zip(*step.split(names, tensors), strict=True), strict=True)
    ranks = mesh.num_devices

    def runs(gm: fx.GraphModule) -> Callable[[list[Any]], list[list[Tensor]]]:
        def made(inputs: list[Any]) -> list[list[Tensor]]:
            per_rank = [list(each) for each in zip(*inputs, strict=True)]
            return [list(each) for each in zip(*run(gm, mesh, per_rank), strict=True)]

        return made

    graphs = {where: runs(gm) for where, gm in program.graphs.items()}
    arriving = {
        name: [tangents.get(int(name.partition(":")[2]), torch.ones((), dtype=_dtype(dtype)))]
        * ranks
        for name, dtype in program.tangent_dtypes.items()
    }
    random = DefaultRandom(torch.device("cpu"))
    around = replaying(random) if draws(program.forward) else at_once
    values = _RankValues(ranks)
    results, gradients = run_turns(program, graphs, values, given, arriving, around)
    return StepResult(
        {name: step.join(name, values) for name, values in results.items()},
        {name.partition(":")[2]: step.join(name, found) for name, found in gradients.items()},
    )


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _tangent(given: dict[int, Tensor], name: str, outputs: Mapping[str, Tensor]) -> Tensor:
    position = name.partition(":")[2]
    if int(position) not in given:
        if f"loss:{position}" not in outputs:
            raise AutoparError(f"output {position} is no loss: train_step needs its tangent")
        given[int(position)] = torch.ones_like(outputs[f"loss:{position}"])
    return given[int(position)]


class _Step:
    """How whole tensors and those of ranks relate, for the inputs and outputs of a program."""

    def __init__(
        self,
        mesh: Mesh,
        graph: Graph,
        structure: Structure,
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
        """Per rank, the inputs called `names`: shards of parameters and of inputs that are handed
        out in pieces, everything else whole. Ranks that hold the same shard share the tensor."""
        found: list[list[Tensor]] = [[] for _ in range(self.mesh.num_devices)]
        for name in names:
            kind, _, target = name.partition(":")
            shards: list[Tensor] = [tensors[name]] * self.mesh.num_devices
            if kind == "param":
                shards = self._shards(self.params[target], self.storage[target], tensors[name])
            elif kind == "input":
                node = self.inputs[target]
                state = input_state(node, self.graph.atoms, self.mesh.sizes)
                shards = self._shards(node, state, tensors[name])
            for inputs, piece in zip(found, shards, strict=True):
                inputs.append(piece)
        return found

    def _shards(self, node: Node, sharding: Sharding, tensor: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        cut: dict[tuple[int, ...], Tensor] = {}
        for rank in range(self.mesh.num_devices):
            coordinate = self.mesh.coordinate(rank)
            key = tuple(at for at, p in zip(coordinate, sharding, strict=True) if p.kind != "R")
            if key not in cut:
                cut[key] = shard(
                    tensor, node.outputs[0], self.graph.atoms, sharding, self.mesh, coordinate
                )
            found.append(cut[key])
        return found

    def join(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        """The whole output called `name`; VerificationError if ranks disagree on it."""
        node = self.leaving[name]
        kind: TensorType = self.graph.type_of(node.inputs[0])
        sharding = Sharding.replicated(len(self.mesh.axes))
        if node.role in STORED_ROLES:
            sharding = self.storage[node.target]
        elif node.role is Role.DETACHED:
            sharding = self.detached[int(node.target)]
        return unshard(
            pieces, kind, self.graph.atoms, sharding, self.mesh,
            tolerance=self.tolerance, name=name,
        )  # fmt: skip
