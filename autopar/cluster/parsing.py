"""Clusters from a short text (`64x8xH100`) or a TOML file.

A text is sizes and the name of a device preset, outermost level first: `8xH100` is one node of
eight, `64x8xH100` is 64 nodes of eight, `H100` is one device. Sizes are taken as written: `64xH100`
is 64 devices joined by the link inside a node (an NVLink domain of 64), never split into nodes.

In a file, whatever is left out is taken from the device's preset, and a figure is a number in the
unit of its key or a quantity in quotes:

    name = "lab"
    device = "H100"                       # or [device], with preset = "H100" and what differs

    [[levels]]                            # outermost first
    size = 4
    link = "InfiniBand HDR 200"           # a preset; or a table, or nothing for the usual link

    [[levels]]
    size = 8
    link.name = "switch"
    link.bytes_per_s = "400GB/s"
    link.latency_s = "2us"                # of each step of a collective
    link.start_s = "14us"                 # of any collective
    link.efficiency = 0.8                 # the part of bytes_per_s they come to; 1 if left out
    link.contention = 0.5                 # the part that nothing hides (`ir.mesh.Link`); else 1
    link.source = "measured"

    [host]
    memory_bytes = "256GiB"               # a device's share, as of all that follows
    memory_bytes_per_s = "77GB/s"         # what that reads and writes
    bytes_per_s = "28GB/s"                # copies, each way

A device may say what its kernels reach of its rates (`ir.mesh.Kernels`), where it differs from its
preset or from what is usual: `kernels = {matmul = 0.7, start_s = "3us"}`.

Of an Ethernet preset `bytes_per_s` is what each group of the level has (a node, usually), for all
of its devices. On clusters of CPUs a preset is as gloo uses it (`links.by_gloo`). A link from a
preset has the preset's curves of collectives: at another `bytes_per_s` these reach the same part of
it. A link with a latency, a start or an efficiency of its own is described by these alone, unless
`curves` has measurements on it (`ir.mesh.Curve`):

    link = {preset = "NVLink 4", bytes_per_s = "225GB/s"}
    link.curves = [{kind = "all_gather", ranks = 8, start_s = "10us", reach = 0.8, knee = 1}]

A profile (`autopar profile`) is a description too: that of the cluster it ran on.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, asdict, replace
from dataclasses import fields as own_fields
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autopar.cluster.figures import MAX_DEVICES, checked
from autopar.cluster.foreign import EXAMPLES, cluster_from
from autopar.cluster.links import LINK_ALIASES, LINKS, SHARED_LINKS, at_most_gloo, by_gloo
from autopar.cluster.measured import measured_on
from autopar.cluster.presets import SYSTEMS, System, device, preset
from autopar.cluster.profile import Profile
from autopar.errors import ClusterError
from autopar.ir.files import read_at_most
from autopar.ir.mesh import Cluster, Curve, Device, Host, Kernels, Level, Link
from autopar.ir.units import parse_bytes, parse_bytes_per_s, parse_seconds

_MAX_FILE_BYTES = 2**20
_OPTIONAL = frozenset({"preset", "efficiency", "contention", "curves", "kernels"})

_Figure = int | float | str
_Noun = TypeVar("_Noun", Device, Link, Host)


def parse_cluster(text: str | os.PathLike[str]) -> Cluster:
    """The cluster that `text` describes: sizes and a device, or the path of a `.toml` file or of a
    profile, a `.json` file.

    The inverse of `cluster.name` for clusters from presets. Upper and lower case are the same.
    ClusterError names the token or key that is wrong.
    """
    if not isinstance(text, str) or is_cluster_file(text):
        path = Path(text)
        return _profiled(path) if path.suffix.lower() == ".json" else _read(path)
    try:
        return _of_presets(text)
    except ClusterError:
        message = cluster_from(text)
        if message is None:
            raise
    raise ClusterError(f"cluster {text!r} {message}")


def is_cluster_file(text: str) -> bool:
    """Whether `text` is a path, and not sizes and a device."""
    return text.lower().endswith((".toml", ".json"))


def _of_presets(text: str) -> Cluster:
    match = re.fullmatch(r"\s*((?:\d+\s*x\s*)*)(.*?)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None or not match[2]:
        raise ClusterError(f"cluster {text!r} names no device: write one, {EXAMPLES}")
    sizes = tuple(_size(token, text) for token in re.findall(r"\d+", match[1])) or (1,)
    base = device(match[2], f"cluster {text!r}", sizes)
    if len(sizes) > 2:
        raise ClusterError(
            f"cluster {text!r} has {len(sizes)} levels: a text has nodes and devices per node; "
            "describe more in a .toml file"
        )
    system = SYSTEMS[base.name]
    names = (system.network_link, system.node_link)[-len(sizes) :]
    levels = tuple(
        Level(
            size,
            _link(_LinkTable(preset=name), prod(sizes[k + 1 :]), base, f"cluster {text!r}"),
        )
        for k, (size, name) in enumerate(zip(sizes, names, strict=True))
    )
    name = "x".join([*map(str, sizes), base.name])
    return checked(
        Cluster(name, base, levels, system.host_of(levels[-1].size)), f"cluster {text!r}"
    )


def _profiled(path: Path) -> Cluster:
    """The cluster that a profile was measured on; presets stand for what it does not measure."""
    profile = Profile.load(path)
    try:
        cluster = _of_presets(profile.cluster)
    except ClusterError:
        raise ClusterError(
            f"profile {path} is of {profile.device}, which is no preset: describe the cluster in a "
            ".toml file, and give that as the cluster and this as its profile"
        ) from None
    return checked(replace(measured_on(cluster, profile), name=path.stem), f"profile {path}")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the tables of a cluster file; None stands for a key that was left out."""


