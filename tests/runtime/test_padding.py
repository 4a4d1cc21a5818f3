"""Batches that ranks padded by themselves come to one length."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.module.accelerated import to_one_length


def _batch(length: int, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": torch.full((2, length), 5),
        "attention_mask": torch.ones(2, length, dtype=torch.bool),
        "labels": torch.full((2, length), 7),
        **more,
    }


def _together(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank makes of its batch."""
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(pad_token_id=3)  # pyright: ignore[reportAttributeAccessIssue]
    rows: list[Sequence[int]] = []

    def bring(row: Sequence[int]) -> Tensor:
        rows.append(row)
        return torch.tensor([row])

    for batch in batches:
        to_one_length(model, batch, bring)
    return [to_one_length(model, batch, lambda _: torch.tensor(rows)) for batch in batches]


def test_the_longest_decides() -> None:
    long, short = _together([_batch(6, note="kept"), _batch(4, note="kept")])
    assert long["input_ids"].tolist() == [[5] * 6] * 2
    assert short["input_ids"].tolist() == [[5, 5, 5, 5, 3, 3]] * 2
    assert short["attention_mask"].tolist() == [[True] * 4 + [False] * 2] * 2
    assert short["attention_mask"].dtype is torch.bool
    assert short["labels"].tolist() == [[7, 7, 7, 7, -100, -100]] * 2
    assert short["note"] == "kept"


def test_each_argument_has_its_own_length() -> None:
    a = {**_batch(4), "labels": torch.zeros(2, 9, dtype=torch.long)}
    b = {**_batch(6), "labels": torch.zeros(2, 3, dtype=torch.long)}
    a, b = _together([a, b])
    assert a["input_ids"].shape == b["input_ids"].shape == (2, 6)
    assert a["labels"].shape == b["labels"].shape == (2, 9)


def test_rows_of_features_are_padded_with_zeros() -> None:
    a, b = _together([{"inputs_embeds": torch.ones(2, n, 3)} for n in (1, 2)])
    assert a["inputs_embeds"].shape == b["inputs_embeds"].shape
    assert a["inputs_embeds"][:, 1].eq(0).all()


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param([{"pixels": torch.zeros(2, n)} for n in (3, 4)], id="unknown argument"),
        pytest.param(
            [{"input_ids": torch.zeros(2, n, dtype=torch.long)} for n in (3, 4)], id="no mask"
        ),
        pytest.param([_batch(3), {**_batch(4), "more": torch.zeros(2, 2)}], id="other arguments"),
        pytest.param(
            [{"inputs_embeds": torch.ones(2, n, n)} for n in (3, 4)], id="other widths"
        ),
        pytest.param(
            [{f"mask{i}": torch.ones(2, n) for i in range(40)} for n in (3, 4)], id="too many"
        ),
    ],
)  # fmt: skip
def test_what_is_not_known_stays_as_it_is(batches: list[dict[str, Any]]) -> None:
    for batch, found in zip(batches, _together(batches), strict=True):
        assert found.keys() == batch.keys()
        assert all(found[key] is batch[key] for key in batch)
