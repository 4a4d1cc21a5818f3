"""Numbers drawn once more from the state that they were drawn from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.ir.passes.recompute import STATE_BYTES
from autopar.rules.creation import CREATION
from autopar.rules.table import records
from autopar.runtime.ops.draws import drawing, redrawing
from autopar.tracer.torch_private import FakeTensorMode
from tests.rules.execution import resolve
from tests.rules.making import make
from tests.rules.samples import SAMPLES
from tests.runtime.draws_workers import compared, dropped
from tests.runtime.microbatch_workers import trained
from tests.runtime.spawn import spawn

aten = torch.ops.aten
DRAWS = sorted(
    name for name in records((CREATION,)) if torch.Tag.nondeterministic_seeded in resolve(name).tags
)
TOLERANCE = 2e-5


def several(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("name", DRAWS)
def test_the_very_same_is_drawn_and_the_generator_left_as_it_was(name: str) -> None:
    op = resolve(name)
    made = torch.Generator().manual_seed(0)
    args, kwargs = SAMPLES[name][0]
    args, kwargs = make(args, made), make(kwargs, made)
    torch.manual_seed(3)
    expected = several(op(*args, **kwargs))
    behind = torch.get_rng_state()
    torch.manual_seed(3)
    *first, state = drawing(op)(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), behind) and state.nbytes == STATE_BYTES
    torch.rand(100)
    between = torch.get_rng_state()
    for _ in range(2):
        again = several(redrawing(op)(state, *args, **kwargs))
        assert torch.equal(torch.get_rng_state(), between)
        for each in (first, again):
            assert all(map(torch.equal, expected, each))


def test_only_the_first_draw_counts_as_one() -> None:
    assert len(DRAWS) >= 25
    for op in (aten.native_dropout.default, aten.bernoulli.p):
        tags = [target.tags for target in (drawing(op), redrawing(op))]
        assert [torch.Tag.nondeterministic_seeded in each for each in tags] == [True, False]


def test_on_a_gpu_the_state_is_on_the_host() -> None:
    op, cuda = aten.native_dropout.default, torch.device("cuda:0")
    with FakeTensorMode():
        ones = torch.ones(8, 8, device=cuda)
        result, mask, state = drawing(op)(ones, 0.5, True)
        again = redrawing(op)(state, ones, 0.5, True)[1]
        assert (state.device.type, state.nbytes) == ("cpu", 16)
        assert result.device == mask.device == again.device == cuda
        drawn = redrawing(aten.rand.default)(state, [4], device=cuda)
        assert drawn.device == cuda


class Masked(nn.Module):
    """Blocks in checkpoints, whose masks the output of the last shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def body(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(layer(F.dropout(x, 0.25)).sin(), 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = checkpoint(self.body, layer, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x.sum(), x


class Inside(Masked):
    """Every mask is recomputed in backward: gradients go through all of them."""

    def body(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(F.dropout(x, 0.25)).sin()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x * self.layers[0].weight.sum())


@pytest.mark.parametrize(
    ("build", "backend", "microbatches"),
    [(Masked, "eager", 1), (Masked, "inductor", 1), (Masked, "eager", 2), (Inside, "eager", 2)],
)
def test_gradients_are_those_of_the_masks_that_were_drawn(
    build: type[Masked], backend: str, microbatches: int
) -> None:
    """Whatever a backend draws in forward: a loss and its gradient in the direction of a parameter,
    by differences under the same masks."""
    model = build().double()
    compiled: Any = autopar.compile(
        copy.deepcopy(model),
        memory={"checkpoint": "as written"},
        backend=backend,
        microbatches=microbatches,
        verify=False,
    )
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = 1e-6
    weights = [p for p in compiled.parameters() if p.requires_grad]
    for call in range(3):
        state = torch.get_rng_state()
        loss, _ = compiled(x)
        torch.rand(7)
        compiled.zero_grad()
        loss.backward()
        losses: list[float] = []
        directions = [torch.randn_like(w) for w in weights]
        for sign in (1, -1):
            with torch.no_grad():
                for w, d in zip(weights, directions, strict=True):
                    w.add_(sign * step * d)
                torch.set_rng_state(state)
                losses.append(float(compiled(x)[0]))
                for w, d in zip(weights, directions, strict=True):
                    w.sub_(sign * step * d)
        slope = (losses[0] - losses[1]) / (2 * step)
        given = zip(weights, directions, strict=True)
        found = sum(float((w.grad * d).sum()) for w, d in given if w.grad is not None)
        assert slope == pytest.approx(found, rel=1e-5), call
        torch.set_rng_state(state)
        eager_model = copy.deepcopy(model)
        eager_model.load_state_dict(compiled.state_dict())
        assert eager_model(x)[0].item() == pytest.approx(loss.item(), rel=1e-9), call
    assert any(":native_dropout." in key for key in compiled.plans[0].structure.only.recompute)


def check(seen: Any) -> None:
    """Whatever the script draws, adds up, evaluates or goes backward through twice."""
    assert seen["worst"] <= TOLERANCE
    assert len(seen["drawn"]) == 3


@pytest.mark.breadth(2)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_ten_steps_of_a_script(microbatches: int) -> None:
    check(compared(microbatches=microbatches))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_a_forward_that_is_done_again_draws_the_same() -> None:
    seen = trained(dropped(), checkpoint="as written")
    assert max(worst for name, worst in seen.items() if name != "told") <= TOLERANCE


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.parametrize("function", ["fsdp", "microbatches", "stages"])
def test_two_processes(function: str) -> None:
    for seen in spawn(f"tests.runtime.draws_workers.{function}", 2):
        check(seen)
