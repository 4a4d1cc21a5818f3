"""Recurrent layers are one op each, and compute what eager computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.tracer import trace
from tests.zoo.cases import make_case, moved
from tests.zoo.equality import check_any_plan

BATCH, STEPS, WIDTH = 4, 3, 6
FORWARD = "autopar.recurrent.default"


def loss(*found: Tensor) -> Tensor:
    return torch.stack([x.sin().mean() for x in found]).sum()


class Loop(nn.Module):
    """Cells in a loop."""

    def __init__(self, kind: type[nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return loss(*state) if isinstance(state, tuple) else loss(state)


class Layer(nn.Module):
    """A layer, and all that it returns."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.layer(x)
        return loss(y, *state) if isinstance(state, tuple) else loss(y, state)


LAYERS: dict[str, tuple[nn.Module, int]] = {
    "lstm": (Layer(nn.LSTM(WIDTH, 5, 2, batch_first=True, bidirectional=True)), 2),
    "projected": (Layer(nn.LSTM(WIDTH, 5, proj_size=3, bias=False, batch_first=True)), 1),
    "dropout": (Layer(nn.GRU(WIDTH, 5, 3, batch_first=True, dropout=0.5)), 3),
    "rnn": (Layer(nn.RNN(WIDTH, 5, nonlinearity="relu", batch_first=True)), 1),
    "lstm cell": (Loop(nn.LSTMCell), STEPS),
    "gru cell": (Loop(nn.GRUCell, bias=False), STEPS),
    "rnn cell": (Loop(nn.RNNCell), STEPS),
}


def inputs() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_is_one_op(name: str) -> None:
    model, count = LAYERS[name]
    graph = trace(model.double(), (inputs(),)).graph
    assert sum(node.op == FORWARD for node in graph.nodes) == count


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "dropout"])
def test_any_plan_computes_what_eager_computes(name: str) -> None:
    model, _ = LAYERS[name]
    found = make_case(moved(model), {"x": inputs()})
    for seed in range(2):
        check_any_plan(found, (2, 2), seed)


def test_numbers_are_drawn_as_eager_draws_them() -> None:
    from autopar import plan, verify

    model, _ = LAYERS["dropout"]
    x = (inputs(),)
    verify(plan(model.double(), x, cluster="4xcpu", mesh="2x2"), model, x)


def test_packed_sequences_are_refused_in_a_sentence() -> None:
    from autopar.errors import TraceError

    class Packed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            lengths = (x[..., 0] != 0).sum(1)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return super().forward(packed)  # pyright: ignore[reportArgumentType]

    with pytest.raises(TraceError, match=r"test_recurrent\.py:\d+: packed = .*\n  how long"):
        trace(Packed(nn.LSTM(WIDTH, 5, batch_first=True)).double(), (inputs(),))
