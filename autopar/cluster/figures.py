"""Whether the figures of a cluster are such that a machine can have them."""

from __future__ import annotations

from dataclasses import asdict
from typing import NoReturn

from autopar.errors import ClusterError
from autopar.ir.mesh import Cluster, Curve, Link
from autopar.ir.redistribute import KINDS

MAX_DEVICES = 1_000_000
_SIZES = 1, 2**50
_RATES = 1e3, 1e21
_TIMES = 0, 1000
"""The bytes, bytes or FLOPs per second, and seconds that a cluster can be made of."""
_PARTS = 1e-3, 10
"""The parts of a rate that a collective or a kernel can come to; switches that add up make more of
one, and caches."""
_COUNTS = 0, 1_000_000
_Bounded = tuple[float, tuple[float, float]]
"""A figure, and what it must lie between."""


def checked(cluster: Cluster, where: str) -> Cluster:
    """The cluster, if every figure is usable; later parts divide by them, and add up what comes of
    it in 64 bits. ClusterError, at `where`, names the one that is not."""
    device, host = cluster.device, cluster.host
    figures: dict[str, _Bounded] = {
        "device.memory_bytes": (device.memory_bytes, _SIZES),
        "device.memory_bytes_per_s": (device.memory_bytes_per_s, _RATES),
        "device.launch_s": (device.launch_s, _TIMES),
        "host.memory_bytes": (host.memory_bytes, (0, _SIZES[1])),
        "host.bytes_per_s": (host.bytes_per_s, _RATES),
        "host.latency_s": (host.latency_s, _TIMES),
        "host.memory_bytes_per_s": (host.memory_bytes_per_s, (0, _RATES[1])),
    }
    figures |= {
        f"device.kernels.{name}": (figure, _kernel_range(name))
        for name, figure in asdict(device.kernels).items()
    }
    figures |= {f"device.flops_per_s.{dtype}": (x, _RATES) for dtype, x in device.flops_per_s}
    if "float32" not in dict(device.flops_per_s):
        _refuse(where, "device.flops_per_s", "without float32, the rate of every dtype not listed")
    if not cluster.levels:
        _refuse(where, "levels", "empty: give at least one, of size 1 for one device")
    for k, level in enumerate(cluster.levels):
        figures[f"levels[{k}].size"] = level.size, (1, MAX_DEVICES)
        figures |= _link_figures(where, f"levels[{k}].link", level.link)
    for key, (value, (least, most)) in figures.items():
        # Not a number is in no range.
        if not least <= value <= most:
            _refuse(where, key, f"{value!s:.40}: it must be from {least:g} to {most:g}")
    if cluster.num_devices > MAX_DEVICES:
        _refuse(where, "number of devices", f"{cluster.num_devices}: at most {MAX_DEVICES}")
    return cluster


def _kernel_range(name: str) -> tuple[float, float]:
    if name.endswith("_s"):
        return _TIMES
    return _COUNTS if name in ("wave", "depth", "processors", "attention_tokens") else _PARTS


def _link_figures(where: str, name: str, link: Link) -> dict[str, _Bounded]:
    figures: dict[str, _Bounded] = {
        f"{name}.bytes_per_s": (link.bytes_per_s, _RATES),
        f"{name}.latency_s": (link.latency_s, _TIMES),
        f"{name}.start_s": (link.start_s, _TIMES),
        f"{name}.efficiency": (link.efficiency, _PARTS),
        f"{name}.contention": (link.contention, (0, 1)),
    }
    for k, curve in enumerate(link.curves):
        here = f"{name}.curves[{k}]"
        if curve.kind not in KINDS:
            _refuse(where, f"{here}.kind", f"{curve.kind!r}: it must be one of {', '.join(KINDS)}")
        if _place(curve) in map(_place, link.curves[:k]):
            _refuse(where, f"{here}.ranks", f"{curve.ranks}: given twice for {curve.kind}")
        figures |= {
            f"{here}.ranks": (curve.ranks, (2, MAX_DEVICES)),
            f"{here}.shared": (curve.shared, (0, MAX_DEVICES)),
            f"{here}.start_s": (curve.start_s, _TIMES),
            f"{here}.reach": (curve.reach, _PARTS),
            f"{here}.knee": (curve.knee, (0, 1000)),
        }
    return figures


def _place(curve: Curve) -> tuple[str, int, int]:
    return curve.kind, curve.ranks, curve.shared


def _refuse(where: str, key: str, why: str) -> NoReturn:
    raise ClusterError(f"{where}: {key} is {why}")
