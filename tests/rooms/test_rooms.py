"""What no linter holds: what an import costs, where torch may be, that there is one version."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import autopar
from tools.check_file_size import MAX_LINES, too_long
from tools.check_names import defined_twice
from tools.check_torch_private import private_uses
from tools.check_words import foreign_words

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cli", "cluster", "cost_model", "ir", "plans", "report", "rules", "solver")
TORCH_FREE = sorted(
    path
    for pattern in ("__init__.py", "errors.py", *(f"{room}/**/*.py" for room in ROOMS))
    for path in (ROOT / "autopar").glob(pattern)
)


def imported(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", TORCH_FREE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nouns_solver_prices_and_reports_know_no_torch(path: Path) -> None:
    assert not imported(path) & {"torch", "transformers"}


@pytest.mark.parametrize("module", ["autopar", "autopar.cli.main"])
def test_import_is_free_of_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit(int('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0


def test_every_folder_is_a_package() -> None:
    """import-linter does not look into a folder without `__init__.py`."""
    folders = {path.parent for path in (ROOT / "autopar").rglob("*.py")}
    assert not [
        str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()
    ]


def test_one_version() -> None:
    assert version("autopar") == autopar.__version__


@pytest.mark.parametrize("name", autopar.__all__)
def test_every_export_is_there(name: str) -> None:
    assert getattr(autopar, name) is not None
    assert name in dir(autopar)


def test_importing_a_module_does_not_hide_the_function_of_its_name() -> None:
    module = importlib.import_module("autopar.compile")
    assert autopar.compile is not module
    assert callable(autopar.compile)


def test_unknown_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = autopar.paralelize


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch\ntorch.fx._pytree.tree_map",
        "from torch import _guards",
        "from torch.distributed import _local_tensor as local",
        "import torch.distributed as dist\ndist._get_default_group()",
        "from torch import fx\nfx._utils",
    ],
)
def test_private_torch_is_found(source: str) -> None:
    assert len(list(private_uses(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops._c10d_functional.all_reduce",
        "import torch\ntorch.__version__",
        "class A:\n    def f(self): return self._torch",
        "from . import _private",
    ],
)
def test_public_torch_is_left_alone(source: str) -> None:
    assert not list(private_uses(source))


def test_long_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "autopar").mkdir()
    (tmp_path / "autopar" / "long.py").write_text("pass\n" * (MAX_LINES + 1))
    (tmp_path / "autopar" / "full.py").write_text("pass\n" * MAX_LINES)
    assert too_long(tmp_path) == [f"autopar/long.py: {MAX_LINES + 1} lines"]


def test_names_defined_twice_are_found(tmp_path: Path) -> None:
    (tmp_path / "autopar" / "cli").mkdir(parents=True)
    shared = (
        "class Step: ...\nSIZE: int = 1\nKind = int\ndef _own(): ...\ndef plan(): ...\naten = 0\n"
    )
    (tmp_path / "autopar" / "one.py").write_text(shared + "def only(): ...\n")
    (tmp_path / "autopar" / "cli" / "two.py").write_text(shared)
    files = "autopar/cli/two.py, autopar/one.py"
    assert defined_twice(tmp_path) == [f"{name}: {files}" for name in ("Kind", "SIZE", "Step")]


MAX_KINDS_OF_PLAN = 9
"""A plan has one form. These places do otherwise what several stages do together."""


def test_few_places_ask_whether_a_plan_is_a_pipeline() -> None:
    asking = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "autopar").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "is_pipeline"
    ]
    assert len(asking) <= MAX_KINDS_OF_PLAN, asking


def test_names_are_words_of_the_field(tmp_path: Path) -> None:
    assert not foreign_words(ROOT)
    (tmp_path / "autopar").mkdir()
    text = """
class Bill:
    num_again: int

    def add(self, turns):
        found = turns
        self._kept_bytes = found

def reload(): ...
"""
    (tmp_path / "autopar" / "roll.py").write_text(text, encoding="utf-8")
    assert [each.split(": ", 2)[1] for each in foreign_words(tmp_path)] == [
        "Bill", "_kept_bytes", "found", "num_again", "roll", "turns",
    ]  # fmt: skip


def test_labels_of_pages_are_words_of_the_field(tmp_path: Path) -> None:
    pages = tmp_path / "autopar" / "report" / "html"
    pages.mkdir(parents=True)
    text = """
TITLE = "Kept in turn", "plans again", "the best plan found"

def head(bytes):
    "What is handed over."
    return f"{bytes} of a piece, made at {bytes}"
"""
    (pages / "page.py").write_text(text, encoding="utf-8")
    template = "{# What pages are made of. #}\n<p class='bar played'>{{ found }}</p>\n"
    (pages / "page.html.j2").write_text(template, encoding="utf-8")
    assert [each.partition(": ")[2] for each in foreign_words(tmp_path)] == [
        "\"<p class='bar played'>{{ found }}</p>\": played is simulated, found is the noun it is: "
        "plan, candidate, result",
        "'Kept in turn': kept is for backward, unsharded, turn is microbatch",
        "' of a piece, made at ': piece is shard, made is the noun it is: output, result",
    ]


def test_files_that_pages_name_are_there() -> None:
    """In backticks, from the root or from the package."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    absent = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages
        for path in re.findall(r"`([a-z_]+/[\w/]+\.py)`", page.read_text(encoding="utf-8"))
        if not ((ROOT / path).exists() or (ROOT / "autopar" / path).exists())
    ]
    assert not absent


def test_the_name_before_of_a_report_warns() -> None:
    importlib.import_module("autopar.report.summary")
    with pytest.warns(DeprecationWarning, match="autopar.run_report"):
        old = getattr(autopar, "report")  # noqa: B009
    assert old is autopar.run_report
