"""Presets: systems that autopar knows by the name of their device, in any spelling.

A new device is one entry in each of `devices.DEVICES` and `SYSTEMS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import TypeVar

from autopar.cluster.devices import ALIASES, DEVICES
from autopar.errors import ClusterError
from autopar.ir.mesh import Device, Host

# Presets by name, in any spelling, and the advice for an unknown name.

Preset = TypeVar("Preset")

_COMMON_DTYPES = ("bfloat16", "float16", "float32")
_PART = r"((?:\d+\s*x\s*)*)(.*)"


def preset(
    name: str, presets: Mapping[str, Preset], what: str, where: str, aliases: Mapping[str, str]
) -> Preset:
    """The preset of that name; ClusterError, which names the most similar one, if there is none."""
    key = _key(name, presets, aliases)
    if key is not None:
        return presets[key]
    nearest = _nearest(name, presets, aliases, 0.6)
    hint = f"; did you mean {nearest}?" if nearest else ""
    raise ClusterError(f"{where}: unknown {what} {name!r} (known: {', '.join(presets)}){hint}")


def device(name: str, where: str, sizes: Sequence[int]) -> Device:
    """The device of that name; ClusterError, with a file in which to describe it, if there is
    none. `sizes` are those of the requested levels."""
    try:
        return preset(name, DEVICES, "device", where, ALIASES)
    except ClusterError as error:
        raise ClusterError(f"{error}{_description(name, sizes)}") from None


def several_kinds(text: str) -> str | None:
    """What to do about a text that lists devices of several kinds, as in `2xL4+2xA10G`; None where
    it is no such list."""
    parts = [part.strip() for part in re.split(r"[+,;&|]|\band\b", text) if part.strip()]
    entries = [_counted(part) for part in parts]
    kinds = list(dict.fromkeys(kind for kind, _ in entries if kind is not None))
    if len(parts) < 2 or not kinds or not all(kind or sizes for kind, sizes in entries):
        return None
    counts = [count or 1 for _, count in entries]
    if len(kinds) == 1 and all(kind for kind, _ in entries):
        sizes = [len(counts), counts[0]] if len({*counts}) == 1 else [sum(counts), 1]
        return f"is in parts of one kind: write {sizes[0]}x{sizes[1]}x{kinds[0]}"
    least = min(kinds, key=lambda kind: (DEVICES[kind].memory_bytes, DEVICES[kind].peak("float32")))
    alone = " and ".join(part for part, (kind, _) in zip(parts, entries, strict=True) if kind)
    return (
        "has devices of several kinds, and a cluster has one: all ranks hold and compute as much. "
        f"Plan for each kind by itself ({alone}), or for all of them as if they were the one with "
        f"the least memory: {sum(counts)}x1x{least} takes each to be a node of its own"
    )


def _counted(part: str) -> tuple[str | None, int]:
    """(kind, count) of a part of a list: None for an unknown kind, 0 without a count."""
    match = re.fullmatch(_PART, part, re.IGNORECASE | re.ASCII | re.DOTALL)
    assert match is not None
    sizes = [int(size[:9]) for size in re.findall(r"\d+", match[1])]
    return _key(match[2], DEVICES, ALIASES), prod(sizes) if sizes else 0


def _description(name: str, sizes: Sequence[int]) -> str:
    """The lines of a file that describe a device like the one with the most similar name."""
    nearest = _nearest(name, DEVICES, ALIASES, 0.0)
    if nearest is None:
        return ""
    like, shown = DEVICES[nearest], "".join(filter(str.isprintable, name))
    common = [(dtype, rate) for dtype, rate in like.flops_per_s if dtype in _COMMON_DTYPES]
    rates = ", ".join(f"{dtype} = {rate / 1e12:g}e12" for dtype, rate in common)
    lines = [
        f"levels = [{', '.join(f'{{size = {size}}}' for size in sizes)}]",
        f'device.preset = "{nearest}"',
        f"device.name = {json.dumps(shown, ensure_ascii=False)}",
        f'device.memory_bytes = "{like.memory_bytes / 1e9:g}GB"',
        f'device.memory_bytes_per_s = "{like.memory_bytes_per_s / 1e9:g}GB/s"',
        f"device.flops_per_s = {{{rates}}}",
    ]
    intro = (
        ". Describe it in a file whose name ends in .toml, and give that. These are the figures of "
        f"{nearest}, the nearest name, to be replaced by its own; the rest stays {nearest}'s:"
    )
    return "\n    ".join([intro, *lines])


def _key(name: str, presets: Mapping[str, object], aliases: Mapping[str, str]) -> str | None:
    return _known(presets, aliases).get(_folded(name))


def _nearest(
    name: str, presets: Mapping[str, object], aliases: Mapping[str, str], cutoff: float
) -> str | None:
    known = _known(presets, aliases)
    nearest = get_close_matches(_folded(name), known, n=1, cutoff=cutoff)
    return known[nearest[0]] if nearest else None


def _known(presets: Mapping[str, object], aliases: Mapping[str, str]) -> dict[str, str]:
    return {_folded(key): key for key in presets} | {
        _folded(alias): key for alias, key in aliases.items()
    }


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.casefold())


@dataclass(frozen=True, slots=True)
class System:
    """The usual surroundings of a device: links (by name) in and between nodes, and the host, whose
    links several devices of a node may share. A device alone copies at `alone_bytes_per_s`."""

    node_link: str
    network_link: str
    host: Host
    alone_bytes_per_s: float

    def host_of(self, num_devices: int) -> Host:
        """The host of a node with `num_devices`."""
        if num_devices > 1:
            return self.host
        return replace(self.host, bytes_per_s=self.alone_bytes_per_s)


def _system(
    node: str,
    network: str,
    memory_gb: float,
    ram_gb_per_s: float,
    gb_per_s: float,
    source: str,
    alone_gb_per_s: float | None = None,
) -> System:
    """A system from the host's share per device: its memory, the rate of that memory (all channels
    of the usual processors), and the rate of copies to it, which may be another if a node has one
    device."""
    source = f"{source}; latency: estimate; memory: {ram_gb_per_s:g} GB/s, estimate by channels"
    rates = gb_per_s * 1e9, 10e-6, source, ram_gb_per_s * 1e9
    host = Host(round(memory_gb * 1e9), *rates)
    return System(node, network, host, 1e9 * (alone_gb_per_s or gb_per_s))


_HDR, _NDR, _XDR, _TCP = (
    "InfiniBand HDR 200",
    "InfiniBand NDR 400",
    "InfiniBand XDR 800",
    "Ethernet 100G",
)
_PAIR = "one device alone copies at {} GB/s (measured), two share an uplink of the host"
_PCIE_4 = "25 GB/s, PCIe 4.0 x16 (measured 26 on an A100 node)"
_DGX_H = f"2 TB for 8 GPUs; {_PAIR.format(55.4)}"

SYSTEMS: dict[str, System] = {
    "A100": _system(
        "NVLink 3",
        _HDR,
        256,
        51.2,
        11,
        f"DGX A100 640GB: 2 TB for 8 GPUs; {_PAIR.format(26)}, measured 11",
        26,
    ),
    "A100-40G": _system(
        "NVLink 3",
        _HDR,
        128,
        51.2,
        6.1,
        "DGX A100 320GB: 1 TB for 8 GPUs; measured 6.1 GB/s with all 8 ranks at once (cloud)",
    ),
    "H100": _system("NVLink 4", _NDR, 256, 76.8, 27.7, f"DGX H100: {_DGX_H}", 55.4),
    "H100-PCIe": _system(
        "PCIe 5 x16", _NDR, 128, 76.8, 27.7, f"estimate: 1 TB for 8 GPUs; {_PAIR.format(57)}", 57
    ),
    "H200": _system("NVLink 4", _NDR, 256, 76.8, 27.7, f"DGX H200: {_DGX_H}", 55.4),
    "GH200": _system(
        "NVLink 4", _NDR, 480, 384, 360, "GH200: 480 GB; NVLink-C2C, estimate: 0.8 of 450 GB/s"
    ),
    "B200": _system("NVLink 5", _NDR, 256, 89.6, 27.7, f"DGX B200: {_DGX_H}", 55.4),
    "GB200": _system(
        "NVLink 5",
        _NDR,
        240,
        256,
        180,
        "GB200 NVL72: 17 TB for 72 GPUs; two share a CPU's NVLink-C2C, estimate: 0.8 of 225 GB/s",
        360,
    ),
    "B300": _system("NVLink 5", _XDR, 256, 89.6, 27.7, f"DGX B300: {_DGX_H}", 55.4),
    "GB300": _system(
        "NVLink 5",
        _XDR,
        240,
        256,
        180,
        "GB300 NVL72: 17 TB for 72 GPUs; two share a CPU's NVLink-C2C, estimate: 0.8 of 225 GB/s",
        360,
    ),
    "MI300X": _system(
        "Infinity Fabric 4",
        "RoCE 400",
        256,
        115.2,
        50,
        "estimate: 2 TB for 8 GPUs; PCIe 5.0 x16 each",
    ),
    "V100": _system(
        "NVLink 2",
        _HDR,
        64,
        19.2,
        12.35,
        "DGX-1: 512 GB for 8 GPUs; PCIe 3.0 x16, measured 12.35 alone",
    ),
    "T4": _system("PCIe 3 x16", _TCP, 48, 25.6, 12.35, "estimate: 192 GB for 4 GPUs; as V100"),
    "L4": _system("PCIe 4 x16", _TCP, 48, 51.2, 25, f"estimate: 192 GB for 4 GPUs; {_PCIE_4}"),
    "L40S": _system("PCIe 4 x16", _TCP, 96, 51.2, 25, f"estimate: 384 GB for 4 GPUs; {_PCIE_4}"),
    "A10G": _system("PCIe 4 x16", _TCP, 48, 51.2, 25, f"g5.48xlarge: 768 GB for 8 GPUs; {_PCIE_4}"),
    "RTX3090": _system("PCIe 4 x16", _TCP, 32, 51.2, 25, f"estimate: 64 GB for 2 GPUs; {_PCIE_4}"),
    "RTX4090": _system("PCIe 4 x16", _TCP, 32, 51.2, 25, f"estimate: 64 GB for 2 GPUs; {_PCIE_4}"),
    "RTX6000Ada": _system(
        "PCIe 4 x16", _TCP, 64, 76.8, 25, f"estimate: 256 GB for 4 GPUs; {_PCIE_4}"
    ),
    "RTXPRO6000": _system(
        "PCIe 5 x16", _TCP, 128, 76.8, 50, "estimate: 1 TB for 8 GPUs; 50 GB/s, PCIe 5.0 x16"
    ),
    "cpu": _system(
        "gloo loopback",
        _TCP,
        4,
        10,
        10.0,
        "estimate: the device's own memory, as fast as a copy within it",
    ),
}
"""Per device; copies to the host are those of every device of a node at once."""
