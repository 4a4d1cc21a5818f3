"""A profile that learns: prices move to what a run took, within bounds, and once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from autopar.cli.main import main
from autopar.cluster.measured import measured_on
from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cluster.profile import MOST, Profile, learn
from autopar.cost_model.roofline import attention_s, matmul_s, pointwise_s
from autopar.errors import ClusterError
from autopar.ir.mesh import Cluster
from autopar.plans.run_record import RUN_VERSION, MeasuredStep, PredictedStep, RunRecord
from autopar.rules.op import Scores
from tests.cost_model.test_interpolation import disturbed
from tests.cost_model.test_measured_links import lab, seconds


def profile() -> Profile:
    links = lab()
    return msgspec.structs.replace(
        disturbed("cpu"),
        cluster=links.cluster,
        sizes=links.sizes,
        collectives=links.collectives,
        overlaps=links.overlaps,
    )


def described(found: Profile) -> Cluster:
    return measured_on(parse_cluster(found.cluster), found)


def source(found: Profile) -> str:
    return described(found).device.source


def record(found: Profile, passes_ns: int, exposed_ns: int | None) -> RunRecord:
    """Of a step of 100 ms compute, 20 ms of 50 ms communication exposed, and 10 ms optimizer."""
    ms = 1_000_000
    return RunRecord(
        schema=RUN_VERSION,
        model="Model",
        plan="0" * 32,
        cluster="lab",
        mesh="dp=8",
        source=source(found),
        backend="eager",
        rank=0,
        steps=7,
        predicted=PredictedStep(130 * ms, 120 * ms, 20 * ms, 50 * ms, 2**20),
        measured=MeasuredStep(None, passes_ns, exposed_ns, None),
    )


def test_prices_take_as_many_times_as_long_as_was_learned() -> None:
    before = profile()
    after, said = learn(before, [(source(before), 1.5, 0.5)])
    old, new = described(before), described(after)
    for out, k in ((2**10, 64), (2**30, 4096), (2**14, 200)):
        prices = (matmul_s(out, k, 0, "float32", on.device) for on in (new, old))
        assert next(prices) == pytest.approx(1.5 * next(prices))
    scores = Scores(2**14, 300, 64, 4.0, True, False)
    for price in (
        lambda on: attention_s(2.0**40, scores, 2**20, "float32", on.device),
        lambda on: pointwise_s(5000, on.device, 0.8, starts=True),
        lambda on: matmul_s(2**14, 2**9, 0, "float64", on.device),
    ):
        assert price(new) == pytest.approx(1.5 * price(old))
    for mesh in ("8", "2x4", "4x2"):
        for a, b in zip(parse_mesh(mesh, new), parse_mesh(mesh, old), strict=True):
            for kind in ("all_gather", "all_reduce", "all_to_all"):
                assert seconds(kind, 2**20, a) == pytest.approx(0.5 * seconds(kind, 2**20, b))
    assert said == (
        "compute: takes 1.5 times what was predicted",
        "communication: takes 0.5 times what was predicted",
    )


def test_a_lesson_is_bounded_and_says_so() -> None:
    found, said = learn(profile(), [(source(profile()), 20.0, None)])
    assert found.learned is not None
    assert found.learned.compute_ppm == MOST * 1e6
    assert "20 counts as the factor of 3 that one lesson changes" in said[0]
    assert said[1] == "communication: not known, left as it is"


def test_a_run_teaches_once_and_only_its_own_profile() -> None:
    first = profile()
    second, _ = learn(first, [(source(first), 2.0, 2.0), (source(first), 0.5, 2.0)])
    assert second.learned is not None
    assert (second.learned.compute_ppm, second.learned.runs) == (1_000_000, 2)
    with pytest.raises(ClusterError, match="a run was priced with other figures"):
        learn(second, [(source(first), 2.0, 2.0)])
    third, _ = learn(second, [(source(second), 1.1, 0.5)])
    assert third.learned is not None
    assert (third.learned.compute_ppm, third.learned.communication_ppm) == (1_100_000, 1_000_000)


def test_ratios_of_a_run() -> None:
    ms = 1_000_000
    found = record(profile(), 200 * ms, 45 * ms)
    assert found.compute_ratio == pytest.approx(1.55)
    assert found.communication_ratio == pytest.approx(1.5)
    unknown = record(profile(), 170 * ms, None)
    assert unknown.compute_ratio == pytest.approx(1.5)
    assert unknown.communication_ratio is None


def test_command_lets_a_profile_learn(tmp_path: Path) -> None:
    lab_file, run = tmp_path / "lab.json", tmp_path / "run.json"
    profile().save(lab_file)
    record(profile(), 170_000_000, 20_000_000).save(run)
    asked = ["profile", "--learn", str(run), "-o", str(lab_file)]
    done = CliRunner().invoke(main, asked)
    assert (done.exit_code, done.stdout.splitlines()) == (
        0,
        [
            "compute: takes 1.5 times what was predicted",
            "communication: takes 1 times what was predicted",
        ],
    )
    learned = Profile.load(lab_file).learned
    assert learned is not None
    assert learned.compute_ppm == 1_500_000
    again = CliRunner().invoke(main, asked)
    assert again.exit_code == 1
    assert "a run was priced with other figures" in again.stderr
    assert CliRunner().invoke(main, asked[:-2]).exit_code == 1
