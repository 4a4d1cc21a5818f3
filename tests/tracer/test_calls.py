"""Calls that are answered otherwise while a model is traced, and values that are known then."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import torch_compilable_check

from autopar import plan, verify
from autopar.errors import DenseGradientWarning, TraceError
from autopar.tracer import known, trace
from tests.zoo.cases import make_case
from tests.zoo.equality import check_plan_chosen

IDS = torch.randint(8, (4, 6))


class Words(nn.Module):
    """An embedding, with what a subclass looks at in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def look(self, ids: Tensor) -> bool:
        return False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return (x.tanh() if self.look(ids) else x).mean()


def ops(model: nn.Module, *args: Tensor) -> list[str]:
    return [node.op for node in trace(model, args).graph.nodes]


class Asserting(Words):
    def look(self, ids: Tensor) -> bool:
        assert ids.max().item() < 8 and (ids >= 0).all(), "no such word"
        return False


class Denying(Words):
    def look(self, ids: Tensor) -> bool:
        assert not (ids < 0).any()
        return False


class Checking(Words):
    """As torch and models of transformers with images write it."""

    def look(self, ids: Tensor) -> bool:
        torch._check_tensor_all(ids >= 0, lambda: "no such word")
        torch._check(
            (ids < 8).all().item(),
            lambda: "no such word",
        )
        torch._check_with(ValueError, bool(ids.max() < 8), lambda: "no such word")
        torch_compilable_check(ids.max() < 8, f"no such word: {ids.max()}")
        torch_compilable_check(ids.min().item() >= 0, "no such word")
        return False


class Raising(Words):
    def look(self, ids: Tensor) -> bool:
        if self.training and ids.max() >= 8:
            raise ValueError("no such word")
        if not (ids.min().item() >= 0):
            raise ValueError("no word")
        return False


class Unclear(Words):
    """Which of the two would raise is not told apart."""

    def look(self, ids: Tensor) -> bool:
        if not bool((ids >= 0).all()) or bool((ids > 8).any()):
            raise ValueError("no such word")
        return False


class Clamping(Words):
    """What overflowed is clamped, as in models of `transformers`."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if x.dtype == self.embed.weight.dtype and not torch.isfinite(x).all():
            limit = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-limit, max=limit)
        if (x > 2).any():
            x = torch.clamp(x, max=1)
        return x.sum()


class ClampingEither(Words):
    """Where the first holds, the second is not looked at."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if torch.isinf(x).any() or torch.isnan(x).any():
            x = torch.clamp(x, max=1)
        return x.sum()


class Catching(Words):
    def look(self, ids: Tensor) -> bool:
        try:
            if ids.max() > 3:
                raise ValueError
        except ValueError:
            return True
        return False


class Masked(Words):
    def look(self, ids: Tensor) -> bool:
        mask = torch.ones(ids.shape)
        mask[:, 0] = 2
        return bool((mask.flatten() > self.least).any())

    least = 1.0


class InEagerAlone(Words):
    """Has no mask where it is compiled, and looks into it."""

    def look(self, ids: Tensor) -> bool:
        mask: Any = None if torch.compiler.is_compiling() else torch.ones(ids.shape)
        return bool(mask.all())


class Unwritten(Words):
    """Memory that was never written has no value, whatever is there."""

    def look(self, ids: Tensor) -> bool:
        return bool(torch.empty(ids.shape).isfinite().any())


class Reading(Words):
    def look(self, ids: Tensor) -> bool:
        return bool(ids.max() > 3)


class Rolling(Words):
    def look(self, ids: Tensor) -> bool:
        return bool(torch.rand(()) < 0.5)


@pytest.mark.parametrize("kind", [Asserting, Checking, Denying, Raising])
def test_what_only_checks_is_taken_to_hold(kind: type[nn.Module]) -> None:
    assert "aten.embedding.default" in ops(kind(), IDS)


@pytest.mark.parametrize("kind", [Unclear, Catching, ClampingEither])
def test_a_check_that_is_unclear_or_decides_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r": if .*\n  a value that"):
        trace(kind(), (IDS,))


@pytest.mark.parametrize("largest", [1.0, 3.0, math.inf])
def test_a_branch_that_only_clamps_is_taken_where_its_condition_holds(largest: float) -> None:
    model = Clamping().double()
    with torch.no_grad():
        model.embed.weight[3, 0] = largest
    found = make_case(model, {"ids": IDS}, exact=False)
    check_plan_chosen(found, (2, 2))


@pytest.mark.parametrize(("least", "taken"), [(1.0, True), (2.0, False)])
def test_the_branch_that_follows_from_the_code_is_taken(least: float, taken: bool) -> None:
    model = Masked()
    model.least = least
    assert ("aten.tanh.default" in ops(model, IDS)) == taken


def test_a_model_that_runs_in_eager_alone_may_look_at_what_follows_from_its_code() -> None:
    assert "aten.tanh.default" in ops(InEagerAlone(), IDS)


@pytest.mark.parametrize("kind", [Reading, Rolling, Unwritten])
def test_a_branch_on_data_or_chance_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"test_calls\.py:\d+: return bool\(.*\n  a value that"):
        trace(kind(), (IDS,))


def test_large_tensors_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MAX_ELEMENTS", 23)
    with pytest.raises(TraceError, match="a value that is known only"):
        trace(Masked(), (IDS,))


def test_gradients_of_embeddings_are_dense() -> None:
    with pytest.warns(DenseGradientWarning, match=r"embeddings \(8x4\).* SparseAdam") as told:
        traced = trace(nn.Embedding(8, 4, sparse=True), (IDS,))
    assert len(told) == 1
    (grad,) = (item for item in traced.gm.graph.output_node().args[0][1:] if item is not None)
    assert grad.meta["val"].layout is torch.strided
    assert grad.meta["val"].shape == (8, 4)


class Dropping(Words):
    layerdrop = 0.1

    def look(self, ids: Tensor) -> bool:
        return bool(torch.rand(()) < self.layerdrop)


def test_layers_left_out_by_chance_are_refused_with_the_cure() -> None:
    with pytest.raises(TraceError, match=r"by chance, .* configuration \(layerdrop, .*\), to 0"):
        trace(Dropping(), (IDS,))


@pytest.mark.parametrize(
    ("mode", "even", "op"),
    [
        ("sum", True, "aten.embedding.default"),
        ("mean", True, "aten.embedding.default"),
        ("max", True, "aten._embedding_bag.default"),
        ("mean", False, "aten._embedding_bag.default"),
    ],
)
def test_bags_of_one_length_are_a_lookup_and_a_sum(mode: str, even: bool, op: str) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(8, 4, mode=mode, sparse=mode == "sum")

        def forward(self, ids: Tensor) -> Tensor:
            if even:
                return self.bags(ids).square().mean()
            return self.bags(ids.flatten(), torch.tensor([0, 5, 9])).square().mean()

    is_told = pytest.warns(DenseGradientWarning) if mode == "sum" else nullcontext()
    with is_told:
        assert op in ops(Bags(), IDS)


class Adapting(Words):
    """An adapter for the rows of one language, which follow from the code."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        chosen = torch.ones(ids.shape[0]) * 2 == torch.tensor([2.0, 3.0] * (ids.shape[0] // 2))
        new = torch.zeros_like(x)
        new[chosen] = self.adapter(x[chosen])
        return (new + x).square().mean()


def test_what_a_known_mask_picks_is_known() -> None:
    model = Adapting().double()
    verify(plan(model, (IDS,), cluster="2xcpu", mesh="2"), model, (IDS,))