class _DeviceTable(_File):
    preset: str | None = None
    name: str | None = None
    kind: str | None = None
    flops_per_s: dict[str, int | float] | None = None
    memory_bytes: _Figure | None = None
    memory_bytes_per_s: _Figure | None = None
    launch_s: _Figure | None = None
    source: str | None = None
    kernels: dict[str, _Figure] | None = None


class _CurveTable(_File):
    kind: str
    ranks: int
    start_s: _Figure
    reach: float
    knee: float
    shared: int = 0


class _LinkTable(_File):
    preset: str | None = None
    name: str | None = None
    bytes_per_s: _Figure | None = None
    latency_s: _Figure | None = None
    start_s: _Figure | None = None
    source: str | None = None
    efficiency: float | None = None
    contention: float | None = None
    curves: list[_CurveTable] | None = None


class _LevelTable(_File):
    size: int
    link: str | _LinkTable | None = None


class _HostTable(_File):
    memory_bytes: _Figure | None = None
    bytes_per_s: _Figure | None = None
    latency_s: _Figure | None = None
    source: str | None = None
    memory_bytes_per_s: _Figure | None = None


class _ClusterTable(_File):
    device: str | _DeviceTable
    levels: list[_LevelTable]
    name: str | None = None
    host: _HostTable | None = None


