"""Of which parameters, gradients, states and outputs a tensor in shards was made, and by what.

What one rank computes alone it can compute of whole tensors, if it has these. Of a tensor that a
script has made of others, as `w.detach()` or `p.grad.abs()`, other ranks may have none: it is made
again. So each is noted with the op that made it, as long as all of that is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor

from autopar.runtime.process.moves import moves
from autopar.runtime.torch_private import in_backward

_ORIGIN = "_autopar_origin"
_MOST_OPS = 16
"""How many ops one after the other are noted: a chain may grow as long as a script runs."""


class Leaf(NamedTuple):
    """A tensor that is known as such; nothing is kept for being noted."""

    tensor: ReferenceType[Tensor]
    version: tuple[int, int]

    def now(self) -> Tensor | None:
        """The tensor, if it is there and as it was."""
        tensor = self.tensor()
        return tensor if tensor is not None and _version(tensor) == self.version else None


class Origin(NamedTuple):
    """What a tensor was made by: an op, with a Leaf or an Origin for each tensor it was given."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_view: bool
    depth: int


class _Noted(NamedTuple):
    origin: Origin
    version: tuple[int, int]

    def __reduce__(self) -> tuple[Any, ...]:
        """Of no use in another process, nor with a copy: None there."""
        return type(None), ()


_NOBODY = Leaf(lambda: None, (0, 0))  # pyright: ignore[reportArgumentType]


def note(
    result: Any,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    view: bool,
    is_here: bool = False,
) -> None:
    """Note that `result`, if it is a tensor, is what `op` makes. In a backward nobody reads alone.
    What `is_here`, all of it, need not be recomputed: it does not refer to what it was made of,
    which may be a parameter that is yet to be sharded."""
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
    # A view counts what is written to what it is a view of, from when autograd has seen it.
    vars(result)[_ORIGIN] = _Noted(origin, _version(args[0] if view else result))


def source_of(x: Tensor) -> Leaf | Origin:
    """How a tensor is noted: by what it was made of, or as it is."""
    noted: _Noted | None = vars(x).get(_ORIGIN)
    if noted is not None and noted.version == _version(x) and _is_there(noted.origin):
        return noted.origin
    return Leaf(ref(x), _version(x))


def _is_there(source: Any) -> bool:
    """Whether all is there that it can be made of again. What autograd leaves as a gradient is made
    of what is gone, and known itself."""
    if isinstance(source, Leaf):
        return source.now() is not None
    given = (*source.args, *source.kwargs.values())
    return all(_is_there(x) for x in given if isinstance(x, (Leaf, Origin)))


def _version(x: Tensor) -> tuple[int, int]:
    """How often it was written to, where that is counted, and any parameter was."""
    return -1 if x.is_inference() else x._version, moves.count


def is_fresh(x: Tensor) -> bool:
    """Whether a tensor is known to have memory of its own, and not that of a parameter."""
    noted: _Noted | None = vars(x).get(_ORIGIN)
    source: Any = None if noted is None else noted.origin
    while isinstance(source, Origin) and source.is_view:
        source = source.args[0]
    return isinstance(source, Origin)


def recomputed(source: Leaf | Origin, whole: Callable[[Tensor | None], Any]) -> Any:
    """The tensor, plain and whole, of those that are known, which `whole` gives; None stands for
    one that is gone, or was changed."""
    if isinstance(source, Leaf):
        return whole(source.now())

    def entire(x: Any) -> Any:
        return recomputed(x, whole) if isinstance(x, (Leaf, Origin)) else x

    args = [entire(x) for x in source.args]
    return source.op(*args, **{name: entire(x) for name, x in source.kwargs.items()})


def numbers_in(x: Any) -> list[float]:
    """The numbers that went into what a tensor was made of, where that is noted."""
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
    """A script is about to write to these. Gradients that autograd adds, and what optimizers do,
    are no changes of its own."""
    if not (in_backward() or moves.are_going_on or all(map(is_fresh, written))):
        moves.once()
        moves.in_place += 1
