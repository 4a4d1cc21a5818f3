"""The plan: every decision, what it is predicted to cost, and how good it is proven to be.

A plan is a value. As a file it is canonical JSON in three parts: `structure` (the decisions,
exact), `estimates` (integers, nanoseconds and bytes), `provenance` (versions and solver statistics,
never compared). A file is valid only if it is byte for byte the encoding of what it decodes to; in
it, identical parameters share an entry (`patterns`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from autopar.errors import PlanError
from autopar.ir.files import Format, Wire
from autopar.ir.grouping import grouped
from autopar.ir.patterns import MAX_NAMES, compress, expand
from autopar.plans.display import Shown
from autopar.plans.estimates import Estimates, Figures, StageEstimates
from autopar.plans.order import OPTIMIZER, Item
from autopar.plans.provenance import Provenance
from autopar.plans.requests.matching import general
from autopar.plans.structure import MAX_ITEMS, Stage, Structure

# In a file, parameters of a class share an entry, and a stage leaves out the figures that it has in
# common with the whole plan.
#
# This works on what JSON decodes to. Nothing is trusted: ValueError on what cannot be a plan.

Table = dict[str, Any]

SHARED_FIGURES = Figures.__struct_fields__
"""Figures that a stage has in common with the whole plan, unless its entry has another one."""


_OMITTED: Table = {"host_bytes": 0, "host_memory": {}, "samples": 0}
"""Figures that are left out if they have these values."""


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
    """`stage` without the figures that it has in common with the whole plan."""
    own = {name: stage.get(name, _OMITTED.get(name)) for name in figures}
    return {n: value for n, value in stage.items() if n not in figures} | {
        name: value for name, value in own.items() if value != figures[name]
    }


def _with_params(stage: Any) -> Table:
    params: Table = {}
    for text, param in _table(stage, "params").items():
        for name in expand(text):
            params[name] = param
        if len(params) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} parameters")
    return cast(Table, stage) | {"params": params}


def _packed(params: Mapping[str, Any]) -> Table:
    classes = grouped(
        ((general(name), msgspec.json.encode(param, order="sorted")), name)
        for name, param in params.items()
    )
    return {text: params[names[0]] for names in classes.values() for text in compress(names)}


def _table(value: Any, what: str) -> Table:
    """`value` itself, a plan or a stage, or the object that it has under the name `what`."""
    table: Any = value
    if what not in ("plan", "stage") and isinstance(value, dict):
        table = cast(Table, value).get(what)
    if not isinstance(table, dict):
        raise ValueError(f"{what} is no object")
    return cast(Table, table)


def _list(table: Table, name: str) -> list[Any]:
    items: Any = table.get(name)
    if not isinstance(items, list):
        raise ValueError(f"{name} is no list")
    return cast(list[Any], items)


SCHEMA_VERSION = 16


class Plan(msgspec.Struct, Shown, frozen=True, forbid_unknown_fields=True):
    """A plan; see the module's text."""

    schema: int
    structure: Structure
    estimates: Estimates
    provenance: Provenance

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, one line per entry of a field, a final newline."""
        return _FORMAT.encode(self)

    @staticmethod
    def from_bytes(data: bytes, source: str = "plan") -> Plan:
        """The inverse of `to_bytes`; PlanError, naming the place, on anything else."""
        return _FORMAT.decode(data, source)

    def check(self) -> None:
        """ValueError, naming the place, if the parts do not make sense together: mesh axes,
        parameters' shapes and dtypes, shardings, stages."""
        structure, estimates = self.structure, self.estimates
        structure.check()
        decided, priced = len(structure.stages), len(estimates.stages)
        if decided != priced:
            raise ValueError(f"stages: {decided} are decided, {priced} priced")
        for each in estimates.stages:
            _check_timeline(each)
        if len(estimates.devices) not in (0, structure.num_ranks):
            raise ValueError(f"devices: {len(estimates.devices)} of {structure.num_ranks}")
        for each in estimates.shared:
            if not each.ranks or max(each.ranks) >= structure.num_ranks:
                raise ValueError(f"shared: {each.kind} of ranks {list(each.ranks)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: whoever reads finds the old plan or the new one. PlanError if
        it cannot be written."""
        _FORMAT.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file; PlanError if it is missing, damaged or of another version."""
        return _FORMAT.load(path)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (2020-12) of plan files of this version; the package has it as
        `plan.schema.json`. It lists the fields; beside that, files must be canonical."""
        schema = msgspec.json.schema(Plan)
        own = schema["$defs"]["StageEstimates"]
        own["required"] = [name for name in own["required"] if name not in SHARED_FIGURES]
        for noun in schema["$defs"].values():
            noun["description"] = " ".join(noun["description"].split())
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"autopar plan, version {SCHEMA_VERSION}",
            **schema,
        }

    @property
    def digest(self) -> str:
        """A hash of the decisions alone: equal for plans that do the same."""
        raw = msgspec.json.encode(self.structure, order="sorted")
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    @property
    def world_size(self) -> int:
        return self.structure.num_devices

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages, each with what is decided and predicted of it."""
        pairs = zip(self.structure.stages, self.estimates.stages, strict=True)
        return tuple(StagePlan(self, k, *pair) for k, pair in enumerate(pairs))


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Stage `number` of the plan `whole`: its decisions and estimates."""

    whole: Plan
    number: int
    structure: Stage
    estimates: StageEstimates

    @property
    def provenance(self) -> Provenance:
        """That of the whole plan."""
        return self.whole.provenance


def stage_of(plan: Plan, stage: int | None, what: str = "") -> StagePlan:
    """A stage of a plan; without a number, the only one. PlanError, listing the stages, if there is
    no such stage, or without a number several; `what` is what needs a single one."""
    count = len(plan.stages)
    if stage is None and count > 1:
        why = f"{what} is of one stage, and " if what else ""
        last = count - 1
        raise PlanError(f"{why}the plan has {count} stages: say which (--stage 0 to {last})")
    if stage is not None and stage >= count:
        stages = f"{count} stages, 0 to {count - 1}" if count > 1 else "one stage, 0"
        raise PlanError(f"there is no stage {stage}: the plan has {stages}")
    return plan.stages[stage or 0]


def _check_timeline(estimates: StageEstimates) -> None:
    curve = estimates.memory_curve
    steps = {key: len(totals) for key, totals in estimates.sends.items()}
    for text in {text for run in estimates.runs for text in run.items}:
        item = None if text in estimates.ops or text == OPTIMIZER else Item.parse(text)
        if item is not None and item.step >= steps.get(item.key, 0):
            raise ValueError(f"order: {text} is neither an op nor sent")
    if sum(run.times * len(run.items) for run in estimates.runs) > MAX_ITEMS:
        raise ValueError(f"order: a step has at most {MAX_ITEMS} items")
    lengths = {len(curve.time_ns), len(curve.unsharded), len(curve.saved), len(curve.transient)}
    if len(lengths) > 1:
        raise ValueError("memory_curve: its lists must be equally long")


_FORMAT = Format(
    Plan,
    "plan",
    "plan again",
    SCHEMA_VERSION,
    PlanError,
    Wire(3, frozenset({"stages"}), pack, unpack),
)
