"""Options stand in one place: signatures, flags, recipes and pages are as it has them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import autopar
from autopar.cli.plan import plan as command
from autopar.plans.plan_options import (
    OptionField,
    PlanOptions,
    from_keywords,
    option_fields,
    to_keywords,
)
from autopar.plans.read_options import make_options, read_options
from autopar.plans.recipe import read_recipe
from tests.options_page import PAGE, page

FIELDS = option_fields()
NOT_OF_A_FRONTIER = {"stages", "cuts", "schedule"}
WRITTEN: dict[str, Any] = {
    "mesh": (2, 4),
    "optimizer": "sgd",
    "microbatches": "4",
    "backend": "inductor",
    "memory_limit": "72GiB",
    "host_memory": "1TiB",
    "residency": "auto",
    "checkpoint": "as written",
    "loss_chunks": 2,
    "saved_dtype": "bfloat16",
    "stages": 2,
    "cuts": "layers.4",
    "schedule": "1f1b",
    "pins": {"a.*": "S(0) on tp"},
    "forbid": {"tp": ["a", "b"]},
    "strategy": "Megatron",
    "differentiable_outputs": "logits",
    "unread_outputs": ["hidden"],
    "time_limit": "2min",
    "strict": True,
}
"""Each option as somebody may write it, and none as it is by default."""


def keyword(field: OptionField) -> str:
    return field.keyword


@pytest.mark.parametrize("function", [autopar.compile, autopar.plan, autopar.frontier])
@pytest.mark.parametrize("field", FIELDS, ids=keyword)
def test_functions_take_it(function: Any, field: OptionField) -> None:
    known = inspect.signature(function).parameters
    if function is autopar.frontier and field.keyword in NOT_OF_A_FRONTIER:
        assert field.keyword not in known
        return
    default = known[field.keyword].default
    if function is autopar.frontier and field.keyword == "microbatches":
        assert default == 1
    else:
        assert (default or field.default) == field.default


@pytest.mark.parametrize("field", FIELDS, ids=keyword)
def test_the_command_has_a_flag(field: OptionField) -> None:
    (found,) = [
        x
        for x in command.get_params(command.make_context("plan", ["t"]))
        if x.name == field.keyword
    ]
    assert found.multiple == field.is_several
    assert isinstance(found, click.Option)
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


def test_a_recipe_takes_them_all(tmp_path: Path) -> None:
    given = {k: [v] if k in ("cuts", "differentiable_outputs") else v for k, v in WRITTEN.items()}
    lines = "".join(f"{name} = {toml(value)}\n" for name, value in given.items())
    path = tmp_path / "made.toml"
    path.write_text(f"target = 'train.py:build'\ncluster = '8xH100'\n{lines}")
    assert read_recipe(path).options.given == read_options(**WRITTEN)


def test_each_is_recorded_and_asked_for_again() -> None:
    read = read_options(**WRITTEN)
    assert set(WRITTEN) == set(map(keyword, FIELDS))
    defaults = to_keywords(PlanOptions())
    assert not {k for k, v in to_keywords(read).items() if v == defaults[k]}
    again = msgspec.json.decode(msgspec.json.encode(read), type=PlanOptions)
    assert again == read == read_options(**to_keywords(read)) == from_keywords(to_keywords(read))
    assert make_options(**to_keywords(again)) == make_options(**WRITTEN)


def test_other_keywords_are_no_options() -> None:
    with pytest.raises(TypeError, match="no options: mesch"):
        read_options(mesch="2x4")


def test_the_page_is_as_the_options_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.options_page writes it"
