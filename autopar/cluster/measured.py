"""A cluster whose figures, of its device and its links, come from a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import median, quantiles
from typing import NamedTuple

from autopar.cluster.curves import Fit, crossing, fit
from autopar.cluster.profile import Matmul, Profile
from autopar.errors import ClusterError
from autopar.ir.grouping import grouped
from autopar.ir.mesh import (
    AttentionSeries,
    Cluster,
    Curve,
    Device,
    Level,
    Link,
    MatmulGrid,
    Measured,
)

_OUTSIDE = 0.99
_DIGITS = 5
"""Significant digits of fits. More would differ between machines that compute the same fit."""


def measured_on(cluster: Cluster, profile: Profile) -> Cluster:
    """`cluster` with the device and the links that `profile` measured, its levels counted from the
    innermost. ClusterError if the profile is of another kind of device."""
    device = device_from_profile(profile, cluster.device)
    links: list[Link] = []
    for k, level in enumerate(reversed(cluster.levels)):
        # Meshes lay axes by the slowest link: noise must not reverse the order of levels.
        most = _OUTSIDE * links[-1].bytes_per_s if links else inf
        links.append(_link(k, level.link, profile, most))
    if profile.learned:
        device = _slower_device(device, profile.learned.compute_ppm / 1e6)
        links = [_slower_link(link, profile.learned.communication_ppm / 1e6) for link in links]
    levels = map(Level, (level.size for level in cluster.levels), reversed(links))
    return replace(cluster, device=device, levels=tuple(levels))


def _slower_device(device: Device, times: float) -> Device:
    """The device whose kernels take `times` as long."""
    its, measured = device.kernels, device.measured
    return replace(
        device,
        flops_per_s=tuple((dtype, rate / times) for dtype, rate in device.flops_per_s),
        memory_bytes_per_s=device.memory_bytes_per_s / times,
        launch_s=device.launch_s * times,
        kernels=replace(
            its, start_s=its.start_s * times, matmul_start_s=its.matmul_start_s * times
        ),
        measured=Measured(
            matmuls=tuple(
                replace(grid, seconds=tuple(tuple(s * times for s in row) for row in grid.seconds))
                for grid in measured.matmuls
            ),
            attention=tuple(
                replace(each, seconds=tuple((keys, s * times) for keys, s in each.seconds))
                for each in measured.attention
            ),
            pointwise=tuple((moved, s * times) for moved, s in measured.pointwise),
        ),
    )


def _slower_link(link: Link, times: float) -> Link:
    """The link whose collectives take `times` as long."""
    return replace(
        link,
        bytes_per_s=link.bytes_per_s / times,
        latency_s=link.latency_s * times,
        start_s=link.start_s * times,
        curves=tuple(replace(curve, start_s=curve.start_s * times) for curve in link.curves),
    )


def device_from_profile(profile: Profile, base: Device) -> Device:
    """`base` with what `profile` measured. Prices are interpolated between its points. Beyond them,
    prices follow the rates that the largest matmul of each dtype and the largest pointwise op
    reached. The launch is measured too.

    Prices of kernels are in parts of datasheet rates, those of `base`'s kernels. So the rates here
    are the ones that reproduce the measured times with these parts. Dtypes that were not measured
    have `base`'s rates. ClusterError if the profile is of another kind of device.
    """
    if profile.kind != base.kind:
        raise ClusterError(
            f"the profile is of {profile.device}, kind {profile.kind}; the cluster's device "
            f"{base.name} is of kind {base.kind}: measure on a device of the cluster"
        )
    largest = max(profile.pointwise, key=lambda entry: entry.num_bytes)
    rate = largest.num_bytes / largest.time_ns * 1e9 / base.kernels.pointwise
    # No measured matmul moved more than the bandwidth allows.
    moved = (entry.num_bytes / entry.time_ns * 1e9 for entry in profile.matmuls)
    thin = max(base.kernels.matmul_memory, *(each / rate for each in moved))
    device = replace(
        base,
        memory_bytes_per_s=rate,
        kernels=replace(base.kernels, matmul_memory=thin),
        measured=_kernels(profile),
    )
    measured = grouped((entry.dtype, entry) for entry in profile.matmuls)
    rates = {
        dtype: _peak(max(entries, key=lambda entry: entry.flops), device)
        for dtype, entries in measured.items()
    }
    kept = [dtype for dtype, _ in base.flops_per_s if dtype not in rates]
    source = f"profile {profile.digest} of {profile.device} with torch {profile.torch}"
    if kept:
        source += f"; {', '.join(kept)}: {base.source}"
    return replace(
        device,
        flops_per_s=tuple(sorted({**dict(base.flops_per_s), **rates}.items())),
        launch_s=profile.launch_ns * 1e-9,
        source=source,
    )


def _kernels(profile: Profile) -> Measured:
    """The points of a profile, in order. Disturbances make a run longer: a point counts for no more
    than a larger one took."""
    grids = (_grid(profile, dtype) for dtype in sorted({e.dtype for e in profile.matmuls}))
    return Measured(
        matmuls=tuple(grid for grid in grids if grid),
        attention=tuple(s for backward in (False, True) for s in _series(profile, backward)),
        pointwise=_rising(sorted((e.num_bytes, e.time_ns * 1e-9) for e in profile.pointwise)),
    )


def _grid(profile: Profile, dtype: str) -> MatmulGrid | None:
    """The matmuls of `dtype` with square results, at the depths that all sizes have. None with less
    than two sizes or two depths."""
    seconds = {
        (e.m * e.n, e.k): e.time_ns * 1e-9
        for e in profile.matmuls
        if e.dtype == dtype and e.m == e.n
    }
    outs = sorted({out for out, _ in seconds})
    depths = sorted({k for _, k in seconds if all((out, k) in seconds for out in outs)})
    if min(len(outs), len(depths)) < 2:
        return None
    rows = tuple(
        tuple(
            min(seconds[a, b] for a in outs if a >= out for b in depths if b >= k) for k in depths
        )
        for out in outs
    )
    return MatmulGrid(dtype, tuple(outs), tuple(depths), rows)


def _series(profile: Profile, backward: bool) -> Iterator[AttentionSeries]:
    series = grouped(
        (
            (e.batch * e.heads * e.sequence, e.head_dim, e.dtype),
            (e.sequence, (e.backward_ns if backward else e.forward_ns) * 1e-9),
        )
        for e in profile.attentions
    )
    for place, points in sorted(series.items()):
        yield AttentionSeries(backward, *place, _rising(sorted(points)))


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((x, min(y for _, y in points[k:])) for k, (x, _) in enumerate(points))


def _peak(entry: Matmul, device: Device) -> float:
    """The peak FLOP/s with which the price of a matmul reproduces `entry`'s time, which is that of
    the device, without a launch."""
    its, seconds = device.kernels, entry.time_ns * 1e-9
    start_s = device.floor_s(its.matmul_start_s) if device.kind == "cuda" else 0.0
    computing_s = seconds - start_s if start_s < seconds / 2 else seconds
    moving_s = entry.num_bytes / (its.matmul_memory * device.memory_bytes_per_s)
    # A matmul that is bound by memory only gives a lower bound of the peak: its own rate.
    if moving_s > 0.9 * computing_s:
        return entry.flops / (its.matmul * seconds)
    return its.matmul_flops(entry.m * entry.n, entry.k) / (its.matmul * computing_s)


class _Place(NamedTuple):
    """The kind of collective, and the ranks, that a curve is for."""

    kind: str
    shared: int
    sides: int
    ranks: int


def _link(level: int, base: Link, profile: Profile, most_bytes_per_s: float) -> Link:
    """The link of `level`, 0 the innermost, with a nominal rate of at most `most_bytes_per_s`;
    `base` where nothing was measured on it."""
    measured = grouped(
        (_Place(sent.kind, sent.shared, sent.sides, sent.ranks), sent)
        for sent in profile.collectives
        if sent.level == level
    )
    if not measured:
        return base
    fits = {
        place: fit([(sent.num_bytes, sent.time_ns * 1e-9) for sent in measured[place]])
        for place in sorted(measured)
    }
    adapter = {place: _adapter_bytes_per_s(place, each) for place, each in fits.items()}
    rate = _rounded(min(most_bytes_per_s, max(adapter.values())))
    curves = tuple(
        Curve(
            place.kind,
            place.sides,
            _rounded(each.start_s),
            _rounded(adapter[place] / rate),
            _rounded(each.root_s / (each.start_s * _link_byte_s(place, each)) ** 0.5),
            place.shared,
        )
        for place, each in fits.items()
    )
    start_s, latency_s = _steps(curves)
    return Link(
        name=base.name,
        bytes_per_s=rate,
        latency_s=latency_s,
        start_s=start_s,
        source=f"profile with torch {profile.torch}, all {profile.num_devices} ranks at once; "
        f"fits within {_percents([error for each in fits.values() for error in each.errors])}",
        curves=curves,
        contention=_contention(level, profile, base),
        is_gloo=base.is_gloo,
    )


def _adapter_bytes_per_s(place: _Place, law: Fit) -> float:
    times, adapters = crossing(place.kind, place.ranks, place.sides, place.shared)
    return law.bytes_per_s * times / adapters


def _link_byte_s(place: _Place, law: Fit) -> float:
    times, _ = crossing(place.kind, place.ranks, place.sides, place.shared)
    return 1 / (law.bytes_per_s * times)


def _steps(curves: Sequence[Curve]) -> tuple[float, float]:
    """(start, latency of a step) of collectives without a curve: the line through the starts of the
    all-gathers with the fewest and the most sides."""
    gathers = sorted(
        (curve for curve in curves if curve.kind == "all_gather"), key=lambda curve: curve.ranks
    )
    if not gathers:
        return min(curve.start_s for curve in curves), 0.0
    first, last = gathers[0], gathers[-1]
    more = last.ranks - first.ranks
    latency_s = max(0.0, (last.start_s - first.start_s) / more) if more else 0.0
    latency_s = min(latency_s, first.start_s / first.ranks)
    return _rounded(first.start_s - (first.ranks - 1) * latency_s), _rounded(latency_s)


def _contention(level: int, profile: Profile, base: Link) -> float:
    parts = [
        (each.both_ns - max(each.computing_ns, each.sending_ns))
        / min(each.computing_ns, each.sending_ns)
        for each in profile.overlaps
        if each.level == level
    ]
    return _rounded(min(1.0, max(0.0, median(parts)))) if parts else base.contention


def _percents(errors: Sequence[float]) -> str:
    worst = quantiles(errors, n=10)[-1] if len(errors) > 1 else errors[0]
    return f"{100 * median(errors):.0f} % (median) and {100 * worst:.0f} % (worst tenth)"


def _rounded(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")
