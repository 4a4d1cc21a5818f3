"""A vocabulary cut over ranks: tables, heads and losses that never gather their scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.simulator import spmd
from autopar.tracer import Traced, trace
from tests.layouts import program_of
from tests.planned import on_h100, plan_for
from tests.sent import observed

TOKENS, WIDTH, CLASSES = 24, 8, 16


class Language(nn.Module):
    """A table, a layer and a head, which may be the table, under a loss that ignores some."""

    def __init__(self, *, tied: bool, weighted: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH, padding_idx=3)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.register_buffer("weight", torch.rand(CLASSES) if weighted else None)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.layer(self.table(ids))))
        return nn.functional.cross_entropy(scores, targets, self.weight, ignore_index=5)


PINS = {
    r"table:forward:embedding.*": "v",
    r"table:backward:embedding.*": "v",
    r"head:forward:mm.*": "n",
    r"head:backward:mm.0": "m",
    r"head:backward:mm.1": "k",
    r":.*:_log_softmax.*": "d1",
    r":.*:nll_loss.*ward\.0": "c",
}


def on_axes(pins: dict[str, str], mesh: str) -> dict[str, str]:
    """On a second axis everything is cut the same way."""
    return {key: ",".join([label] * len(mesh.split("x"))) for key, label in pins.items()}


@pytest.mark.parametrize("mesh", ["2", "4", "2x2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_cut_vocabulary_gathers_no_scores(mesh: str, tied: bool) -> None:
    torch.manual_seed(0)
    model = Language(tied=tied, weighted=not tied).double()
    ids, targets = (torch.randint(0, CLASSES, (TOKENS,)) for _ in range(2))
    ids[:2], targets[:4] = 3, 5
    traced: Traced = trace(model, (ids, targets), {})
    plan = plan_for(traced.graph, mesh, on_axes(PINS, mesh))
    program = program_of(traced, plan.structure.only)
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()}
    tensors |= {f"buffer:{n}": b for n, b in model.named_buffers()}
    tensors |= {"input:0": ids, "input:1": targets}
    laid = on_h100(mesh)[1]
    loss = model(ids, targets)
    loss.backward()
    found = spmd.train_step(program, laid, traced.graph, plan.structure.only, tensors)
    torch.testing.assert_close(found.outputs["loss:0"], loss.detach(), rtol=1e-9, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
    step = observed(program, laid, traced.graph, plan.structure, tensors)
    scores = TOKENS * CLASSES // laid.num_devices
    for sent in (*step.forward, *step.backward):
        assert sent.kind != "all_gather" or sent.after.shape != (TOKENS, CLASSES)
    assert {v.numel() for v in step.saved if v.numel() > TOKENS * WIDTH} <= {scores}


def test_an_ignored_token_is_counted_by_no_rank() -> None:
    """The mean is over the tokens that count, wherever their classes lie."""
    torch.manual_seed(0)
    model = Language(tied=False, weighted=False).double()
    ids = torch.arange(TOKENS) % CLASSES
    targets = torch.full((TOKENS,), 5)
    targets[7] = 15
    traced = trace(model, (ids, targets), {})
    plan = plan_for(traced.graph, "4", PINS)
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()}
    program = program_of(traced, plan.structure.only)
    found = spmd.train_step(
        program,
        on_h100("4")[1],
        traced.graph,
        plan.structure.only,
        tensors | {"input:0": ids, "input:1": targets},
    )
    expected = model(ids, targets).detach()
    torch.testing.assert_close(found.outputs["loss:0"], expected, rtol=1e-9, atol=0)
