"""A script trains as ever while its model works in microbatches, as eager on the whole batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import ArgumentError, MicrobatchError
from autopar.runtime.program import microbatch_run
from tests.runtime.microbatch_workers import trained
from tests.runtime.spawn import spawn
from tests.runtime.workers import distance, gpt2, llama

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


@pytest.mark.nightly
def test_random_numbers_are_those_of_the_whole_batch() -> None:
    model = with_dropout()
    check(trained(model, microbatches=2))


@pytest.mark.nightly
@pytest.mark.processes
def test_two_processes_in_shards() -> None:
    for seen in spawn("tests.runtime.microbatch_workers.two", 2):
        assert isinstance(seen, dict)
        check(seen)


class Odd(nn.Module):
    """Models whose gradients are not what a factor makes of those of a loss of 1."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.w, self.v = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = x @ (self.w + self.v) if self.kind == "shared" else x @ self.w * (x @ self.v)
        if self.kind == "clamped":
            h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        loss = functional.cross_entropy(h, y)
        if self.kind == "two losses":
            return {"loss": loss, "aux": h.square().mean()}
        return {"loss": loss.half().float() if self.kind == "half" else loss}


@pytest.mark.parametrize("kind", ["shared", "clamped", "two losses", "half"])
def test_gradients_in_any_proportion(kind: str) -> None:
    plain = Odd(kind)
    compiled = autopar.compile(copy.deepcopy(plain), microbatches=4)
    for step, scale in enumerate((1.0, 0.25, 0.25, 2.0**24, 1.0, 3.0, 1e-7, 1.0)):
        torch.manual_seed(step)
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        for model in (plain, compiled):
            found = model(x, y)
            loss = found["loss"] if step % 3 else sum(found.values())
            model.zero_grad()
            (loss * scale).backward()
        for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            if step == 3 and kind == "half":
                assert not p.grad.isfinite().any() and not q.grad.isfinite().any()
            else:
                assert distance(p.grad, q.grad) <= (1e-3 if kind == "half" else TOLERANCE)


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
    ids = torch.arange(8 * 16).reshape(8, 16) * 7 % 31
    return {"input_ids": ids, "labels": ids}


def test_without_gradients_there_is_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = llama(), list[str]()
    compiled = autopar.compile(copy.deepcopy(plain), microbatches=4)

    class Watched(microbatch_run.MicrobatchRun):
        def _run(self, phase: str, *rest: Any) -> Any:
            seen.append(phase)
            return super()._run(phase, *rest)

    monkeypatch.setattr(microbatch_run, "MicrobatchRun", Watched)
    compiled(**_eight())["loss"].backward()
    assert seen == ["forward", "backward"] * 4
    seen.clear()
    with torch.no_grad():
        found, wanted = compiled(**_eight()), plain(**_eight())
    assert seen == ["forward"] * 4
    for name in ("loss", "logits"):
        torch.testing.assert_close(found[name], wanted[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.nightly
def test_a_plan_from_a_file_keeps_its_microbatches(tmp_path: Path) -> None:
    first = autopar.compile(llama(), microbatches=4)
    first(**_eight())
    first.plans[-1].save(tmp_path / "llama.plan.json")
    compiled = autopar.compile(llama(), plan=tmp_path / "llama.plan.json")
    compiled(**_eight())
    compiled(**{name: tensor[:, :8] for name, tensor in _eight().items()})
    compiled(**{name: tensor[:6] for name, tensor in _eight().items()})
    found = [plan.structure.microbatches for plan in compiled.plans]
    assert found == [4, 4, 3]


def test_validating_before_training() -> None:
    plain = llama()
    compiled = autopar.compile(copy.deepcopy(plain), microbatches=4)
    few = {name: tensor[:5] for name, tensor in _eight().items()}
    with torch.no_grad():
        torch.testing.assert_close(compiled(**few)["loss"], plain(**few)["loss"])
    for model in (compiled, plain):
        model(**_eight())["loss"].backward()
    for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert distance(p.grad, q.grad) <= TOLERANCE


class Listed(nn.Module):
    """Layers in a list, of which the first is handed all of the input, and others what a turn made
    of it, flattened by each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_layers_in_a_list_are_handed_whole_inputs_and_parts_of_them() -> None:
    plain, x = Listed(), torch.randn(8, 6, 8)
    ours = autopar.compile(copy.deepcopy(plain), microbatches=2, cluster="cpu")
    for each in (plain, ours):
        each(x).backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
