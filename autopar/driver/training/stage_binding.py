"""From the programs of a pipeline's stages to the step of one rank: which part of which tensor each
rank sends to which, and from where results leave the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from autopar.codegen import bind
from autopar.compile import Compiled
from autopar.ir.graph import OUTPUT_ROLES, Phase, Role, TensorType
from autopar.ir.own_ops import RECEIVE, SEND
from autopar.ir.passes.stages import StageLink, link_of
from autopar.ir.redistribute import OnMesh, ShardBox, holders, shard_pieces
from autopar.runtime.dtensor_private import local_slices
from autopar.runtime.process.own_group import own_group
from autopar.runtime.process.stage_groups import StageGroups
from autopar.runtime.process.world import World
from autopar.runtime.program.binding import detached_places, runnable
from autopar.runtime.program.function import Step
from autopar.runtime.program.meter import Meter
from autopar.runtime.program.pipelined import (
    CopiedGradient,
    Leaving,
    RandomMicrobatches,
    RankSchedule,
    make_pipelined_step,
)
from autopar.runtime.program.program import MICROBATCH_INPUT, Program
from autopar.runtime.program.random import DefaultRandom, draws
from autopar.runtime.program.sharded_ops import Place
from autopar.runtime.program.stage_messages import RANDOM, Channels, PeerPart, RankLinks, SendPlan


def make_step_in_stages(
    compiled: Compiled,
    groups: StageGroups | None,
    world: World,
    backend: str,
    meter: Meter,
    shown: Mapping[str, Any],
) -> Step:
    """The step of a pipeline on this rank; `groups` is None in a world of one. A collective call.
    `shown` is what `Step` says of results."""
    return StageBinder(compiled, groups, world, backend, meter).step(shown)


@dataclass(frozen=True)
class _End:
    """The end of a link: a stage, the tensor there, and its sharding on the stage's mesh."""

    stage: int
    tensor: TensorType
    holding: OnMesh


