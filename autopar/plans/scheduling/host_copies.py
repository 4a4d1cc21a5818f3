"""When tensors are copied to the host and back: offloaded activations, parameters and gradients.

A copy to the host starts as soon as forward is done with a tensor. A copy back starts as late as
possible, since the tensor is held from then on. What is computed until the tensor is needed has to
hide this copy and all those behind it: the link takes one after the other.
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
"""Bytes that are moved to read and write an element of two bytes."""

_SLACK = 1.5
"""By what factor copies are assumed to take longer than they do, since some ops take less time than
is counted. Llama-8B, offloaded in part on eight H100s, waits 77 ms for copies without it, and 3 ms
with it."""


def pace(cluster: Cluster) -> int:
    """How many bytes a device gets from its host in the time that it takes to read and write 2**20
    elements: `Stage.reload_pace`."""
    unit_s = _UNIT * _ELEMENT_BYTES / cluster.device.memory_bytes_per_s
    return max(1, round(unit_s * cluster.host.bytes_per_s))


def elements(num_bytes: int, pace: int) -> float:
    """How many elements a device reads and writes while so many bytes come back."""
    return _UNIT * num_bytes / pace


def on_host(tensor: OffloadedTensor, layout: Layout) -> Value:
    """The value of an offloaded tensor in the host's memory."""
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
    """The key of the copies of a class of activations."""
    return f"{root_key(layout.graph, tensor.root)}@{kind}"


def _offload(tensor: OffloadedTensor, layout: Layout) -> Message:
    host_value = on_host(tensor, layout)
    key = copy_key(tensor, layout, "offload")
    return _message(layout, key, "offload", host_value._replace(on_host=False), host_value)


def _reload(tensor: OffloadedTensor, layout: Layout) -> Message:
    host_value = on_host(tensor, layout)
    target = host_value._replace(phase=Phase.BACKWARD, on_host=False)
    return _message(layout, copy_key(tensor, layout, "reload"), "reload", host_value, target)


def _message(
    layout: Layout, key: str, kind: CopyKind, source: Value, target: Value, **how: bool
) -> Message:
    """The copy of a tensor whose buffers are used as they are."""
    axis = layout.mesh.link_names.index(TO_HOST if kind == "offload" else FROM_HOST)
    as_it_is = Copies(sent=False, brought=False)
    return Message((Transfer(key, 0, source, target, HostCopy(kind, axis, **how), as_it_is),))


def _starts(in_order: list[OffloadedTensor], ops: list[Node], layout: Layout) -> list[int]:
    """The op before which the copy back of each tensor starts; tensors are in the order in which
    they are needed. If the pace of the link is not known, copies start as early as possible. None
    starts before the part of backward that needs it first."""
    graph, link_pace = layout.graph, layout.reload_pace
    placed = blocks_of(graph, layout.mesh)
    blocks = placed.of
    indices, of_op = [node.index for node in ops], [blocks[node.index] for node in ops]
    ends = accumulate(work(graph, node) / layout.mesh.num_devices for node in ops)
    begins = [0.0, *ends][: len(ops)]
    starts: list[int] = []
    latest = inf
    for tensor in reversed(in_order):
        num_bytes = layout.held_bytes(tensor.root, layout.for_backward(tensor.root))
        takes = _SLACK * elements(num_bytes, link_pace) if link_pace else inf
        latest = min(latest, begins[bisect_left(indices, tensor.first)]) - takes
        block = blocks[tensor.first]
        start = max(placed.first_with(Phase.BACKWARD, block), block - AHEAD)
        earliest = bisect_left(of_op, start)
        place = max(earliest, bisect_right(begins, latest) - 1)
        starts.append(indices[place])
    return starts[::-1]


# When parameters on the host (`ir.offloading`) come to the device, and gradients leave it.


def at_home(each: StreamedParam, layout: Layout) -> Value:
    """A parameter as it is stored, on the host."""
    return Value(Phase.FORWARD, each.param, layout.output_state(each.param), on_host=True)


def loads(layout: Layout, phase: Phase) -> dict[int, list[Message]]:
    """The copies of parameters to the device in a phase, in the order of their use, by the op
    before which they start. A gather starts a block ahead; copies start so many blocks ahead that
    it finds them there, in the same part of the phase."""
    blocks = blocks_of(layout.graph, layout.mesh)
    first = _first_ops(layout, phase)
    copies: dict[int, list[Message]] = defaultdict(list)
    due = ((_used_in(each, phase), each) for each in layout.streamed_params)
    for block, each in sorted((b, each) for b, each in due if b is not None):
        host_value = at_home(each, layout)
        target = host_value._replace(phase=phase, on_host=False)
        ahead = max(blocks.first_with(phase, block), block - AHEAD)
        key = _copy_key(each, layout, "reload")
        copies[first[ahead]].append(_message(layout, key, "reload", host_value, target))
    return copies


def unload(each: StreamedParam, layout: Layout, gradient: Value) -> Message:
    """The copy of a gradient, as it is stored, to the host."""
    key, host_value = _copy_key(each, layout, "offload"), gradient._replace(on_host=True)
    return _message(layout, key, "offload", gradient, host_value, is_read_there=True)


class StreamCopy(NamedTuple):
    """A copy of a parameter or of its gradient, of a kind of `HostCopy`. It happens in every
    microbatch, or `once`; `place` is the window that hides it."""

    key: str
    kind: CopyKind
    phase: Phase
    once: bool
    place: WindowPlace | None


def copies_of(each: StreamedParam, layout: Layout) -> Iterator[StreamCopy]:
    """The copies of a parameter and of its gradient."""
    places = iter(each.copied_in(blocks_of(layout.graph, layout.mesh)))
    loaded, unloaded = (_copy_key(each, layout, kind) for kind in ("reload", "offload"))
    for phase in Phase:
        if _used_in(each, phase) is not None:
            yield StreamCopy(loaded, "reload", phase, False, next(places))
    if each.gradient is not None:
        yield StreamCopy(unloaded, "offload", Phase.BACKWARD, True, next(places))


def _copy_key(each: StreamedParam, layout: Layout, kind: str) -> str:
    """The key of the copies of a class of parameters."""
    word = "load" if kind == "reload" else "unload"
    return f"{layout.graph.nodes[each.param.node].key}@{word}"


def _used_in(each: StreamedParam, phase: Phase) -> int | None:
    return each.forward if phase is Phase.FORWARD else each.backward


def _first_ops(layout: Layout, phase: Phase) -> dict[int, int]:
    """The first op of each block of a phase."""
    blocks = blocks_of(layout.graph, layout.mesh).of
    ops = reversed(layout.graph.with_role(Role.OP))
    return {blocks[n.index]: n.index for n in ops if n.phase is phase and not n.view}
