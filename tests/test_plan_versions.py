"""Plan files of older versions: one of each is kept, as the autopar of its time wrote it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from autopar.cli.main import main
from autopar.errors import PlanError
from autopar.plans.plan import SCHEMA_VERSION, Plan
from tests.report.plans import two_axis_plan

FOLDER = Path(__file__).parent / "plan_versions"
VERSIONS = range(1, SCHEMA_VERSION)


def path_of(version: int) -> Path:
    return FOLDER / f"v{version}.json"


def test_every_version_is_kept() -> None:
    assert sorted(FOLDER.iterdir()) == [path_of(version) for version in VERSIONS]


@pytest.mark.parametrize("version", VERSIONS)
def test_older_versions_load_with_their_decisions(version: int) -> None:
    plan = Plan.load(path_of(version))
    today = two_axis_plan()
    for field in ("params", "ops", "routes", "mesh", "inputs", "fingerprint"):
        assert getattr(plan.structure, field) == getattr(today.structure, field), field
    assert plan.structure.stages[0].num_ranks == 8
    assert plan.estimates.exposed_communication_ns == plan.estimates.communication_ns > 0
    assert plan.estimates.order == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_plan_is_saved_as_one_of_today(version: int, tmp_path: Path) -> None:
    plan = Plan.load(path_of(version))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert msgspec.structs.replace(plan, schema=SCHEMA_VERSION) == again


@pytest.mark.parametrize("version", VERSIONS)
def test_older_versions_are_shown(version: int) -> None:
    result = CliRunner().invoke(main, ["show", str(path_of(version))])
    assert result.exit_code == 0, result.output
    assert "model.layers.*.mlp.up.weight" in result.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("old", "new"),
    [('"size": 2', '"size": 0'), ('"mesh": [', '"mesh" : ['), ('"ops": {', '"opts": {')],
)
def test_damage_to_an_older_file_is_seen(version: int, old: str, new: str) -> None:
    text = path_of(version).read_text()
    assert old in text
    with pytest.raises(PlanError):
        Plan.from_bytes(text.replace(old, new).encode())
