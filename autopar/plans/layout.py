"""A plan's decisions, parsed for the graph they are for: the state of every tensor at every use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.errors import PlanMismatchError, StageError
from autopar.ir.choices import Choice, ParamChoice, pull_back, shardings
from autopar.ir.graph import STORED_ROLES, Graph, Node, Phase, Ref, Role
from autopar.ir.input_sharding import input_state
from autopar.ir.mesh import Mesh
from autopar.ir.offloading import (
    OffloadedTensor,
    StreamedParam,
    can_be_on_host,
    offloaded,
    streamed,
)
from autopar.ir.passes.stages import Cut, first_ops
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group, Use, root_key, root_of
from autopar.plans.passes import StepForm, step_graph
from autopar.plans.structure import Stage, Structure

Pair = tuple[tuple[Sharding, ...], tuple[Sharding, ...]]
"""The shardings of a node's inputs and of its outputs."""


class Move(NamedTuple):
    """One step of a group's route."""

    source: Sharding
    target: Sharding

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"

    @staticmethod
    def parse(text: str) -> Move:
        """The inverse of `str`; ValueError on anything else."""
        source, _, target = text.partition(" -> ")
        return Move(Sharding.parse(source), Sharding.parse(target))


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan's decisions, parsed: the sharding of every tensor at every use."""

    graph: Graph
    mesh: Mesh
    ops: Mapping[str, Choice]
    params: Mapping[str, ParamChoice]
    outputs: Mapping[str, Sharding]
    saved: Mapping[str, Sharding]
    routes: Mapping[str, tuple[Move, ...]]
    offloaded_tensors: tuple[OffloadedTensor, ...] = ()
    """What is offloaded."""
    reload_pace: int = 0
    streamed_params: tuple[StreamedParam, ...] = ()
    """The parameters on the host."""
    _pairs: dict[str, Pair] = field(default_factory=dict[str, Pair])
    _use_states: dict[tuple[Ref, Phase], tuple[Sharding, ...]] = field(
        default_factory=dict[tuple[Ref, Phase], tuple[Sharding, ...]]
    )
    _held: dict[tuple[str, Sharding], int] = field(default_factory=dict[tuple[str, Sharding], int])
    _pulled: dict[tuple[str, Sharding], Sharding | None] = field(
        default_factory=dict[tuple[str, Sharding], Sharding | None]
    )

    def choice(self, node: Node) -> Choice:
        """What an op does. PlanMismatchError if the plan does not say."""
        if node.key not in self.ops:
            raise PlanMismatchError(f"the plan has no decision for {node.key} ({node.op})")
        return self.ops[node.key]

    def pair(self, node: Node) -> Pair:
        """(inputs, outputs) of a node that is neither a view nor a gradient."""
        if node.key not in self._pairs:
            self._pairs[node.key] = self._find(node)
        return self._pairs[node.key]

    def _find(self, node: Node) -> Pair:
        if node.role is Role.OP:
            return shardings(node, self.choice(node))
        if node.role is Role.DETACHED:
            return (self.outputs[node.key],), ()
        if node.role is Role.INPUT:
            return (), (input_state(node, self.graph.atoms, self.mesh.sizes),)
        whole = Sharding.replicated(len(self.mesh))
        return (whole,) * len(node.inputs), (whole,) * len(node.outputs)

    def seen_through(self, use: Use, sharding: Sharding) -> tuple[Sharding, ...] | None:
        """The shardings of the root and of each view of the use's chain, the last of which is
        `sharding`, in which the use reads its input. None if no sharding of the root leads to
        `sharding`."""
        states = [sharding]
        for index in reversed(use.chain):
            view = self.graph.nodes[index]
            key = view.key, states[-1]
            if key not in self._pulled:
                self._pulled[key] = pull_back(self.graph, view, states[-1])
            state = self._pulled[key]
            if state is None:
                return None
            states.append(state)
        return tuple(reversed(states))

    def output_state(self, ref: Ref) -> Sharding:
        """The sharding in which a root is made; of a parameter, that in which it is stored."""
        root = self.graph.nodes[ref.node]
        if root.role is Role.PARAM:
            return self.params[root.target].storage
        return self.pair(root)[1][ref.output]

    def source(self, group: Group) -> Sharding:
        """The sharding in which the group's routes start."""
        root = self.graph.nodes[group.root.node]
        if group.phase is Phase.BACKWARD and root.phase is Phase.FORWARD:
            return self.for_backward(group.root)
        return self.output_state(group.root)

    def for_backward(self, ref: Ref) -> Sharding:
        """The sharding in which a root of forward is saved for backward."""
        root = self.graph.nodes[ref.node]
        if root.role is Role.PARAM:
            return self.params[root.target].for_backward
        saved = self.saved.get(root_key(self.graph, ref))
        return self.pair(root)[1][ref.output] if saved is None else saved

    def use_states(self, group: Group) -> tuple[Sharding, ...]:
        """The shardings in which the group's uses read its tensor, one per use."""
        key = group.root, group.phase
        if key not in self._use_states:
            self._use_states[key] = self._find_use_states(group)
        return self._use_states[key]

    def _find_use_states(self, group: Group) -> tuple[Sharding, ...]:
        use_states: list[Sharding] = []
        for use in group.uses:
            user = self.graph.nodes[use.node]
            if user.role in STORED_ROLES:
                target = self.params[user.target].storage
            else:
                target = self.pair(user)[0][use.arg]
            states = self.seen_through(use, target)
            if states is None:
                raise PlanMismatchError(f"{user.key}: no sharding of {group.key} gives {target}")
            use_states.append(states[0])
        return tuple(use_states)

    def held_bytes(self, ref: Ref, state: Sharding) -> int:
        """Bytes of one rank's shard of a tensor in `state`; of the largest shard if they differ."""
        key = root_key(self.graph, ref), state
        if key not in self._held:
            tensor = self.graph.type_of(ref)
            self._held[key] = local_bytes(tensor, self.graph.atoms, state, self.mesh.sizes)
        return self._held[key]


