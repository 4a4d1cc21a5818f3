"""Prices of collectives: the published formulas, what measured links add to them, and the volumes
of the literature's schemes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.links import LINKS
from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
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
plain_links = st.builds(
    Link,
    name=st.just("test"),
    bytes_per_s=st.floats(1e8, 1e12),
    latency_s=st.floats(0, 1e-3),
    start_s=st.floats(0, 1e-3),
    source=st.just("test"),
    efficiency=st.just(1.0),
    curves=st.just(()),
)
presets = st.sampled_from(tuple(LINKS.values()))
links = plain_links | presets


@given(kinds, sizes, shards, shards, links)
def test_more_bytes_never_cost_less(kind: str, n: int, a: int, b: int, link: Link) -> None:
    less, more = sorted((a * n, b * n))
    assert seconds(kind, less, n, link) <= seconds(kind, more, n, link)
    assert received(kind, less, n) <= received(kind, more, n)


@given(kinds, sizes, shards, plain_links)
def test_no_jumps(kind: str, n: int, shard: int, link: Link) -> None:
    """A shard of one more byte costs at most the bytes that this adds: twice n over the link."""
    whole = shard * n
    rise = seconds(kind, whole + n, n, link) - seconds(kind, whole, n, link)
    assert rise <= 2 * n / link.bytes_per_s + 1e-9 * seconds(kind, whole, n, link)


@given(kinds, sizes, shards, plain_links)
def test_no_collective_beats_its_link(kind: str, n: int, shard: int, link: Link) -> None:
    least = received(kind, shard * n, n) / link.bytes_per_s
    assert seconds(kind, shard * n, n, link) >= least * (1 - 1e-9)


@given(st.sampled_from([kind for kind in KINDS if kind != "slice"]), sizes, shards, plain_links)
def test_more_ranks_never_cost_less(kind: str, n: int, shard: int, link: Link) -> None:
    whole = shard * n * (n + 1)
    assert seconds(kind, whole, n, link) <= seconds(kind, whole, n + 1, link) * (1 + 1e-9)


# Switches that add up make all_reduce on 8 ranks cheaper than on 4, and devices that have a link
# to each other device more than one.
RISING = sorted(set(LINKS) - {"Infinity Fabric 4"})


FALLING = {
    ("reduce_scatter", "NVLink 4"): {3: 2.8e-4},
    ("reduce_scatter", "NVLink 5"): {3: 0.0435, 6: 1.4e-3, 7: 5.7e-3},
    ("reduce_scatter", "gloo loopback"): {3: 0.0392},
    ("all_gather", "NVLink 5"): {3: 0.0226},
    ("all_gather", "gloo loopback"): {3: 0.0447},
    ("all_to_all", "NVLink 5"): {3: 0.041, 5: 1.4e-3, 6: 9.0e-3, 7: 0.0128},
    ("all_to_all", "gloo loopback"): {3: 0.0611},
}
"""By what part so many ranks are put above one more, where only 2, 4 and 8 ranks were measured."""


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "all_to_all", "permute"])
@pytest.mark.parametrize("name", RISING)
def test_more_ranks_never_start_sooner_nor_send_faster(kind: str, name: str) -> None:
    """What lies between may fall: the root does from 4 to 8 ranks of A100, by 3 us at 1 MiB."""
    known, found = FALLING.get((kind, name), {}), set[int]()
    for n in range(2, 129):
        for whole in (0, 2**40 * n * (n + 1)):
            few, many = (seconds(kind, whole, ranks, LINKS[name]) for ranks in (n, n + 1))
            assert few <= many * (1 + known.get(n, 1e-6))
            found |= {n} if few > many * (1 + 1e-6) else set()
    assert found == known.keys()


@given(kinds, sizes, st.sampled_from([1, 2, 4, 8]), shards, presets, st.floats(1, 100))
def test_more_bandwidth_never_costs_more(
    kind: str, n: int, shared: int, shard: int, link: Link, times: float
) -> None:
    """Of the link, and of the one within the nodes."""

    def taken(outer: float, inner: float) -> float:
        nodes, nvlink = (
            replace(each, bytes_per_s=rate * each.bytes_per_s)
            for each, rate in ((link, outer), (LINKS["NVLink 4"], inner))
        )
        on = Axis("dp", n * shared, nodes, shared, nvlink if shared > 1 else None)
        return collective_s(kind, *local_bytes(kind, shard * n * shared, n * shared), on)

    assert taken(times, 1) <= taken(1, 1) * (1 + 1e-9)
    assert taken(1, times) <= taken(1, 1) * (1 + 1e-9)


@given(kinds, st.integers(1, 30), st.sampled_from(["8x8xH100", "4xA100", "2x6xL4", "16x8xB200"]))
def test_many_sizes_at_once(kind: str, factor: int, cluster: str) -> None:
    """An array of bytes and shares has the prices of each alone."""
    (on,) = parse_mesh(str(parse_cluster(cluster).num_devices), parse_cluster(cluster)).axes
    wholes = np.array([0, 1, 2**10, 2**20, 2**30], np.int64) * factor * on.size
    shares = np.array([0.1, 0.2, 0.3, 0.5, 1.0])
    given_ = local_bytes(kind, wholes, on.size)
    together = collective_s(kind, *given_, on, shares) + np.zeros(len(wholes))
    alone = [
        collective_s(kind, int(a), int(b), on, share)
        for a, b, share in zip(*given_, shares.tolist(), strict=True)
    ]
    assert together.tolist() == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_members_of_a_message_add_up_to_it(kind: str) -> None:
    (on,) = parse_mesh("16", parse_cluster("2x8xH100")).axes
    whole = 25 << 20
    parts = [whole // 2, whole // 4, whole // 4]
    taken = [collective_s(kind, *local_bytes(kind, part, 16), on, part / whole) for part in parts]
    assert sum(taken) == pytest.approx(collective_s(kind, *local_bytes(kind, whole, 16), on))


def test_between_measured_ranks_and_beyond() -> None:
    """Three ranks lie between two and four; sixteen start as much later than eight as eight than
    four, and send as fast as eight."""
    link = LINKS["NVLink 5"]
    starts = [seconds("all_gather", 0, n, link) for n in (2, 3, 4, 8, 16)]
    assert starts[0] < starts[1] < starts[2]
    assert starts[4] - starts[3] == pytest.approx(starts[3] - starts[2])
    rate = [(n - 1) / n * 2**50 / seconds("all_gather", 2**50, n, link) for n in (8, 16)]
    assert rate == pytest.approx([754e9] * 2, rel=1e-3)


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
