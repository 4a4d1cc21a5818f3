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
    return _with_params(plan, _packed(plan["structure"]["params"]))


def unpack(plan: Any) -> Table:
    """The inverse of `pack`."""
    found: Table = {}
    for text, param in _table(_table(_table(plan, "plan"), "structure"), "params").items():
        for name in expand(text):
            found[name] = param
        if len(found) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} parameters")
    return _with_params(cast(Table, plan), found)


def _packed(params: Mapping[str, Any]) -> Table:
    classes: dict[tuple[str, bytes], list[str]] = {}
    for name, param in params.items():
        content = msgspec.json.encode(param, order="sorted")
        classes.setdefault((general(name), content), []).append(name)
    return {text: params[names[0]] for names in classes.values() for text in compress(names)}


def _with_params(plan: Table, params: Table) -> Table:
    return plan | {"structure": plan["structure"] | {"params": params}}


def _table(value: Any, what: str) -> Table:
    """The object that `value` is or has under a name."""
    found: Any = value
    if what != "plan" and isinstance(value, dict):
        found = cast(Table, value).get(what)
    if not isinstance(found, dict):
        raise ValueError(f"{what} is no object")
    return cast(Table, found)
