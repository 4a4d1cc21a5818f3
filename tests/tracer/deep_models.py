"""Models whose blocks repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH, SEQ, VOCAB = 8, 6, 4, 24

Made = tuple[nn.Module, dict[str, Any]]


def _tokens(kinds: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (4, SEQ), generator=generator)
    labels = torch.randint(kinds, (4,), generator=generator) if kinds else ids
    return {"input_ids": ids, "labels": labels}


_DECODER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 12,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8,
}


def llama() -> Made:
    """Its head is its embedding."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER, tie_word_embeddings=True)), _tokens()


def gpt2() -> Made:
    """With dropout."""
    config = hf.GPT2Config(
        n_layer=DEPTH, n_embd=WIDTH, n_head=2, n_positions=8, vocab_size=VOCAB, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), _tokens()


def t5() -> Made:
    """Both halves, each with a bias that its first block makes for all."""
    config = hf.T5Config(
        d_model=WIDTH, d_kv=4, num_heads=2, d_ff=12, num_layers=DEPTH, num_decoder_layers=DEPTH,
        vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0,
        relative_attention_num_buckets=8,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), _tokens()


def bert() -> Made:
    config = hf.BertConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=2, intermediate_size=12,
        vocab_size=VOCAB, max_position_embeddings=8,
    )  # fmt: skip
    return hf.BertForMaskedLM(config), {**_tokens(), "attention_mask": torch.ones(4, SEQ).long()}


def vit() -> Made:
    config = hf.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=2, intermediate_size=12,
        image_size=8, patch_size=4, num_labels=3,
    )  # fmt: skip
    images = {"pixel_values": torch.zeros(4, 3, 8, 8), "labels": _tokens(3)["labels"]}
    return hf.ViTForImageClassification(config), images


def mixtral(**more: Any) -> Made:
    config = hf.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2, **more)
    return hf.MixtralForCausalLM(config), _tokens()


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Deep(nn.Module):
    """Blocks, called one after the other by `between`."""

    def __init__(
        self, between: Callable[[Deep, int, Tensor], Tensor], blocks: list[nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(DEPTH)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.between = between
        self.skips: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in range(len(self.blocks)):
            x = self.between(self, i, x)
        self.skips = []
        return x.square().mean()


def deep(between: Callable[[Deep, int, Tensor], Tensor], *blocks: nn.Module) -> Made:
    return Deep(between, list(blocks)), {"x": torch.zeros(4, WIDTH)}


def one_by_one(model: Deep, i: int, x: Tensor) -> Tensor:
    return model.blocks[i](x)


def plain() -> Made:
    return deep(one_by_one)


def scaled_between() -> Made:
    """A parameter of the caller's is used after each block."""
    return deep(lambda model, i, x: model.blocks[i](x) * model.scale)


def whole_model() -> Made:
    """Nothing but the run, called by no code of the user's."""
    model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    return model, {"input": torch.zeros(4, WIDTH)}


def batch_norms() -> Made:
    """Every block changes buffers."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(DEPTH)]
    return deep(one_by_one, *blocks)


def causal_masks() -> Made:
    """Every block makes a mask of its own, whose dims no parameter has."""

    class Masked(Block):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(5, 5, device=x.device).tril().sum(0).cumsum(0)
            return super().forward(x) + mask.mean()

    return deep(one_by_one, *(Masked() for _ in range(DEPTH)))


def period_of_two() -> Made:
    return deep(one_by_one, *(Block(bias=i % 2 == 0) for i in range(DEPTH + 4)))


def two_masks() -> Made:
    """Every other block reads another tensor, as local and global attention do."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips = model.skips or [x.cos(), x.sin()]
        return model.blocks[i](x) + model.skips[i % 2]

    return deep(between, *(Block() for _ in range(DEPTH + 3)))


def period_of_three_with_odd_ends() -> Made:
    kinds = [Block(bias=False), *(Block(bias=i % 3 == 0) for i in range(13)), nn.Tanh()]
    return deep(one_by_one, *kinds)


def frozen_half() -> Made:
    model, inputs = deep(one_by_one, *(Block() for _ in range(2 * DEPTH)))
    model.blocks[:DEPTH].requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
    return model, inputs


def frozen_start() -> Made:
    """Nothing before the blocks is trained, and neither is half of them."""
    model, inputs = frozen_half()
    model.first.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]
    return model, inputs


class Slower(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * ctx.factor, None


def gradient_scaled_alike() -> Made:
    return deep(lambda model, i, x: Slower.apply(model.blocks[i](x), 0.5))  # pyright: ignore[reportArgumentType]


def checkpointed() -> Made:
    """Every block is computed again in backward."""
    return deep(lambda model, i, x: checkpoint(model.blocks[i], x, use_reentrant=False))  # pyright: ignore[reportReturnType]


def runs_within_blocks() -> Made:
    """Stages of unequal length, as in a Swin transformer."""
    stages = [nn.Sequential(*(Block() for _ in range(n))) for n in (2, 7, 9)]
    return deep(one_by_one, *stages)


def runs_within_a_run() -> Made:
    stages = [nn.Sequential(*(Block() for _ in range(DEPTH))) for _ in range(DEPTH)]
    return deep(one_by_one, *stages)


Kind = tuple[str, int, int]
"""Of a run its list, head and period."""

SHORT: dict[Callable[[], Made], list[Kind]] = {
    llama: [("model.layers", 1, 1)],
    gpt2: [("transformer.h", 1, 1)],
    t5: [("encoder.block", 1, 1), ("decoder.block", 1, 1)],
    bert: [("bert.encoder.layer", 1, 1)],
    vit: [("vit.layers", 1, 1)],
    mixtral: [("model.layers", 1, 1)],
    plain: [("blocks", 1, 1)],
    scaled_between: [("blocks", 1, 1)],
    whole_model: [("", 1, 1)],
    batch_norms: [("blocks", 1, 1)],
    causal_masks: [("blocks", 1, 1)],
    period_of_two: [("blocks", 1, 2)],
    two_masks: [("blocks", 2, 2)],
    period_of_three_with_odd_ends: [("blocks", 2, 3)],
    frozen_half: [("blocks", DEPTH, 1)],
    frozen_start: [("blocks", DEPTH + 1, 1)],
    gradient_scaled_alike: [("blocks", 1, 1)],
    checkpointed: [("blocks", 1, 1)],
    runs_within_blocks: [("blocks.1", 1, 1), ("blocks.2", 1, 1)],
    runs_within_a_run: [("blocks", 1, 1)],
}
"""Models that are traced in short, and their runs."""
