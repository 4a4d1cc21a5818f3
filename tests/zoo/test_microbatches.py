"""Steps in microbatches are steps: what eager makes of the whole batch, under any plan; and what
they are predicted to hold, they hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from autopar.compile import best_on
from autopar.driver.search.open_counts import possible_counts
from autopar.errors import MicrobatchError
from autopar.ir.passes.microbatches import in_microbatches
from autopar.solver.search import silent
from tests.live_bytes import peak_bytes
from tests.planned import as_planned
from tests.zoo import ZOO
from tests.zoo.cases import trained
from tests.zoo.equality import check_any_plan
from tests.zoo.test_memory import request, step

REFUSED = {
    "mixtral": "aten.mul.Tensor in the model",  # its loss that balances experts
    "grouped": "aten.sort.default in model.layers.0.mlp.experts",
    "resnet": "aten.sub.Tensor in stem.1",  # batch norm
    "mobile": "aten.sub.Tensor in norm1",
    "sequence": "aten.sqrt.default in the model",  # the root of a mean over the batch
}
DAILY = ("gpt2", "llama", "t5", "vit", "unet")


@pytest.mark.breadth(3)
@pytest.mark.parametrize(("sizes", "seed"), [((2,), 0), ((2, 2), 1)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        *DAILY,
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ZOO
            if name not in (*DAILY, *REFUSED)
        ),
    ],
)
def test_any_plan_is_eager(name: str, sizes: tuple[int, ...], seed: int) -> None:
    found = trained(name)
    plan = check_any_plan(found, sizes, seed, microbatches=2)
    assert plan.structure.microbatches == 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_batch_is_named(name: str) -> None:
    with pytest.raises(MicrobatchError, match=f"{REFUSED[name]} needs the whole batch"):
        in_microbatches(trained(name).traced.graph, 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("gpt2", "2"), ("llama", "2"), ("llama", "2x2"), ("vit", "2"), ("opt", "2x2")],
)
def test_what_is_predicted_is_held(name: str, mesh: str) -> None:
    wanted, peaks = request(name, mesh), list[int]()
    for count in islice(possible_counts(step(name).graph, 8), 3):
        found = best_on(replace(wanted, microbatches=count), silent)
        plan = as_planned(found.request, found.structure, found.estimates)
        memory = plan.estimates.memory
        held = peak_bytes(step(name), plan)
        assert held <= memory.total <= 1.03 * held
        peaks.append(memory.saved)
    assert peaks == sorted(peaks, reverse=True) and len(peaks) > 1
