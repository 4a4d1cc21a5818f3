"""Texts and files that are no cluster, but say something of one: output of `nvidia-smi`, lists of
hosts, traces of torch's profiler, plans.

None of them is read as a cluster: they leave out what prices need, the device first of all. An
error says what was given, and what to write, with the figures from it.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from autopar.cluster.devices import preset_of
from autopar.cluster.presets import several_kinds
from autopar.ir.files import read_at_most
from autopar.ir.grouping import grouped

EXAMPLES = "for example 8xH100, 64x8xH100 or a path to a .toml file"

_HEAD_BYTES = 2**20
"""Only these first bytes of a file are read: a trace may be huge, and its beginning says where it
is from."""

_USUAL = "H100"
"""The device in a proposed cluster where the device is unknown."""

_OF_LINKS = {6: ("NVLink 2", "V100"), 12: ("NVLink 3", "A100"), 18: ("NVLink 4", "H100")}
_NVLINK_GB_PER_S = 25
"""The rate per link and direction of NVLink 2 to 4."""

_HOST = re.compile(
    r"(?P<host>[\w.@-]+)(:(?P<count>\d+))?(?P<slots>(\s+(max[_-])?slots\s*=\s*\d+)*)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Foreign:
    """`what` was given, as the end of "this is ...", and the `remedy`: what to write for the
    cluster, as sentences with lines of TOML behind them."""

    what: str
    remedy: str


def cluster_from(given: str | Path) -> str | None:
    """What was `given` in the place of a cluster, and what to do, as the end of a sentence. None if
    it is not devices of several kinds, a list of hosts, or a file."""
    if isinstance(given, str):
        if not given.strip():
            return None
        several = several_kinds(given)
        if several is not None:
            return several
        hosts = _node_list(given)
        if hosts is not None:
            return f"is {hosts.what}. {hosts.remedy}"
    try:
        foreign = look_into(given)
    except (FileNotFoundError, NotADirectoryError):
        is_path = os.sep in str(given) or re.search(r"[^\d\W]\.\w+$", str(given))
        return f"is no cluster, and no file: write {EXAMPLES}" if is_path else None
    except ValueError:
        return None
    except OSError as error:
        return f"is a file that cannot be read: {error.strerror}"
    if foreign is None and isinstance(given, Path):
        return None
    foreign = foreign or Foreign("a file of another kind", "")
    remedy = foreign.remedy or f"Write a cluster, {EXAMPLES}"
    return f"is {foreign.what}, and no cluster. {remedy}"


def look_into(path: str | os.PathLike[str]) -> Foreign | None:
    """What a file is that describes no cluster; None if it is of an unknown kind. OSError if it
    cannot be read, ValueError if its name cannot be that of a file."""
    if Path(path).is_dir():
        return Foreign("a folder", "")
    data = read_at_most(path, _HEAD_BYTES)
    if data[:2] == b"\x1f\x8b":
        data = _unzipped(data)
    if not data.strip():
        return Foreign("an empty file", "")
    try:
        text = data.decode(errors="strict" if len(data) < _HEAD_BYTES else "ignore")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        return Foreign("a binary file", "")
    # Terminals underline the first line of `nvidia-smi topo -m`.
    text = re.sub(r"\x1b?\[[\d;]*m", "", text)
    readers = (
        _trace, _plan, _topology, _list_of_gpus, _cluster_text, _toml, _node_list, _hostfile
    )  # fmt: skip
    return next(filter(None, (read(text) for read in readers)), None)


def _unzipped(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(data, _HEAD_BYTES)
    except zlib.error:
        return data


def _write(num_nodes: int, per_node: int, device: str | None) -> str:
    """The advice how to write so many devices. None is an unknown device."""
    sizes = f"{num_nodes}x{per_node}" if num_nodes > 1 else f"{per_node}"
    if device is not None:
        return f"write {sizes}x{device}"
    return f"write {sizes}x{_USUAL}, with the name of the devices for {_USUAL} if they are others"


def _trace(text: str) -> Foreign | None:
    if '"traceEvents"' not in text and not re.match(r'\s*\[\s*\{[^{}]*"ph"\s*:', text):
        return None
    listed = cast(list[object], _part(text, "deviceProperties", []))
    there = [cast(dict[str, Any], one) for one in listed if isinstance(one, dict)]
    ranks = _part(text, "distributedInfo", {}).get("world_size", 1)
    size = ranks if isinstance(ranks, int) and ranks > 0 else 1
    what = "a trace of one run, as torch.profiler exports it"
    if not there:
        return Foreign(what, f"For the CPUs that it ran on write {size}xcpu.")
    properties = there[0]
    name, memory = str(properties.get("name", "")), properties.get("totalGlobalMem")
    device = preset_of(name, memory if isinstance(memory, int) else None)
    per_node = min(size, len(there))
    if size % per_node:
        return Foreign(what, f"It tells of {size} ranks on nodes of {len(there)} devices, {name}.")
    summary = f"It tells of {size} ranks on {size // per_node} nodes, with {name}"
    return Foreign(what, f"{summary}: {_write(size // per_node, per_node, device)}.")


def _part(text: str, key: str, missing: Any) -> Any:
    """The value of a key of JSON that may be cut off behind it."""
    match = re.search(rf'"{key}"\s*:\s*', text)
    try:
        value = json.JSONDecoder().raw_decode(text, match.end())[0] if match else missing
    except ValueError:
        return missing
    return value if isinstance(value, type(missing)) else missing


def _plan(text: str) -> Foreign | None:
    if not text.startswith("{") or '"schema"' not in text or '"structure"' not in text:
        return None
    cluster: object = _part(text, "structure", {}).get("cluster")
    hint = f": its cluster is {cluster}, write that" if isinstance(cluster, str) else ""
    return Foreign("a plan of autopar's", f"It was made for one cluster{hint}.")


def _topology(text: str) -> Foreign | None:
    rows = [line.split() for line in text.splitlines()]
    header = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), None)
    if header is None:
        return None
    num = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    links = {row[0]: row[1 : num + 1] for row in rows if row[:1] != [] and row[1:] != header[1:]}
    table = [links.get(f"GPU{k}", []) for k in range(num)]
    what = f"what `nvidia-smi topo -m` prints of {num} GPUs"
    if any(len(row) != num or row[k] != "X" for k, row in enumerate(table)):
        return Foreign(f"{what}, cut off", f"Of these, {_write(1, num, None)}.")
    return Foreign(what, _joined(table))


def _joined(table: Sequence[Sequence[str]]) -> str:
    """The links between GPUs, and the TOML for them: with groups that NVLink joins, if these are
    alike and equally large."""
    num = len(table)
    kinds = Counter(kind for k, row in enumerate(table) for kind in row[k + 1 :])
    text = f"They are joined by {', '.join(sorted(kinds))}" if kinds else "There is one"
    nvlinks = {int(kind[2:]) for kind in kinds if re.fullmatch(r"NV\d+", kind)}
    groups = {
        frozenset(j for j, kind in enumerate(row) if kind[:2] in ("X", "NV")) for row in table
    }
    sizes = {len(group) for group in groups}
    is_even = len(nvlinks) == 1 and len(sizes) == 1 and len(groups) * max(sizes) == num
    if not is_even:
        plain = f'levels = [{{size = {num}, link = "PCIe 4 x16"}}]'
        slowest = "the slowest, taken for PCIe 4" if nvlinks else "taken for PCIe 4"
        return _toml_of(f"{text}: {slowest}", _USUAL if nvlinks else "L40S", plain)
    (count,), (size,) = nvlinks, sizes
    link, device = _OF_LINKS.get(count, ("NVLink 3", "A100"))
    inner = f'"{link}"'
    if count not in _OF_LINKS:
        inner = f'{{preset = "{link}", bytes_per_s = "{count * _NVLINK_GB_PER_S}GB/s"}}'
    outer = f'{{size = {num // size}, link = "PCIe 4 x16"}}, ' if size < num else ""
    text += f", {count} NVLinks each" + (' (of B200s that is "NVLink 5")' if count == 18 else "")
    return _toml_of(text, device, f"levels = [{outer}{{size = {size}, link = {inner}}}]")


def _toml_of(text: str, device: str, levels: str) -> str:
    return (
        f"{text}. Write into a .toml file, with the name of the GPUs for {device} where they are "
        f'others, and give that:\n    device = "{device}"\n    {levels}'
    )


def _list_of_gpus(text: str) -> Foreign | None:
    names = re.findall(r"^GPU \d+: (.+?) \(UUID", text, re.MULTILINE)
    if not names:
        return None
    what = f"what `nvidia-smi -L` prints of {len(names)} GPUs"
    if len({*names}) > 1:
        return Foreign(what, f"They are of several kinds ({', '.join(sorted({*names}))}).")
    return Foreign(what, f"They are {names[0]}: {_write(1, len(names), preset_of(names[0]))}.")


def _cluster_text(text: str) -> Foreign | None:
    if not re.fullmatch(r"\s*(\d+x){1,2}\w[\w -]*\s*", text, re.IGNORECASE | re.ASCII):
        return None
    return Foreign("the name of a file that holds a cluster's text", f"Write {text.strip()}.")


def _toml(text: str) -> Foreign | None:
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError):
        return None
    if not {"device", "levels"} & {*table}:
        return None
    return Foreign("TOML under another name", "Give the file a name that ends in .toml.")


def _node_list(text: str) -> Foreign | None:
    """A list of hosts with ranges in brackets, split at commas outside of brackets."""
    name = r"[A-Za-z][\w.-]*(?:\[[\d,-]+\][\w.-]*)*"
    text = text.strip()
    if not re.fullmatch(rf"{name}(,{name})*", text, re.ASCII) or not ("[" in text or "," in text):
        return None
    hosts = re.findall(name, text, re.ASCII)
    num = sum(prod(map(_count, re.findall(r"\[([\d,-]+)\]", host))) for host in hosts)
    return Foreign(f"a list of {num} hosts, as Slurm writes it", _of_hosts(num))


def _count(ranges: str) -> int:
    """How many numbers `01-04,07` stands for."""
    ends = (one.partition("-") for one in ranges.split(",") if one.strip("-"))
    return sum(max(0, int(last or first) - int(first) + 1) for first, _, last in ends if first)


def _of_hosts(num: int) -> str:
    sizes = f"{num}x8" if num > 1 else "8"
    return (
        f"It does not tell their devices: write {sizes}x{_USUAL} if each has 8 of {_USUAL}, else "
        "their number and name."
    )


def _hostfile(text: str) -> Foreign | None:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    matches = [_HOST.fullmatch(line) for line in lines if line]
    hosts = [host for host in matches if host is not None]
    if not hosts or len(hosts) < len(matches):
        return None
    slots = [_slots(host) for host in hosts]
    if None in slots and not all(re.search(r"[\d.-]|^localhost$", host["host"]) for host in hosts):
        return None
    named = grouped((host["host"], size or 1) for host, size in zip(hosts, slots, strict=True))
    sizes = {name: sum(some) for name, some in named.items()}
    num, counts = len(sizes), sorted({*sizes.values()})
    if None in slots and counts == [1]:
        return Foreign(f"a list of {num} hosts", _of_hosts(num))
    what = f"a hostfile of {num} hosts with {' and '.join(map(str, counts))} slots"
    if len(counts) == 1:
        return Foreign(what, f"Of these, {_write(num, counts[0], None)}.")
    return Foreign(
        what,
        "All nodes of a cluster have as many devices as one another: for as many of each as the "
        f"smallest has, {_write(num, counts[0], None)}.",
    )


def _slots(host: re.Match[str]) -> int | None:
    match = re.search(r"(?<![_-])slots\s*=\s*(\d+)", host["slots"])
    return int(host["count"] or (match[1] if match else 0)) or None
