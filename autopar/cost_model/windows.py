"""Hidden communication: the windows of a problem, and of a plan.

A window is the blocks of one list in one phase, or a block beside lists (`ir.blocks`). The device
computes, and waits for redistributions that ops need. Meanwhile the links of every mesh axis gather
the parameters of the next block and reduce the gradients of the one before. A window takes as long
as its busiest resource. `c` is the compute in it; `w[a]` is waited for, and `h[a]` sent beside
compute, on axis `a`. `l` is the time of the host's launches, where the device has a host. `k[a]` is
the part by which compute and links slow each other down while both are busy (`Link.contention`).

    device    c + sum_a w[a] + sum_a k[a] h[a]
    axis a    w[a] + h[a] + k[a] c
    host      l

The links to and from the host are two more axes if activations are offloaded or parameters are on
the host; ops never wait for those.

The time of a pair was measured as `max + k min`, which is the larger of the first two lines. The
saving is the sum of all times minus that maximum, and is stated here resource by resource.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from autopar.ir.blocks import WindowPlace as Place
from autopar.ir.mesh import Device, Mesh
from autopar.ir.problem import IntArray, Saving, Window

NO_AXIS = -1
_WHOLE = 1000
"""Contention counts in thousandths: integers, so that sums can be checked exactly."""

Amount = TypeVar("Amount", int, IntArray)


@dataclass(frozen=True, slots=True)
class Hiding:
    """The savings of events in a window, one for each resource: the device, the axes of a mesh, the
    links to and from the host if there are copies, and the host if it launches (`has_host`)."""

    contention: tuple[int, ...]
    has_host: bool = False

    @staticmethod
    def of(mesh: Mesh, device: Device, copies: Sequence[int] = ()) -> Hiding:
        """For the links of a mesh, those to and from the host if they have contention `copies`, and
        the host behind `device`."""
        contention = (round(axis.crossed.contention * _WHOLE) for axis in mesh)
        return Hiding((*contention, *copies), device.host_launch_s > 0)

    def computed(self, ns: Amount) -> tuple[Amount, ...]:
        """The savings of one op's compute."""
        axes = (self._left(ns, axis) for axis in range(len(self.contention)))
        return (0 * ns, *axes, *self._but_host(ns))

    def launched(self, ns: Amount) -> tuple[Amount, ...]:
        """The savings of launches by the host."""
        return (*(ns for _ in range(1 + len(self.contention))), *self._but_host(0 * ns))

    def waited(self, axis: int, ns: Amount) -> tuple[Amount, ...]:
        """Those of a collective on `axis` that an op waits for; `NO_AXIS`: a copy on the device."""
        return (0 * ns, *self._beside(axis, ns))

    def sent(self, axis: int, ns: Amount) -> tuple[Amount, ...]:
        """The savings of a collective on `axis` that no op waits for."""
        device = 0 * ns if axis == NO_AXIS else self._left(ns, axis)
        return (device, *self._beside(axis, ns))

    def _left(self, ns: Amount, axis: int) -> Amount:
        return ns - ns * self.contention[axis] // _WHOLE

    def _beside(self, axis: int, ns: Amount) -> Iterator[Amount]:
        yield from (0 * ns if axis == each else ns for each in range(len(self.contention)))
        yield from self._but_host(ns)

    def _but_host(self, ns: Amount) -> tuple[Amount, ...]:
        return (ns,) if self.has_host else ()


_Table = dict[int, IntArray]


