"""What a plan looks like in a file, beside its fields: parameters of a class share an entry.

This works on what JSON decodes to. Nothing is trusted: ValueError on what cannot be a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from autopar.ir.patterns import MAX_NAMES, compress, expand
from autopar.plans.matching import general

Table = dict[str, Any]


def pack(plan: Table) -> Table:
    """`plan` with one entry for identical parameters: `layers.{0-31}.mlp.weight`."""
    return plan | {"structure": _packed_structure(plan["structure"])}


def unpack(plan: Any) -> Table:
    """The inverse of `pack`."""
    return _table(plan, "plan") | {"structure": _unpacked_structure(_table(plan, "structure"))}


def _packed_structure(structure: Table) -> Table:
    stages = [s | {"structure": _packed_structure(s["structure"])} for s in structure["stages"]]
    found = structure | {"params": _packed(structure["params"]), "stages": stages}
    if not found["saved_dtype"]:
        # What is seldom asked for is left out.
        del found["saved_dtype"]
    return found


def _unpacked_structure(structure: Table, depth: int = 0) -> Table:
    found: Table = {}
    for text, param in _table(structure, "params").items():
        for name in expand(text):
            found[name] = param
        if len(found) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} parameters")
    stages = structure.get("stages", [])
    if not isinstance(stages, list) or (stages and depth):
        raise ValueError("stages is no list, or has stages of its own")
    inner = (_table(stage, "structure") for stage in cast(list[Any], stages))
    unpacked = (_unpacked_structure(each, depth + 1) for each in inner)
    pairs = zip(cast(list[Table], stages), unpacked, strict=True)
    return structure | {"params": found, "stages": [s | {"structure": u} for s, u in pairs]}


def _packed(params: Mapping[str, Any]) -> Table:
    classes: dict[tuple[str, bytes], list[str]] = {}
    for name, param in params.items():
        content = msgspec.json.encode(param, order="sorted")
        classes.setdefault((general(name), content), []).append(name)
    return {text: params[names[0]] for names in classes.values() for text in compress(names)}


def _table(value: Any, what: str) -> Table:
    """The object that `value` is or has under a name."""
    found: Any = value
    if what != "plan" and isinstance(value, dict):
        found = cast(Table, value).get(what)
    if not isinstance(found, dict):
        raise ValueError(f"{what} is no object")
    return cast(Table, found)
