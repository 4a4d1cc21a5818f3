"""Presets by their names, however these are written, and what to do about a name that is none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from math import prod
from typing import TypeVar

from autopar.cluster.devices import ALIASES, DEVICES
from autopar.errors import ClusterError
from autopar.ir.mesh import Device

Preset = TypeVar("Preset")

_COMMON_DTYPES = ("bfloat16", "float16", "float32")
_PART = r"((?:\d+\s*x\s*)*)(.*)"


def preset(
    name: str, presets: Mapping[str, Preset], what: str, where: str, aliases: Mapping[str, str]
) -> Preset:
    """The preset of that name; ClusterError, which names the most similar one, if there is none."""
    found = _key(name, presets, aliases)
    if found is not None:
        return presets[found]
    nearest = _nearest(name, presets, aliases, 0.6)
    hint = f"; did you mean {nearest}?" if nearest else ""
    raise ClusterError(f"{where}: unknown {what} {name!r} (known: {', '.join(presets)}){hint}")


def device(name: str, where: str, sizes: Sequence[int]) -> Device:
    """The device of that name; ClusterError, with a file in which to describe it, if there is
    none. `sizes` are those of the levels that have been asked for."""
    try:
        return preset(name, DEVICES, "device", where, ALIASES)
    except ClusterError as error:
        raise ClusterError(f"{error}{_description(name, sizes)}") from None


def several_kinds(text: str) -> str | None:
    """What to do about a text that lists devices of several kinds, as in `2xL4+2xA10G`; None where
    it is no such list."""
    parts = [part.strip() for part in re.split(r"[+,;&|]|\band\b", text) if part.strip()]
    found = [_counted(part) for part in parts]
    kinds = list(dict.fromkeys(kind for kind, _ in found if kind is not None))
    if len(parts) < 2 or not kinds or not all(kind or sizes for kind, sizes in found):
        return None
    counts = [count or 1 for _, count in found]
    if len(kinds) == 1 and all(kind for kind, _ in found):
        sizes = [len(counts), counts[0]] if len({*counts}) == 1 else [sum(counts), 1]
        return f"is in parts of one kind: write {sizes[0]}x{sizes[1]}x{kinds[0]}"
    least = min(kinds, key=lambda kind: (DEVICES[kind].memory_bytes, DEVICES[kind].peak("float32")))
    alone = " and ".join(part for part, (kind, _) in zip(parts, found, strict=True) if kind)
    return (
        "has devices of several kinds, and a cluster has one: all ranks hold and compute as much. "
        f"Plan for each kind by itself ({alone}), or for all of them as if they were the one with "
        f"the least memory: {sum(counts)}x1x{least} takes each to be a node of its own"
    )


def _counted(part: str) -> tuple[str | None, int]:
    """The kind of a part of a list, None if it is unknown, and how many there are, 0 if it does not
    say."""
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
    told = (
        ". Describe it in a file whose name ends in .toml, and give that. These are the figures of "
        f"{nearest}, the nearest name, to be replaced by its own; the rest stays {nearest}'s:"
    )
    return "\n    ".join([told, *lines])


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
