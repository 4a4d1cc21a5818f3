"""When tensors are copied to the host and back: what is offloaded, parameters and gradients.

Copies to the host start as soon as forward is done with a tensor. Those back start as late as what
is computed until a tensor is needed covers them, and all those behind them, since the link brings
one after the other: the earlier one starts, the longer is it held.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from math import inf
from typing import Literal, NamedTuple

from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.graph import Node, Phase, Role
from autopar.ir.mesh import FROM_HOST, TO_HOST, Cluster
from autopar.ir.offloading import AHEAD, OffloadedTensor, StreamedParam
from autopar.ir.redistribute import Copies
from autopar.ir.schedule import HostCopy, Message, Transfer, Value
from autopar.ir.uses import root_key
from autopar.plans.layout import Layout
from autopar.plans.scheduling.bucketing import work

CopyKind = Literal["offload", "reload"]

COPIES: tuple[CopyKind, CopyKind] = ("offload", "reload")
"""The kinds of copies (`HostCopy`), on each of `mesh.HOST_LINKS`, in each phase."""

_UNIT = 1 << 20
_ELEMENT_BYTES = 4
"""What is moved for an element that is read and written, of two bytes."""

_SLACK = 1.5
"""How much longer a copy is taken to take than it does, since some of what is computed takes less
than is counted. Llama-8B, offloaded in part on eight H100s, waits 77 ms for copies without it, and
3 ms with it."""


def pace(cluster: Cluster) -> int:
    """How many bytes a device gets of its host in the time that it takes to read and write 2**20
    elements: `Structure.reload_pace`."""
    unit_s = _UNIT * _ELEMENT_BYTES / cluster.device.memory_bytes_per_s
    return max(1, round(unit_s * cluster.host.bytes_per_s))


def elements(num_bytes: int, pace: int) -> float:
    """How many elements a device reads and writes while a tensor comes back."""
    return _UNIT * num_bytes / pace


def on_host(tensor: OffloadedTensor, layout: Layout) -> Value:
    """What is handed over of a tensor that is away."""
    return Value(Phase.FORWARD, tensor.root, layout.for_backward(tensor.root), on_host=True)


def host_copies(layout: Layout, phase: Phase) -> dict[int, list[Message]]:
    """The copies of a phase, by the op before which they start."""
    nodes = layout.graph.nodes
    ops = [n for n in nodes if n.phase is phase and n.role is Role.OP and not n.view]
    copies: dict[int, list[Message]] = defaultdict(list)
    if phase is Phase.FORWARD:
        indices = [node.index for node in ops]
        for tensor in sorted(layout.offloaded_tensors, key=lambda each: (each.last, each.root)):
            behind = indices[bisect_right(indices, tensor.last)]
            copies[behind].append(_offload(tensor, layout))
    elif layout.offloaded_tensors:
        in_order = sorted(layout.offloaded_tensors, key=lambda each: (each.first, each.root))
        for tensor, before in zip(in_order, _starts(in_order, ops, layout), strict=True):
            copies[before].append(_reload(tensor, layout))
    return copies


def copy_key(tensor: OffloadedTensor, layout: Layout, kind: str) -> str:
    """What the copies of a class are called."""
    return f"{root_key(layout.graph, tensor.root)}@{kind}"


def _offload(tensor: OffloadedTensor, layout: Layout) -> Message:
    there = on_host(tensor, layout)
    key = copy_key(tensor, layout, "offload")
    return _message(layout, key, "offload", there._replace(on_host=False), there)


def _reload(tensor: OffloadedTensor, layout: Layout) -> Message:
    there = on_host(tensor, layout)
    back = there._replace(phase=Phase.BACKWARD, on_host=False)
    return _message(layout, copy_key(tensor, layout, "reload"), "reload", there, back)


def _message(
    layout: Layout, key: str, kind: CopyKind, source: Value, target: Value, **how: bool
) -> Message:
    """The copy of a tensor as it is."""
    axis = layout.mesh.link_names.index(TO_HOST if kind == "offload" else FROM_HOST)
    as_it_is = Copies(sent=False, brought=False)
    return Message((Transfer(key, 0, source, target, HostCopy(kind, axis, **how), as_it_is),))


def _starts(in_order: list[OffloadedTensor], ops: list[Node], layout: Layout) -> list[int]:
    """Before which op each of the tensors, in the order in which they are needed, is on its way; as
    early as may be where the pace of the link is not known, but in the part of backward that needs
    it first."""
    graph, known = layout.graph, layout.reload_pace
    placed = blocks_of(graph, layout.mesh)
    blocks = placed.of
    indices, of_op = [node.index for node in ops], [blocks[node.index] for node in ops]
    ends = accumulate(work(graph, node) / layout.mesh.num_devices for node in ops)
    begins = [0.0, *ends][: len(ops)]
    starts: list[int] = []
    latest = inf
    for tensor in reversed(in_order):
        num_bytes = layout.held_bytes(tensor.root, layout.for_backward(tensor.root))
        takes = _SLACK * elements(num_bytes, known) if known else inf
        latest = min(latest, begins[bisect_left(indices, tensor.first)]) - takes
        block = blocks[tensor.first]
        start = max(placed.first_with(Phase.BACKWARD, block), block - AHEAD)
        earliest = bisect_left(of_op, start)
        place = max(earliest, bisect_right(begins, latest) - 1)
        starts.append(indices[place])
    return starts[::-1]


# When parameters that live on the host (`ir.offloading`) come to the device, and gradients go.


def at_home(each: StreamedParam, layout: Layout) -> Value:
    """A parameter as it is stored, on the host."""
    return Value(Phase.FORWARD, each.param, layout.output_state(each.param), on_host=True)


def loads(layout: Layout, phase: Phase) -> dict[int, list[Message]]:
    """The copies of parameters to the device in a phase, in the order in which they are used, by
    the op before which they start: so many blocks ahead that a gather, which starts a block ahead,
    finds them there, in the same part of the phase."""
    known = blocks_of(layout.graph, layout.mesh)
    first = _first_ops(layout, phase)
    copies: dict[int, list[Message]] = defaultdict(list)
    due = ((_used_in(each, phase), each) for each in layout.streamed_params)
    for block, each in sorted((b, each) for b, each in due if b is not None):
        home = at_home(each, layout)
        target = home._replace(phase=phase, on_host=False)
        ahead = max(known.first_with(phase, block), block - AHEAD)
        key = _copy_key(each, layout, "reload")
        copies[first[ahead]].append(_message(layout, key, "reload", home, target))
    return copies


def unload(each: StreamedParam, layout: Layout, gradient: Value) -> Message:
    """The copy of a gradient, as it is stored, to the host."""
    key, there = _copy_key(each, layout, "offload"), gradient._replace(on_host=True)
    return _message(layout, key, "offload", gradient, there, is_read_there=True)


class StreamCopy(NamedTuple):
    """A copy of a parameter or of its gradient, of a kind of `HostCopy`. It happens in every turn,
    or `once`; `place` is what hides it."""

    key: str
    kind: CopyKind
    phase: Phase
    once: bool
    place: WindowPlace | None


def copies_of(each: StreamedParam, layout: Layout) -> Iterator[StreamCopy]:
    """Those of a parameter."""
    places = iter(each.copied_in(blocks_of(layout.graph, layout.mesh)))
    loaded, unloaded = (_copy_key(each, layout, kind) for kind in ("reload", "offload"))
    for phase in Phase:
        if _used_in(each, phase) is not None:
            yield StreamCopy(loaded, "reload", phase, False, next(places))
    if each.gradient is not None:
        yield StreamCopy(unloaded, "offload", Phase.BACKWARD, True, next(places))


def _copy_key(each: StreamedParam, layout: Layout, kind: str) -> str:
    """What the copies of a class are called."""
    word = "load" if kind == "reload" else "unload"
    return f"{layout.graph.nodes[each.param.node].key}@{word}"


def _used_in(each: StreamedParam, phase: Phase) -> int | None:
    return each.forward if phase is Phase.FORWARD else each.backward


def _first_ops(layout: Layout, phase: Phase) -> dict[int, int]:
    """The first op of each block of a phase."""
    blocks = blocks_of(layout.graph, layout.mesh).of
    ops = reversed(layout.graph.with_role(Role.OP))
    return {blocks[n.index]: n.index for n in ops if n.phase is phase and not n.view}
