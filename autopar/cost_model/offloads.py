"""Offloading in the problem: copies to and from the host instead of device memory.

Where the problem decides what backward recomputes, it decides what is offloaded too (`is_open`). An
activation class then has each sharding that it can be saved in as one more choice, offloaded.
Tensors of the class that stay on the device (`ir.offloading`) take device memory, and so do those
whose copies are under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.event_prices import copy_ns, is_open
from autopar.cost_model.flows import saved_by
from autopar.cost_model.moves import to_ns
from autopar.cost_model.optimizer_kinds import find_optimizers
from autopar.cost_model.saved import Rounding
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.errors import AutoparError
from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.choices import Decision, ParamChoice, Saved
from autopar.ir.graph import Graph, Node, Phase, Ref
from autopar.ir.grouping import grouped
from autopar.ir.mesh import FROM_HOST, HOST_LINKS, TO_HOST, Cluster, Mesh
from autopar.ir.offloading import (
    AHEAD,
    Hosting,
    OffloadedTensor,
    StreamedParam,
    can_be_on_host,
    copied_in,
    offloadable,
    offloaded,
    streamed,
)
from autopar.ir.own_ops import is_optional, original_key
from autopar.ir.problem import IntArray
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import SAVED, Group, is_saved, root_key
from autopar.plans.requests.request import PlanRequest
from autopar.plans.scheduling.bucketing import work
from autopar.plans.scheduling.host_copies import elements, pace


@dataclass(frozen=True, slots=True)
class SavedForBackward:
    """A class of `count` saved activations. Per choice of the node `holder`, `states` has the
    sharding in which a tensor is saved, None where it is not, and `offloaded` whether it is."""

    holder: str
    root: Ref
    count: int
    states: tuple[Sharding | None, ...]
    offloaded: tuple[bool, ...]


class Offloads:
    """The offloading of a request. `tensors` has the offloaded tensors of each class, or, if that
    `is_open`, of each class that may be offloaded."""

    def __init__(self, request: PlanRequest) -> None:
        self.graph, self.mesh = request.step, request.mesh
        self.rounding = Rounding(request)
        self.host = request.cluster.host
        self.launch_ns = to_ns(request.cluster.device.host_launch_s)
        self.is_open = request.recompute is None
        self.tensors: Mapping[str, Sequence[OffloadedTensor]] = {}
        if not self.is_open:
            self.tensors = grouped(
                (root_key(self.graph, each.root), each)
                for each in offloaded(self.graph, self.mesh, request.offloaded)
            )
        elif is_open(request):
            computed = self._computed()
            self.tensors = {
                key: tensors
                for key, tensors in offloadable(self.graph, self.mesh).items()
                if self._hides(tensors[0].root, request.cluster, computed)
            }

    def _computed(self) -> Mapping[int, float]:
        """The work of forward in the block of each op."""
        blocks = blocks_of(self.graph, self.mesh).of
        total: dict[int, float] = {}
        for node in self.graph.nodes:
            if node.index in blocks and node.phase is Phase.FORWARD:
                block = blocks[node.index]
                total[block] = total.get(block, 0) + work(self.graph, node)
        return {index: total.get(block, 0) for index, block in blocks.items()}

    def _hides(self, root: Ref, cluster: Cluster, computed: Mapping[int, float]) -> bool:
        """Whether the copy of a tensor, sharded over all devices, takes more than twice its start,
        and no longer than the block that makes the tensor computes."""
        num_bytes = self.graph.type_of(root).num_bytes // self.mesh.num_devices
        takes = elements(num_bytes, pace(cluster)) * self.mesh.num_devices
        is_long = copy_ns(num_bytes, cluster.host) > 2 * copy_ns(0, cluster.host)
        return is_long and takes <= computed[root.node]

    @property
    def open_classes(self) -> Mapping[str, Sequence[OffloadedTensor]]:
        """The classes for which offloading is a decision."""
        return self.tensors if self.is_open else {}

    def labels(self, key: str, states: Sequence[Sharding | None]) -> tuple[Decision, ...]:
        """The ways to save a class that is not recomputed, on the device or on the host. A state
        None stands for not saving it."""
        may_be = key in self.open_classes
        on_host = (Saved((s,), offloaded=True) for s in states if may_be and s is not None)
        return (*(Saved() if s is None else s for s in states), *on_host)

    def saved_for_backward(
        self,
        all_groups: Sequence[Group],
        table: Mapping[str, NodeClass],
        saves: Mapping[str, Sequence[Decision]],
    ) -> Iterator[SavedForBackward]:
        """All activations that forward saves for backward, or may. Of an op that may be recomputed,
        those outputs that backward reads."""
        nodes = self.graph.nodes
        read = {(nodes[group.root.node].key, group.root.output) for group in all_groups}
        for entry in table.values():
            if is_optional(entry.node):
                node = table[original_key(entry.key)].node
                flags = tuple(isinstance(c, Saved) and c.offloaded for c in entry.choices)
                for output in range(len(node.outputs)):
                    root, states = Ref(node.index, output), saved_by(entry, output)
                    known = self._known(root, flags)
                    if (entry.key, output) in read:
                        yield SavedForBackward(entry.key, root, entry.count, states, known)
        crossing = [group.root for group in all_groups if is_saved(self.graph, group)]
        counts = Counter(root_key(self.graph, root) for root in crossing)
        for key, root in {root_key(self.graph, root): root for root in crossing}.items():
            entry = table[self.graph.nodes[root.node].key]
            holder, states = entry.key, entry.output_states(root.output)
            if key in saves:
                holder, states = SAVED + key, tuple(map(state_of, saves[key]))
            flags = (not self.is_open,) * len(states)
            if self.is_open and key in saves:
                flags = tuple(isinstance(c, Saved) and c.offloaded for c in saves[key])
            yield SavedForBackward(holder, root, counts[key], states, self._known(root, flags))

    def _known(self, root: Ref, flags: tuple[bool, ...]) -> tuple[bool, ...]:
        return flags if root_key(self.graph, root) in self.tensors else (False,) * len(flags)

    def held(self, activations: SavedForBackward) -> IntArray:
        """Bytes on the device when forward ends, per choice. Of an offloaded class,
        the tensors that stay on the device count, and `AHEAD` whose copies are under way."""
        num_offloaded = len(self.tensors.get(root_key(self.graph, activations.root), ()))
        near = min(activations.count, activations.count - num_offloaded + AHEAD)
        counts = np.where(activations.offloaded, near, activations.count)
        return counts * self._bytes(activations)

    def add_copies(
        self,
        activations: SavedForBackward,
        costs: dict[str, IntArray],
        windows: Windows,
        number: Mapping[str, int],
    ) -> None:
        """Adds the cost of copies to `costs`, and what hides them to `windows`, per choice."""
        tensors = self.tensors.get(root_key(self.graph, activations.root), ())
        if not tensors or not any(activations.offloaded):
            return
        pairs = zip(self._bytes(activations).tolist(), activations.offloaded, strict=True)
        each = np.array([copy_ns(n, self.host) if copied else 0 for n, copied in pairs], np.int64)
        launched = np.array(activations.offloaded, np.int64) * self.launch_ns
        copies = self.graph.microbatches * len(HOST_LINKS) * len(tensors)
        costs[activations.holder] += copies * (each + launched)
        hides = (copied_in(self.graph, self.mesh, one) for one in tensors)
        for k, places in enumerate(zip(*hides, strict=True)):
            sent = windows.hiding.sent(len(self.mesh) + k, each)
            for place, count in Counter(places).items():
                hidden = sent, windows.hiding.launched(launched)
                windows.add_node(place, number[activations.holder], *hidden, count=count)

    def _bytes(self, activations: SavedForBackward) -> IntArray:
        tensor, atoms = self.rounding.saved_type(activations.root), self.graph.atoms
        states, sizes = activations.states, self.mesh.sizes
        return np.array(
            [0 if s is None else local_bytes(tensor, atoms, s, sizes) for s in states], np.int64
        )


def optional_ops(graph: Graph, keys: Mapping[str, Sequence[OffloadedTensor]]) -> frozenset[str]:
    """The keys of the ops that make the tensors with these keys."""
    return frozenset(graph.nodes[tensors[0].root.node].key for tensors in keys.values())


def state_of(label: Decision) -> Sharding | None:
    """The sharding that a label says a class is saved in; None if it is not saved."""
    if isinstance(label, Saved):
        return label.states[0] if label.states else None
    assert isinstance(label, Sharding)
    return label


# Parameters on the host: their copies, the optimizer's step there, and the memory that they save.
#
# A class of which some parameters may be on the host has each storage once more for each number of
# them (`ParamChoice.num_on_host`): these take none of the device's memory.

_PARTS = 8
"""The number of equal parts in which a class of parameters goes to the host."""


def why_not_on_host(optimizer: str, cluster: Cluster) -> str:
    """Why no parameter can be on the host: the optimizer cannot step there, or its speed there is
    not known. Empty if some can."""
    if any(each.whole for each in find_optimizers(optimizer).all):
        return f"{optimizer} steps on whole parameters, which is not done on hosts"
    if not cluster.host.memory_bytes_per_s:
        return f"cluster {cluster.name} does not say host.memory_bytes_per_s"
    return ""


def on_host_counts(request: PlanRequest) -> Mapping[str, tuple[int, ...]]:
    """The numbers of parameters of each class that may be on the host. Classes that are not listed
    are on the device. AutoparError if the request has parameters on the host that cannot be."""
    wrong = why_not_on_host(request.options.given.optimizer, request.cluster)
    known = can_be_on_host(request.step)
    if request.params_on_host is None:
        if wrong or not is_open(request):
            return {}
        settled = dict(request.known_on_host)
        offered = {key: Hosting.of(m, settled).counts(_PARTS) for key, m in known.items()}
        return {key: counts for key, counts in offered.items() if any(counts)}
    if request.params_on_host and wrong:
        raise AutoparError(f"parameters cannot live on the host: {wrong}")
    counts = {
        key: sum(m in request.params_on_host for m in members) for key, members in known.items()
    }
    return {key: (count,) for key, count in counts.items() if count}


class ParamsOnHost:
    """The parameters of a request that are on the host, by choice."""

    def __init__(self, request: PlanRequest) -> None:
        graph, self._given = request.step, request.params_on_host
        self._known_on_host = dict(request.known_on_host)
        self._has_host_memory = request.cluster.has_host_memory
        known = can_be_on_host(graph)
        self.members = {key: known[key] for key in on_host_counts(request)}
        """The parameters of each class of which any may be on the host."""
        names = [name for members in self.members.values() for name in members]
        params = streamed(graph, request.mesh, names)
        self.streamed = {graph.nodes[each.param.node].target: each for each in params}
        self._known: dict[tuple[str, int], frozenset[str]] = {}

    def on_host(self, key: str, count: int) -> frozenset[str]:
        """The names of the parameters of a class on the host, if `count` are."""
        if self._given is not None:
            return self._given
        if (key, count) not in self._known:
            hosting = Hosting.of(self.members.get(key, ()), self._known_on_host)
            self._known[key, count] = frozenset(hosting.names(count))
        return self._known[key, count]

    def is_on_host(self, param: Node, choice: ParamChoice) -> bool:
        """Whether a parameter is on the host under a choice of its class."""
        return bool(choice.num_on_host) and param.target in self.on_host(
            param.key, choice.num_on_host
        )

    def is_elsewhere(self, param: Node, choice: ParamChoice) -> bool:
        """Whether a parameter takes none of the device's memory at rest. The host of a CPU shares
        that memory."""
        return self._has_host_memory and self.is_on_host(param, choice)

    def stays(self, param: Node, choice: ParamChoice) -> bool:
        """Whether the device keeps its copy of a parameter from forward to backward."""
        return self.is_on_host(param, choice) and self.streamed[param.target].stays

    def who(self, param: Node) -> str:
        """The name of a parameter whose class may be on the host, else empty: a key for caches."""
        return param.target if param.key in self.members else ""


def add_param_copies(
    request: PlanRequest,
    hosts: ParamsOnHost,
    table: Mapping[str, NodeClass],
    costs: dict[str, IntArray],
    windows: Windows,
    number: Mapping[str, int],
) -> None:
    """Adds the copies of parameters that are on the host, or may be, to `costs`, and what hides
    them to `windows`, per choice."""
    graph, mesh, cluster = request.step, request.mesh, request.cluster
    launch_ns = to_ns(cluster.device.host_launch_s)
    for key, members in hosts.members.items():
        entry = table[key]
        counts = [choice.num_on_host for choice in entry.choices if isinstance(choice, ParamChoice)]
        tensor = entry.node.outputs[0]
        sides = (local_bytes(tensor, graph.atoms, state, mesh.sizes) for state, _ in entry.outputs)
        each = np.array([copy_ns(num_bytes, cluster.host) for num_bytes in sides], np.int64)
        for number_on_host in sorted({*counts} - {0}):
            chosen = np.array([count == number_on_host for count in counts])
            takes, launched = chosen * each, chosen * np.int64(launch_ns)
            names = hosts.on_host(key, number_on_host)
            params = [hosts.streamed[name] for name in members if name in names]
            for (link, is_once, place), count in _places(graph, mesh, params).items():
                times = 1 if is_once else graph.microbatches
                costs[key] += count * times * (takes + launched)
                sent = windows.hiding.sent(mesh.link_names.index(link), takes)
                hidden = sent, windows.hiding.launched(launched)
                windows.add_node(place, number[key], *hidden, count=count, once=is_once)


def _places(
    graph: Graph, mesh: Mesh, params: Sequence[StreamedParam]
) -> Counter[tuple[str, bool, WindowPlace | None]]:
    """The number of copies, by link, by whether they happen once or in every microbatch, and by the
    window that hides them."""
    known = blocks_of(graph, mesh)
    counts = Counter[tuple[str, bool, WindowPlace | None]]()
    for each in params:
        places = [*each.copied_in(known)]
        if each.gradient is not None:
            counts[TO_HOST, True, places.pop()] += 1
        counts.update((FROM_HOST, False, place) for place in places)
    return counts
