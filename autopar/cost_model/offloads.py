"""What is offloaded, or may be, in the problem: copies to and from the host instead of memory.

Where it is open what backward recomputes, it is open what is offloaded too, on devices whose host
has memory of its own and meshes of up to one axis: each state that an activation of a class can be
saved in is one more choice. Tensors of the class that stay on the device (`ir.offloading`) take
memory, and so do as many as are on their way at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.event_prices import copy_ns, is_open
from autopar.cost_model.flows import saved_by
from autopar.cost_model.moves import to_ns
from autopar.cost_model.saved import Rounding
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.ir.blocks import blocks_of
from autopar.ir.choices import Decision, Saved
from autopar.ir.graph import Graph, Phase, Ref
from autopar.ir.grouping import grouped
from autopar.ir.mesh import HOST_LINKS, Cluster
from autopar.ir.offloading import AHEAD, OffloadedTensor, copied_in, offloadable, offloaded
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
    """A class of activations: per choice of the node `holder` the state in which one of its `count`
    tensors is handed over, None where it is not, and whether it is offloaded."""

    holder: str
    root: Ref
    count: int
    states: tuple[Sharding | None, ...]
    offloaded: tuple[bool, ...]


class Offloads:
    """Those of a request: `tensors` has what is away of each class that is offloaded, or may be if
    that `is_open`."""

    def __init__(self, request: PlanRequest) -> None:
        self.graph, self.mesh = request.step, request.mesh
        self.rounding = Rounding(request)
        self.host = request.cluster.host
        self.launch_ns = to_ns(request.cluster.device.host_launch_s)
        self.is_open = request.recompute is None
        self.tensors: Mapping[str, Sequence[OffloadedTensor]] = {}
        if not self.is_open:
            away = offloaded(self.graph, self.mesh, request.offloaded)
            self.tensors = grouped((root_key(self.graph, each.root), each) for each in away)
        elif is_open(request):
            computed = self._computed()
            self.tensors = {
                key: away
                for key, away in offloadable(self.graph, self.mesh).items()
                if self._hides(away[0].root, request.cluster, computed)
            }

    def _computed(self) -> Mapping[int, float]:
        """What forward computes in the block of each op."""
        blocks = blocks_of(self.graph, self.mesh).of
        total: dict[int, float] = {}
        for node in self.graph.nodes:
            if node.index in blocks and node.phase is Phase.FORWARD:
                block = blocks[node.index]
                total[block] = total.get(block, 0) + work(self.graph, node)
        return {index: total.get(block, 0) for index, block in blocks.items()}

    def _hides(self, root: Ref, cluster: Cluster, computed: Mapping[int, float]) -> bool:
        """Whether a copy of a tensor, cut by all devices, takes longer than its start, and no
        longer than the block that makes it computes."""
        num_bytes = self.graph.type_of(root).num_bytes // self.mesh.num_devices
        takes = elements(num_bytes, pace(cluster)) * self.mesh.num_devices
        is_long = copy_ns(num_bytes, cluster.host) > 2 * copy_ns(0, cluster.host)
        return is_long and takes <= computed[root.node]

    @property
    def open_classes(self) -> Mapping[str, Sequence[OffloadedTensor]]:
        """Those of which it is open."""
        return self.tensors if self.is_open else {}

    def labels(self, key: str, states: Sequence[Sharding | None]) -> tuple[Decision, ...]:
        """How a class may be saved that is not recomputed, on the device and in the host's memory;
        None is not at all."""
        may_be = key in self.open_classes
        away = (Saved((s,), offloaded=True) for s in states if may_be and s is not None)
        return (*(Saved() if s is None else s for s in states), *away)

    def saved_for_backward(
        self,
        all_groups: Sequence[Group],
        table: Mapping[str, NodeClass],
        saves: Mapping[str, Sequence[Decision]],
    ) -> Iterator[SavedForBackward]:
        """All that forward hands to backward, or may: of the outputs of an op that may be made
        again, those that anyone reads there."""
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
        """Bytes on the device when forward ends, per choice: of what is offloaded those that stay,
        and those that are soon on their way."""
        away = len(self.tensors.get(root_key(self.graph, activations.root), ()))
        near = min(activations.count, activations.count - away + AHEAD)
        counts = np.where(activations.offloaded, near, activations.count)
        return counts * self._bytes(activations)

    def add_copies(
        self,
        activations: SavedForBackward,
        costs: dict[str, IntArray],
        windows: Windows,
        number: Mapping[str, int],
    ) -> None:
        """What copies cost, and where they hide, per choice."""
        away = self.tensors.get(root_key(self.graph, activations.root), ())
        if not away or not any(activations.offloaded):
            return
        pairs = zip(self._bytes(activations).tolist(), activations.offloaded, strict=True)
        each = np.array([copy_ns(n, self.host) if copied else 0 for n, copied in pairs], np.int64)
        launched = np.array(activations.offloaded, np.int64) * self.launch_ns
        copies = self.graph.microbatches * len(HOST_LINKS) * len(away)
        costs[activations.holder] += copies * (each + launched)
        hides = (copied_in(self.graph, self.mesh, one) for one in away)
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
    """The keys of the ops that make what has these keys."""
    return frozenset(graph.nodes[away[0].root.node].key for away in keys.values())


def state_of(label: Decision) -> Sharding | None:
    """In which state a class is saved, if it is, by the label of that decision."""
    if isinstance(label, Saved):
        return label.states[0] if label.states else None
    assert isinstance(label, Sharding)
    return label
