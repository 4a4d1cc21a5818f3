"""Weights, checkpoints and data on real processes, started once: four, and then two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import autopar
from tests.runtime import weights_workers
from tests.runtime.spawn import spawn
from tests.runtime.workers import llama

pytestmark = [pytest.mark.processes, pytest.mark.timeout(450)]

TOLERANCE = 1e-5
TIME_LIMIT_S = 420


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a pretrained model is, and what processes save goes."""
    path = tmp_path_factory.mktemp("weights")
    model: Any = llama(1)
    model.save_pretrained(path / "pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER", str(path))
        patch.setattr(weights_workers, "FOLDER", path)
        yield path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    return spawn("tests.runtime.weights_workers.four", 4, timeout_s=TIME_LIMIT_S)


@pytest.fixture(scope="module")
def more_ranks(folder: Path) -> list[Any]:
    return spawn("tests.runtime.weights_workers.four_more", 4, timeout_s=TIME_LIMIT_S)


def test_each_rank_reads_its_shards_and_no_more(ranks: list[Any]) -> None:
    for seen in (rank["save"] for rank in ranks):
        assert seen["read before planning"] == 0
        assert seen["read"] == seen["stored"] == seen["held"] < 0.6 * seen["whole"]
        assert seen["param"] < TOLERANCE
        assert seen["names"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_loads_on_other_meshes_and_world_sizes(ranks: list[Any], folder: Path) -> None:
    seen = [rank["load"] for rank in ranks]
    seen += spawn("tests.runtime.weights_workers.two", 2)
    seen.append(weights_workers.load())
    for each in seen:
        assert max(each.values()) < TOLERANCE


def test_save_pretrained_is_read_back_equal(ranks: list[Any], folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "saved")
    ours = autopar.compile(weights_workers.on_meta(), weights=folder / "saved", cluster="1xcpu")
    theirs, _ = weights_workers.reference()
    for p, q, r in zip(model.parameters(), ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        assert weights_workers.distance(p, r) < TOLERANCE
    for rank in ranks:
        assert "NotADirectoryError" in rank["save"]["unwritable"]


def test_a_seed_gives_the_same_on_any_mesh(ranks: list[Any]) -> None:
    check_seed(ranks)


def check_seed(ranks: list[Any]) -> None:
    for seen in (rank["seeded"] for rank in ranks):
        assert seen["equal"]
        assert seen["held"] < 0.6


@pytest.mark.nightly
def test_seeds_on_one_axis_and_other_pieces(more_ranks: list[Any]) -> None:
    check_seed(more_ranks)
    for seen in (rank["pieces"] for rank in more_ranks):
        ways = {name: value for name, value in seen.items() if isinstance(value, float)}
        assert len(ways) == 3 and max(ways.values()) < TOLERANCE


def test_a_batch_in_pieces_is_the_whole_batch(ranks: list[Any]) -> None:
    described = "0: float32[8, 16]"
    for seen in (rank["pieces"] for rank in ranks):
        ways = {name: value for name, value in seen.items() if isinstance(value, float)}
        assert len(ways) == 4 and max(ways.values()) < TOLERANCE
        assert seen["local on 2x2 input"] == f"{described} [S(0)] on 4"
        assert seen["2-D input"] == f"{described} [S(0), R] on 2x2"
        assert seen["replicated input"] == described


def test_ranks_load_the_rows_that_one_process_would(ranks: list[Any]) -> None:
    for seen in (rank["loaded"] for rank in ranks):
        loader = autopar.dataloader(torch.arange(20), 8, shuffle=True, drop_last=True, seed=3)  # type: ignore[arg-type]
        assert seen["batches"] == [batch.tolist() for batch in loader] * 2
        assert "a batch has 6 rows, which 4 ranks cannot divide evenly" in seen["wrong"]


@pytest.mark.nightly
def test_dropout_repeats_with_the_seed_of_rank_0(more_ranks: list[Any]) -> None:
    for seen in (rank["random"]["losses"] for rank in more_ranks):
        assert seen == more_ranks[0]["random"]["losses"]
        assert seen[0] == seen[1] != seen[2]
        assert seen[0][0] != seen[0][1]
