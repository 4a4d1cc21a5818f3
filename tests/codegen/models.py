"""Small models, traced, with what eager makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.tracer import Traced, trace

BATCH, SEQ, VOCAB = 4, 8, 48


class MLP(nn.Module):
    """Two linear layers, and the mean of the squares."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))).square().mean()


class Shapes(nn.Module):
    """Ops whose arguments speak of shapes, or that average, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(4, 1, 8))
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b, c = self.mix(x).chunk(3, -1)
        b = torch.cat([b[:, 4:], b[:, :4]], 1) + self.offset
        c = c.reshape(8, 2, 4, 8).mean(1)
        a = a * self.scale.expand(4, 8, 8).unflatten(0, (2, 2)).flatten(0, 1).repeat(2, 1, 1)
        d = torch.stack([a[:, :, ::2], b[:, :, 1::2]], 0).mean((0, 3))
        e = self.conv(self.norm(y)).flatten(1)[:, :32]
        f = torch.where(x > 0, a, b).roll(1, 1).softmax(-1).cumsum(1).narrow(1, 2, 4)
        g = torch.nn.functional.pad(c, (1, 1)).select(1, 2).new_ones(8, 8) * x.std(-1)
        h = x.new_full((8, 8), 0.5) * a.squeeze().amax(-1) + f.mean() * e.sum()
        loss = (
            (d * g).mean() + (e.unsqueeze(1) * b.mean(-1, keepdim=True)).square().mean() + h.mean()
        )
        return {
            "loss": loss + c.square().mean() * f.std(),
            "b": b,
            "mixed": (a * b).transpose(0, 1),
        }


def shapes() -> tuple[nn.Module, dict[str, Any]]:
    x = torch.randn(8, 8, 8, dtype=torch.float64)
    y = torch.randn(8, 8, 4, 4, dtype=torch.float64)
    return Shapes().double(), {"x": x, "y": y}


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    return MLP().double(), {"x": torch.randn(BATCH * 2, SEQ, 8, dtype=torch.float64)}


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=VOCAB, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM", use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _tokens()


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, head_dim=8, num_attention_heads=8,
        num_key_value_heads=4, intermediate_size=48, vocab_size=VOCAB,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens()


MODELS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mlp": mlp,
    "shapes": shapes,
    "gpt2": gpt2,
    "llama": llama,
}


@dataclass(frozen=True)
class Case:
    """A traced model; what `spmd.train_step` takes; eager's loss and gradients."""

    traced: Traced
    tensors: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    outputs: dict[int, Tensor]
    """Eager's other outputs, by position, where the model returns a dict."""


@cache
def case(name: str) -> Case:
    """The model called `name`, traced once."""
    torch.manual_seed(0)
    model, kwargs = MODELS[name]()
    # Biases and scales of 0 and 1 would hide that one is added or multiplied twice.
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return make_case(model, kwargs)


def make_case(model: nn.Module, kwargs: dict[str, Any]) -> Case:
    traced = trace(model, (), kwargs)
    result = model(**kwargs)
    loss = result if isinstance(result, Tensor) else result["loss"]
    loss.backward()
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()}
    tensors |= {f"buffer:{n}": b for n, b in model.named_buffers()}
    tensors |= {f"input:{i}": x for i, x in enumerate(kwargs.values())}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    others = list(result.values())[1:] if isinstance(result, dict) else []
    outputs = {
        position: x.detach() for position, x in enumerate(others, 1) if isinstance(x, Tensor)
    }
    return Case(traced, tensors, loss.detach(), gradients, outputs)
