"""What it costs and saves that parameters live on the host: copies, and the optimizer's step.

A class of parameters that may live there has each storage once more, in the host's memory
(`ParamChoice.on_host`): it takes none of the device's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from autopar.cost_model.host_link import copy_ns
from autopar.cost_model.moves import to_ns
from autopar.cost_model.optimizer import find_optimizer
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.errors import AutoparError
from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.choices import ParamChoice
from autopar.ir.mesh import FROM_HOST, TO_HOST
from autopar.ir.problem import IntArray
from autopar.ir.redistribute import local_bytes
from autopar.ir.residency import Streamed, can_be_hosted, streamed
from autopar.plans.request import PlanRequest

_MAX_AXES = 1
"""On how many mesh axes it is open where parameters live, as for what is offloaded."""


def residences(request: PlanRequest) -> Mapping[str, tuple[bool, ...]]:
    """Per class of parameters whether it lives on the host, or may live on either side; classes
    that are not listed live on the device. AutoparError if an optimizer cannot step on the host, or
    it is not known how fast it does."""
    optimizer, host = request.options.optimizer, request.cluster.host
    wrong = ""
    if find_optimizer(optimizer).by_tensor:
        wrong = f"{optimizer} steps on whole parameters, which is not done on hosts"
    elif not host.memory_bytes_per_s:
        wrong = f"cluster {request.cluster.name} does not say host.memory_bytes_per_s"
    if request.hosted is None:
        has_host = request.cluster.device.kind != "cpu" and len(request.mesh) <= _MAX_AXES
        offered = can_be_hosted(request.step) if has_host and not wrong else ()
        return dict.fromkeys(offered, (False, True))
    if request.hosted and wrong:
        raise AutoparError(f"parameters cannot live on the host: {wrong}")
    return dict.fromkeys(request.hosted, (True,))


class Streams:
    """The copies of a request's parameters that live on the host, or may."""

    def __init__(self, request: PlanRequest) -> None:
        self.graph, self.mesh, self.cluster = request.step, request.mesh, request.cluster
        self.of_class: dict[str, list[Streamed]] = {}
        for each in streamed(self.graph, self.mesh, residences(request).keys()):
            self.of_class.setdefault(self.graph.nodes[each.param.node].key, []).append(each)

    def add_copies(
        self,
        table: Mapping[str, NodeClass],
        costs: dict[str, IntArray],
        windows: Windows,
        number: Mapping[str, int],
    ) -> None:
        """What copies cost, and where they hide, per choice."""
        for key, members in self.of_class.items():
            self._add(table[key], members, costs, windows, number[key])

    def _add(
        self,
        entry: NodeClass,
        members: list[Streamed],
        costs: dict[str, IntArray],
        windows: Windows,
        number: int,
    ) -> None:
        device, turns = self.cluster.device, self.graph.turns
        takes, launched = np.zeros((2, len(entry.choices)), np.int64)
        for c, choice in enumerate(entry.choices):
            if isinstance(choice, ParamChoice) and choice.on_host:
                tensor, sizes = entry.node.outputs[0], self.mesh.sizes
                num_bytes = local_bytes(tensor, self.graph.atoms, choice.storage, sizes)
                takes[c] = copy_ns(num_bytes, self.cluster.host)
                launched[c] = to_ns(device.host_launch_s)
        for (link, is_once, place), count in self._places(members).items():
            costs[entry.key] += count * (1 if is_once else turns) * (takes + launched)
            if place is not None:
                axis = self.mesh.link_names.index(link)
                for savings in (
                    windows.hiding.sent(axis, takes),
                    windows.hiding.launched(launched),
                ):
                    saved = [count * each for each in savings]
                    windows.add_node(place, number, saved, once=is_once)

    def _places(self, members: list[Streamed]) -> Counter[tuple[str, bool, WindowPlace | None]]:
        """How many copies there are on a link to or from the host, in every turn or once, by what
        hides them."""
        known = blocks_of(self.graph, self.mesh)
        found = Counter[tuple[str, bool, WindowPlace | None]]()
        for each in members:
            places = [*each.copied_in(known)]
            if each.gradient is not None:
                found[TO_HOST, True, places.pop()] += 1
            found.update((FROM_HOST, False, place) for place in places)
        return found
