"""Chunks of a dim: whose rows they are, what may be done with them, what travels, who asks."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from autopar.cost_model.limits import Limits
from autopar.cost_model.space import classes
from autopar.ir import uneven
from autopar.ir.graph import Atom, Role, TensorType
from autopar.ir.redistribute import buffer_bytes, is_legal, local_bytes, local_shape, step
from autopar.ir.sharding import Placement, Sharding
from autopar.ir.uses import groups
from tests.codegen.meshes import mesh
from tests.graphs import linear_step

ATOMS = (Atom(10, "a", True), Atom(3, "heads", True), Atom(4, "width", True), Atom(6, "b", True))
ROWS = TensorType("float32", (10, 4), ((0,), (2,)))
HEADS = TensorType("float32", (12, 6), ((1, 2), (3,)))


@given(
    size=st.integers(0, 400),
    ways=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
)
def test_rows_are_those_that_torch_gives(size: int, ways: list[int], data: st.DataObject) -> None:
    """`DTensor`, and `torch.chunk` applied again and again, are the two references."""
    index = [data.draw(st.integers(0, n - 1)) for n in ways]
    start, length = uneven.held(size, zip(ways, index, strict=True))
    piece, offset, left = torch.arange(size), 0, size
    for n, at in zip(ways, index, strict=True):
        left, first = Shard.local_shard_size_and_offset(left, n, at)
        offset += first
        chunks = piece.chunk(n)
        piece = chunks[at] if at < len(chunks) else piece[:0]
    assert (start, length) == (offset, left)
    assert torch.equal(torch.arange(start, start + length), piece)
    assert length <= uneven.largest(size, ways)
    assert uneven.held(size, [(n, 0) for n in ways]) == (0, uneven.largest(size, ways))


@pytest.mark.parametrize(
    ("kind", "dims", "sizes", "expected"),
    [
        (ROWS, (0,), (2,), "[S(0)]"),
        (ROWS, (0,), (3,), "[C(0)]"),
        (ROWS, (0, 0), (3, 2), "[C(0), S(0)]"),
        (ROWS, (0, 0), (2, 3), "[C(0), C(0)]"),
        (ROWS, (0, None, 1), (4, 2, 4), "[C(0), R, S(1)]"),
        (HEADS, (0,), (2,), "[C(0)]"),
        (HEADS, (0, 0), (2, 3), "[C(0), S(0)]"),
    ],
)
def test_dtensors_shards_are_even_for_as_long_as_they_can(
    kind: TensorType, dims: tuple[int | None, ...], sizes: tuple[int, ...], expected: str
) -> None:
    found = uneven.stored(kind, ATOMS, dims, sizes)
    assert str(found) == expected
    assert Sharding.parse(expected) == found
    assert is_legal(kind, ATOMS, found, sizes)


@pytest.mark.parametrize(
    ("kind", "text", "sizes"),
    [
        (ROWS, "[S(0), C(0)]", (2, 3)),
        (ROWS, "[C(0), C(1)]", (3, 3)),
        (ROWS, "[C(2)]", (3,)),
        (HEADS, "[C(0), S(0.1)]", (2, 2)),
    ],
)
def test_pieces_that_no_rank_can_hold_are_refused(
    kind: TensorType, text: str, sizes: tuple[int, ...]
) -> None:
    assert not is_legal(kind, ATOMS, Sharding.parse(text), sizes)


@pytest.mark.parametrize("text", ["C(0.1)", "C()", "c(0)", "C(-1)"])
def test_other_texts_are_no_placement(text: str) -> None:
    with pytest.raises(ValueError, match="not a placement"):
        Placement.parse(text)


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("[C(0), C(0)]", "[R, C(0)]", "all_gather"),
        ("[C(0), C(0)]", "[C(0), R]", None),
        ("[C(0), S(0)]", "[R, S(0)]", "all_gather"),
        ("[C(0), S(0)]", "[C(0), R]", None),
        ("[P, C(0)]", "[C(0), C(0)]", "reduce_scatter"),
        ("[P, C(0)]", "[R, C(0)]", "all_reduce"),
        ("[P, C(0)]", "[S(1), C(0)]", None),
        ("[C(0), P]", "[C(0), C(0)]", None),
        ("[R, C(0)]", "[C(0), C(0)]", "slice"),
        ("[R, C(0)]", "[S(1), C(0)]", None),
        ("[R, C(0)]", "[R, S(1)]", None),
    ],
)
def test_only_the_innermost_chunks_are_joined_or_cut(
    source: str, target: str, kind: str | None
) -> None:
    move = step(ROWS, ATOMS, Sharding.parse(source), Sharding.parse(target))
    assert (move and move.kind) == kind


@pytest.mark.parametrize(
    ("source", "target", "sizes", "expected"),
    [
        ("[C(0)]", "[R]", (3,), (4 * 16, 3 * 4 * 16)),
        ("[P]", "[C(0)]", (3,), (3 * 4 * 16, 4 * 16)),
        ("[R]", "[C(0)]", (3,), (10 * 16, 4 * 16)),
        ("[C(0), C(0)]", "[R, C(0)]", (3, 4), (16, 3 * 16)),
        ("[C(0), S(0)]", "[R, S(0)]", (3, 2), (2 * 16, 3 * 2 * 16)),
        ("[P, C(0)]", "[R, C(0)]", (3, 4), (3 * 16, 3 * 16)),
    ],
)
def test_what_travels_is_padded(
    source: str, target: str, sizes: tuple[int, ...], expected: tuple[int, int]
) -> None:
    states = Sharding.parse(source), Sharding.parse(target)
    move = step(ROWS, ATOMS, *states)
    assert move is not None
    assert buffer_bytes(ROWS, ATOMS, *states, move, sizes) == expected


def test_memory_is_that_of_the_largest_piece() -> None:
    assert local_shape(ROWS, ATOMS, Sharding.parse("[C(0), C(0)]"), (3, 4)) == (1, 4)
    assert local_shape(ROWS, ATOMS, Sharding.parse("[C(0), R]"), (3, 4)) == (4, 4)


@given(
    texts=st.lists(
        st.sampled_from(["R", "P", "S(0)", "S(1)", "S(0.1)", "C(0)", "C(1)"]), max_size=3
    ),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=3, max_size=3),
    tensor=st.sampled_from([ROWS, HEADS]),
)
def test_bytes_are_those_of_the_shape(
    texts: list[str], sizes: list[int], tensor: TensorType
) -> None:
    sharding = Sharding(tuple(map(Placement.parse, texts)))
    assume(is_legal(tensor, ATOMS, sharding, sizes))
    where = tensor, ATOMS, sharding, sizes[: len(texts)]
    assert local_bytes(*where) == 4 * prod(local_shape(*where))


def storages(hidden: int, out: int, *sizes: int) -> set[str]:
    """How the weight of one layer may be stored."""
    graph = linear_step(12, hidden, out)
    on = mesh(*sizes)
    table = classes(graph, on, groups(graph), Limits(graph, on), {})
    (entry,) = (e for e in table.values() if e.node.role is Role.PARAM)
    return {str(choice).partition("|")[0] for choice in entry.choices}


def test_chunks_are_offered_where_the_size_does_not_divide() -> None:
    assert storages(12, 6, 2) == {"[R]", "[S(0)]", "[S(1)]"}
    assert storages(10, 6, 3) == {"[R]", "[C(0)]", "[S(1)]"}
    assert storages(10, 7, 3) == {"[R]", "[C(0)]"}
    assert storages(2, 7, 3) == {"[R]", "[C(1)]"}
    assert storages(2, 2, 3) == {"[R]"}
    assert storages(10, 7, 3, 2) == {"[R, R]", "[R, S(0)]", "[C(0), R]", "[C(0), S(0)]"}
