"""The plan of each stage of a pipeline, one after the other: what it is sent lies as the one that
sends it has it, and a tied weight as the first of its stages that is planned has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from autopar.compile import Say
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.offloads import why_not_on_host
from autopar.driver.search.device_limits import DeviceSharing, SharedMemory, StageBytes
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.meshes import explaining, meshes_of, survey
from autopar.driver.search.on_mesh import best_on_mesh
from autopar.driver.search.shortage import smallest_memory
from autopar.errors import InfeasibleError, UnsuitedMeshError
from autopar.ir.choices import ParamChoice
from autopar.ir.graph import Graph, Role
from autopar.ir.offloading import can_be_on_host
from autopar.ir.own_ops import RECEIVE, SEND, is_end
from autopar.ir.pipeline import PipelineSchedule, Waiting
from autopar.ir.sharding import Sharding
from autopar.plans.estimates import Memory
from autopar.plans.memory_refinement import Candidate
from autopar.plans.requests.matching import general, matches
from autopar.plans.requests.request import GraphRequest, Narrowed, PlanRequest, with_host_share
from autopar.plans.requests.strategies import expand_strategy
from autopar.plans.structure import Stage

HeldOnDevices = Callable[[Sequence[Candidate]], Sequence[Memory]]
"""What a device of each rank holds where stages are planned so."""


def plan_stages(
    ranks: Sequence[GraphRequest],
    graphs: Sequence[Graph],
    actions: PipelineSchedule,
    held: HeldOnDevices,
    say: Say,
) -> list[Candidate]:
    """The plan of each of `graphs`, as it is asked of its rank: on a part of the cluster, and the
    mesh in its options, with choices that are `narrowed` where possible. Devices hold what waits in
    `actions`, those of a rank that of all its stages, as `held` says, which have no more on the
    host together than its share. Stages that differ from another in nothing but the names of their
    parameters are planned as that one. InfeasibleError if they do not fit in memory."""
    planner = _Planner(ranks, graphs, actions, held, say)
    can_be, first = _tied(graphs), ranks[0]
    options = first.options
    hosted = {name: False for name, can in can_be.items() if not can}
    is_open = options.residency == "auto" and options.params_on_host is None
    has_host = is_open and not why_not_on_host(options.given.optimizer, first.cluster)
    tries = (hosted, can_be) if has_host and any(can_be.values()) else (hosted,)
    found: Sequence[Candidate] = ()
    for known_on_host in tries:
        sharing = planner.sharing()
        try:
            for limits, shares in sharing:
                try:
                    plans = planner.plan_within(limits, shares, known_on_host)
                except InfeasibleError as error:
                    sharing.refuse(error)
                else:
                    sharing.take(plans)
            found = sharing.plans
            break
        except InfeasibleError as error:
            if known_on_host is tries[-1]:
                raise
            # A stage with room keeps a tied weight on the device, where another has none for it.
            say(f"{error}; with tied weights on the host")
    return [planner.of_device(stage, each) for stage, each in enumerate(found)]


def _tied(graphs: Sequence[Graph]) -> dict[str, bool]:
    """The parameters that several stages have, and whether all of these can have them on the
    host."""
    count = Counter(name for graph in graphs for name in _params(graph))
    can_be = Counter(
        name for graph in graphs for found in can_be_on_host(graph).values() for name in found
    )
    return {name: can_be[name] == stages for name, stages in count.items() if stages > 1}


class _Planner:
    """What is asked of the stages of `ranks`, and the plans that are known."""

    def __init__(
        self,
        ranks: Sequence[GraphRequest],
        graphs: Sequence[Graph],
        actions: PipelineSchedule,
        held: HeldOnDevices,
        say: Say,
    ) -> None:
        self.of_stages = [ranks[actions.ranks[stage]] for stage in range(len(graphs))]
        self.limits = [rank.memory_limit_bytes for rank in ranks]
        self.shares = [rank.cluster.host.memory_bytes for rank in ranks]
        self.graphs, self.actions, self.held, self.say = graphs, actions, held, say
        self.waiting = [actions.others(stage) for stage in range(len(graphs))]
        self.known: dict[object, Candidate] = {}
        self.lean: dict[int, Candidate] = {}
        """The smallest-memory plans of stages that share their memory."""
        all_others = [each for others in self.waiting for each in others]
        self.most = Waiting(*(max(n) for n in zip(*all_others, strict=True)))
        self.policy = ranks[0].options.policy
        self.unit = max(1, -(-self.most.backward // self.policy.stages_in_flight))

    def sharing(self) -> DeviceSharing:
        """How the stages of each rank share its memory, and its host's."""
        self.lean = {}

        def least(stage: int, candidate: Candidate) -> int:
            self.lean[stage] = smallest_memory(candidate.request, self.say)
            return self.lean[stage].estimates.memory.total

        def held(candidates: Sequence[Candidate]) -> list[int]:
            return [memory.total for memory in self.held(candidates)]

        def on_host(candidates: Sequence[Candidate]) -> list[int]:
            stages = map(self.actions.stages_of, range(len(self.limits)))
            return [sum(candidates[stage].estimates.host_bytes for stage in own) for own in stages]

        device = SharedMemory(
            "memory limit", self.limits, held, lambda each: each.estimates.memory.total, least,
            "Raise --memory-limit, use more devices, or lower the batch",
        )  # fmt: skip
        host = SharedMemory(
            "share of the host's memory", self.shares, on_host,
            lambda each: each.estimates.host_bytes, None,
            "Raise --memory-host, use more devices, or more --microbatches",
        )  # fmt: skip
        return DeviceSharing(self.actions, (device, host), self.say, self.policy.sharing_rounds)

    def of_device(self, stage: int, candidate: Candidate) -> Candidate:
        """A plan that says how much memory its device has, for all of its stages."""
        limit = self.limits[self.actions.ranks[stage]]
        estimates = msgspec.structs.replace(candidate.estimates, memory_limit=limit)
        return replace(candidate, estimates=estimates)

    def plan_within(
        self, limits: StageBytes, shares: StageBytes, on_host: Mapping[str, bool]
    ) -> list[Candidate]:
        """The plans of all stages, each within so many bytes of its device and of the host, where
        it is known of some parameters whether they are `on_host`."""
        graphs, say = self.graphs, self.say
        laid = _LaidOut({}, {})
        found: dict[int, Candidate] = {}
        for stage, strategy in _strategies(self.of_stages, graphs).items():
            graph, mesh = graphs[stage], self.of_stages[stage].options.mesh
            settled = tuple(sorted(laid.settled(graph, mesh)))
            stored, known_on_host = laid.stored(graph), {**laid.on_host(), **on_host}
            here = self._rank_request(stage, strategy, limits[stage], shares[stage])
            here = here.of_part(graph, stored, known_on_host)
            others = tuple(map(self._rounded, self.waiting[stage]))
            key = (
                *(_signature(graph), here.cluster, mesh, limits[stage], others, settled),
                *(tuple(stored.items()), here.known_on_host),
            )
            if key not in self.known:
                say(f"planning stage {stage} of {len(graphs)}")
                wanted = here.while_waiting(others, is_split=self.actions.is_split)
                wanted = replace(wanted, tolerance=self.policy.stages_tolerance)
                try:
                    for request in _narrowed(wanted, settled):
                        try:
                            self.known[key] = best_on_mesh(request, Trail(say))
                            break
                        except InfeasibleError as error:
                            say(f"{error}; with other choices")
                    if key not in self.known:
                        wanted = replace(wanted, narrowed=settled)
                        with explaining(wanted, say):
                            self.known[key] = survey(wanted, Trail(say)).only
                except InfeasibleError:
                    lean = self.lean.get(stage)
                    # It may be all that fits, and found by no search. Tied weights lie as they do.
                    if lean is None or stored or lean.estimates.memory.total > limits[stage]:
                        raise
                    self.known[key] = lean
            now = here.while_waiting(self.waiting[stage], is_split=self.actions.is_split)
            found[stage] = _while_waiting(now, _renamed(self.known[key], graph))
            laid.add(graph, found[stage].structure, mesh)
        return [found[stage] for stage in range(len(graphs))]

    def _rank_request(
        self, stage: int, strategy: str, limit_bytes: int, share_bytes: int
    ) -> GraphRequest:
        """What is asked of a stage that may hold so much on its device, and on the host."""
        asked = self.of_stages[stage]
        options = replace(asked.options, memory_limit_bytes=limit_bytes, strategy=strategy)
        return replace(asked, options=options, cluster=with_host_share(asked.cluster, share_bytes))

    def _rounded(self, each: Waiting) -> Waiting:
        """As many as stages are planned for that are equal but for that."""
        unit, most = self.unit, self.most
        return Waiting(*(min(-(-n // unit) * unit, top) for n, top in zip(each, most, strict=True)))


def _strategies(of_stages: Sequence[GraphRequest], graphs: Sequence[Graph]) -> dict[int, str]:
    """The strategy of each stage, those first for whose tied weights it asks for something: other
    stages have them as these do. It is none where it has nothing to say. UnsuitedMeshError if that
    is so of all."""
    strategy = of_stages[0].options.strategy
    if not strategy:
        return dict.fromkeys(range(len(graphs)), "")
    tied = _tied(graphs)
    first, suited = list[int](), list[int]()
    for stage, graph in enumerate(graphs):
        asked = of_stages[stage]
        (mesh,) = meshes_of(asked.cluster, asked.options)
        try:
            demands = expand_strategy(strategy, graph, mesh)
        except UnsuitedMeshError:
            if stage == len(graphs) - 1 and not first and not suited:
                raise
            continue
        patterns = [
            each.pattern for each in demands if each.kind == "param" and each.pattern != "*"
        ]
        names = [name for name in _params(graph) if name in tied]
        is_asked = any(matches(pattern, name) for name in names for pattern in patterns)
        (first if is_asked else suited).append(stage)
    found = dict.fromkeys((*first, *suited), strategy)
    return found | {stage: "" for stage in range(len(graphs)) if stage not in found}


def _params(graph: Graph) -> list[str]:
    return [node.target for node in graph.with_role(Role.PARAM)]


def _while_waiting(graph_request: GraphRequest, candidate: Candidate) -> Candidate:
    """The same plan with as many other microbatches as are `graph_request` for."""
    request = replace(
        candidate.request, in_flight=graph_request.in_flight, others=graph_request.others
    )
    if request == candidate.request:
        return candidate
    return replace(
        candidate, request=request, estimates=cost_breakdown(request, candidate.structure).estimates
    )


def _narrowed(graph_request: GraphRequest, settled: Narrowed) -> Iterator[PlanRequest]:
    """The same with choices that are `settled` as well, where nothing is asked for that may
    contradict those that are `narrowed`."""
    if not graph_request.options.imposed:
        (mesh,) = meshes_of(graph_request.cluster, graph_request.options)
        yield replace(graph_request, narrowed=(*settled, *graph_request.narrowed)).on(mesh)


_End = tuple[str, str, str]
"""Where something is sent, or where it comes: by op, tensor, and the mesh there."""


@dataclass(slots=True)
class _LaidOut:
    """How what stages send and are sent is laid out, by its ends, and how they store parameters."""

    ends: dict[_End, str]
    params: dict[str, ParamChoice]

    def settled(self, graph: Graph, mesh: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """How what a stage on `mesh` sends and is sent is laid out, by key, as far as other stages
        on such a mesh have settled it."""
        for node in graph.nodes:
            other = {SEND: RECEIVE, RECEIVE: SEND}.get(node.op)
            if other is not None and (other, node.target, mesh) in self.ends:
                yield node.key, (self.ends[other, node.target, mesh],)

    def stored(self, graph: Graph) -> dict[str, Sharding]:
        """How the parameters of a stage are stored that others have too."""
        names = (name for name in _params(graph) if name in self.params)
        return {name: self.params[name].storage for name in names}

    def on_host(self) -> dict[str, bool]:
        """Which parameters are on the host."""
        return {name: bool(choice.num_on_host) for name, choice in self.params.items()}

    def add(self, graph: Graph, structure: Stage, mesh: str) -> None:
        """Takes the plan of a stage."""
        ends = filter(is_end, graph.nodes)
        self.ends |= {(n.op, n.target, mesh): structure.ops[n.key] for n in ends}
        own = {name: param.choice for name, param in structure.params.items()}
        self.params = own | self.params


def _signature(graph: Graph) -> object:
    """What stages have in common that are planned alike."""
    return tuple(
        (
            *(node.key, node.role, node.phase, node.inputs, node.outputs),
            # Of an op it names a tensor of the whole step.
            "" if node.role is Role.OP else general(node.target),
        )
        for node in graph.nodes
    )


def _renamed(candidate: Candidate, graph: Graph) -> Candidate:
    """The plan of another stage, for the parameters of this one, whose `_signature` is the same."""
    own = candidate.request.graph
    if own is graph:
        return candidate
    names = {
        a.target: b.target
        for a, b in zip(own.with_role(Role.PARAM), graph.with_role(Role.PARAM), strict=True)
    }
    params = {names[name]: param for name, param in candidate.structure.params.items()}
    structure = msgspec.structs.replace(candidate.structure, params=params)
    return replace(candidate, request=replace(candidate.request, graph=graph), structure=structure)
