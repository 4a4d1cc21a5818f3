"""Options as people write them, read and settled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf, isfinite
from numbers import Real
from typing import Any

from autopar.cluster.mesh_shapes import read_mesh
from autopar.errors import ArgumentError, AutoparError, StageError
from autopar.ir.files import read_at_most
from autopar.ir.mesh import MESH_OF_RANK
from autopar.ir.pipeline import ActionTable
from autopar.ir.units import parse_bytes, parse_seconds
from autopar.plans.constraints import (
    Constraint,
    check_strategy,
    parse_forbidden,
    parse_pins,
)
from autopar.plans.options import (
    AUTO,
    CHECKPOINTS,
    RESIDENCIES,
    SAVED_DTYPES,
    Options,
    check_backend,
    is_named,
    is_table,
)
from autopar.plans.pipeline_orders import SCHEDULES
from autopar.plans.plan import SavedDtype
from autopar.plans.plan_options import PlanOptions, Quantity, from_keywords

_MAX_TABLE_BYTES = 2**24
"""Of the file that a table of actions is in."""


def read_options(**given: Any) -> PlanOptions:
    """Options by their keywords (`plan_options`), each as people write it, in the one way in which
    a plan records it: `mesh` as `mesh_shapes` reads it; `memory_limit` and `host_memory` in bytes,
    or as text such as "72GiB", `time_limit` in seconds, or as "2min"; `pins` and `forbid` as
    `constraints` reads them; `microbatches`, `stages` and `loss_chunks` as a number or "auto";
    `cuts`, `differentiable_outputs` and `unread_outputs` as one or several; `schedule` by its name,
    or a table or the path of one; `saved_dtype` as torch names it, None for that of what is saved.
    AutoparError on what cannot be read."""
    strict = given.get("strict", False)
    if not isinstance(strict, bool):
        raise ArgumentError(f"strict={strict!r}: write True or False")
    read: dict[str, Callable[[Any], Any]] = {
        "mesh": read_mesh,
        "memory_limit": partial(_bytes, "memory_limit", "72GiB"),
        "host_memory": partial(_bytes, "host_memory", "1.5TiB"),
        "time_limit": lambda x: _quantity("time_limit", x, parse_seconds, "seconds", "2min"),
        "pins": lambda x: _without("pin ", parse_pins(x)),
        "forbid": lambda x: _without("forbid ", parse_forbidden(x)),
        "strategy": check_strategy,
        "backend": check_backend,
        "microbatches": partial(_number, "microbatches"),
        "stages": partial(_number, "stages"),
        "loss_chunks": partial(_number, "loss_chunks"),
        "residency": partial(_one_of, "residency", RESIDENCIES),
        "checkpoint": partial(_one_of, "checkpoint", CHECKPOINTS),
        "cuts": _several,
        "differentiable_outputs": _several,
        "unread_outputs": _several,
        "schedule": read_schedule,
        "saved_dtype": check_saved_dtype,
    }
    return from_keywords({name: read.get(name, _same)(value) for name, value in given.items()})


def make_options(**given: Any) -> Options:
    """What `read_options` reads, settled: `microbatches` is None for "auto" in stages and 1
    elsewhere, where nobody says; `stages` 1, or more if that waits and no mesh, number of
    microbatches or constraint is given; a table as `schedule` settles both. AutoparError on what
    cannot be, or not together."""
    return _settled(read_options(**given))


def _settled(given: PlanOptions) -> Options:
    memory, pipeline, imposed = given.memory, given.pipeline, given.constraints
    constraints = (*parse_pins(imposed.pins), *parse_forbidden(imposed.forbid))
    axes, cuts, order = given.mesh, pipeline.cuts, pipeline.schedule
    stages, microbatches = pipeline.stages, given.microbatches
    num_stages = _count("stages", _usual_stages(axes) if stages is None else stages)
    if MESH_OF_RANK in axes and num_stages == 1 and not cuts:
        raise ArgumentError(f"mesh={axes!r}: that is of a pipeline, and stages={stages!r}")
    usual = "auto" if num_stages != 1 or cuts else 1
    if cuts and num_stages not in (None, 1, len(cuts) + 1):
        raise ArgumentError(
            f"stages={num_stages}: cuts before {', '.join(cuts)} make {len(cuts) + 1}; "
            "give all cuts, or none and only how many stages"
        )
    count = _count("microbatches", usual if microbatches is None else microbatches)
    is_free = axes == "auto" and microbatches in (None, "auto") and imposed.is_empty
    if is_table(order):
        num_stages, count = _as_in(ActionTable.parse(order), num_stages, microbatches, cuts)
    elif order != "auto" and num_stages == 1 and not cuts:
        raise ArgumentError(f"schedule={order!r}: that is of stages; say how many, or auto")
    return Options(
        mesh=axes,
        optimizer=given.optimizer,
        memory_limit_bytes=_size(memory.limit),
        time_limit_s=None if given.search.time_limit is None else float(given.search.time_limit),
        strict=given.search.strict,
        constraints=constraints,
        strategy=imposed.strategy,
        differentiable_outputs=given.outputs.differentiable,
        backend=given.backend,
        microbatches=count,
        residency=memory.residency,
        checkpoint=memory.checkpoint,
        stages=num_stages,
        cuts=cuts,
        schedule=order,
        loss_chunks=_count("loss_chunks", memory.loss_chunks),
        unread_outputs=given.outputs.unread,
        saved_dtype=check_saved_dtype(memory.saved_dtype),
        microbatches_if_needed=microbatches is None and count == 1,
        stages_if_needed=stages is None and not cuts and order == "auto" and is_free,
        host_memory_bytes=_size(memory.host),
        given=given,
    )


def _same(value: Any) -> Any:
    return value


def _size(given: Quantity) -> int | None:
    return None if given is None else int(given)


def _bytes(name: str, example: str, given: Any) -> int | None:
    found = _quantity(name, given, parse_bytes, "bytes", example)
    return None if found is None else int(found)


def _without(word: str, constraints: Iterable[Constraint]) -> tuple[str, ...]:
    """How constraints were written."""
    return tuple(each.origin.removeprefix(word) for each in constraints)


def _number(name: str, given: Any) -> int | str | None:
    """A number or "auto", None where nobody says."""
    return None if given is None else _count(name, given) or AUTO


def _usual_stages(mesh: str) -> int | str:
    """How many stages there are where nobody says."""
    return "auto" if MESH_OF_RANK in mesh else 1


def _several(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def check_saved_dtype(given: object) -> SavedDtype:
    """`given`, which may be one of torch's dtypes, "" for None. ArgumentError unless it is one of
    `SAVED_DTYPES`."""
    name = "" if given is None else str(given).removeprefix("torch.")
    for known in SAVED_DTYPES:
        if name == known:
            return known
    words = " or ".join(filter(None, SAVED_DTYPES))
    raise ArgumentError(f"saved_dtype={given!r}: write {words}, or nothing")


def _one_of(name: str, known: Sequence[str], given: str) -> str:
    if given not in known:
        raise ArgumentError(f"{name}={given!r}: write one of {', '.join(known)}")
    return given


def read_schedule(given: str | os.PathLike[str]) -> str:
    """The name of a schedule, or a table as text: `given`, or what is in the file `given`.
    ArgumentError if it is none of them, or no table that ranks can follow."""
    text = os.fspath(given)
    if is_named(text):
        return text
    if not is_table(text):
        text = _schedule_file(text)
    try:
        return str(ActionTable.parse(text))
    except StageError as error:
        raise ArgumentError(f"schedule: {error}") from None


def _schedule_file(path: str) -> str:
    """The text in a file."""
    try:
        return read_at_most(path, _MAX_TABLE_BYTES).decode()
    except (OSError, ValueError) as error:
        words = ", ".join(SCHEDULES)
        raise ArgumentError(
            f'schedule={path!r}: write "auto", one of {words} ("interleaved:2", "zb:2"), a '
            f'table such as "0F0 0B0", or the path of one ({error})'
        ) from None


def _as_in(
    table: ActionTable, stages: int | None, microbatches: int | str | None, cuts: Sequence[str]
) -> tuple[int, int]:
    """How many stages and microbatches there are, which the user may have said as well."""
    num_stages, count = table.num_stages, table.microbatches
    if num_stages == 1:
        raise ArgumentError("schedule: the table has one stage, which is no pipeline")
    asked = None if microbatches is None else _count("microbatches", microbatches)
    if asked not in (None, count):
        raise ArgumentError(f"microbatches={asked}: the table has {count}; leave it out")
    if stages not in (None, 1, num_stages):
        raise ArgumentError(f"stages={stages}: the table has {num_stages}; leave it out")
    if cuts and len(cuts) + 1 != num_stages:
        raise ArgumentError(f"{len(cuts) + 1} stages are cut: the table has {num_stages}")
    return num_stages, count


def _count(name: str, given: int | str) -> int | None:
    """How many; None for "auto"."""
    if given == "auto":
        return None
    is_number = isinstance(given, str) and given.isascii() and given.isdecimal()
    count = int(given) if is_number else given
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f'{name}={given!r}: write a number, or "auto"')
    return count


def _quantity(
    name: str,
    given: Any,
    parse: Callable[[str], float],
    unit: str,
    example: str,
) -> float | None:
    """The number in `given`; None where there is no limit."""
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
    return number
