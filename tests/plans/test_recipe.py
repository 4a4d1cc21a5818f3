"""The TOML files beside golden plans: strict to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.driver.gate.recipe import cluster_file, read_recipe
from autopar.errors import RecipeError

LEAST = 'target = "../train.py:build"\ncluster = "2x4xA100"\n'

EVERYTHING = """
target = "package.module:build"
root = ".."
cluster = "lab.toml"
global_batch = 64
mesh = "dp=2,tp=4"
optimizer = "sgd"
memory.limit = "30GiB"
search.time_limit = 2.5
search.strict = true
search.margin = true
constraints.strategy = "megatron"
profile = "a100.profile.json"
constraints.forbid = ["dp:lm_head"]

[constraints.pins]
"*.down_proj.weight" = "S(1) on tp"
"""

LAB = 'device = "A100"\nlevels = [{size = 2}, {size = 4}]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "lab.toml").write_text(LAB)
    return folder


def written(folder: Path, text: str) -> Path:
    path = folder / "toy.toml"
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(written(folder, LEAST))
    assert recipe.target == f"{folder.parent}/train.py:build"
    assert recipe.golden == folder / "toy.plan.json"
    assert (recipe.root, recipe.cluster.name, recipe.options.mesh) == (folder, "2x4xA100", "auto")
    monkeypatch.chdir(folder)
    assert read_recipe(Path("toy.toml")) == recipe


def test_a_table_of_actions_is_a_file_beside_it(folder: Path) -> None:
    (folder / "own.table").write_text("0F0, 0B0\n1F0, 1B0\n")
    options = read_recipe(written(folder, LEAST + 'pipeline.schedule = "own.table"')).options
    assert (options.schedule, options.stages) == ("0F0 0B0\n1F0 1B0", 2)
    for text in ("zb-h1", "0F0 0B0\\n1F0 1B0"):
        known = read_recipe(
            written(folder, f'{LEAST}pipeline.stages = 2\npipeline.schedule = "{text}"')
        ).options
        assert known.schedule == text.replace("\\n", "\n")
    with pytest.raises(RecipeError, match=r"no\.table"):
        read_recipe(written(folder, LEAST + 'pipeline.schedule = "no.table"'))


def test_every_option_of_plan(folder: Path) -> None:
    recipe = read_recipe(written(folder, EVERYTHING))
    assert (recipe.target, recipe.root) == ("package.module:build", folder.parent)
    assert (recipe.cluster.name, recipe.cluster.num_devices) == ("lab", 8)
    assert recipe.profile == folder / "a100.profile.json"
    options = recipe.options
    assert (recipe.global_batch, options.mesh, options.given.optimizer) == (64, "dp=2,tp=4", "sgd")
    assert (options.memory_limit_bytes, options.time_limit_s) == (30 * 2**30, 2.5)
    search = options.given.search
    assert (search.strict, options.strategy, search.margin) == (True, "megatron", True)
    assert [c.origin for c in options.constraints] == [
        "pin *.down_proj.weight=S(1) on tp",
        "forbid dp:lm_head",
    ]
    assert cluster_file(folder / "toy.toml") == folder / "lab.toml"


def test_time_limits_are_only_those_asked_for(folder: Path) -> None:
    assert read_recipe(written(folder, LEAST)).options.time_limit_s is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing required field `target`"),
        ('target = "m.py:build"', "missing required field `cluster`"),
        (LEAST + "batch = 3", "unknown field `batch`"),
        (LEAST + 'global_batch = "64"', "$.global_batch"),
        (LEAST + "global_batch = 0", "global_batch is 0"),
        (LEAST + "memory.limit = 0", "memory.limit=0: it must be more than 0 bytes"),
        (LEAST + 'memory.limit = "72"', "memory.limit: '72' has no unit"),
        (LEAST + "search.time_limit = nan", "search.time_limit=nan: it must be more than 0"),
        (LEAST + "search.time_limit = 0", "search.time_limit=0: it must be more than 0 seconds"),
        (LEAST + 'constraints.pins = ["weight"]', "pin weight"),
        (LEAST + 'constraints.strategy = "zero"', "there is no strategy 'zero'"),
        (LEAST + 'root = "nowhere"', "root is 'nowhere'"),
        ('target = "build"\ncluster = "H100"', "target is 'build'"),
        ('target = "m.py:build"\ncluster = "H1000"', "H1000"),
        ('target = "m.py:build"\ncluster = "no.toml"', "no.toml cannot be read"),
        ("target = ", "Invalid value"),
        (LEAST + "global_batch = 1\nglobal_batch = 2", "Cannot overwrite a value"),
    ],
)
def test_errors_name_the_file_and_the_key(folder: Path, text: str, words: str) -> None:
    with pytest.raises(RecipeError) as raised:
        read_recipe(written(folder, text))
    assert words in str(raised.value)
    assert "toy.toml" in str(raised.value)


def test_what_is_no_text(folder: Path) -> None:
    path = folder / "toy.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match=r"toy\.toml: 'utf-8'"):
        read_recipe(path)
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        read_recipe(folder / "none.toml")
