"""The command that says why: from a plan alone, and with the model it was made for."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from autopar.cli.main import main
from autopar.errors import AutoparError, ClusterError, ConstraintError
from autopar.plans.plan import Plan
from autopar.plans.recorded import cluster_of, options_of
from autopar.plans.requests.plan_options import ConstraintOptions, MemoryOptions, PlanOptions
from autopar.plans.requests.read_options import make_options
from tests.redone import redecided
from tests.report.plans import renamed, two_axis_plan

TARGET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def build():
    return Net(), (torch.zeros(64, 256),)

def sized():
    return Net(), lambda batch: (torch.zeros(batch, 256),)
"""
ON = ("--cluster", "2x2xH100", "--mesh", "2x2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def fails(result: Result, status: int, message: str) -> None:
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    assert message in result.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explained") / "explained_target.py"
    path.write_text(TARGET)
    return f"{path}:build"


@pytest.fixture(scope="module")
def stored(target: str) -> str:
    path = str(Path(target.rpartition(":")[0]).with_name("plan.json"))
    result = run("plan", target, *ON, "--constraints-pin", "up.weight=S(0) on tp", "-o", path)
    assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture
def by_hand(tmp_path: Path) -> str:
    path = str(tmp_path / "plan.json")
    two_axis_plan().save(path)
    return path


def test_the_stored_part_needs_no_torch(by_hand: str, tmp_path: Path) -> None:
    evil = tmp_path / "evil.json"
    renamed(two_axis_plan(), "__import__('os').abort()").save(evil)
    code = f"""
import sys
from autopar.cli.main import main
for arguments in (
    [{by_hand!r}], [{by_hand!r}, "lm_head"], [{str(evil)!r}], [{str(evil)!r}, "lm_head:f"]
):
    try:
        main(["explain", *arguments])
    except SystemExit as stop:
        assert stop.code == int(arguments[-1] == "lm_head:f"), arguments
assert not {{"torch", "numpy", "transformers"}} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_json_and_width(by_hand: str) -> None:
    content = json.loads(run("explain", by_hand, "lm_head.weight", "--json").stdout)
    assert (content["kind"], content["alternatives"]) == ("parameter", [])
    assert all(len(line) <= 50 for line in run("explain", by_hand, "--width", "50").stdout.split())


@pytest.mark.parametrize("name", ["lm_heads", "x:y:z", "model.layers.*.mlp.up.wieght"])
def test_unknown_names(by_hand: str, name: str) -> None:
    fails(run("explain", by_hand, name), 1, "close to it are")


def test_alternatives_of_the_model(stored: str, target: str) -> None:
    result = run("explain", stored, "down.weight", target, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    plan = Plan.load(stored)
    (found,) = content["alternatives"]
    chosen = [each for each in found["alternatives"] if each["is_chosen"]]
    assert [each["sharding"] for each in chosen] == [plan.structure.params["down.weight"].storage]
    assert found["modelled_ns"] == chosen[0]["modelled_ns"] == plan.estimates.stages[0].modelled_ns
    assert [each["change"].split(" ")[0] for each in content["benefits"]] == ["1", "2", "2"]
    assert all(
        each["before_ns"] == plan.estimates.stages[0].modelled_ns for each in content["benefits"]
    )


def test_what_was_imposed_is_imposed_again(stored: str, target: str) -> None:
    content = json.loads(run("explain", stored, "up.weight", target, "--json").stdout)
    (found,) = content["alternatives"]
    assert {each["sharding"].rpartition(", ")[2] for each in found["alternatives"]} == {"S(0)]"}


def test_the_target_may_stand_alone(stored: str, target: str) -> None:
    result = run("explain", stored, target)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "What more would buy" in result.stdout
    assert "What else it could be" not in result.stdout


def test_another_model_is_refused(stored: str, target: str) -> None:
    sized = target.replace(":build", ":sized")
    fails(run("explain", stored, sized, "--global-batch", "32"), 5, "[32, 256]")


def test_other_prices_are_told(stored: str, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = run("explain", stored, target, "--cluster", "2x2xA100")
    assert result.exit_code == 0
    assert "cluster 2x2xH100 in the plan, 2x2xA100 now" in result.stderr


def test_a_cluster_that_is_no_preset_is_asked_for(tmp_path: Path, target: str) -> None:
    plan = two_axis_plan()
    structure = redecided(plan.structure, cluster="ours")
    path = str(tmp_path / "plan.json")
    msgspec.structs.replace(plan, structure=structure).save(path)
    fails(run("explain", path, target), 1, "give --cluster FILE")


def test_a_name_is_no_path(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("this is not read")
    plan = two_axis_plan()
    structure = redecided(plan.structure, cluster=str(path))
    with pytest.raises(ClusterError, match="which is no preset"):
        cluster_of(msgspec.structs.replace(plan, structure=structure))


def imposed(*lines: str, options: PlanOptions = PlanOptions()) -> Plan:  # noqa: B008
    plan = two_axis_plan()
    provenance = msgspec.structs.replace(plan.provenance, imposed=lines, options=options)
    return msgspec.structs.replace(plan, provenance=provenance)


def test_options_of_a_plan_are_those_it_was_made_with() -> None:
    given = make_options(
        mesh="dp=2,tp=4",
        memory={
            "limit": two_axis_plan().estimates.memory_limit,
            "residency": "auto",
            "checkpoint": "as written",
            "loss_chunks": 1,
        },
        constraints={
            "pins": ("a.*=S(0) on tp", "b=[S(1) on tp]"),
            "forbid": ("dp:lm_head",),
            "strategy": "megatron",
        },
        backend="eager",
        microbatches=1,
        pipeline={"stages": 1},
    )
    plan = imposed(*given.imposed, options=given.given)
    assert options_of(plan) == given
    others = ConstraintOptions(strategy="ddp")
    found = options_of(plan, others)
    assert (found.given.backend, found.strategy, found.constraints) == ("eager", "ddp", ())


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        (PlanOptions(memory=MemoryOptions(residency="gpu")), "residency='gpu': write one of"),
        (PlanOptions(memory=MemoryOptions(host="much")), "memory.host: 'much'"),
        (PlanOptions(backend="jit"), "no backend 'jit'"),
        (PlanOptions(constraints=ConstraintOptions(strategy="4d")), "no strategy '4d'"),
    ],
    ids=str,
)
def test_what_a_file_asks_for_is_read_strictly(recorded: PlanOptions, words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        options_of(imposed(options=recorded))


HEAD = """
import torch
from torch import nn
from torch.nn import functional

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 64)
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, ids):
        logits = self.head(self.table(ids)).flatten(0, -2)
        return {"loss": functional.cross_entropy(logits, ids.flatten()), "logits": logits}

