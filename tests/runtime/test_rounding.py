"""Scripts whose model saves activations in fewer bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.driver.gate.recipe import read_recipe
from autopar.errors import ArgumentError
from tests.grouped import grouped
from tests.runtime.microbatch_workers import batch
from tests.runtime.spawn import spawn
from tests.runtime.workers import distance, llama, slow_devices


def test_it_is_asked_for_and_told() -> None:
    plain, given = llama(), batch(0, 8)
    compiled = autopar.compile(
        copy.deepcopy(plain), memory={"saved_dtype": torch.bfloat16}, verify=True
    )
    compiled(**given).loss.backward()
    plain(**given).loss.backward()
    pairs = list(zip(compiled.parameters(), plain.parameters(), strict=True))
    grads = [(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]
    assert len(grads) == len(pairs)
    assert 1e-4 < max(distance(a, b) for a, b in grads) < 1e-2
    (plan,) = compiled.plans
    assert "saved dtype bfloat16" in plan.provenance.imposed
    again = autopar.compile(copy.deepcopy(plain), plan=plan)
    again(**given).loss.backward()
    again.eval()(input_ids=given["input_ids"])
    assert {each.structure.only.saved_dtype for each in again.plans} == {"bfloat16"}


CLASSES, TOKENS, WIDTH = 200, (8, 64), 64


def off_by(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> float:
    """How far all gradients together are from those of eager."""
    plain = copy.deepcopy(model)
    compiled = autopar.compile(model, **grouped(**options))
    found: list[Tensor] = []
    for each in (compiled, plain):
        each(**inputs).backward()
        grads = [p.grad.flatten() for p in each.parameters() if p.grad is not None]
        found.append(torch.cat(grads).double())
    return float((found[0] - found[1]).norm() / found[1].norm())


def tokens() -> dict[str, Tensor]:
    """Each token has one that follows it."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, CLASSES, TOKENS, generator=draw)
    return {"ids": ids, "target": torch.randperm(CLASSES, generator=draw)[ids]}


class Sure(nn.Module):
    """All but certain of every target, once it is trained."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.loss = nn.Linear(WIDTH, CLASSES, bias=False), loss

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        scores = self.head(self.linear(self.table(ids)))
        if self.loss == "logsumexp":
            own = scores.gather(-1, target[..., None])[..., 0]
            return (scores.logsumexp(-1) - own).mean()
        if self.loss == "binary":
            truth = F.one_hot(target, CLASSES).float()
            return F.binary_cross_entropy_with_logits(scores, truth, reduction="sum") / ids.numel()
        if self.loss == "probability":
            return -scores.softmax(-1).gather(-1, target[..., None]).log().mean()
        return F.cross_entropy(scores.flatten(0, -2), target.flatten())


def sure(loss: str) -> Sure:
    torch.manual_seed(0)
    model, given = Sure(loss), tokens()
    steps = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(1000):
        reached = model(**given)
        if float(reached.detach()) < 0.01:
            model.zero_grad()
            return model
        steps.zero_grad()
        reached.backward()
        steps.step()
    raise AssertionError(f"{loss}: {float(reached.detach())}")


@pytest.mark.breadth(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("loss", "chunks"),
    [("scores", 1), ("scores", 4), ("logsumexp", 1), ("binary", 1), ("probability", 1)],
)
def test_a_sure_model_keeps_its_gradients(loss: str, chunks: int, dtype: str) -> None:
    """They are the small part that exponentials of scores differ from certainty by."""
    assert off_by(sure(loss), tokens(), loss_chunks=chunks, saved_dtype=dtype) <= 0.01


class Attentive(nn.Module):
    def __init__(self, scale: float, how: str) -> None:
        super().__init__()
        self.table, self.qkv = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head, self.scale, self.how = nn.Linear(WIDTH, CLASSES, bias=False), scale, how

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        made = self.attend(self.table(ids))
        if self.how == "checkpoint":
            made = checkpoint(self.attend, self.table(ids), use_reentrant=False)
        return F.cross_entropy(self.head(made).flatten(0, -2), target.flatten())

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        q, mask = self.scale * q, torch.ones(TOKENS[1], TOKENS[1]).tril().log()
        if self.how == "mask":
            return F.scaled_dot_product_attention(q, k, v, mask)[:, 0]
        if self.how == "spelled out":
            return ((q @ k.transpose(-1, -2) / 8 + mask).softmax(-1) @ v)[:, 0]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


@pytest.mark.parametrize("how", ["causal", "mask", "spelled out", "checkpoint"])
def test_attention_to_one_key_keeps_its_gradients(how: str) -> None:
    torch.manual_seed(0)
    options = {"checkpoint": "as written"} if how == "checkpoint" else {}
    model = Attentive(100.0, how)
    assert off_by(model, tokens(), loss_chunks=1, saved_dtype="bfloat16", **options) <= 0.01


class Routed(nn.Module):
    """A layer of experts in a checkpoint, each token to the best of eight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.router = nn.Embedding(2000, 32), nn.Linear(32, 8, bias=False)
        self.up, self.how = nn.Parameter(0.3 * torch.randn(8, 32, 32)), how
        self.inner, self.head = nn.Linear(32, 32), nn.Linear(32, CLASSES, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = checkpoint(self.layer, self.table(ids).mul(1.0), use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, -2), target.flatten())

    def layer(self, x: Tensor) -> Tensor:
        scores = self.router(x + self.inner(x).tanh())
        if self.how == "topk":
            chosen = F.one_hot(scores.topk(1, -1).indices[..., 0], 8).float()
        elif self.how == "greater":
            chosen = torch.where(scores > 0.1, 1.0, 0.0)
        else:
            chosen = (4 * scores).round()
        weights = chosen * scores.softmax(-1)
        return x + torch.einsum("bte,btd,edf->btf", weights, x, self.up)


