"""Prices of collectives: the published formulas, and the volumes of the literature's schemes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.collectives import collective_s
from autopar.ir.mesh import Axis, Link
from autopar.ir.redistribute import KINDS
from tests.sent import received_bytes

LINK = Link("test", 100e9, 2e-6, 10e-6, "test")


def axis(size: int, link: Link = LINK) -> Axis:
    return Axis("dp", size, link)


def local_bytes(kind: str, whole: int, n: int) -> tuple[int, int]:
    """Local bytes in and out where the unsharded side has `whole`, n of which it is a multiple."""
    shard = whole // n
    return {
        "all_reduce": (whole, whole),
        "all_gather": (shard, whole),
        "reduce_scatter": (whole, shard),
        "all_to_all": (whole, whole),
        "permute": (whole, whole),
        "slice": (whole, shard),
    }[kind]


def seconds(kind: str, whole: int, n: int, link: Link = LINK) -> float:
    return collective_s(kind, *local_bytes(kind, whole, n), axis(n, link))


def received(kind: str, whole: int, n: int) -> int:
    return received_bytes(kind, *local_bytes(kind, whole, n), n)


@pytest.mark.parametrize(
    ("kind", "whole", "expected_s"),
    [
        ("all_gather", 8 * 10**9, 7 * 2e-6 + 7e9 / 100e9),
        ("reduce_scatter", 8 * 10**9, 7 * 2e-6 + 7e9 / 100e9),
        ("all_to_all", 8 * 10**9, 7 * 2e-6 + 7e9 / 100e9),
        ("all_reduce", 8 * 10**9, 14 * 2e-6 + 14e9 / 100e9),
        ("all_reduce", 8000, 6 * 2e-6 + 16000 / 100e9),
        ("permute", 10**9, 2e-6 + 1e9 / 100e9),
        ("slice", 8 * 10**9, 0.0),
    ],
)
def test_formulas_on_eight_ranks(kind: str, whole: int, expected_s: float) -> None:
    start_s = 0.0 if kind == "slice" else LINK.start_s
    assert seconds(kind, whole, 8) == pytest.approx(start_s + expected_s, rel=1e-12)


def test_ring_and_tree_take_turns() -> None:
    """With n = 8 they cost the same where 8 a = B / (4 b): the price has no jump there."""
    even = round(4 * 8 * LINK.latency_s * LINK.bytes_per_s)
    tree_s = LINK.start_s + 6 * LINK.latency_s + 2 * even / LINK.bytes_per_s
    assert seconds("all_reduce", even, 8) == pytest.approx(tree_s, rel=1e-12)
    step = 800
    below = seconds("all_reduce", even, 8) - seconds("all_reduce", even - step, 8)
    above = seconds("all_reduce", even + step, 8) - seconds("all_reduce", even, 8)
    assert below == pytest.approx(2 * step / LINK.bytes_per_s, rel=1e-6)
    assert above == pytest.approx(14 / 8 * step / LINK.bytes_per_s, rel=1e-6)


def test_an_all_reduce_moves_what_scatter_and_gather_do() -> None:
    for n in (2, 3, 8):
        whole = 24 * n
        parts = received("reduce_scatter", whole, n) + received("all_gather", whole, n)
        assert received("all_reduce", whole, n) == parts


kinds = st.sampled_from(KINDS)
sizes = st.integers(2, 1024)
shards = st.integers(0, 2**33)
links = st.builds(
    Link,
    name=st.just("test"),
    bytes_per_s=st.floats(1e8, 1e12),
    latency_s=st.floats(0, 1e-3),
    start_s=st.floats(0, 1e-3),
    source=st.just("test"),
)


@given(kinds, sizes, shards, shards, links)
def test_more_bytes_never_cost_less(kind: str, n: int, a: int, b: int, link: Link) -> None:
    less, more = sorted((a * n, b * n))
    assert seconds(kind, less, n, link) <= seconds(kind, more, n, link)
    assert received(kind, less, n) <= received(kind, more, n)


@given(kinds, sizes, shards, links)
def test_no_jumps(kind: str, n: int, shard: int, link: Link) -> None:
    """A shard of one more byte costs at most the bytes that this adds: twice n over the link."""
    whole = shard * n
    rise = seconds(kind, whole + n, n, link) - seconds(kind, whole, n, link)
    assert rise <= 2 * n / link.bytes_per_s + 1e-9 * seconds(kind, whole, n, link)


@given(kinds, sizes, shards, links)
def test_no_collective_beats_its_link(kind: str, n: int, shard: int, link: Link) -> None:
    least = received(kind, shard * n, n) / link.bytes_per_s
    assert seconds(kind, shard * n, n, link) >= least * (1 - 1e-9)


@given(st.sampled_from([kind for kind in KINDS if kind != "slice"]), sizes, shards, links)
def test_more_ranks_never_cost_less(kind: str, n: int, shard: int, link: Link) -> None:
    whole = shard * n * (n + 1)
    assert seconds(kind, whole, n, link) <= seconds(kind, whole, n + 1, link) * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_talks_to_nobody(kind: str) -> None:
    assert collective_s(kind, 1000, 1000, axis(1)) == 0.0
    assert received_bytes(kind, 1000, 1000, 1) == 0


def test_shards_that_do_not_divide_are_rounded_up() -> None:
    """Ten bytes on four ranks: padded shards of three, and 7.5 bytes to receive."""
    assert received_bytes("all_gather", 3, 10, 4) == 8
    assert received_bytes("all_to_all", 9, 10, 4) == received_bytes("all_to_all", 10, 9, 4) == 8


@pytest.mark.parametrize(
    ("kind", "in_bytes", "out_bytes", "words"),
    [
        ("broadcast", 8, 8, "unknown collective 'broadcast' .*all_gather"),
        ("all_gather", 8, 4, "all_gather cannot turn 8 local bytes into 4"),
        ("reduce_scatter", 4, 8, "reduce_scatter cannot turn"),
        ("slice", 4, 8, "slice cannot turn"),
        ("all_reduce", 4, 8, "all_reduce cannot turn"),
        ("all_to_all", -4, 8, "negative bytes"),
    ],
)
def test_nonsense_is_an_error_even_on_one_rank(
    kind: str, in_bytes: int, out_bytes: int, words: str
) -> None:
    for n in (1, 4):
        with pytest.raises(ValueError, match=words):
            collective_s(kind, in_bytes, out_bytes, axis(n))


# Y = X W, with #X, #W, #Y the bytes of the whole tensors: what each device receives, forward and
# backward, under the tensor-parallel schemes of the literature.
X, W, Y = 2**9 * 3**4 * 5, 2**9 * 3**4 * 7, 2**9 * 3**4 * 11
ONE_AXIS = (2, 4, 8)
SQUARES = (2, 3, 4)


@pytest.mark.parametrize("p", ONE_AXIS)
def test_data_parallel(p: int) -> None:
    assert received("all_reduce", W, p) * p == 2 * (p - 1) * W


@pytest.mark.parametrize("p", ONE_AXIS)
def test_zero3(p: int) -> None:
    forward = received("all_gather", W, p)
    backward = received("all_gather", W, p) + received("reduce_scatter", W, p)
    assert forward * p == (p - 1) * W
    assert backward * p == 2 * (p - 1) * W


@pytest.mark.parametrize("p", ONE_AXIS)
def test_one_dimensional_column_and_row(p: int) -> None:
    column_backward, row_forward = received("all_reduce", X, p), received("all_reduce", Y, p)
    assert column_backward * p == 2 * (p - 1) * X
    assert row_forward * p == 2 * (p - 1) * Y


@pytest.mark.parametrize("q", SQUARES)
def test_two_dimensional(q: int) -> None:
    """X and W lie in q by q blocks; each is gathered along one axis. Backward gathers them again
    and scatters both gradients."""
    forward = received("all_gather", X // q, q) + received("all_gather", W // q, q)
    scatters = received("reduce_scatter", X // q, q) + received("reduce_scatter", W // q, q)
    assert forward * q**2 == (q - 1) * (X + W)
    assert (forward + scatters) * q**2 == 2 * (q - 1) * (X + W)


@pytest.mark.parametrize("q", SQUARES)
@pytest.mark.parametrize("d", [2, 3])
def test_two_and_a_half_dimensional(d: int, q: int) -> None:
    """d replicas of the q by q grid share the batch; the blocks of W's gradient are reduced."""
    rows = X // d
    forward = received("all_gather", rows // q, q) + received("all_gather", W // q, q)
    scatters = received("reduce_scatter", rows // q, q) + received("reduce_scatter", W // q, q)
    reduce = received("all_reduce", W // q**2, d)
    assert forward * q**2 * d == (q - 1) * (X + d * W)
    backward = forward + scatters + reduce
    assert backward * q**2 * d == 2 * forward * q**2 * d + 2 * (d - 1) * W


@pytest.mark.parametrize("q", SQUARES)
def test_three_dimensional(q: int) -> None:
    """On a cube, X and W are gathered along one axis each and Y is scattered along the third;
    backward Y's gradient is gathered and those of X and W are scattered."""
    forward = received("all_gather", X // q**2, q) + received("all_gather", W // q**2, q)
    forward += received("reduce_scatter", Y // q**2, q)
    backward = received("all_gather", Y // q**2, q) + received("reduce_scatter", X // q**2, q)
    backward += received("reduce_scatter", W // q**2, q)
    assert forward * q**3 == backward * q**3 == (q - 1) * (X + W + Y)
