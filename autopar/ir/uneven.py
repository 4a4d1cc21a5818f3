"""Dims cut into chunks that may be uneven: how parameters are stored where sizes do not divide.

`C(dim)` cuts a dim as DTensor's `Shard(dim)` and `torch.chunk` do: of `n` rows over `p` ranks each
gets ceil(n / p), the last ones fewer or none. The axes that cut a dim follow each other from the
fastest (last) to the slowest, as on the `DeviceMesh` of parameters. For as long as their sizes
divide the dim's first part, the cut is the even `S(dim)`. From the first axis that does not, it is
`C(dim)` of the rest, and the parts of the dim no longer matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from autopar.ir.graph import Atom, TensorType
from autopar.ir.sharding import C, Placement, R, S, Sharding


def held(size: int, cuts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(start, length) of the rows of one rank, of `size` rows in all. Each of `cuts` is (number of
    chunks, index of the rank's chunk). `start` is counted from the first of the `size` rows."""
    start, length = 0, size
    for num_parts, index in cuts:
        chunk = chunk_length(length, num_parts)
        first = min(index * chunk, length)
        start, length = start + first, min(chunk, length - first)
    return start, length


def chunk_length(size: int, num_parts: int) -> int:
    """Rows of the largest of `num_parts` chunks."""
    return -(-size // num_parts)


def largest(size: int, all_counts: Iterable[int]) -> int:
    """Rows of the largest chunk after cuts into `all_counts` chunks, one after the other."""
    for num_parts in all_counts:
        size = chunk_length(size, num_parts)
    return size


def chunked_axes(sharding: Sharding) -> tuple[int, ...]:
    """The axes that cut a dim into chunks, outermost (fastest) first."""
    axes = [k for k, placement in enumerate(sharding) if placement.kind == "C"]
    return tuple(reversed(axes))


def chunked_dim(sharding: Sharding) -> int | None:
    """The dim that is cut into chunks, if one is."""
    axes = chunked_axes(sharding)
    return sharding[axes[0]].dim if axes else None


def without_chunks(sharding: Sharding) -> Sharding:
    """The sharding of the tensor before it is cut into chunks."""
    return Sharding(tuple(R if p.kind == "C" else p for p in sharding))


def fits(tensor: TensorType, sharding: Sharding) -> bool:
    """Whether ranks can hold the chunks of `sharding`, if there are any. These must be of one dim,
    which other axes cut only before them and in its first part."""
    axes = chunked_axes(sharding)
    if not axes:
        return True
    dims = {sharding[k].dim for k in axes}
    even = [k for k, p in enumerate(sharding) if p.kind == "S" and p.dim in dims]
    return (
        len(dims) == 1
        and max(dims) < len(tensor.shape)
        and all(sharding[k].part == 0 and k > axes[0] for k in even)
    )


def is_padded(tensor: TensorType, source: Sharding, target: Sharding, sizes: Sequence[int]) -> bool:
    """Whether some rank pads its chunk in the step that joins or cuts one of them."""
    cut = max((source, target), key=lambda s: len(chunked_axes(s)))
    dim = chunked_dim(cut)
    axes = [k for k, p in enumerate(cut) if p.kind != "R" and p.dim == dim]
    return dim is not None and tensor.shape[dim] % prod(sizes[k] for k in axes) != 0


def stored(
    tensor: TensorType, atoms: Sequence[Atom], dims: Sequence[int | None], sizes: Sequence[int]
) -> Sharding:
    """The sharding that equals DTensor's with `Shard(dims[k])` on axis k, or `Replicate()` where
    `dims[k]` is None."""
    placements: list[Placement] = [R] * len(sizes)
    num_parts: dict[int, int] = {}
    uneven: set[int] = set()
    for axis in reversed(range(len(sizes))):
        dim = dims[axis]
        if dim is None:
            continue
        parts = tensor.parts[dim]
        num_parts[dim] = num_parts.get(dim, 1) * sizes[axis]
        if dim in uneven or not parts or atoms[parts[0]].size % num_parts[dim]:
            uneven.add(dim)
        placements[axis] = C(dim) if dim in uneven else S(dim)
    return Sharding(tuple(placements))


def chunkable_dim(tensor: TensorType, sizes: Sequence[int]) -> int | None:
    """The dim for uneven storage: the first with an element for each device. None if the tensor has
    no such dim."""
    num_devices = prod(sizes)
    return next((dim for dim, size in enumerate(tensor.shape) if size >= num_devices), None)
