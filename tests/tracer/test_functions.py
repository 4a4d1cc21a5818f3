"""Functions that are spelled out while a model is traced are those of torch, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import compile as compiled
from autopar.errors import GuardError, TraceError
from autopar.tracer import trace
from autopar.tracer.calls import CallMode
from autopar.tracer.torch_private import weight_norm

Function = Callable[[Tensor], Tensor]
SCORES = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.arange(8) % 6
WEIGHTS = torch.linspace(0.5, 2, 6, dtype=torch.float64)
COUNTS = torch.tensor([1, 2, 1, 3, 1, 1])
EYE = torch.eye(6, dtype=torch.float64)


def positive(x: Tensor) -> Tensor:
    return x.mT @ x + EYE


FUNCTIONS: dict[str, Function] = {
    "cholesky": lambda x: torch.linalg.cholesky(positive(x)),
    "upper": lambda x: torch.linalg.cholesky(positive(x), upper=True),
    "old cholesky": lambda x: torch.cholesky(positive(x)),
    "inv": lambda x: torch.linalg.inv(positive(x)),
    "inverse": lambda x: positive(x).inverse(),
    "inverses": lambda x: torch.inverse(positive(x.unflatten(0, (2, 4)))),
    "solve": lambda x: torch.linalg.solve(positive(x), x.mT),
    "solve a vector": lambda x: torch.linalg.solve(positive(x), WEIGHTS),
    "solve from the right": lambda x: torch.linalg.solve(positive(x), x, left=False),
    "cov": lambda x: torch.cov(x.t()),
    "cov of a row": lambda x: x[0].cov(),
    "biased cov": lambda x: x.t().cov(correction=0),
    "counted cov": lambda x: torch.cov(x, fweights=COUNTS),
    "weighted cov": lambda x: torch.cov(x, aweights=WEIGHTS),
    "cov with all": lambda x: torch.cov(x, correction=1, fweights=COUNTS, aweights=WEIGHTS),
    "corrcoef": lambda x: torch.corrcoef(x.t()),
    "corrcoef of a row": lambda x: x[0].corrcoef(),
    "nll": lambda x: F.gaussian_nll_loss(x, x.roll(1, 0), x.abs()),
    "small nll": lambda x: F.gaussian_nll_loss(x, x.roll(1, 0), x.square() / 9, eps=0.1, full=True),
    "nll of rows": lambda x: F.gaussian_nll_loss(x, x + 1, x[:, 0].exp(), reduction="sum"),
    "nll of columns": lambda x: F.gaussian_nll_loss(x, x + 1, x[:, :1].exp(), reduction="none"),
    "nll of one": lambda x: F.gaussian_nll_loss(x, x + 1, 2.0),
    "margin": lambda x: F.multi_margin_loss(x, TARGETS),
    "margin at a kink": lambda x: F.multi_margin_loss(x.round() + 0 * x, TARGETS) + x.sum(),
    "squared margin": lambda x: F.multi_margin_loss(x, TARGETS, p=2, margin=0.5, weight=WEIGHTS),
    "margins": lambda x: F.multi_margin_loss(x, TARGETS, reduction="none"),
    "margins of before": lambda x: F.multi_margin_loss(x, TARGETS, size_average=False),
    "margin of one": lambda x: F.multi_margin_loss(x[0], torch.tensor(2), reduction="none"),
    "weight norm of rows": lambda x: weight_norm(x, x[:, :1].exp(), 0),
    "weight norm of columns": lambda x: weight_norm(x, x[:1].exp(), 1),
    "weight norm": lambda x: weight_norm(x, x.sum().exp(), -1),
    "module": lambda x: nn.MultiMarginLoss(reduction="sum")(x, TARGETS),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.cholesky is deprecated")
@pytest.mark.filterwarnings("ignore:.*size_average and reduce args will be deprecated")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_like_torch(name: str) -> None:
    def run() -> tuple[Tensor, Tensor]:
        x = SCORES.clone().requires_grad_()
        if name == "margin at a kink":
            x = SCORES.round().requires_grad_()
        found = FUNCTIONS[name](x)
        weights = torch.linspace(1, 2, found.numel(), dtype=found.dtype).reshape(found.shape)
        return found.detach(), torch.autograd.grad((found * weights).sum(), x)[0]

    with CallMode():
        actual = run()
    for got, expected in zip(actual, run(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).square().mean()


@pytest.mark.parametrize("name", ["cholesky", "inv", "solve", "cov", "corrcoef", "nll", "margin"])
def test_in_a_model(name: str) -> None:
    eager = Applied(FUNCTIONS[name])
    ours: Any = compiled(Applied(FUNCTIONS[name]))
    ours.load_state_dict(eager.state_dict())
    for model in (eager, ours):
        model(SCORES).backward()
    torch.testing.assert_close(ours.layer.weight.grad, eager.layer.weight.grad)


@pytest.mark.parametrize("name", ["cholesky", "inv", "solve a vector"])
def test_what_has_no_result_is_nan(name: str) -> None:
    good = SCORES[:6] + 9 * EYE
    bad = torch.zeros(6, 6, dtype=torch.float64)
    function = {
        "cholesky": torch.linalg.cholesky,
        "inv": torch.linalg.inv,
        "solve a vector": lambda x: torch.linalg.solve(x, WEIGHTS.expand(2, 6)),
    }[name]
    with CallMode():
        found = function(torch.stack([good @ good.mT, bad]))
    assert found[0].isfinite().all() and found[1].isnan().all()


def test_other_functions_that_check_are_refused_with_what_to_write() -> None:
    model = Applied(lambda x: torch.linalg.lu_factor(positive(x))[0])
    with pytest.raises(TraceError, match="lu_factor_ex"):
        trace(model, (SCORES,))


def test_a_generator_of_its_own_is_refused_with_its_line() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x * torch.randn(6, generator=torch.Generator().manual_seed(0))

    with pytest.raises(GuardError, match=r"test_functions\.py:\d+ draws from a generator"):
        trace(Applied(noisy), (SCORES,))
