"""What ranks compare of tensors beside outputs, and of their random numbers, in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.generators import Drawing
from autopar.runtime.process import beside as module
from autopar.runtime.process.beside import Beside, differ

CPU = torch.device("cpu")
BIG = (1 << 14) * 3 + 5


def are_told_apart(first: object, second: object) -> bool:
    sums: list[tuple[float, float]] = []
    for given in (first, second):
        beside = Beside()
        beside.add("here", [given])
        sums.append(beside.taken())
    return differ(*zip(*sums, strict=True))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (noise(4, 8), noise(4, 8, seed=1)),
        (noise(BIG), noise(BIG, seed=1)),
        (noise(BIG), noise(BIG).flip(0)),
        (noise(BIG), noise(BIG).neg()),
        (noise(40), noise(40) * 1.01),
        (noise(40, dtype=torch.bfloat16), noise(40, seed=1, dtype=torch.bfloat16)),
        (noise(40).to(torch.float8_e4m3fn), noise(40, seed=1).to(torch.float8_e4m3fn)),
        (noise(40, dtype=torch.complex64), noise(40, seed=1, dtype=torch.complex64)),
        (noise(4, 8).to_sparse(), noise(4, 8, seed=1).to_sparse()),
        (torch.tensor(0.5), torch.tensor(0.25)),
        (torch.tensor(0.5), torch.tensor(-0.5)),
        (torch.tensor(0.5), torch.tensor(0.0)),
        (torch.tensor(0.5), torch.tensor(float("nan"))),
        (torch.tensor([0.5, 1.0]), torch.tensor([float("inf"), 1.0])),
        (torch.tensor([0.5]).expand(8), torch.tensor([0.25]).expand(8)),
        (torch.arange(8), torch.arange(8).flip(0)),
        (torch.arange(BIG), torch.arange(BIG) + (torch.arange(BIG) == BIG - 1)),
        (torch.tensor(3), torch.tensor(4)),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (nn.Parameter(noise(3)), nn.Parameter(noise(3, seed=1))),
    ],
)
def test_what_differs_is_told(first: Tensor, second: Tensor) -> None:
    assert are_told_apart(first, second)
    assert not are_told_apart(first, first.detach())


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 2**-8)]
)
def test_what_kernels_add_up_in_another_order_is_the_same(dtype: torch.dtype, share: float) -> None:
    x = noise(64, 64, dtype=dtype)
    y = (x.double() * (1 + share * noise(64, 64, seed=1, dtype=torch.float64))).to(dtype)
    assert not torch.equal(x, y)
    assert not are_told_apart(x, y)


def test_what_has_no_values_or_is_no_tensor_counts_nothing() -> None:
    beside = Beside()
    beside.add("here", [torch.empty(0), torch.empty(3, device="meta"), 3, None, "text"])
    assert beside.taken() == (0.0, 0.0)
    assert beside.describe() == {}


def test_where_rows_differ_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rows_differ", [True])
    assert not are_told_apart(noise(3), noise(3, seed=1))


def test_it_is_told_what_was_there() -> None:
    beside = Beside()
    for x in (torch.tensor(2), torch.ones(4), torch.tensor(2)):
        beside.add("in mul", [x])
    beside.taken()
    told = beside.describe()
    assert [*told] == ["in mul (int64[])", "in mul (float32[4])", "in mul (int64[]) (2)"]
    assert told["in mul (int64[])"] == "digest 2"
    beside.taken()
    assert beside.describe() == {}


class LateOnHost:
    """As `Late` does it, without a GPU."""

    def __init__(self) -> None:
        self.before: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor | None:
        before, self.before = self.before, values
        return before


def test_what_a_gpu_computes_is_told_a_time_late(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu: list[bool] = []
    plain = module._sums

    def sums(x: Tensor) -> tuple[float, float] | Tensor:
        found = plain(x)
        return torch.tensor(found, dtype=torch.float64) if on_gpu else found

    monkeypatch.setattr(module, "Late", LateOnHost)
    monkeypatch.setattr(module, "_sums", sums)
    beside, taken = Beside(), list[tuple[float, float]]()
    for step, on in enumerate((False, True, True, False, False)):
        on_gpu[:] = [True] if on else []
        beside.add(f"step {step}", [torch.tensor(step + 1)] * (2 if step == 1 else 1))
        if on:
            assert beside.taken(at_call=False) == (0.0, 0.0)
        taken.append(beside.taken())
        if step == 2:
            told = beside.describe()
    assert taken == [(0.0, 1.0), (0.0, 0.0), (0.0, 4.0), (0.0, 3.0), (0.0, 4.0)]
    assert told == {"step 1 (int64[])": "digest 2", "step 1 (int64[]) (2)": "digest 2"}


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: torch.randn(1),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.randint(0, 9, (1,)),
        lambda: torch.randperm(3),
        lambda: torch.rand(700),
        lambda: torch.rand(624 * 4),
    ],
)
def test_each_draw_moves_the_place_and_a_seed_takes_it_back(draw: Callable[[], object]) -> None:
    drawing = Drawing(CPU)
    torch.manual_seed(5)
    first = drawing.place
    draw()
    assert drawing.place != first
    assert drawing.seed == 5
    torch.manual_seed(5)
    assert drawing.place == first


def test_generators_go_on_from_another_ranks_states() -> None:
    drawing = Drawing(CPU)
    torch.manual_seed(5)
    torch.randn(3, dtype=torch.float64)
    states, place = drawing.states(), drawing.place
    expected = torch.rand(4)
    torch.manual_seed(6)
    drawing.go_on(states)
    assert (drawing.seed, drawing.place) == (5, place)
    assert torch.equal(torch.rand(4), expected)