class StageBinder:
    """Builds what one rank runs of a pipeline."""

    def __init__(
        self,
        compiled: Compiled,
        groups: StageGroups | None,
        world: World,
        backend: str,
        meter: Meter,
    ) -> None:
        self.compiled, self.groups, self.world = compiled, groups, world
        self.backend, self.meter = backend, meter
        structure = compiled.plan.structure
        self.structure, self.graph = structure, compiled.traced.graph
        self.first_ranks = tuple(stage.first_rank for stage in structure.stages)
        self.meshes = tuple(stage.mesh for stage in structure.stages)
        self.actions = structure.actions
        self.here = tuple(
            k for k, (first, mesh) in enumerate(zip(self.first_ranks, self.meshes, strict=True))
            if first <= world.rank < first + mesh.num_devices
        )  # fmt: skip
        self.random = self._random()
        self.ends = dict(self._ends())

    def step(self, shown: Mapping[str, Any]) -> Step:
        """The step of this rank."""
        return make_pipelined_step(
            self.rank_schedule(), self.meter.timed, places=self._places(), **shown
        )

    def rank_schedule(self) -> RankSchedule:
        """The pipeline as this rank knows it."""
        links = {link for link, _ in self.ends} | {*(self.random.links if self.random else ())}
        self.actions.check({(link.source, link.target, link.phase) for link in links})
        route = self._route()
        channels: Channels | None = None
        if self.groups is not None:
            channels = self.groups.channels
            self.groups.channels.open(route.pairs)
        programs = {stage: self._bound(stage) for stage in self.here}
        pre_step_check = self.world.pre_step_check
        graphs = {
            stage: runnable(program, self.backend, self.meter, pre_step_check, f" of stage {stage}")
            for stage, program in programs.items()
        }
        return RankSchedule(
            actions=self.actions,
            route=route,
            channels=channels,
            programs=programs,
            graphs=graphs,
            inputs=self._inputs(),
            results=tuple(self._results()),
            gradients=tuple(self._gradients()),
            copies=dict(self._copies()),
            random=self.random,
            tangent_dtypes={
                f"tangent:{node.target}": node.outputs[0].dtype
                for node in self.graph.with_role(Role.TANGENT)
            },
            is_proportional=all(each.is_proportional for each in self.compiled.programs),
            device=self.world.device,
            pre_step_check=pre_step_check,
        )

    def _bound(self, stage: int) -> Program:
        program, device = self.compiled.programs[stage], self.world.device
        if self.groups is None:
            return bind(program, {}, self.meshes[stage], (), device)
        at = self.groups.stages[stage]
        return bind(program, at.names, at.mesh, at.coordinate if at.mesh.axes else (), device)

    def _ends(self) -> Iterator[tuple[tuple[StageLink, str], _End]]:
        """The ends of each link, by the link and whether it is sent or received there."""
        for stage, layout in enumerate(self.compiled.layouts):
            for node in layout.graph.nodes:
                if node.op not in (SEND, RECEIVE):
                    continue
                inputs, outputs = layout.pair(node)
                is_send = node.op == SEND
                tensor = layout.graph.type_of(node.inputs[0]) if is_send else node.outputs[0]
                holding = OnMesh(self.meshes[stage], inputs[0] if is_send else outputs[0])
                yield (link_of(node, stage), node.op), _End(stage, tensor, holding)

    def _route(self) -> RankLinks:
        outgoing: list[SendPlan] = []
        incoming: list[SendPlan] = []
        # The stages' graphs share them.
        atoms = self.compiled.layouts[0].graph.atoms
        for link in sorted(link for link, op in self.ends if op == RECEIVE):
            source, target = self.ends[link, SEND], self.ends[link, RECEIVE]
            if source.stage not in self.here and target.stage not in self.here:
                continue
            held = holders(source.tensor, atoms, source.holding)
            first, other = self.first_ranks[source.stage], self.first_ranks[target.stage]
            if target.stage in self.here:
                device = self.world.rank - other
                box = target.holding.box(target.tensor, atoms, device)
                legs = [
                    PeerPart(first + each.source, _within(box, each.box))
                    for each in shard_pieces(held, box, device)
                ]
                incoming.append(_send_plan(link, target.tensor, box, legs))
            if source.stage in self.here:
                mine = self.world.rank - first
                box = source.holding.box(source.tensor, atoms, mine)
                legs = [
                    PeerPart(other + device, _within(box, each.box))
                    for device in range(target.holding.mesh.num_devices)
                    for each in shard_pieces(
                        held, target.holding.box(target.tensor, atoms, device), device
                    )
                    if each.source == mine
                ]
                outgoing.append(_send_plan(link, source.tensor, box, legs))
        for send_plans, send_plan in self._random_send_plans():
            (outgoing if send_plans == "out" else incoming).append(send_plan)
        row_of = {
            first + device: self.actions.ranks[stage]
            for stage, first in enumerate(self.first_ranks)
            for device in range(self.meshes[stage].num_devices)
        }
        # Senders and receivers go through links in one order.
        ordered = (sorted(each, key=lambda p: p.link) for each in (outgoing, incoming))
        return RankLinks(self.world.rank, row_of, *map(tuple, ordered))

    def _random(self) -> RandomMicrobatches | None:
        stages = tuple(k for k, each in enumerate(self.compiled.programs) if draws(each.forward))
        if not stages:
            return None
        links = tuple(StageLink(a, b, Phase.FORWARD, RANDOM) for a, b in pairwise(stages))
        return RandomMicrobatches(stages, links, self.first_ranks[stages[-1]])

    def _random_send_plans(self) -> Iterator[tuple[str, SendPlan]]:
        if self.random is None:
            return
        size = DefaultRandom(self.world.device).now().numel()
        every, rank = (slice(0, size),), self.world.rank
        for link in self.random.links:
            a, b = self.first_ranks[link.source], self.first_ranks[link.target]
            num_sources = self.meshes[link.source].num_devices
            pairs = [
                (a + k % num_sources, b + k) for k in range(self.meshes[link.target].num_devices)
            ]
            given = tuple(PeerPart(other, every) for source, other in pairs if source == rank)
            taken = tuple(PeerPart(other, every) for other, target in pairs if target == rank)
            for direction, stage, parts in (
                ("out", link.source, given),
                ("in", link.target, taken),
            ):
                if stage in self.here:
                    yield direction, SendPlan(link, (size,), (size,), torch.uint8, parts)

    def _inputs(self) -> tuple[str, ...]:
        """All inputs that stages take of the model and the call: every rank checks all of them for
        changes."""
        names = dict[str, None]()
        own = {MICROBATCH_INPUT}
        for program in self.compiled.programs:
            own |= {each.name for each in program.sums}
            for part in program.parts:
                names |= dict.fromkeys(part.forward_inputs)
        return tuple(n for n in names if n not in own and not n.startswith("received:"))

    def _results(self) -> Iterator[Leaving]:
        owners = {
            name: stage
            for stage, program in reversed(list(enumerate(self.compiled.programs)))
            for name in program.forward_outputs
        }
        for node in self.graph.nodes:
            name = f"{node.role.value}:{node.target}"
            if node.role not in OUTPUT_ROLES or name not in owners:
                continue
            stays = node.role in (Role.DETACHED, Role.UPDATE)
            source = None if stays else self.first_ranks[owners[name]]
            yield self._leaving(name, self.graph.type_of(node.inputs[0]), source)

    def _gradients(self) -> Iterator[Leaving]:
        types = {node.target: node.outputs[0] for node in self.graph.with_role(Role.PARAM)}
        programs = self.compiled.programs
        names = (name for each in programs for name in each.gradients)
        for name in dict.fromkeys(names):
            target = name.partition(":")[2]
            yield self._leaving(name, types[target], None, on_host=target in self._on_host)

    @property
    def _on_host(self) -> set[str]:
        params = self.structure.params
        return {name for name, param in params.items() if param.choice.num_on_host}

    def _leaving(
        self, name: str, tensor: TensorType, source: int | None, *, on_host: bool = False
    ) -> Leaving:
        device = torch.device("cpu") if on_host else self.world.device
        return Leaving(name, tensor.shape, getattr(torch, tensor.dtype), device, source)

    def _copies(self) -> Iterator[tuple[str, CopiedGradient]]:
        """The gradients of tied weights that other ranks copy too, and of the script's tensors."""
        if self.groups is None:
            return
        params = {node.target: node for node in self.graph.with_role(Role.PARAM)}
        types = {name: node.outputs[0] for name, node in params.items()}
        for each in self._gradients():
            target = each.name.partition(":")[2]
            if params[target].external:
                counts = self.world.rank in self.first_ranks
                yield each.name, CopiedGradient(own_group(), each.shape, counts)
                continue
            place = self.groups.place(target)
            if place.mesh not in self.groups.copies.values():
                continue
            if place.mesh.get_coordinate() is not None:
                slices = local_slices(types[target].shape, *place)
                shape = tuple(part.stop - part.start for part in slices)
                yield each.name, CopiedGradient(place.mesh.get_group(place.mesh.ndim - 1), shape)

    def _places(self) -> dict[str, Place]:
        if self.groups is None:
            return {}
        places: dict[str, Place] = {}
        for stage, program in enumerate(self.compiled.programs):
            groups = self.groups.stages[stage]
            places |= detached_places(self.graph, program, groups, of_stage=True)
        return places


def _within(box: ShardBox, part: ShardBox) -> tuple[slice, ...]:
    """A part of `box`, with offsets from the start of `box`."""
    return tuple(slice(a - first, b - first) for (first, _), (a, b) in zip(box, part, strict=True))


def _send_plan(
    link: StageLink, tensor: TensorType, box: ShardBox, legs: Sequence[PeerPart]
) -> SendPlan:
    lengths = iter(end - start for start, end in box)
    parts = [[next(lengths) for _ in dim] for dim in tensor.parts]
    split = tuple(size for dim in parts for size in dim)
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return SendPlan(link, tuple(map(prod, parts)), split, dtype, tuple(legs))