def _read(path: Path) -> Cluster:
    where = f"cluster file {path}"
    try:
        data = read_at_most(path, _MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ClusterError(f"{where} cannot be read: {why or error}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ClusterError(f"{where} is larger than {_MAX_FILE_BYTES} bytes: not a cluster file")
    try:
        content = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        message = cluster_from(path)
        raise ClusterError(f"{where} {message}" if message else f"{where}: {error}") from error
    if not content:
        raise ClusterError(f"{where} {cluster_from(path) or 'describes nothing'}")
    try:
        table = msgspec.convert(content, _ClusterTable)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{where}: {error}") from error
    return _from_table(table, path.stem, where)


def _from_table(table: _ClusterTable, stem: str, where: str) -> Cluster:
    given = _DeviceTable(preset=table.device) if isinstance(table.device, str) else table.device
    base = (
        device(given.preset, f"{where}, device", [level.size for level in table.levels])
        if given.preset is not None
        else None
    )
    system = SYSTEMS[base.name] if base else None
    of_node = table.levels[-1].size if table.levels else 1
    own_device = _device(given, base, f"{where}, device")
    cluster = Cluster(
        name=table.name if table.name is not None else stem,
        device=own_device,
        levels=_levels(table.levels, system, own_device, where),
        host=_merge(
            table.host or _HostTable(),
            system.host_of(of_node) if system else None,
            Host,
            {
                "memory_bytes": parse_bytes,
                "bytes_per_s": parse_bytes_per_s,
                "latency_s": parse_seconds,
                "memory_bytes_per_s": parse_bytes_per_s,
            },
            f"{where}, host",
        ),
    )
    return checked(cluster, where)


def _device(given: _DeviceTable, base: Device | None, where: str) -> Device:
    device = _merge(
        given,
        base,
        Device,
        {
            "memory_bytes": parse_bytes,
            "memory_bytes_per_s": parse_bytes_per_s,
            "launch_s": parse_seconds,
        },
        where,
    )
    rates = dict(base.flops_per_s) if base else {}
    for dtype, rate in (given.flops_per_s or {}).items():
        rates[dtype] = _figure(rate, float, f"{where}.flops_per_s.{dtype}")
    kernels = _kernels(given.kernels or {}, device.kernels, f"{where}.kernels")
    source = device.source
    if base and given.kernels and given.source is None:
        source += "; changed: kernels"
    return replace(device, flops_per_s=tuple(rates.items()), kernels=kernels, source=source)


def _kernels(given: dict[str, _Figure], base: Kernels, where: str) -> Kernels:
    known = asdict(base)
    for key in given:
        if key not in known:
            raise ClusterError(f"{where}: unknown key {key!r} (known: {', '.join(sorted(known))})")
    read = {key: _figure(value, parse_seconds, f"{where}.{key}") for key, value in given.items()}
    return replace(base, **read)


def _levels(
    tables: list[_LevelTable], system: System | None, device: Device, where: str
) -> tuple[Level, ...]:
    usual = (system.network_link, system.node_link) if system else ()
    levels: list[Level] = []
    for k, table in enumerate(tables):
        here = f"{where}, levels[{k}]"
        below = max(1, prod(inner.size for inner in tables[k + 1 :]))
        from_last = len(tables) - k
        if table.link is None and from_last > len(usual):
            raise ClusterError(f"{here} has no link, and none is usual there: name one")
        given = usual[-from_last] if table.link is None else table.link
        own = _LinkTable(preset=given) if isinstance(given, str) else given
        levels.append(Level(table.size, _link(own, below, device, here)))
    return tuple(levels)


def _link(given: _LinkTable, below: int, device: Device, where: str) -> Link:
    base = None if given.preset is None else _preset_link(given.preset, below, device, where)
    described = given.latency_s, given.start_s, given.efficiency
    if base is not None and described != (None, None, None):
        base = replace(base, curves=())
    here = f"{where}.link"
    readers = {
        "bytes_per_s": parse_bytes_per_s,
        "latency_s": parse_seconds,
        "start_s": parse_seconds,
    }
    link = _merge(given, base, Link, readers, here)
    if given.preset is not None and link.bytes_per_s > 0:
        link = replace(link, bytes_per_s=link.bytes_per_s / _sharers(given.preset, below, where))
    if device.kind == "cpu":
        link = replace(link if given.preset is None else at_most_gloo(link), is_gloo=True)
    curves = (
        Curve(
            curve.kind,
            curve.ranks,
            _figure(curve.start_s, parse_seconds, f"{here}.curves[{k}].start_s"),
            curve.reach,
            curve.knee,
            curve.shared,
        )
        for k, curve in enumerate(given.curves or ())
    )
    ordered = sorted(curves, key=lambda curve: (curve.kind, curve.shared, curve.ranks))
    return link if given.curves is None else replace(link, curves=tuple(ordered))


def _merge(
    given: _File,
    base: _Noun | None,
    make: type[_Noun],
    readers: dict[str, Callable[[str], int | float]],
    where: str,
) -> _Noun:
    """A `make` with the table's fields, and those of `base` where the table has none.

    If the source is left out, it says that the base was changed, if it was.
    """
    fields: dict[str, Any] = {}
    for key in given.__struct_fields__:
        value = getattr(given, key)
        if key in ("preset", "curves", "kernels") or value is None:
            continue
        fields[key] = _figure(value, readers[key], f"{where}.{key}") if key in readers else value
    if base is not None:
        if fields and "source" not in fields:
            fields["source"] = f"{base.source}; changed: {', '.join(sorted(fields))}"
        return replace(base, **fields)
    optional = {*_OPTIONAL, *(f.name for f in own_fields(make) if f.default is not MISSING)}
    missing = [key for key in given.__struct_fields__ if key not in {*fields, *optional}]
    if missing:
        raise ClusterError(f"{where} lacks {', '.join(missing)}: give it, or name a preset")
    return make(**fields)


def _figure(value: _Figure, read: Callable[[str], int | float], where: str) -> int | float:
    if isinstance(value, str):
        try:
            return read(value)
        except ValueError as error:
            raise ClusterError(f"{where}: {error}") from error
    try:
        number = float(value)
        return round(value) if read is parse_bytes else number
    except (OverflowError, ValueError):
        raise ClusterError(f"{where}: this is no number that can be used: {value!s:.40}") from None


def _preset_link(name: str, devices_below: int, device: Device, where: str) -> Link:
    """The link of that name, and how many share it, at the rate of all of them."""
    link = preset(name, LINKS, "link", where, LINK_ALIASES)
    sharers = _sharers(name, devices_below, where)
    if sharers > 1:
        link = replace(
            link,
            name=f"{link.name} / {sharers}",
            source=f"{link.source}; shared by {sharers} devices",
        )
    return by_gloo(link) if device.kind == "cpu" else link


def _sharers(name: str, devices_below: int, where: str) -> int:
    """How many devices share one link of that preset."""
    link = preset(name, LINKS, "link", where, LINK_ALIASES)
    return devices_below if link.name in SHARED_LINKS else 1


def _size(token: str, text: str) -> int:
    if len(token) > len(str(MAX_DEVICES)) or int(token) < 1:
        raise ClusterError(f"cluster {text!r}: {token!r} is not a size from 1 to {MAX_DEVICES}")
    return int(token)
