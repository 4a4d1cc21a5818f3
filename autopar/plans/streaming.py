"""When parameters that live on the host (`ir.residency`) come to the device, and gradients go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.graph import Phase, Role
from autopar.ir.mesh import FROM_HOST, TO_HOST
from autopar.ir.offloading import AHEAD
from autopar.ir.redistribute import Copies
from autopar.ir.residency import Streamed
from autopar.ir.schedule import HostCopy, Message, Transfer, Value
from autopar.plans.layout import Layout

_LOAD, _UNLOAD = "load", "unload"


def at_home(each: Streamed, layout: Layout) -> Value:
    """A parameter as it is stored, on the host."""
    return Value(Phase.FORWARD, each.param, layout.made(each.param), on_host=True)


def loads(layout: Layout, phase: Phase) -> dict[int, list[Message]]:
    """The copies of parameters to the device in a phase, in the order in which they are used, by
    the op before which they start: so many blocks ahead that a gather, which starts a block ahead,
    finds them there, in the same part of the phase."""
    known = blocks_of(layout.graph, layout.mesh)
    first = _first_ops(layout, phase)
    found: dict[int, list[Message]] = defaultdict(list)
    due = ((_used_in(each, phase), each) for each in layout.streamed)
    for block, each in sorted((b, each) for b, each in due if b is not None):
        home = at_home(each, layout)
        target = home._replace(phase=phase, on_host=False)
        copy = HostCopy("reload", layout.mesh.link_names.index(FROM_HOST))
        ahead = max(known.first_with(phase, block), block - AHEAD)
        found[first[ahead]].append(_message(each, layout, home, target, copy))
    return found


def unload(each: Streamed, layout: Layout, gradient: Value) -> Message:
    """The copy of a gradient, as it is stored, to the host."""
    copy = HostCopy("offload", layout.mesh.link_names.index(TO_HOST), is_read_there=True)
    return _message(each, layout, gradient, gradient._replace(on_host=True), copy)


class StreamCopy(NamedTuple):
    """A copy of a parameter or of its gradient, of a kind of `HostCopy`. It happens in every turn,
    or `once`; `place` is what hides it."""

    key: str
    kind: Literal["offload", "reload"]
    phase: Phase
    once: bool
    place: WindowPlace | None


def copies_of(each: Streamed, layout: Layout) -> Iterator[StreamCopy]:
    """Those of a parameter."""
    places = iter(each.copied_in(blocks_of(layout.graph, layout.mesh)))
    loaded, unloaded = (_copy_key(each, layout, kind) for kind in ("reload", "offload"))
    for phase in Phase:
        if _used_in(each, phase) is not None:
            yield StreamCopy(loaded, "reload", phase, False, next(places))
    if each.gradient is not None:
        yield StreamCopy(unloaded, "offload", Phase.BACKWARD, True, next(places))


def _copy_key(each: Streamed, layout: Layout, kind: str) -> str:
    """What the copies of a class are called."""
    word = _LOAD if kind == "reload" else _UNLOAD
    return f"{layout.graph.nodes[each.param.node].key}@{word}"


def _used_in(each: Streamed, phase: Phase) -> int | None:
    return each.forward if phase is Phase.FORWARD else each.backward


def _first_ops(layout: Layout, phase: Phase) -> dict[int, int]:
    """The first op of each block of a phase."""
    graph, found = layout.graph, dict[int, int]()
    blocks = blocks_of(graph, layout.mesh).of
    for node in graph.with_role(Role.OP):
        if node.phase is phase and not node.view:
            found.setdefault(blocks[node.index], node.index)
    return found


def _message(
    each: Streamed, layout: Layout, source: Value, target: Value, copy: HostCopy
) -> Message:
    as_it_is = Copies(sent=False, brought=False)
    key = _copy_key(each, layout, copy.kind)
    return Message((Transfer(key, 0, source, target, copy, as_it_is),))
