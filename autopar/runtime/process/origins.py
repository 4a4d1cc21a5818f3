"""From which parameters, gradients, states and outputs a tensor in shards was computed, and by
which ops.

A rank alone computes from whole tensors, which it gets from the others. They may not have a tensor
that a script has computed, as `w.detach()` or `p.grad.abs()`: it is recomputed. So each is noted
with its op and inputs, which hold as long as none of them has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch.utils
from torch import Tensor

from autopar.runtime.process.moves import moves
from autopar.runtime.replacing import once
from autopar.runtime.torch_private import in_backward

_ORIGIN = "_autopar_origin"
_MOST_OPS = 16
"""How many ops one after the other are noted: a chain may grow as long as a script runs."""


class _Handle:
    """A tensor, which is not kept alive, for all notes of it; None once it has other contents."""

    def __init__(self, tensor: Tensor) -> None:
        place = id(tensor)
        self.tensor: ReferenceType[Tensor] | None = ref(tensor, lambda _: _handles.pop(place, None))

    def now(self) -> Tensor | None:
        return None if self.tensor is None else self.tensor()


_handles: dict[int, _Handle] = {}
"""By the `id` of each tensor that is noted, as long as it lives. On the tensor itself they would be
saved with it."""


class Leaf(NamedTuple):
    """A tensor that all ranks know, None if there is none; the note does not keep it alive."""

    handle: _Handle | None
    version: tuple[int, int]

    def now(self) -> Tensor | None:
        """The tensor, if it is there and as it was."""
        tensor = None if self.handle is None else self.handle.now()
        return tensor if tensor is not None and _version(tensor) == self.version else None


class Origin(NamedTuple):
    """How a tensor was computed: an op, with a Leaf or an Origin for each input tensor."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_view: bool
    depth: int


class _Noted(NamedTuple):
    origin: Origin
    version: tuple[int, int]

    def __reduce__(self) -> tuple[Any, ...]:
        """Notes do not hold in another process or for a copy: None there."""
        return type(None), ()


_NOBODY = Leaf(None, (0, 0))


def note(
    result: Any,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    view: bool,
    is_here: bool = False,
) -> None:
    """Note that `result`, if it is a tensor, is that of `op`. In a backward no rank reads alone. A
    result that `is_here`, whole, need not be recomputed: its note has no inputs, which may be
    parameters that are yet to be sharded."""
    if in_backward() or not isinstance(result, Tensor) or "out" in kwargs:
        return
    depth = 1
    sources: list[Any] = []
    for given in (*args, *kwargs.values()):
        if isinstance(given, (list, tuple)) and any(isinstance(x, Tensor) for x in given):
            return
        source = source_of(given) if isinstance(given, Tensor) else given
        source = _NOBODY if is_here and isinstance(source, Leaf) else source
        depth = max(depth, source.depth + 1) if isinstance(source, Origin) else depth
        sources.append(source)
    if depth > _MOST_OPS:
        return
    named = dict(zip(kwargs, sources[len(args) :], strict=True))
    origin = Origin(op, tuple(sources[: len(args)]), named, view, depth)
    # The version of a view also counts writes to its base, once autograd has seen it.
    vars(result)[_ORIGIN] = _Noted(origin, _version(args[0] if view else result))


def source_of(x: Tensor) -> Leaf | Origin:
    """The note of a tensor: how it was computed, or the tensor itself."""
    noted: _Noted | None = vars(x).get(_ORIGIN)
    if noted is not None and noted.version == _version(x) and _is_there(noted.origin):
        return noted.origin
    handle = _handles.get(id(x))
    if handle is None:
        handle = _handles[id(x)] = _Handle(x)
    return Leaf(handle, _version(x))


@once
def know_swaps() -> None:
    """From now on torch can swap the contents of two tensors, as where a parametrization sets a
    parameter: it refuses to while there are weak references to one of them. Notes of both end."""
    swap = torch.utils.swap_tensors

    @wraps(swap)
    def after_notes(t1: Tensor, t2: Tensor) -> None:
        for x in (t1, t2):
            handle = _handles.pop(id(x), None)
            if handle is not None:
                handle.tensor = None
            vars(x).pop(_ORIGIN, None)
        swap(t1, t2)

    torch.utils.swap_tensors = after_notes


def _is_there(source: Any) -> bool:
    """Whether all tensors exist that it can be recomputed from. A gradient comes from tensors that
    are gone; it is a known tensor itself."""
    if isinstance(source, Leaf):
        return source.now() is not None
    given = (*source.args, *source.kwargs.values())
    return all(_is_there(x) for x in given if isinstance(x, (Leaf, Origin)))


def _version(x: Tensor) -> tuple[int, int]:
    """(how often the tensor was written to, if that is counted; how often any parameter
    changed)."""
    return -1 if x.is_inference() else x._version, moves.count


def is_fresh(x: Tensor) -> bool:
    """Whether a tensor is known not to share memory with a parameter."""
    noted: _Noted | None = vars(x).get(_ORIGIN)
    source: Any = None if noted is None else noted.origin
    while isinstance(source, Origin) and source.is_view:
        source = source.args[0]
    return isinstance(source, Origin)


def recomputed(source: Leaf | Origin, whole: Callable[[Tensor | None], Any]) -> Any:
    """The tensor, plain and whole, recomputed from known ones, which `whole` gives. `whole` gets
    None for a tensor that is gone, or was changed."""
    if isinstance(source, Leaf):
        return whole(source.now())

    def entire(x: Any) -> Any:
        return recomputed(x, whole) if isinstance(x, (Leaf, Origin)) else x

    args = [entire(x) for x in source.args]
    return source.op(*args, **{name: entire(x) for name, x in source.kwargs.items()})


def numbers_in(x: Any) -> list[float]:
    """The numbers from which a tensor was computed, if that is noted."""
    noted: _Noted | None = vars(x).get(_ORIGIN) if isinstance(x, Tensor) else None
    waiting: list[Any] = [] if noted is None else [noted.origin]
    seen: set[int] = set()
    numbers: list[float] = []
    while waiting:
        source = waiting.pop()
        if type(source) in (int, float):
            numbers.append(float(source))
        elif isinstance(source, Origin) and id(source) not in seen:
            seen.add(id(source))
            waiting += [*source.args, *source.kwargs.values()]
    return numbers


def count_changes(written: Iterable[Tensor]) -> None:
    """A script is about to write to these. Gradients that autograd adds, and optimizer steps, do
    not count."""
    if not (in_backward() or moves.are_going_on or all(map(is_fresh, written))):
        moves.once()
        moves.in_place += 1
