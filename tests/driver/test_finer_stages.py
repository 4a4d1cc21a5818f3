"""Ranks of a pipeline on meshes of three axes: looked at where those that they refine are near the
best, as of one stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.driver.search.incumbent import Trail
from autopar.driver.search.segment_division import Divided
from autopar.driver.search.segment_search import SegmentSearch
from autopar.plans.pipeline_orders import make_schedule
from autopar.plans.requests.policy import other_thresholds
from autopar.tracer import trace
from tests.driver.test_segments import Chain, asked
from tests.planned import hostless

FINE = "dp=2,cp=2,tp=2: what segments take"


def divided(heard: list[str], **options: object) -> Divided:
    with torch.device("meta"):
        graph = trace(Chain([4096] * 7), (torch.zeros(1024, 4096),)).graph
    wanted = asked(graph, 16, stages=2, microbatches=2, **options)
    wanted = replace(wanted, cluster=hostless("2x8xH100"))
    return SegmentSearch(wanted, Trail(heard.append)).divided(make_schedule("1f1b", 2, 2))


@pytest.mark.parametrize(
    ("devices", "within", "is_tried"), [(8, 10.0, True), (8, -0.5, False), (16, 10.0, False)]
)
def test_meshes_of_three_axes_are_looked_at_where_they_promise_something(
    devices: int, within: float, is_tried: bool
) -> None:
    heard: list[str] = []
    plain = divided([])
    with other_thresholds(refined_devices=devices, refined_within=within):
        found = divided(heard)
    assert (FINE in heard) is is_tried
    assert found.step_ns <= plain.step_ns


def test_none_is_looked_at_where_memory_binds() -> None:
    heard: list[str] = []
    with other_thresholds(refined_devices=8, refined_within=10.0):
        found = divided(heard, memory_limit="140MiB")
    assert found.is_tight and FINE not in heard