def _check_on_host(graph: Graph, names: Collection[str]) -> None:
    """PlanMismatchError if a parameter that lives on the host cannot in `graph`."""
    allowed = {name for members in can_be_on_host(graph).values() for name in members}
    if wrong := sorted({*names} - allowed):
        raise PlanMismatchError(
            f"parameter {wrong[0]} lives in the host's memory, but this call of the model changes "
            "it, or returns it as it is: plan such a call first, or with memory.residency='cuda'"
        )


def layouts(graph: Graph, structure: Structure) -> tuple[Layout, ...]:
    """The layout of each stage; `graph` is the step of the whole model. Errors are those of
    `step_graph` and `parse_layout`."""
    starts = tuple(stage.start for stage in structure.stages[1:])
    return tuple(
        parse_layout(step_graph(graph, StepForm.of(stage)._replace(cut=Cut(starts, number))), stage)
        for number, stage in enumerate(structure.stages)
    )


def starts_in(graph: Graph, structure: Structure) -> tuple[str, ...]:
    """The modules that begin the stages of a pipeline, but for the first, in another call of its
    model. If the call leaves out the first module of a stage, that is the first one that reads a
    parameter of the stage. StageError if there is none."""
    modules, earlier = first_ops(graph), set[str]()
    starts: list[str] = []
    for number, stage in enumerate(structure.stages):
        own = stage.params.keys() - earlier
        earlier |= own
        if number and stage.start in modules:
            starts.append(stage.start)
        elif number:
            start = next(_readers(graph, own), None)
            if start is None:
                raise StageError(
                    f"this call of the model reads no parameter of stage {number}, which begins "
                    f"with {stage.start}: call the whole model, cut it elsewhere "
                    "(pipeline.cuts), or compile it with pipeline.stages=1"
                )
            starts.append(start)
    return tuple(starts)


def _readers(graph: Graph, params: Collection[str]) -> Iterator[str]:
    """The modules of forward that read some of the parameters, in order."""
    indices = {node.index for node in graph.with_role(Role.PARAM) if node.target in params}
    for node in graph.with_role(Role.OP):
        reads = any(root_of(graph, ref)[0].node in indices for ref in node.inputs)
        if reads and node.phase is Phase.FORWARD:
            yield node.module


def parse_layout(step: Graph, stage: Stage) -> Layout:
    """The layout of `stage` for `step`, its graph after all passes (`passes.step_graph`).
    ValueError if a text is no decision, or a tensor cannot be offloaded; PlanMismatchError if a
    parameter cannot live on the host."""
    mesh = stage.mesh
    params = {name: param.choice for name, param in stage.params.items()}
    nodes = step.with_role(Role.PARAM)
    on_host = [n.target for n in nodes if n.target in params and params[n.target].num_on_host]
    _check_on_host(step, on_host)
    return Layout(
        step,
        mesh,
        ops={key: Choice.parse(text) for key, text in stage.ops.items()},
        params=params,
        outputs={key: Sharding.parse(text) for key, text in stage.outputs.items()},
        saved={key: Sharding.parse(text) for key, text in stage.saved.items()},
        routes={
            key: tuple(Move.parse(text) for text in steps) for key, steps in stage.routes.items()
        },
        offloaded_tensors=offloaded(step, mesh, stage.offloaded),
        reload_pace=stage.reload_pace,
        streamed_params=streamed(step, mesh, on_host),
    )
