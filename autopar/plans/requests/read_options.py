"""Options as people write them, read and resolved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from math import inf, isfinite
from numbers import Real
from types import NoneType
from typing import Any, get_args

from msgspec.structs import replace

from autopar.cluster.mesh_shapes import read_mesh
from autopar.errors import ArgumentError, AutoparError, StageError
from autopar.ir.files import read_at_most
from autopar.ir.mesh import MESH_OF_RANK
from autopar.ir.pipeline import PipelineSchedule
from autopar.ir.units import parse_bytes, parse_seconds
from autopar.plans.pipeline_orders import SCHEDULES
from autopar.plans.requests.constraints import (
    Constraint,
    check_strategy,
    parse_forbidden,
    parse_pins,
)
from autopar.plans.requests.options import (
    AUTO,
    SAVED_DTYPES,
    Options,
    check_backend,
    is_named,
    is_written_out,
)
from autopar.plans.requests.plan_options import (
    BYTES,
    GROUPS,
    OptionField,
    PlanOptions,
    as_group,
    option_fields,
    value_of,
)
from autopar.plans.structure import SavedDtype

_MAX_TABLE_BYTES = 2**24
"""The limit for the file of a pipeline schedule."""


def read_options(**given: Any) -> PlanOptions:
    """Options by their names in `PlanOptions`, each read into the one form that plans record.
    Groups may be mappings.

    Sizes are in bytes, or text such as "72GiB"; times in seconds, or "2min". Numbers may be "auto".
    What may be several may be one as well. `mesh` is read by `mesh_shapes`, `pins` and `forbid` by
    `constraints`. `schedule` is a name, a table or the path of one. `saved_dtype` is a dtype of
    torch or its name; with None, activations are saved in their own dtype. AutoparError on what
    cannot be read, TypeError on other names.
    """
    groups: dict[str, Any] = {name: as_group(name, given.get(name)) for name in GROUPS}
    unread = PlanOptions(**given | groups)
    read: dict[str, dict[str, Any]] = {"": {}}
    for field in option_fields():
        read.setdefault(field.group, {})[field.name] = _read(field, value_of(unread, field))
    top = read.pop("")
    anew: dict[str, Any] = {name: GROUPS[name](**values) for name, values in read.items()}
    return PlanOptions(**top | anew)


def make_options(**given: Any) -> Options:
    """The options that `read_options` reads, resolved. `stages` is 1 by default, or more if one
    stage waits and no mesh, number of microbatches or constraint is given. A table as `schedule`
    decides both. AutoparError on impossible options."""
    return resolve_options(read_options(**given))


def unsaid_open(read: PlanOptions) -> PlanOptions:
    """The same, with a number of stages "auto" that is not given."""
    stages = AUTO if read.pipeline.stages is None else read.pipeline.stages
    return replace(read, pipeline=replace(read.pipeline, stages=stages))


def resolve_options(given: PlanOptions) -> Options:
    """The resolved options, as by `make_options`."""
    memory, pipeline, imposed = given.memory, given.pipeline, given.constraints
    constraints = (*parse_pins(imposed.pins), *parse_forbidden(imposed.forbid))
    axes, cuts, order = given.mesh, tuple(pipeline.cuts), os.fspath(pipeline.schedule)
    stages, count = pipeline.stages, _count("microbatches", given.microbatches)
    usual = "auto" if MESH_OF_RANK in axes else 1
    num_stages = _count("pipeline.stages", usual if stages is None else stages)
    if MESH_OF_RANK in axes and num_stages == 1 and not cuts:
        raise ArgumentError(f"mesh={axes!r}: that is of a pipeline, and pipeline.stages={stages!r}")
    if cuts and num_stages not in (None, 1, len(cuts) + 1):
        raise ArgumentError(
            f"pipeline.stages={num_stages}: cuts before {', '.join(cuts)} make {len(cuts) + 1}; "
            "give all cuts, or none and only how many stages"
        )
    is_free = axes == "auto" and count is None and imposed.is_empty
    if is_written_out(order):
        num_stages, count = _as_in(PipelineSchedule.parse(order), num_stages, count, cuts)
    elif order != "auto" and num_stages == 1 and not cuts:
        raise ArgumentError(
            f"pipeline.schedule={order!r}: that is of stages; say how many, or auto"
        )
    return Options(
        given,
        mesh=axes,
        memory_limit_bytes=None if memory.limit is None else int(memory.limit),
        constraints=constraints,
        strategy=check_strategy(imposed.strategy),
        microbatches=count,
        loss_chunks=_count("memory.loss_chunks", memory.loss_chunks),
        residency=memory.residency or "cuda",
        residency_if_needed=memory.residency is None,
        saved_dtype=check_saved_dtype(memory.saved_dtype),
        stages=num_stages,
        cuts=cuts,
        schedule=order,
        stages_if_needed=stages is None and not cuts and order == "auto" and is_free,
    )


def _read(field: OptionField, given: Any) -> Any:
    """The value `given` for an option, by its own reader if it has one, or else by its kind."""
    if field.path in _READERS:
        return _READERS[field.path](given)
    is_unsaid = given is None and NoneType in get_args(field.kind)
    return None if is_unsaid else _read_by_kind(field, given)


def _read_by_kind(field: OptionField, given: Any) -> Any:
    if field.words and given not in field.words:
        raise ArgumentError(f"{field.path}={given!r}: write one of {', '.join(field.words)}")
    if field.is_several:
        return (given,) if isinstance(given, str) else tuple(given)
    if field.unit:
        return _quantity(field.path, given, field.unit)
    if field.is_flag and not isinstance(given, bool):
        raise ArgumentError(f"{field.path}={given!r}: write True or False")
    return _count(field.path, given) or AUTO if int in get_args(field.kind) else given


def _without(word: str, constraints: Iterable[Constraint]) -> tuple[str, ...]:
    """The texts of constraints, as they were given."""
    return tuple(each.origin.removeprefix(word) for each in constraints)


def check_saved_dtype(given: object) -> SavedDtype:
    """`given`, which may be one of torch's dtypes; "" for None. ArgumentError unless it is one of
    `SAVED_DTYPES`."""
    name = "" if given is None else str(given).removeprefix("torch.")
    for known in SAVED_DTYPES:
        if name == known:
            return known
    words = " or ".join(filter(None, SAVED_DTYPES))
    raise ArgumentError(f"memory.saved_dtype={given!r}: write {words}, or nothing")


def read_work_limit(given: object) -> int:
    """The number `given`, or as text. ArgumentError unless it is whole, and 0 or more."""
    text = "" if isinstance(given, bool) else f"{given}"
    if not (text.isascii() and text.isdigit()):
        raise ArgumentError(
            f"search.work_limit={given!r}: write about how many CPU seconds the search may take, "
            "or 0 for no limit"
        )
    return int(text)


def read_schedule(given: str | os.PathLike[str]) -> str:
    """The name of a schedule, or a table as text: `given`, or the content of the file `given`.
    ArgumentError if it is neither, or no table that ranks can follow."""
    text = os.fspath(given)
    if is_named(text):
        return text
    if not is_written_out(text):
        text = _schedule_file(text)
    try:
        return str(PipelineSchedule.parse(text))
    except StageError as error:
        raise ArgumentError(f"pipeline.schedule: {error}") from None


def _schedule_file(path: str) -> str:
    """The text in a file."""
    try:
        return read_at_most(path, _MAX_TABLE_BYTES).decode()
    except (OSError, ValueError) as error:
        words = ", ".join(SCHEDULES)
        raise ArgumentError(
            f'pipeline.schedule={path!r}: write "auto", one of {words} ("interleaved:2", "zb:2"), '
            f'a table such as "0F0 0B0", or the path of one ({error})'
        ) from None


def _as_in(
    actions: PipelineSchedule,
    stages: int | None,
    requested: int | None,
    cuts: Sequence[str],
) -> tuple[int, int]:
    """The numbers of stages and microbatches of a table, with which those of the user must
    agree."""
    num_stages, count = actions.num_stages, actions.microbatches
    if num_stages == 1:
        raise ArgumentError("pipeline.schedule: the table has one stage, which is no pipeline")
    if requested not in (None, count):
        raise ArgumentError(f"microbatches={requested}: the table has {count}; leave it out")
    if stages not in (None, 1, num_stages):
        raise ArgumentError(f"pipeline.stages={stages}: the table has {num_stages}; leave it out")
    if cuts and len(cuts) + 1 != num_stages:
        raise ArgumentError(f"{len(cuts) + 1} stages are cut: the table has {num_stages}")
    return num_stages, count


def _count(name: str, given: int | str | None) -> int | None:
    """The number; None for "auto", or if it is left out."""
    if given in ("auto", None):
        return None
    is_number = isinstance(given, str) and given.isascii() and given.isdecimal()
    count = int(given) if is_number else given
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f'{name}={given!r}: write a number, or "auto"')
    return count


def _quantity(name: str, given: Any, unit: str) -> float | None:
    """The number in `given`, an integer if it is in bytes; None for no limit."""
    parse, example = (parse_bytes, "72GiB") if unit == BYTES else (parse_seconds, "2min")
    try:
        value = parse(given) if isinstance(given, str) else given
    except ValueError as error:
        raise AutoparError(f"{name}: {error}") from error
    if value is None or value == inf:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(f'{name}={given!r}: write {unit}, or text such as "{example}"')
    number = float(value)
    if not (isfinite(number) and number > 0):
        raise AutoparError(f"{name}={given!r}: it must be more than 0 {unit}")
    return int(number) if unit == BYTES else number


_READERS: dict[str, Callable[[Any], Any]] = {
    "mesh": read_mesh,
    "backend": check_backend,
    "memory.saved_dtype": check_saved_dtype,
    "pipeline.schedule": read_schedule,
    "search.work_limit": read_work_limit,
    "constraints.pins": lambda given: _without("pin ", parse_pins(given)),
    "constraints.forbid": lambda given: _without("forbid ", parse_forbidden(given)),
    "constraints.strategy": check_strategy,
}
"""The readers of options that are not read by their kind, by path."""
