"""The judge with a real network: its scenarios, its statistics, and what it says where it cannot
run. Nothing is timed."""

from __future__ import annotations

import sys
from math import isclose
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from autopar.cluster.parsing import parse_cluster
from benchmarks.contenders import Contender
from benchmarks.emulated import network, scores, worker
from benchmarks.emulated.__main__ import main, stated
from benchmarks.emulated.outcome import Entry, Outcome, load, save
from benchmarks.emulated.report import rows
from benchmarks.emulated.scenarios import SCENARIOS, workload
from benchmarks.processes import run_ranks

OUTCOME = Outcome(
    "wide-2",
    [
        Entry("autopar", [10.0, 30.0, 12.0], 9.0, "mesh"),
        Entry("autopar, fsdp", [20.0, 90.0, 24.0], 36.0, "mesh"),
        Entry("DDP", [8.0, 24.0, 11.0]),
    ],
    {"autopar, ddp": "autopar"},
    {"autopar, 3d": "needs three axes"},
    1e-7,
)


def test_the_scenarios_are_what_they_are_meant_to_be() -> None:
    found = SCENARIOS.values()
    assert len(found) >= 8
    assert {each.ranks for each in found} == {2, 4, 6, 8}
    assert any(each.per_node == 1 for each in found), "slow everywhere"
    assert any(each.per_node > 1 and each.nodes > 1 for each in found), "slow between"


@pytest.mark.breadth(4)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_workload_trains_and_its_batch_can_be_cut_or_is_too_small(name: str) -> None:
    case, scenario = workload(name), SCENARIOS[name]
    model, batch = case.build(), case.batch()
    assert list(case.blocks(model))
    sizes = {x.shape[0] for x in batch.values()}
    assert len(sizes) == 1
    assert not sizes.pop() % scenario.ranks or name == "long-4"
    case.loss(model, batch).backward()


def test_ratios_are_medians_over_rounds() -> None:
    chosen, fsdp, ddp = OUTCOME.entries
    assert scores.ratio(fsdp, chosen) == 2.0
    assert scores.ratio(chosen, ddp) == 1.25
    assert scores.fastest(OUTCOME) is ddp
    assert scores.behind(OUTCOME) == 1.25


def test_rivals_are_compared_where_they_ran_or_had_the_same_plan() -> None:
    other = Outcome("deep-4", OUTCOME.entries[:2], {}, {}, 0.0)
    found = scores.rivals([OUTCOME, other])
    assert found["autopar, ddp"] == (1, 1.0)
    assert found["autopar, fsdp"][0] == 2
    assert isclose(found["autopar, fsdp"][1], 2.0)
    assert found["DDP"][0] == 1
    assert "autopar, 3d" not in found


def test_predictions_are_judged_where_there_are_any() -> None:
    assert isclose(scores.median_error([OUTCOME]), (1 / 4 + 1 / 2) / 2)
    assert scores.rank_correlation([OUTCOME]) == 1.0
    alone = Outcome("deep-4", OUTCOME.entries[::2], {}, {}, 0.0)
    assert scores.rank_correlation([alone]) is None


def test_who_is_far_behind_is_measured_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is measured to the end however slow it is."""
    found = [SimpleNamespace(name=name) for name in ("autopar", "fast", "near", "far")]
    takes_ms = {"autopar": 90.0, "fast": 10.0, "near": 20.0, "far": 21.0}

    def time_rounds(
        some: list[Contender], rounds: int, *, warmup_rounds: int
    ) -> dict[str, list[float]]:
        assert warmup_rounds == (len(some) == len(found)), "all are warm before they are compared"
        return {each.name: [takes_ms[each.name]] * rounds for each in some}

    monkeypatch.setattr(worker, "time_rounds", time_rounds)
    times = worker.near_rounds(cast("list[Contender]", found), 12)
    assert {name: len(all_) for name, all_ in times.items()} == {
        "autopar": 12,
        "fast": 12,
        "near": 12,
        "far": 3,
    }
    assert set(map(len, worker.near_rounds(cast("list[Contender]", found), 2).values())) == {2}
    far, chosen = (Entry(name, times[name]) for name in ("far", "autopar"))
    assert scores.ratio(chosen, far) == 90 / 21


def test_without_a_profile_a_file_states_what_a_node_sends(tmp_path: Path) -> None:
    path = tmp_path / "stated.toml"
    for scenario in SCENARIOS.values():
        path.write_text(stated(scenario), encoding="utf-8")
        found = parse_cluster(path)
        assert found.num_devices == scenario.ranks
        rate = found.levels[0].link.bytes_per_s * scenario.per_node
        assert rate == scenario.mbit_per_s * 1e6 / 8


def test_orders_are_not_measured_without_a_profile() -> None:
    done = CliRunner().invoke(main, ["--orders", "--no-profile"])
    assert done.exit_code == 2
    assert "--orders are measured with a profile" in done.output


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "emulated.json"
    assert load(path) == {}
    save([OUTCOME], path)
    assert load(path) == {"wide-2": OUTCOME}


def test_a_table_names_twins_and_what_was_left_out() -> None:
    cells = [row[1:] for row in rows(OUTCOME)]
    assert cells[0] == ["DDP", "", "11", "1.00"]
    assert cells[1] == ["autopar, = autopar, ddp", "9", "12", "1.25"]
    assert cells[-1][0] == "autopar, 3d"


def test_where_namespaces_are_not_permitted_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "apart", lambda command: ["sh", "-c", "echo no >&2; exit 1"])
    done = CliRunner().invoke(main, ["--data", str(tmp_path / "none.json")])
    assert done.exit_code == 0
    assert "skipped: network namespaces are not permitted: no" in done.output
    assert "nothing was measured" in done.output


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert network.refusal() == "there is no unshare here"


@pytest.mark.parametrize(
    ("mbit_per_s", "num_bytes"), [(50, 32_000), (500, 62_500), (1000, 125_000)]
)
def test_an_idle_link_lets_little_pass_at_once(mbit_per_s: int, num_bytes: int) -> None:
    """A millisecond's worth, or two packets, each as large as packets may be."""
    assert network.burst_bytes(mbit_per_s) == num_bytes


def test_a_network_is_gone_with_the_process_that_built_it() -> None:
    """Where namespaces are not permitted nothing is built, and so nothing is left either."""

    def seen() -> bool:
        links = Path("/proc/net/dev").read_text(encoding="utf-8")
        return "bridge" in links or Path("/run/netns/n0").exists()

    network.refusal()
    assert not seen()


def test_ranks_are_told_who_they_are_and_one_that_fails_ends_all() -> None:
    tell = "import os; print(*(os.environ[x] for x in ('RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')))"
    assert run_ranks([sys.executable, "-c", tell], 2, local_ranks=1) == b"0 2 1\n"
    fail = "import os, time; time.sleep(60 * (os.environ['RANK'] == '0')); raise SystemExit(1)"
    assert run_ranks([sys.executable, "-c", fail], 2) is None
