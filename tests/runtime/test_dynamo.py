"""`torch.compile(model, backend="autopar")`, found by its entry point, trains as eager does."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.driver.dynamo_backend import backend
from autopar.errors import AutoparError
from autopar.plans.requests.options import Options
from tests.runtime import dynamo_workers
from tests.runtime.spawn import ROOT, spawn

TOLERANCE = 1e-5


def check(seen: dict[str, Any]) -> None:
    assert seen["loss"] < TOLERANCE and seen["param"] < TOLERANCE
    assert seen["calls"] == [3.0, 3.0]
    assert seen["plain"]


def test_one_process() -> None:
    check(dynamo_workers.train(backend))


@pytest.mark.processes
def test_two_processes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point as an installed autopar has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch_dynamo_backends"]
    installed = tmp_path / "autopar-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: autopar\nVersion: 0\n")
    lines = "\n".join(f"{name} = {target}" for name, target in points.items())
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{lines}\n")
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    for seen in spawn("tests.runtime.dynamo_workers.by_name", 2):
        assert isinstance(seen, dict)
        check(seen)


def test_a_graph_after_a_break_is_an_error() -> None:
    """Its inputs are what a graph before it computed, and have gradients."""
    model: Any = torch.compile(nn.Linear(3, 3), backend=backend)
    with pytest.raises(AutoparError, match="broke the model into several graphs"):
        model(torch.randn(2, 3, requires_grad=True))


def test_an_option_that_there_is_not() -> None:
    model = torch.compile(nn.Linear(2, 2), backend=backend, options={"meshes": "2"})
    with pytest.raises(Exception, match=r"takes no meshes: did you mean mesh. It takes mesh, "):
        model(torch.randn(1, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"constraints": {"strategy": "megatron"}},
            "cannot do strategy megatron: parameters stay whole",
        ),
        (
            {"constraints": {"pins": "weight=S(0) on tp"}},
            "cannot do pin weight=S.0. on tp: parameters stay whole",
        ),
        (
            {"constraints": {"pins": {"param:*": "[R, S(0)]"}}},
            "cannot do pin param:.*: parameters stay whole",
        ),
        ({"microbatches": 2}, "has no microbatches: gradients come from the script for every"),
        ({"memory": {"residency": "cpu"}}, r"memory of torch.compile.* takes no residency"),
        ({"mesh": 2.5}, "mesh=2.5 is no mesh: write sizes"),
    ],
)
def test_what_it_cannot_do_is_told_at_once(options: dict[str, Any], words: str) -> None:
    model = torch.compile(nn.Linear(2, 2), backend=backend, options=options)
    with pytest.raises(Exception, match=words):
        model(torch.randn(1, 2))


@pytest.mark.parametrize("memory", [{}, {"residency": "cuda"}])
def test_its_parameters_stay_on_the_device(
    memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing fits otherwise: they are the script's."""
    asked: list[Options] = []

    def compiled(flat: nn.Module, _given: object, options: Options, _scalars: object) -> nn.Module:
        asked.append(options)
        return flat

    monkeypatch.setattr("autopar.driver.dynamo_backend._Compiled", compiled)
    torch.compile(nn.Linear(2, 2), backend=backend, options={"memory": memory})(torch.randn(1, 2))
    (options,) = asked
    assert (options.residency, options.residency_if_needed) == ("cuda", False)


def test_it_has_no_modes() -> None:
    model = torch.compile(nn.Linear(2, 2), backend=backend, mode="reduce-overhead")
    with pytest.raises(Exception, match="has no modes: leave out mode="):
        model(torch.randn(1, 2))