@pytest.mark.parametrize("how", ["topk", "greater", "round"])
def test_what_is_made_again_decides_as_forward_did(how: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 2000, (8, 256))
    inputs, options = {"ids": ids, "target": ids % CLASSES}, {"checkpoint": "as written"}
    model = Routed(how)
    assert off_by(model, inputs, loss_chunks=1, saved_dtype="bfloat16", **options) <= 0.005


class Largest(nn.Module):
    """Backward looks for what is equal to the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.linear(self.table(ids))
        return (x.amax(-1) - x.clamp(-0.5, 0.5).mean(-1) + 0 * target).square().mean()


def test_backward_finds_the_largest() -> None:
    torch.manual_seed(0)
    assert off_by(Largest(), tokens(), saved_dtype="bfloat16") <= 0.005


@pytest.mark.nightly
def test_a_plan_of_stages_is_equal_in_float64() -> None:
    how = {"stages": 2, "microbatches": 4, "saved_dtype": "float16"}
    plan = autopar.plan(llama(), batch(0, 8), cluster=slow_devices(2), **grouped(**how))
    assert {part.saved_dtype for part in plan.structure.stages} == {"float16"}
    report = autopar.verify(plan, llama(), batch(0, 8))
    assert max(each.relative for each in report.differences) > 1e-5


@pytest.mark.parametrize("dtype", ["float8", "float32", 16])
def test_other_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(ArgumentError, match="write bfloat16 or float16, or nothing"):
        autopar.compile(llama(), memory={"saved_dtype": dtype})  # pyright: ignore[reportArgumentType]


def test_a_recipe_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    lines = 'target = "train:build"', 'cluster = "2xH100"', 'memory.saved_dtype = "bfloat16"'
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_recipe(path).options.saved_dtype == "bfloat16"


@pytest.mark.nightly
@pytest.mark.processes
def test_two_processes() -> None:
    for seen in spawn("tests.runtime.draws_workers.rounded", 2):
        assert isinstance(seen, dict)
        assert seen["loss"] <= 2e-5 < 1e-4 < seen["grad"] <= 2e-2
