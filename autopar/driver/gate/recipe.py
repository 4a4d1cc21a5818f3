"""How a golden plan is made: the small TOML file beside it.

    target = "../model.py:build"          # or package.module:build
    cluster = "8x8xH100"                  # or the path of a .toml file, or of a profile
    global_batch = 64
    [memory]
    limit = "72GiB"

All other keys and tables are the options of a plan (docs/options.md). Paths are relative to the
file.
"""

from __future__ import annotations

import tomllib
import warnings
from dataclasses import dataclass
from os import fspath
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from autopar.cluster.parsing import is_cluster_file, parse_cluster
from autopar.errors import ArgumentError, AutoparError, OldNameWarning, RecipeError
from autopar.ir.files import read_at_most
from autopar.ir.mesh import Cluster
from autopar.plans.requests.options import Options, is_named, is_written_out
from autopar.plans.requests.plan_options import PlanOptions, in_groups, option_fields
from autopar.plans.requests.read_options import make_options

PLAN_SUFFIX = ".plan.json"
_MAX_FILE_BYTES = 2**20


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """The keys that are not options of a plan."""

    target: str
    cluster: str
    global_batch: int | None = None
    root: str = "."
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """`target` is planned on `cluster` with `options`; `root` is the folder that its modules are
    imported from. `profile` is the path of one, or None. `golden` is the path of the plan. All
    paths are absolute."""

    path: Path
    target: str
    root: Path
    cluster: Cluster
    profile: Path | None
    global_batch: int | None
    options: Options

    @property
    def golden(self) -> Path:
        return golden_of(self.path)


def golden_of(path: Path) -> Path:
    """The path of the plan beside the TOML file `path`."""
    return path.with_name(path.stem + PLAN_SUFFIX)


def cluster_file(path: Path) -> Path | None:
    """The cluster file that the recipe `path` names, whatever else is in it; None if it names none,
    or cannot be read."""
    try:
        text: object = tomllib.loads(_text(path)).get("cluster")
    except (RecipeError, ValueError, RecursionError):
        return None
    if not (isinstance(text, str) and is_cluster_file(text)):
        return None
    return (path.parent / text).resolve()


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file; RecipeError, naming file and key, if it cannot be read."""
    path = path.resolve()
    try:
        content = tomllib.loads(_text(path))
        given = _options_in(content, path)
        table = msgspec.convert(content, _Table)
    except (ValueError, RecursionError, ArgumentError) as error:
        raise RecipeError(f"{path}: {error}") from None
    batch = table.global_batch
    if batch is not None and batch < 1:
        raise RecipeError(f"{path}: global_batch is {batch}: it must be at least 1")
    try:
        cluster = parse_cluster(str(cluster_file(path) or table.cluster))
        options = make_options(**asdict(given))
    except AutoparError as error:
        raise RecipeError(f"{path}: {error}") from None
    root = (path.parent / table.root).resolve()
    if not root.is_dir():
        raise RecipeError(f"{path}: root is {table.root!r}, and {root} is no folder")
    return Recipe(
        path=path,
        target=_target(table.target, path),
        root=root,
        cluster=cluster,
        profile=None if table.profile is None else (path.parent / table.profile).resolve(),
        global_batch=batch,
        options=options,
    )


def _options_in(content: dict[str, Any], path: Path) -> PlanOptions:
    """Takes the options out of `content`. ValueError, naming the key, on one of another type;
    ArgumentError on one that does not exist, or that is given twice."""
    names = (*PlanOptions.__struct_fields__, *(f.before for f in option_fields()))
    known = {name: content.pop(name) for name in names if name in content}
    grouped, old = in_groups(known)
    for before, field in old.items():
        where = f"write {field.name} under [{field.group}]"
        text = f"{path}: {before} goes with the next release: {where}"
        warnings.warn(OldNameWarning(text), stacklevel=4)
    options = msgspec.convert(msgspec.to_builtins(grouped), PlanOptions)
    schedule = fspath(options.pipeline.schedule)
    if not (is_named(schedule) or is_written_out(schedule)):
        # A file, relative to that of the recipe.
        schedule = str(path.parent / schedule)
    return replace(options, pipeline=replace(options.pipeline, schedule=schedule))


def _target(text: str, path: Path) -> str:
    """`text`, with the file that it names relative to that of the recipe."""
    place, colon, name = text.rpartition(":")
    if not (place and name):
        raise RecipeError(
            f"{path}: target is {text!r}: write it as ../train.py:build or package.module:build"
        )
    return f"{(path.parent / place).resolve()}{colon}{name}" if place.endswith(".py") else text


def _text(path: Path) -> str:
    try:
        data = read_at_most(path, _MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise RecipeError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: {error}") from None
