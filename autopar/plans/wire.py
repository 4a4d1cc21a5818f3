"""What a plan looks like in a file, beside its fields: parameters of a class share an entry, and a
stage has no figure that is the whole plan's.

This works on what JSON decodes to. Nothing is trusted: ValueError on what cannot be a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from autopar.ir.patterns import MAX_NAMES, compress, expand
from autopar.plans.estimates import Figures
from autopar.plans.matching import general

Table = dict[str, Any]

SHARED_FIGURES = Figures.__struct_fields__
"""What a stage has as the whole plan, unless it says otherwise."""


_UNTOLD: Table = {"host_bytes": 0, "host_memory": {}, "samples": 0}
"""Figures that are left out where they are these."""


def pack(plan: Table) -> Table:
    """`plan` with one entry for identical parameters: `layers.{0-31}.mlp.weight`."""
    structure, estimates = plan["structure"], plan["estimates"]
    stages = [stage | {"params": _packed(stage["params"])} for stage in structure["stages"]]
    figures = {name: estimates[name] for name in SHARED_FIGURES if name in estimates}
    priced = [_without_shared(each, figures) for each in estimates["stages"]]
    return plan | {
        "structure": structure | {"stages": stages},
        "estimates": estimates | {"stages": priced},
    }


def unpack(plan: Any) -> Table:
    """The inverse of `pack`."""
    structure, estimates = _table(plan, "structure"), _table(plan, "estimates")
    stages = [_with_params(stage) for stage in _list(structure, "stages")]
    figures = {name: estimates[name] for name in SHARED_FIGURES if name in estimates}
    priced = [figures | _table(each, "stage") for each in _list(estimates, "stages")]
    return _table(plan, "plan") | {
        "structure": structure | {"stages": stages},
        "estimates": estimates | {"stages": priced},
    }


def _without_shared(stage: Table, figures: Table) -> Table:
    """`stage` without what all of the plan has in the same way."""
    own = {name: stage.get(name, _UNTOLD.get(name)) for name in figures}
    return {n: value for n, value in stage.items() if n not in figures} | {
        name: value for name, value in own.items() if value != figures[name]
    }


def _with_params(stage: Any) -> Table:
    found: Table = {}
    for text, param in _table(stage, "params").items():
        for name in expand(text):
            found[name] = param
        if len(found) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} parameters")
    return cast(Table, stage) | {"params": found}


def _packed(params: Mapping[str, Any]) -> Table:
    classes: dict[tuple[str, bytes], list[str]] = {}
    for name, param in params.items():
        content = msgspec.json.encode(param, order="sorted")
        classes.setdefault((general(name), content), []).append(name)
    return {text: params[names[0]] for names in classes.values() for text in compress(names)}


def _table(value: Any, what: str) -> Table:
    """The object that `value` is, a plan or a stage, or has under a name."""
    found: Any = value
    if what not in ("plan", "stage") and isinstance(value, dict):
        found = cast(Table, value).get(what)
    if not isinstance(found, dict):
        raise ValueError(f"{what} is no object")
    return cast(Table, found)


def _list(table: Table, name: str) -> list[Any]:
    found: Any = table.get(name)
    if not isinstance(found, list):
        raise ValueError(f"{name} is no list")
    return cast(list[Any], found)
