"""The published JSON Schema: that of the nouns, and one that real plan files fulfil."""

from __future__ import annotations

import copy
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings

from autopar.ir.files import written
from autopar.plans.plan import Plan
from tests.report.any_plans import plans
from tests.report.plans import two_axis_plan

REWRITE = bool(os.environ.get("AUTOPAR_REWRITE_GOLDEN"))


def published() -> dict[str, Any]:
    return json.loads((files("autopar.plans") / "plan.schema.json").read_text())


def test_the_published_schema_is_that_of_the_nouns() -> None:
    text = written(Plan.json_schema(), None).decode()
    path = Path(str(files("autopar.plans") / "plan.schema.json"))
    if REWRITE:
        path.write_text(text)
    assert path.read_text() == text, "AUTOPAR_REWRITE_GOLDEN=1 writes it anew"


@settings(max_examples=30)
@given(plan=plans())
def test_plan_files_fulfil_it(plan: Plan) -> None:
    jsonschema.validate(json.loads(plan.to_bytes()), published())


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("structure", "stages", 0, "mesh", 0, "size"), 0),
        (("estimates", "flops"), -1),
        (("structure", "strategy"), "x"),
        (("structure", "stages", 0, "params", "lm_head.weight", "residency"), "disk"),
    ],
)
def test_what_is_no_plan_does_not(way: tuple[Any, ...], value: Any) -> None:
    content = copy.deepcopy(json.loads(two_axis_plan().to_bytes()))
    jsonschema.validate(content, published())
    holder = content
    for step in way[:-1]:
        holder = holder[step]
    holder[way[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, published())
