"""When what is offloaded goes and comes, in a stack of equal layers, by hand."""

from __future__ import annotations

import pytest

from autopar.ir.offloading import offloadable
from autopar.ir.schedule import Compute, Event, Start, Wait
from autopar.plans.scheduling.events import schedule
from autopar.plans.scheduling.host_copies import pace
from tests.graphs import linear_step
from tests.layouts import laid_out
from tests.planned import on_h100, plan_for
from tests.plans.test_scheduling import SHARDED, check
from tests.redone import redecided

LAYERS = 8
PIECE = 64 * 32 * 4 // 2
"""The bytes of what a layer makes, on each of two devices."""
PER_LAYER = (2 * 64 * 32 * 32 / 400 + 32 * 32 + 64 * 32) / 2
"""Elements that each reads and writes in a layer's backward."""


def told(pace: int) -> tuple[list[str], list[str]]:
    """Ops and copies of forward and of backward, by name."""
    graph = linear_step(64, 32, 32, layers=LAYERS)
    plan = plan_for(graph, "2", SHARDED, bucket_bytes=1)
    keys = (*offloadable(graph, plan.structure.only.mesh),)
    assert keys == tuple(f"forward.{k}" for k in range(LAYERS - 3))
    structure = redecided(plan.structure, offloaded=keys, reload_pace=pace)
    found = schedule(laid_out(graph, structure.only))
    check(graph, found)

    def text(event: Event) -> str:
        match event:
            case Compute(node):
                return graph.nodes[node].key
            case Start(message) if "load" in message.kind:
                return f"start {message.transfers[0].key}"
            case Wait(message) if "load" in message.kind:
                return f"wait {message.transfers[0].key}"
            case _:
                return ""

    forward, backward = ([text(e) for e in p] for p in (found.forward, found.backward))
    return [x for x in forward if x], [x for x in backward if x]


def test_offloads_start_behind_the_last_use_and_are_over_when_the_next_block_is() -> None:
    forward, _ = told(0)
    expected: list[str] = []
    for k in range(LAYERS):
        expected += [f"start forward.{k - 2}@offload"] * (1 < k < LAYERS - 1)
        expected += [f"wait forward.{k - 3}@offload"] * (k > 2)
        expected.append(f"forward.{k}")
    assert forward == expected


def before(backward: list[str], event: str) -> str:
    """The op before which something starts."""
    behind = backward[backward.index(event) :]
    return next(text for text in behind if "load" not in text)


IN_THE_LAYER_BEFORE = [f"dgrad.{k + 2}" for k in range(LAYERS - 3)]
WITH_THE_LAYER_BEFORE = [f"wgrad.{k + 2}" for k in range(LAYERS - 3)]
A_LAYER_EARLIER = [f"wgrad.{k + 3}" for k in range(LAYERS - 3)]


@pytest.mark.parametrize(
    ("copies_per_layer", "expected"),
    [
        (100.0, IN_THE_LAYER_BEFORE),
        # A gradient of the input is two thirds of a layer.
        (2.0, IN_THE_LAYER_BEFORE),
        (1.25, WITH_THE_LAYER_BEFORE),
        # Each takes longer than a layer, so that those needed earlier wait for those needed later.
        (0.78, ["dgrad.3", "dgrad.4", *A_LAYER_EARLIER[2:]]),
        (0.1, A_LAYER_EARLIER),
        (0.0, A_LAYER_EARLIER),
    ],
)
def test_reloads_start_as_late_as_covers_them(copies_per_layer: float, expected: list[str]) -> None:
    """Each takes 1.5 times as long as it does."""
    _, backward = told(round(1.5 * copies_per_layer * PIECE * 2**20 / PER_LAYER))
    for k in range(LAYERS - 3):
        assert backward[backward.index(f"wgrad.{k + 1}") - 1] == f"wait forward.{k}@reload"
        assert before(backward, f"start forward.{k}@reload") == expected[k]


def test_pace() -> None:
    cluster, _ = on_h100("2")
    assert pace(cluster) == round(2**22 / 3.35e12 * 27.7e9)
