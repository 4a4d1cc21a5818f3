"""A script trains as ever while its model works in microbatches, as eager on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ArgumentError, MicrobatchError
from tests.runtime.microbatch_workers import trained
from tests.runtime.spawn import spawn
from tests.runtime.workers import gpt2, llama

TOLERANCE = 2e-5


def check(seen: dict[str, Any]) -> None:
    told = seen["told"]
    wrong = {k: v for k, v in seen.items() if k != "told" and not v <= TOLERANCE}
    assert not wrong
    assert not told or "the gradient of output 1 comes from the script" in told[0]


def test_ten_steps_of_a_script() -> None:
    seen = trained(llama(), microbatches=4)
    check(seen)
    assert seen["told"]


def with_dropout() -> nn.Module:
    model = gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def test_random_numbers_are_those_of_the_whole_batch() -> None:
    model = with_dropout()
    check(trained(model, microbatches=2))


@pytest.mark.processes
def test_two_processes_in_shards() -> None:
    for seen in spawn("tests.runtime.microbatch_workers.two", 2):
        assert isinstance(seen, dict)
        check(seen)


class Centred(nn.Module):
    """Takes the mean over the batch in between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return (x - x.mean(0)).square().sum()


def test_what_cannot_be_split_is_an_error_that_names_it() -> None:
    with pytest.raises(MicrobatchError, match=r"aten\.sub\.Tensor in the model needs the"):
        autopar.compile(Centred(), microbatches=2)(torch.randn(8, 4))
    with pytest.raises(MicrobatchError, match="a batch of 8 is not divided by 3 microbatches"):
        autopar.compile(llama(), microbatches=3)(**_eight())
    with pytest.raises(ArgumentError, match='microbatches=0: write a number, or "auto"'):
        autopar.compile(llama(), microbatches=0)


def _eight() -> dict[str, torch.Tensor]:
    ids = torch.zeros(8, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}
