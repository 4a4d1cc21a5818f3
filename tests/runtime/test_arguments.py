"""Arguments as people write them: taken, or refused in one sentence."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

import autopar
from autopar.cluster.mesh_shapes import MeshLike, read_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.optimizer_kinds import optimizer_name
from autopar.driver.arguments import read_cluster
from autopar.errors import AutoparError, ConstraintError
from autopar.plans.requests.read_options import make_options
from tests.grouped import grouped

WEIGHT = nn.Parameter(torch.zeros(2))


def planned(**options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    return autopar.plan(model, torch.randn(8, 8), **grouped(**options))


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (None, "auto"),
        ("auto:3", "auto:3"),
        (4, "4"),
        ((2, 2), "2x2"),
        ([2, 4], "2x4"),
        (torch.Size([2, 2]), "2x2"),
        ({"dp": 2, "tp": 4}, "dp=2,tp=4"),
    ],
)
def test_a_mesh_is_taken(mesh: MeshLike, text: str) -> None:
    assert read_mesh(mesh) == text


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("AdamW", "adamw"),
        (torch.optim.AdamW, "adamw"),
        (torch.optim.RAdam([WEIGHT]), "radam"),
        (partial(torch.optim.Adagrad, lr=0.1), "adagrad"),
        (torch.optim.SGD([WEIGHT]), "sgd"),
        (torch.optim.SGD([WEIGHT], momentum=0.9), "sgd-momentum"),
        (partial(torch.optim.SGD, momentum=0.9), "sgd-momentum"),
        (partial(torch.optim.AdamW, fused=True), "adamw-fused"),
        (torch.optim.Adam([WEIGHT], fused=True), "adam-fused"),
        (torch.optim.AdamW([WEIGHT], foreach=True), "adamw"),
        (type("Mine", (torch.optim.Adam,), {}), "adam"),
    ],
)
def test_an_optimizer_is_taken(optimizer: object, name: str) -> None:
    assert optimizer_name(optimizer) == name


def test_limits_are_taken() -> None:
    def limits(memory: Any, time: Any) -> tuple[int | None, float | None]:
        options = make_options(mesh=None, memory={"limit": memory}, search={"time_limit": time})
        return options.memory_limit_bytes, options.time_limit_s

    assert limits(72e9, 5) == limits("72GB", "5s") == (72_000_000_000, 5.0)
    assert limits(None, None) == limits(float("inf"), float("inf")) == (None, None)


def test_a_cluster_is_taken(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert read_cluster(4, model) == read_cluster("4xcpu", model) == parse_cluster("4xcpu")
    file = tmp_path / "lab.toml"
    file.write_text('device = "A100"\nlevels = [{size = 2}]\n')
    assert read_cluster(file, model) == read_cluster(str(file), model) == parse_cluster(str(file))
    assert read_cluster(None, model) is None
    with pytest.raises(AutoparError, match="cannot be read: No such file"):
        read_cluster(tmp_path / "none", model)


def test_all_of_it_in_a_plan() -> None:
    plain = planned(cluster="4xcpu", mesh="dp=2,tp=2", pins={"weight": "S(0) on tp"})
    other = planned(
        cluster=4,
        mesh={"dp": 2, "tp": 2},
        optimizer=torch.optim.AdamW,
        memory_limit=None,
        time_limit=None,
        pins="weight=S(0) on tp",
        forbid=None,
        strategy=None,
    )
    assert other.structure == plain.structure


@pytest.mark.parametrize("stages", [1, "2", "auto"])
@pytest.mark.parametrize(("given", "count"), [(None, None), ("auto", None), ("3", 3), (3, 3)])
def test_microbatches_are_open_unless_given(
    stages: int | str, given: int | str | None, count: int | None
) -> None:
    """A command line has numbers as text."""
    options = make_options(mesh=None, microbatches=given, pipeline={"stages": stages})
    assert options.microbatches == count


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": 2.5}, r"mesh=2.5 is no mesh: write sizes, slowest axis first, as \(2, 4\)"),
        ({"mesh": ("2", 4)}, "is no mesh"),
        ({"mesh": True}, "is no mesh"),
        ({"mesh": {"dp": "2"}}, "is no mesh"),
        ({"mesh": 3}, "mesh '3' has 3 devices, but cluster 4xcpu has 4"),
        ({"mesh": {"d p": 4}}, "'d p=4' is not name=size"),
        (
            {"stages": 4, "cuts": "layers.1"},
            "stages=4: cuts before layers.1 make 2; give all cuts, or none and only how many",
        ),
        ({"cluster": 2.0}, "cluster is a float: write the devices as text .8xH100., the path"),
        ({"cluster": 0}, "is not a size from 1 to"),
        ({"optimizer": "adan"}, "'adan' is not known: name the one most like it of sgd"),
        ({"optimizer": torch.optim.SparseAdam}, "needs sparse gradients"),
        ({"optimizer": None}, "optimizer is None: leave it out for AdamW"),
        ({"memory_limit": "72"}, "memory.limit: '72' has no unit"),
        ({"memory_limit": -1}, "memory.limit=-1: it must be more than 0 bytes"),
        ({"memory_limit": float("nan")}, "it must be more than 0 bytes"),
        ({"memory_limit": [72]}, "write bytes, or text such as .72GiB."),
        ({"time_limit": True}, "write seconds, or text such as .2min."),
        ({"strict": "no"}, "strict='no': write True or False"),
        ({"strategy": 3}, "there is no strategy 3: choose ddp"),
        ({"strategy": ["fsdp"]}, "there is no strategy .*'fsdp'.*: choose ddp"),
        ({"profile": 3}, "profile=3 is neither a profile nor the path of one"),
        ({"meshes": 4}, "autopar.plan takes no meshes: did you mean mesh. It takes model, inputs"),
        ({"lr": 1.0}, "autopar.plan takes no lr. It takes"),
    ],
)
def test_what_says_nothing_is_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AutoparError, match=words) as caught:
        planned(**{"cluster": "4xcpu", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": 3}, "plan=3 is neither a plan nor the path of one"),
        ({"weights": {"weight": WEIGHT}}, "weights is a dict: give the path of a safetensors"),
        ({"seed": "0"}, "seed='0': write a whole number"),
        ({"inputs": 3}, "inputs=3: say .global. or .local."),
        ({"inputs": ["x"]}, r"inputs=\['x'\]: say .global. or .local."),
        ({"backend": 3}, "no backend 3: choose one of eager"),
        ({"plans": None}, "autopar.compile takes no plans: did you mean plan"),
    ],
)
def test_what_compile_alone_takes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        autopar.compile(nn.Linear(2, 2), **grouped(**options))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear, "model is the class Linear: give a torch.nn.Module that was made"),
        (torch.relu, "model is a builtin_function_or_method"),
        (DataParallel(nn.Linear(2, 2)), "wrapped in DataParallel, which autopar takes the place"),
    ],
)
def test_a_model_must_be_one(model: Any, words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        autopar.compile(model)
    with pytest.raises(AutoparError, match=words):
        autopar.plan(model, torch.randn(1, 2))


def test_a_wrong_kind_is_a_type_error_too() -> None:
    with pytest.raises(TypeError):
        autopar.compile(nn.Linear(2, 2), meshes=4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConstraintError):
        autopar.compile(nn.Linear(2, 2), constraints={"strategy": "tensor parallel"})
