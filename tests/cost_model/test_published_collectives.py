"""Collectives as others measured them: what the presets say, point by point.

A part of the points was fitted, as `cluster/links.py` says; none of the rest was.
"""

from __future__ import annotations

import pytest

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.collectives import collective_s

MIB, GIB = 2**20, 2**30

AIC = "ai-dynamo/aiconfigurator, comm/nccl"
ISSUE_309 = "NVIDIA/nccl-tests issue 309"
ISSUE_232 = "NVIDIA/nccl-tests issue 232: one GPU per node, one adapter of 400 Gb/s"

# kind, cluster, bytes of the unsharded side, microseconds, how far off it may be, source
POINTS = (
    ("all_reduce", "8xA100", 32 * MIB, 367, 0.08, AIC),
    ("all_gather", "4xA100", MIB, 22.5, 0.17, AIC),
    ("all_reduce", "8xH100", 256 * MIB, 1092, 0.01, AIC),
    ("reduce_scatter", "8xH100", 16 * MIB, 69.7, 0.08, AIC),
    ("all_gather", "8xH100", 2**16, 13.1, 0.1, AIC),
    ("all_reduce", "8xH200", 64 * MIB, 319.6, 0.03, AIC),
    ("all_gather", "8xB200", 128 * MIB, 206.8, 0.13, AIC),
    ("all_reduce", "8xB300", 256 * MIB, 715, 0.02, AIC),
    ("reduce_scatter", "4xGB300", 64 * MIB, 106.8, 0.12, AIC),
    ("all_reduce", "8xRTXPRO6000", 16 * MIB, 1248, 0.08, AIC),
    ("all_reduce", "2xL40S", 16 * MIB, 850, 0.08, AIC),
    ("all_reduce", "2x1xH100", 4 * MIB, 153.3, 0.08, ISSUE_232),
    ("all_reduce", "2x1xH100", 32 * MIB, 808, 0.06, ISSUE_232),
    ("all_reduce", "2x8xH100", 128 * MIB, 749, 0.06, ISSUE_309),
    ("all_reduce", "4x8xH100", GIB, 5803, 0.05, ISSUE_309),
    ("all_reduce", "4x8xH100", GIB, 6532, 0.08, ISSUE_309 + ", another cluster"),
    ("all_reduce", "8x8xH100", GIB, 7415, 0.14, ISSUE_309),
    ("all_reduce", "8x8xH100", GIB, 5593, 0.15, ISSUE_309 + ", tuned"),
    ("all_reduce", "16x8xH100", 16 * GIB, 92173, 0.04, "awsome-distributed-training, EFA on p5"),
    ("all_reduce", "8xMI300X", 4 * GIB, 24020, 0.01, "stas00/ml-engineering, network"),
)


@pytest.mark.parametrize(("kind", "cluster", "whole", "us", "within", "source"), POINTS)
def test_published(
    kind: str, cluster: str, whole: int, us: float, within: float, source: str
) -> None:
    described = parse_cluster(cluster)
    n = described.num_devices
    (on,) = parse_mesh(str(n), described).axes
    given = whole // n if kind == "all_gather" else whole
    brought = whole // n if kind == "reduce_scatter" else whole
    predicted_us = collective_s(kind, given, brought, on) * 1e6
    assert predicted_us == pytest.approx(us, rel=within), source
