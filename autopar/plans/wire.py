"""What a plan looks like in a file, beside its fields: parameters of a class share an entry, and
files of older versions are brought up to date.

Both work on what JSON decodes to. Nothing is trusted: ValueError on what cannot be a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from autopar.ir.patterns import MAX_NAMES, compress, expand
from autopar.plans.matching import general

Table = dict[str, Any]


def pack(plan: Table) -> Table:
    """`plan` with one entry for parameters that lie alike: `layers.{0-31}.mlp.weight`."""
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


def upgrade(plan: Any, version: int) -> Table:
    """`plan`, written as `version` wrote it, as the next version would have."""
    return _UPGRADES[version](_table(plan, "plan")) | {"schema": version + 1}


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


def _from_1(plan: Table) -> Table:
    """Version 2 prices the optimizer: the ops and the whole have its time, unknown before."""
    estimates = _table(plan, "estimates")
    ops = _table(estimates, "ops")
    timed = {key: _table(ops, key) | {"optimizer_ns": 0} for key in ops}
    return plan | {"estimates": estimates | {"ops": timed, "optimizer_ns": 0}}


def _from_2(plan: Table) -> Table:
    """Version 3 says what was imposed on a plan: nothing could be before."""
    return plan | {"provenance": _table(plan, "provenance") | {"imposed": []}}


def _from_3(plan: Table) -> Table:
    """Version 4 writes parameters by class. What else it has is absent from older plans, but for
    stages, of which there was one, and communication, which never was hidden."""
    structure, estimates = _table(plan, "structure"), _table(plan, "estimates")
    stage = {"modules": ["*"], "first_rank": 0, "num_ranks": _num_ranks(structure)}
    return plan | {
        "structure": structure
        | {"params": _packed(_table(structure, "params")), "stages": [stage]},
        "estimates": estimates | {"exposed_communication_ns": estimates.get("communication_ns", 0)},
    }


def _num_ranks(structure: Table) -> int:
    mesh: Any = structure.get("mesh")
    ranks = 1
    for axis in cast(list[Any], mesh) if isinstance(mesh, list) else []:
        size: Any = _table(axis, "plan").get("size")
        if not isinstance(size, int) or not 1 <= size <= 1_000_000:
            raise ValueError("a mesh axis has no size")
        ranks *= size
    return ranks


_UPGRADES: Mapping[int, Callable[[Table], Table]] = {1: _from_1, 2: _from_2, 3: _from_3}
