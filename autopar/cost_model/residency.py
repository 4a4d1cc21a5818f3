"""What it costs and saves that parameters live on the host: copies, and the optimizer's step.

A class of parameters that may live there, or some of it may, has each storage once more for each
number that do (`ParamChoice.num_on_host`): they take none of the device's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from autopar.cost_model.event_prices import copy_ns, is_open
from autopar.cost_model.moves import to_ns
from autopar.cost_model.optimizer_kinds import find_optimizers
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.errors import AutoparError
from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.choices import ParamChoice
from autopar.ir.graph import Node
from autopar.ir.mesh import FROM_HOST, TO_HOST, Cluster
from autopar.ir.offloading import Hosting, StreamedParam, can_be_on_host, streamed
from autopar.ir.problem import BoolArray, IntArray
from autopar.ir.redistribute import local_bytes
from autopar.plans.requests.request import PlanRequest

_PARTS = 8
"""In how many equal parts classes of parameters go to the host."""


def why_not_on_host(optimizer: str, cluster: Cluster) -> str:
    """Why no parameter can live on the host, where an optimizer cannot step there, or it is not
    known how fast it does; empty if some can."""
    if any(each.whole for each in find_optimizers(optimizer).all):
        return f"{optimizer} steps on whole parameters, which is not done on hosts"
    if not cluster.host.memory_bytes_per_s:
        return f"cluster {cluster.name} does not say host.memory_bytes_per_s"
    return ""


def on_host_counts(request: PlanRequest) -> Mapping[str, tuple[int, ...]]:
    """Of how many parameters of each class the host may have the memory; classes that are not
    listed live on the device. AutoparError if some live on the host that cannot."""
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
    """Which of a request's parameters live on the host, under which choice."""

    def __init__(self, request: PlanRequest) -> None:
        graph, self._given = request.step, request.params_on_host
        self._known_on_host = dict(request.known_on_host)
        self._has_host_memory = request.cluster.has_host_memory
        known = can_be_on_host(graph)
        self.members = {key: known[key] for key in on_host_counts(request)}
        """The parameters of each class of which any may be on the host."""
        names = [name for found in self.members.values() for name in found]
        found = streamed(graph, request.mesh, names)
        self.streamed = {graph.nodes[each.param.node].target: each for each in found}
        self._known: dict[tuple[str, int], frozenset[str]] = {}

    def on_host(self, key: str, count: int) -> frozenset[str]:
        """Those of a class that are on the host, where so many are."""
        if self._given is not None:
            return self._given
        if (key, count) not in self._known:
            hosting = Hosting.of(self.members.get(key, ()), self._known_on_host)
            self._known[key, count] = frozenset(hosting.names(count))
        return self._known[key, count]

    def is_on_host(self, param: Node, choice: ParamChoice) -> bool:
        """Whether a parameter is on the host, where that is chosen for its class."""
        return bool(choice.num_on_host) and param.target in self.on_host(
            param.key, choice.num_on_host
        )

    def is_elsewhere(self, param: Node, choice: ParamChoice) -> bool:
        """Whether a parameter takes none of the device's memory at rest: that of the host of a CPU
        is the same."""
        return self._has_host_memory and self.is_on_host(param, choice)

    def stays(self, param: Node, choice: ParamChoice) -> bool:
        """Whether what was copied of it for forward is kept for backward."""
        return self.is_on_host(param, choice) and self.streamed[param.target].stays

    def who(self, param: Node) -> str:
        """What tells a parameter apart from others of its class that may be elsewhere."""
        return param.target if param.key in self.members else ""


class Streams:
    """The copies of a request's parameters that live on the host, or may."""

    def __init__(self, request: PlanRequest) -> None:
        self.graph, self.mesh, self.cluster = request.step, request.mesh, request.cluster
        self.hosts = ParamsOnHost(request)

    def add_copies(
        self,
        table: Mapping[str, NodeClass],
        costs: dict[str, IntArray],
        windows: Windows,
        number: Mapping[str, int],
    ) -> None:
        """What copies cost, and where they hide, per choice."""
        for key in self.hosts.members:
            entry = table[key]
            counts = [
                choice.num_on_host for choice in entry.choices if isinstance(choice, ParamChoice)
            ]
            for count in sorted({*counts} - {0}):
                chosen = np.array([each == count for each in counts])
                self._add(entry, self._on_host(key, count), chosen, costs, windows, number[key])

    def _on_host(self, key: str, count: int) -> list[StreamedParam]:
        """Those of a class that are on the host, where so many are."""
        names, hosts = self.hosts.on_host(key, count), self.hosts
        return [hosts.streamed[name] for name in hosts.members[key] if name in names]

    def _add(
        self,
        entry: NodeClass,
        streamed: list[StreamedParam],
        chosen: BoolArray,
        costs: dict[str, IntArray],
        windows: Windows,
        number: int,
    ) -> None:
        """The copies of parameters under the choices that are `chosen`."""
        device, microbatches = self.cluster.device, self.graph.microbatches
        tensor, atoms, sizes = entry.node.outputs[0], self.graph.atoms, self.mesh.sizes
        sides = (local_bytes(tensor, atoms, storage, sizes) for storage, _ in entry.outputs)
        each = np.array([copy_ns(num_bytes, self.cluster.host) for num_bytes in sides], np.int64)
        takes, launched = chosen * each, chosen * np.int64(to_ns(device.host_launch_s))
        for (link, is_once, place), count in self._places(streamed).items():
            costs[entry.key] += count * (1 if is_once else microbatches) * (takes + launched)
            sent = windows.hiding.sent(self.mesh.link_names.index(link), takes)
            hidden = sent, windows.hiding.launched(launched)
            windows.add_node(place, number, *hidden, count=count, once=is_once)

    def _places(
        self, streamed: list[StreamedParam]
    ) -> Counter[tuple[str, bool, WindowPlace | None]]:
        """How many copies there are on a link to or from the host, in every turn or once, by what
        hides them."""
        known = blocks_of(self.graph, self.mesh)
        found = Counter[tuple[str, bool, WindowPlace | None]]()
        for each in streamed:
            places = [*each.copied_in(known)]
            if each.gradient is not None:
                found[TO_HOST, True, places.pop()] += 1
            found.update((FROM_HOST, False, place) for place in places)
        return found
