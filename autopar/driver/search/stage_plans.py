"""The plan of each stage of a pipeline, one after the other. A received tensor is sharded as its
sender has it, and a tied weight as the first planned stage has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
"""The memory of a device of each rank, with these plans of the stages."""


def plan_stages(
    ranks: Sequence[GraphRequest],
    graphs: Sequence[Graph],
    actions: PipelineSchedule,
    held: HeldOnDevices,
    say: Say,
) -> list[Candidate]:
    """The plan of each of `graphs` for the request of its rank: on a part of the cluster, with the
    mesh of its options, and with `narrowed` choices where possible. The stages of a rank have to
    fit in its device together, as `held` says, with what waits in `actions`, and in the device's
    share of the host. Stages that differ only in the names of their parameters share one plan.
    InfeasibleError if they do not fit in memory."""
    planner = _Planner(ranks, graphs, actions, held, say)
    can_be, first = _tied(graphs), ranks[0]
    options = first.options
    is_open = options.residency == "auto" and options.params_on_host is None
    has_host = is_open and not why_not_on_host(options.given.optimizer, first.cluster)
    on_host = {name: False for name, can in can_be.items() if not can}
    while True:
        sharing = planner.sharing()
        try:
            for limits, shares in sharing:
                try:
                    plans = planner.plan_within(limits, shares, on_host)
                except InfeasibleError as error:
                    sharing.refuse(error)
                else:
                    sharing.take(plans)
            return [planner.of_device(stage, plan) for stage, plan in enumerate(sharing.plans)]
        except InfeasibleError as error:
            if on_host is can_be or not (has_host and any(can_be.values())):
                raise
            # A stage with room keeps a tied weight on the device, where another has none for it.
            say(f"{error}; with tied weights on the host")
            on_host = can_be


def _tied(graphs: Sequence[Graph]) -> dict[str, bool]:
    """The parameters that several stages have, and whether all of these can have them on the
    host."""
    count = Counter(name for graph in graphs for name in _params(graph))
    can_be = Counter(
        name for graph in graphs for names in can_be_on_host(graph).values() for name in names
    )
    return {name: can_be[name] == stages for name, stages in count.items() if stages > 1}


class _Planner:
    """The requests of the stages, and the plans so far."""

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
        """A plan with the memory limit of its whole device, which all of its stages share."""
        limit = self.limits[self.actions.ranks[stage]]
        estimates = msgspec.structs.replace(candidate.estimates, memory_limit=limit)
        return replace(candidate, estimates=estimates)

    def plan_within(
        self, limits: StageBytes, shares: StageBytes, on_host: Mapping[str, bool]
    ) -> list[Candidate]:
        """The plans of all stages, each within its `limits` of the device's memory and its `shares`
        of the host's, in bytes. Of some parameters it is known whether they are `on_host`."""
        laid, plans = _LaidOut({}, {}), dict[int, Candidate]()
        for stage, strategy in _strategies(self.of_stages, self.graphs).items():
            graph, mesh = self.graphs[stage], self.of_stages[stage].options.mesh
            settled = tuple(sorted(laid.settled(graph, mesh)))
            stored, known_on_host = laid.stored(graph), {**laid.on_host(), **on_host}
            request = self._rank_request(stage, strategy, limits[stage], shares[stage])
            request = request.of_part(graph, stored, known_on_host)
            others = tuple(map(self._rounded, self.waiting[stage]))
            key = (
                *(_signature(graph), request.cluster, mesh, limits[stage], others, settled),
                *(tuple(stored.items()), request.known_on_host),
            )
            if key not in self.known:
                self.say(f"planning stage {stage} of {len(self.graphs)}")
                rounded = request.while_waiting(others, is_split=self.actions.is_split)
                rounded = replace(rounded, tolerance=self.policy.stages_tolerance)
                with self._or_smallest(key, stage, limits[stage], is_settled=bool(stored)):
                    for narrowed in _narrowed(rounded, settled):
                        try:
                            self.known[key] = best_on_mesh(narrowed, Trail(self.say))
                        except InfeasibleError as error:
                            self.say(f"{error}; with other choices")
                    if key not in self.known:
                        wider = replace(rounded, narrowed=settled)
                        with explaining(wider, self.say):
                            self.known[key] = survey(wider, Trail(self.say)).only
            request = request.while_waiting(self.waiting[stage], is_split=self.actions.is_split)
            plans[stage] = _while_waiting(request, _renamed(self.known[key], graph))
            laid.add(graph, plans[stage].structure, mesh)
        return [plans[stage] for stage in range(len(self.graphs))]

    @contextmanager
    def _or_smallest(
        self, key: object, stage: int, limit_bytes: int, *, is_settled: bool
    ) -> Generator[None]:
        """Within it, a stage is planned. If the search finds no plan, the smallest-memory plan may
        still fit, and is taken. It stores tied weights its own way, so not if they are settled."""
        try:
            yield
        except InfeasibleError:
            smallest = self.lean.get(stage)
            if smallest is None or is_settled or smallest.estimates.memory.total > limit_bytes:
                raise
            self.known[key] = smallest

    def _rank_request(
        self, stage: int, strategy: str, limit_bytes: int, share_bytes: int
    ) -> GraphRequest:
        """The request for a stage within a limit of its device's memory, and a share of the
        host's."""
        request = self.of_stages[stage]
        options = replace(request.options, memory_limit_bytes=limit_bytes, strategy=strategy)
        return replace(
            request, options=options, cluster=with_host_share(request.cluster, share_bytes)
        )

    def _rounded(self, each: Waiting) -> Waiting:
        """The waiting microbatches, rounded up, so that more stages share a plan."""
        unit, most = self.unit, self.most
        return Waiting(*(min(-(-n // unit) * unit, top) for n, top in zip(each, most, strict=True)))


def _strategies(of_stages: Sequence[GraphRequest], graphs: Sequence[Graph]) -> dict[int, str]:
    """The strategy of each stage; empty if it says nothing of one. Stages whose tied weights it
    constrains come first: the others store these weights as they do. UnsuitedMeshError if it says
    nothing of any stage."""
    strategy = of_stages[0].options.strategy
    if not strategy:
        return dict.fromkeys(range(len(graphs)), "")
    tied = _tied(graphs)
    first, suited = list[int](), list[int]()
    for stage, graph in enumerate(graphs):
        request = of_stages[stage]
        (mesh,) = meshes_of(request.cluster, request.options)
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
        decides_tied = any(matches(pattern, name) for name in names for pattern in patterns)
        (first if decides_tied else suited).append(stage)
    strategies = dict.fromkeys((*first, *suited), strategy)
    return strategies | {stage: "" for stage in range(len(graphs)) if stage not in strategies}


def _params(graph: Graph) -> list[str]:
    return [node.target for node in graph.with_role(Role.PARAM)]


def _while_waiting(graph_request: GraphRequest, candidate: Candidate) -> Candidate:
    """The same plan with as many other microbatches as in `graph_request`."""
    request = replace(
        candidate.request, in_flight=graph_request.in_flight, others=graph_request.others
    )
    if request == candidate.request:
        return candidate
    return replace(
        candidate, request=request, estimates=cost_breakdown(request, candidate.structure).estimates
    )


def _narrowed(graph_request: GraphRequest, settled: Narrowed) -> Iterator[PlanRequest]:
    """The request with choices that are `settled` as well, unless constraints may contradict those
    that are `narrowed`."""
    if not graph_request.options.imposed:
        (mesh,) = meshes_of(graph_request.cluster, graph_request.options)
        yield replace(graph_request, narrowed=(*settled, *graph_request.narrowed)).on(mesh)


_End = tuple[str, str, str]
"""Where a tensor is sent or received: the op, the tensor, and the mesh."""


@dataclass(slots=True)
class _LaidOut:
    """The shardings of tensors that stages send and receive, by their ends, and the storage of
    parameters."""

    ends: dict[_End, str]
    params: dict[str, ParamChoice]

    def settled(self, graph: Graph, mesh: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The shardings of tensors that a stage on `mesh` sends and receives, by key, as far as
        other stages on such a mesh have settled them."""
        for node in graph.nodes:
            other = {SEND: RECEIVE, RECEIVE: SEND}.get(node.op)
            if other is not None and (other, node.target, mesh) in self.ends:
                yield node.key, (self.ends[other, node.target, mesh],)

    def stored(self, graph: Graph) -> dict[str, Sharding]:
        """The storage of parameters that other stages have too."""
        names = (name for name in _params(graph) if name in self.params)
        return {name: self.params[name].storage for name in names}

    def on_host(self) -> dict[str, bool]:
        """Whether each parameter is on the host."""
        return {name: bool(choice.num_on_host) for name, choice in self.params.items()}

    def add(self, graph: Graph, structure: Stage, mesh: str) -> None:
        """Adds the plan of a stage."""
        ends = filter(is_end, graph.nodes)
        self.ends |= {(n.op, n.target, mesh): structure.ops[n.key] for n in ends}
        own = {name: param.choice for name, param in structure.params.items()}
        self.params = own | self.params


def _signature(graph: Graph) -> object:
    """A value that stages share if one plan serves them all."""
    return tuple(
        (
            *(node.key, node.role, node.phase, node.inputs, node.outputs),
            # The target of an op names a tensor of the whole step.
            "" if node.role is Role.OP else general(node.target),
        )
        for node in graph.nodes
    )


def _renamed(candidate: Candidate, graph: Graph) -> Candidate:
    """The plan of another stage with an equal `_signature`, for the parameters of this one."""
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
