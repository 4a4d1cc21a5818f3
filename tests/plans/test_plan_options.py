"""Options stand in one place: signatures, flags, recipes and pages are as it has them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from torch import nn

import autopar
from autopar.cli.plan import plan as command
from autopar.cli.plan_flags import flag_of
from autopar.driver.gate.recipe import read_recipe
from autopar.errors import ArgumentError, AutoparError, OldNameWarning
from autopar.plans.requests.plan_options import (
    GROUPS,
    OptionField,
    PlanOptions,
    in_groups,
    option_fields,
    value_of,
)
from autopar.plans.requests.read_options import make_options, read_options
from tests.options_page import PAGE, page

FIELDS = option_fields()
FUNCTIONS = autopar.compile, autopar.plan, autopar.frontier
MAX_PARAMETERS = 18
"""Options that belong together are a group: what comes goes into one."""
WRITTEN: dict[str, Any] = {
    "mesh": (2, 4),
    "optimizer": "sgd",
    "microbatches": "4",
    "backend": "inductor",
    "memory": {
        "limit": "72GiB", "host": "1TiB", "residency": "auto", "checkpoint": "as written",
        "loss_chunks": 2, "saved_dtype": "bfloat16",
    },
    "pipeline": {"stages": 2, "cuts": "layers.4", "schedule": "1f1b"},
    "constraints": {
        "pins": {"a.*": "S(0) on tp"}, "forbid": {"tp": ["a", "b"]}, "strategy": "Megatron",
    },
    "outputs": {"differentiable": "logits", "unread": ["hidden"]},
    "search": {"work_limit": 60, "time_limit": "2min", "margin": True, "strict": True},
}  # fmt: skip
"""Each option as somebody may write it, and none as it is by default."""


def path_of(field: OptionField) -> str:
    return field.path


def written(field: OptionField) -> Any:
    return WRITTEN[field.group][field.name] if field.group else WRITTEN[field.name]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_take_them(function: Any) -> None:
    known = inspect.signature(function).parameters
    assert len(known) <= MAX_PARAMETERS
    for name in PlanOptions.__struct_fields__:
        default, usual = known[name].default, getattr(PlanOptions(), name)
        assert default is None if name in GROUPS else (default or usual) == usual


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_exported(name: str) -> None:
    kind = GROUPS[name]
    assert getattr(autopar, kind.__name__) is kind and kind.__name__ in autopar.__all__
    assert type(getattr(PlanOptions(), name)) is kind


@pytest.mark.parametrize("field", FIELDS, ids=path_of)
def test_the_command_has_a_flag(field: OptionField) -> None:
    params = command.get_params(command.make_context("plan", ["t"]))
    (found,) = [x for x in params if flag_of(field) in x.opts]
    assert isinstance(found, click.Option)
    assert found.multiple == field.is_several
    assert (found.default, found.help) == (field.default, field.help)


def toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "'" + "x".join(map(str, value)) + "'"
    if isinstance(value, dict):
        pairs = (f"'{k}' = {toml(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool | int) else f"'{value}'"


def recipe(folder: Path, given: dict[str, Any]) -> Path:
    lines = "".join(f"{name} = {toml(value)}\n" for name, value in given.items())
    path = folder / "made.toml"
    path.write_text(f"target = 'train.py:build'\ncluster = '8xH100'\n{lines}")
    return path


def test_a_recipe_takes_them_all(tmp_path: Path) -> None:
    assert read_recipe(recipe(tmp_path, WRITTEN)).options.given == read_options(**WRITTEN)


def test_each_is_recorded_and_asked_for_again() -> None:
    read = read_options(**WRITTEN)
    assert not [f.path for f in FIELDS if value_of(read, f) == value_of(PlanOptions(), f)]
    again = msgspec.json.decode(msgspec.json.encode(read), type=PlanOptions)
    anew = msgspec.structs.asdict(again)
    assert again == read == read_options(**anew) and hash(again) == hash(read)
    assert make_options(**anew) == make_options(**WRITTEN)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesch": "2x4"}, "mesch"),
        ({"memory": {"limitt": 1}}, "memory takes no limitt: did you mean limit"),
        ({"memory": "72GiB"}, r"write memory=autopar.MemoryOptions\(limit=...\)"),
        ({"memory": autopar.SearchOptions()}, r"write memory=autopar.MemoryOptions"),
        ({"memory": {"limit": "72"}}, "memory.limit: "),
        ({"search": {"strict": 1}}, "search.strict=1: write True or False"),
        ({"search": {"margin": "yes"}}, "search.margin='yes': write True or False"),
    ],
)
def test_other_names_and_values_are_errors(given: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, AutoparError), match=said):
        read_options(**given)


def old_names() -> dict[str, Any]:
    """All that is `WRITTEN` of options that were there without groups, by their names of then."""
    return {field.before or field.name: written(field) for field in FIELDS if is_old(field)}


def is_old(field: OptionField) -> bool:
    return bool(field.before) or not field.group


def test_names_of_before_are_those_in_groups() -> None:
    moved, old = in_groups(old_names())
    read, all_read = read_options(**moved), read_options(**WRITTEN)
    for field in FIELDS:
        there = all_read if is_old(field) else PlanOptions()
        assert value_of(read, field) == value_of(there, field)
    assert set(old) == {field.before for field in FIELDS if field.group and is_old(field)}
    with pytest.raises(ArgumentError, match=r"memory_limit is memory\.limit: say one"):
        in_groups({"memory_limit": 1, "memory": {"limit": 2}})


def test_a_recipe_takes_names_of_before(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"stages": 2, "forbid": {"tp": ["a", "b"]}, "margin": True})
    with pytest.warns(OldNameWarning, match=r"write \w+ under \[\w+\]") as told:
        options = read_recipe(path).options
    assert options.given == read_options(
        pipeline={"stages": 2}, constraints={"forbid": {"tp": ["a", "b"]}}, search={"margin": True}
    )
    assert [str(each.message).partition(": ")[2].split()[0] for each in told] == [
        "stages", "forbid", "margin",
    ]  # fmt: skip


def test_a_command_takes_flags_of_before() -> None:
    given = ["t", "--stages=2", "--pin", "a=R", "--no-margin", "-o", "x", "--memory-limit", "1GiB"]
    with pytest.warns(OldNameWarning, match="goes with the next release") as told:
        found = command.make_context("plan", given).params
    assert (found["option_pipeline_stages"], found["option_search_margin"]) == ("2", False)
    assert found["option_constraints_pins"] == ("a=R",)
    assert [str(each.message).split()[-1] for each in told] == [
        "--pipeline-stages", "--constraints-pin", "--no-search-margin",
    ]  # fmt: skip


def test_functions_take_names_of_before() -> None:
    plan: Any = autopar.plan
    with (
        pytest.warns(OldNameWarning, match=r'write search=\{"strict": \.\.\.\}') as told,
        pytest.raises(ArgumentError, match=r"search\.strict=2: write True"),
    ):
        plan(nn.Linear(1, 1), None, strict=2)
    assert [each.filename for each in told] == [__file__]
    assert issubclass(OldNameWarning, DeprecationWarning)


def test_the_page_is_as_the_options_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.options_page writes it"
