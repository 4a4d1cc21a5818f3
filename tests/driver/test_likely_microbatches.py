"""The number of microbatches near which the search begins, where one does not fit."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

import msgspec
import pytest
import torch
from torch import Tensor, nn

from autopar.compile import best_on
from autopar.cost_model.least_memory import least_at_rest
from autopar.driver.search.open_counts import count_ladder, likely_count, possible_counts
from autopar.plans.estimates import StageEstimates
from autopar.plans.memory_refinement import MemoryBinds
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.planned import hostless, on_h100


@pytest.mark.parametrize("devices", [1, 8, 72, 576])
def test_more_microbatches_never_leave_a_device_more_samples(devices: int) -> None:
    for size in (*range(1, 130), 252, 1000, 1008, 2048):
        counts = count_ladder(size, devices)
        assert {*counts} >= {2**k for k in range(12) if size % 2**k == 0}, "none is lost"
        assert [*counts] == sorted({*counts}) and not any(size % n for n in counts)
        assert all(later <= 8 * count for count, later in pairwise(counts))
        samples = [size // n // gcd(size // n, devices) for n in counts]
        assert samples == sorted(samples, reverse=True)


@pytest.mark.parametrize(
    ("size", "devices", "counts"),
    [(32, 64, [1, 2, 4, 8, 16, 32]), (48, 8, [1, 2, 4, 8, 16, 48]), (7, 8, [1, 7]), (1, 8, [1]),
     (252, 64, [1, 2, 4, 9, 21, 63, 126, 252]), (10007, 8, [1])],
)  # fmt: skip
def test_counts_are_powers_of_two_where_samples_are(
    size: int, devices: int, counts: list[int]
) -> None:
    assert [*count_ladder(size, devices)] == counts


LAYERS, WIDTH, BATCH = 6, 512, 4096
LIMIT = 1 << 25
"""Above what is at rest, below what one microbatch holds."""


class Net(nn.Module):
    """Layers, which may be frozen, and a trained head."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(layers).requires_grad_(not is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x).square().mean()


def asked(limit: int, *, is_frozen: bool = False) -> PlanRequest:
    with torch.device("meta"):
        graph = trace(Net(is_frozen=is_frozen), (torch.empty(BATCH, WIDTH),), {}).graph
    options = make_options(mesh="2", backend="eager", memory={"limit": limit})
    _, mesh = on_h100("2")
    return make_graph_request(graph, hostless("2xH100"), options).on(mesh)


def free(request: PlanRequest) -> StageEstimates:
    """The plan whatever its memory."""
    with pytest.raises(MemoryBinds) as found:
        best_on(request, silent, is_probe=True)
    assert found.value.free.estimates is not None
    return found.value.free.estimates


def holding(plan: StageEstimates, saved: int, compute_ns: int) -> StageEstimates:
    memory = msgspec.structs.replace(plan.memory, saved=saved, transient=0, unsharded=0)
    return msgspec.structs.replace(plan, memory=memory, compute_ns=compute_ns)


def test_what_recompute_cannot_save_is_split() -> None:
    request = asked(LIMIT)
    room = request.memory_limit_bytes - least_at_rest(request)
    for times in (2, 9, 70):
        # No time is lost by recompute: the fewest that a tenth of the activations fits in.
        count = likely_count(request, holding(free(request), times * room, 0))
        assert count == next(n for n in possible_counts(request.graph, 8) if 10 * n >= times)
    most = likely_count(request, holding(free(request), 10**6 * room, 0))
    assert most == BATCH // 2, "two devices share the samples of each"


def test_what_takes_long_to_recompute_is_split_further() -> None:
    request = asked(LIMIT)
    room = request.memory_limit_bytes - least_at_rest(request)
    assert likely_count(request, holding(free(request), 9 * room, 10**12)) == 16


def test_frozen_parameters_that_are_held_whole_would_be_gathered() -> None:
    """To gather them in every microbatch takes longer than what recompute costs."""
    counts: list[int] = []
    for is_frozen in (False, True):
        request = asked(LIMIT, is_frozen=is_frozen)
        room = request.memory_limit_bytes - least_at_rest(request)
        plan = holding(free(request), 4 * room, 90_000)
        sends = msgspec.structs.replace(plan, sends={})
        counts.append(likely_count(request, sends))
    assert counts == [4, 1]