@dataclass(slots=True)
class Windows:
    """Collects the windows of a problem: the savings of its nodes' choices and its flows' arcs."""

    hiding: Hiding
    resources: tuple[str, ...]
    """Their names."""
    microbatches: int = 1
    """How often each addition happens in a step (`ir.passes.microbatches`), unless it happens
    `once`: in the last microbatch."""
    nodes: dict[Place, list[_Table]] = field(default_factory=dict[Place, list[_Table]])
    flows: dict[Place, list[_Table]] = field(default_factory=dict[Place, list[_Table]])

    @staticmethod
    def of(
        mesh: Mesh, device: Device, copies: Sequence[int] = (), microbatches: int = 1
    ) -> Windows:
        """No windows yet; arguments are those of `Hiding.of`."""
        hiding = Hiding.of(mesh, device, copies)
        links = mesh.link_names[: len(hiding.contention)]
        return Windows(hiding, ("device", *links, *("host",) * hiding.has_host), microbatches)

    def add_node(
        self,
        place: Place | None,
        node: int,
        *savings: Sequence[IntArray],
        count: int = 1,
        once: bool = False,
    ) -> None:
        """Adds the savings of a node's choices, `count` times, to a window; None is no window."""
        for saved in savings:
            self._add(self.nodes, place, node, [count * each for each in saved], once=once)

    def add_flow(
        self,
        place: Place | None,
        flow: int,
        saved: Sequence[IntArray],
        *,
        once: bool = False,
    ) -> None:
        """Adds the savings of a flow's arcs to a window; None is no window."""
        self._add(self.flows, place, flow, saved, once=once)

    def of_arcs(
        self,
        costs: IntArray,
        axes: IntArray,
        saved: Callable[[int, IntArray], tuple[IntArray, ...]],
    ) -> list[IntArray]:
        """The savings of arcs of these `costs` on links of `axes`, a row per resource."""
        rows = np.zeros((len(self.resources), len(costs)), np.int64)
        for axis in np.unique(axes).tolist():
            rows[:, axes == axis] = saved(axis, costs[axes == axis])
        return list(rows)

    def _add(
        self,
        tables: dict[Place, list[_Table]],
        place: Place | None,
        number: int,
        savings: Sequence[IntArray],
        *,
        once: bool = False,
    ) -> None:
        for there, count in _places_by_part(place, 1 if once else self.microbatches):
            rows = tables.setdefault(there, [{} for _ in savings])
            for row, saving in zip(rows, savings, strict=True):
                if saving.any():
                    more = count * saving
                    row[number] = row[number] + more if number in row else more

    def stated(self) -> tuple[Window, ...]:
        """All windows in which something may hide."""
        nothing: list[_Table] = [{} for _ in self.resources]
        windows: list[Window] = []
        for place in sorted({*self.nodes, *self.flows}):
            nodes, flows = (some.get(place, nothing) for some in (self.nodes, self.flows))
            if all(map(any, zip(nodes, flows, strict=True))):
                savings = map(Saving, self.resources, nodes, flows)
                windows.append(Window(window_key(place), tuple(savings)))
        return tuple(windows)


class Hidden:
    """Hidden time under a plan, added up event by event."""

    def __init__(self, hiding: Hiding, microbatches: int = 1) -> None:
        self._microbatches = microbatches
        self._sums: dict[Place, list[int]] = defaultdict(lambda: [*hiding.computed(0)])

    def add(self, place: Place | None, savings: Sequence[int], *, once: bool = False) -> None:
        """Adds an event in a window, in every microbatch or `once`; None is no window."""
        for there, count in _places_by_part(place, 1 if once else self._microbatches):
            for resource, saving in enumerate(savings):
                self._sums[there][resource] += count * saving

    @property
    def by_window(self) -> dict[str, int]:
        """Hidden nanoseconds by the key of a window; windows that hide nothing are left out."""
        least = {window_key(place): min(self._sums[place]) for place in sorted(self._sums)}
        return {key: ns for key, ns in least.items() if ns}


def _places_by_part(place: Place | None, microbatches: int) -> Iterator[tuple[Place, int]]:
    """The windows of the last microbatch and of all before it, each with the number of times that
    an event happens there. An event of one microbatch hides in the last; None is no window."""
    if place is None:
        return
    yield place, 1
    if microbatches > 1:
        phase, name = place
        yield (phase, f"{name} {_BEFORE}".lstrip()), microbatches - 1


_BEFORE = "in the microbatches before"


def window_key(place: Place) -> str:
    """`forward model.layers.*`"""
    return f"{place[0].value} {place[1]}".rstrip()