def build():
    return Head(), (torch.zeros(8, 32, dtype=torch.long),)
"""


def test_a_loss_in_chunks_without_logits(tmp_path: Path) -> None:
    """It is solved as it was: in as many chunks, and without what nobody reads."""
    target = tmp_path / "explained_head.py"
    target.write_text(HEAD)
    path, built = str(tmp_path / "plan.json"), f"{target}:build"
    asked = "--cluster", "2xH100", "--memory-loss-chunks", "4", "--outputs-unread", "logits"
    result = run("plan", built, *asked, "-o", path)
    assert result.exit_code == 0, result.stderr
    options = options_of(Plan.load(path))
    assert (options.loss_chunks, options.given.outputs.unread) == (4, ("logits",))
    result = run("explain", path, "head.weight", built)
    # Were it another problem, a warning would say that it has another best step.
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "asked",
    [
        ("--memory-residency", "auto"), ("--memory-residency", "cpu"),
        ("--memory-checkpoint", "as written"), ("--memory-host", "64GiB"),
        ("--outputs-differentiable", "logits"), ("--search-strict",),
        ("--memory-saved-dtype", "bfloat16"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_it_is_planned_again_as_it_was_asked_for(tmp_path: Path, asked: tuple[str, ...]) -> None:
    target = tmp_path / "asked_head.py"
    target.write_text(HEAD)
    path, built = str(tmp_path / "plan.json"), f"{target}:build"
    result = run("plan", built, "--cluster", "2xH100", *asked, "-o", path)
    assert result.exit_code == 0, result.stderr
    result = run("explain", path, "head.weight", built)
    # Were it another problem, a warning would say that it has another best step.
    assert (result.exit_code, result.stderr) == (0, "")


def test_as_many_microbatches_as_were_planned(stored: str, target: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    assert run("plan", target, *ON, "--microbatches", "4", "-o", path).exit_code == 0
    assert (
        options_of(Plan.load(stored)).microbatches,
        options_of(Plan.load(path)).microbatches,
    ) == (1, 4)
    result = run("explain", path, "up.weight", target, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    (found,) = json.loads(result.stdout)["alternatives"]
    assert found["modelled_ns"] == Plan.load(path).estimates.stages[0].modelled_ns


def test_what_cannot_be_asked_for_again_is_refused() -> None:
    plan = imposed("parameters as they are stored")
    with pytest.raises(ConstraintError, match="say what is to be imposed"):
        options_of(plan)
    assert options_of(plan, ConstraintOptions(strategy="ddp")).strategy == "ddp"
