"""A profile in the place of the figures of a cluster: its device, and its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import median, quantiles
from typing import NamedTuple

from autopar.cluster.curves import Fit, crossing, fit
from autopar.cluster.profile import Matmul, Profile, Sent
from autopar.errors import ClusterError
from autopar.ir.mesh import Cluster, Curve, Device, Level, Link

_OUTSIDE = 0.99
_DIGITS = 5
"""More would differ between machines that compute the same fit."""


def measured_on(cluster: Cluster, profile: Profile) -> Cluster:
    """`cluster` with the device and the links that `profile` measured, its levels counted from the
    innermost. ClusterError if the profile is of another kind of device."""
    device = device_from_profile(profile, cluster.device)
    links: list[Link] = []
    for k, level in enumerate(reversed(cluster.levels)):
        # Meshes lay axes by the slowest link: noise must not turn levels round.
        most = _OUTSIDE * links[-1].bytes_per_s if links else inf
        links.append(_link(k, level.link, profile, most))
    levels = map(Level, (level.size for level in cluster.levels), reversed(links))
    return replace(cluster, device=device, levels=tuple(levels))


def device_from_profile(profile: Profile, base: Device) -> Device:
    """`base` with the rates that `profile` measured: what the largest matmul of each dtype and the
    largest copy reached, and the launch.

    The price of a kernel takes parts of datasheet rates, those of `base`'s kernels, so these are
    the rates with which it gives the measured times back. Dtypes that were not measured keep
    `base`'s rates.
    ClusterError if the profile is of another kind of device.
    """
    if profile.kind != base.kind:
        raise ClusterError(
            f"the profile is of {profile.device}, kind {profile.kind}; the cluster's device "
            f"{base.name} is of kind {base.kind}: measure on a device of the cluster"
        )
    copy = max(profile.memory_copies, key=lambda entry: entry.num_bytes)
    device = replace(base, memory_bytes_per_s=copy.bytes_per_s / base.kernels.pointwise)
    measured: dict[str, Matmul] = {}
    for entry in profile.matmuls:
        if entry.dtype not in measured or entry.flops > measured[entry.dtype].flops:
            measured[entry.dtype] = entry
    rates = {dtype: _peak(entry, device) for dtype, entry in measured.items()}
    kept = [dtype for dtype, _ in base.flops_per_s if dtype not in rates]
    source = f"profile of {profile.device} with torch {profile.torch}"
    if kept:
        source += f"; {', '.join(kept)}: {base.source}"
    return replace(
        device,
        flops_per_s=tuple(sorted({**dict(base.flops_per_s), **rates}.items())),
        launch_s=profile.launch_ns * 1e-9,
        source=source,
    )


def _peak(entry: Matmul, device: Device) -> float:
    """The peak FLOP/s with which the price of a product gives `entry`'s time back, which is that of
    the device, without a launch."""
    its, seconds = device.kernels, entry.time_ns * 1e-9
    start_s = device.floor_s(its.product_start_s) if device.kind == "cuda" else 0.0
    computing_s = seconds - start_s if start_s < seconds / 2 else seconds
    moving_s = entry.num_bytes / (its.product_memory * device.memory_bytes_per_s)
    # A matmul that is bound by memory says of the peak only that it is not lower than what it did.
    if moving_s > 0.9 * computing_s:
        return entry.flops / (its.product * seconds)
    return its.product_flops(entry.m * entry.n, entry.k) / (its.product * computing_s)


class _Place(NamedTuple):
    """Where collectives were measured: all that a curve is for."""

    kind: str
    shared: int
    sides: int
    ranks: int


def _link(level: int, base: Link, profile: Profile, most_bytes_per_s: float) -> Link:
    """The link of `level`, 0 the innermost, its nominal rate no more than given; `base` where
    nothing was measured on it."""
    measured: dict[_Place, list[Sent]] = {}
    for sent in profile.collectives:
        if sent.level == level:
            place = _Place(sent.kind, sent.shared, sent.sides, sent.ranks)
            measured.setdefault(place, []).append(sent)
    if not measured:
        return base
    found = {place: _fitted(measured[place]) for place in sorted(measured)}
    adapter = {place: _adapter_bytes_per_s(place, each) for place, each in found.items()}
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
        for place, each in found.items()
    )
    errors = [error for each in found.values() for error in each.errors]
    start_s, latency_s = _steps(curves)
    return Link(
        name=base.name,
        bytes_per_s=rate,
        latency_s=latency_s,
        start_s=start_s,
        source=f"profile with torch {profile.torch}, all {profile.num_devices} ranks at once; "
        f"fits within {_percents(errors)}",
        curves=curves,
        contention=_contention(level, profile, base),
    )


def _fitted(entries: Sequence[Sent]) -> Fit:
    return fit([(entry.num_bytes, entry.time_ns * 1e-9) for entry in entries])


def _adapter_bytes_per_s(place: _Place, found: Fit) -> float:
    times, adapters = crossing(place.kind, place.ranks, place.sides, place.shared)
    return found.bytes_per_s * times / adapters


def _link_byte_s(place: _Place, found: Fit) -> float:
    times, _ = crossing(place.kind, place.ranks, place.sides, place.shared)
    return 1 / (found.bytes_per_s * times)


def _steps(curves: Sequence[Curve]) -> tuple[float, float]:
    """(start, latency of a step) of what has no curve: through the starts of the all-gathers with
    the fewest and the most sides."""
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
