"""Models whose blocks repeat, and models whose blocks only look as if they did."""

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


def mixtral_with_balance() -> Made:
    """The logits of all routers meet in one loss."""
    return mixtral(output_router_logits=True)


def all_hidden_states() -> Made:
    model, inputs = llama()
    return model, {**inputs, "output_hidden_states": True}


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

    def forward(self, x: Tensor) -> Tensor:
        self.skips: list[Tensor] = []
        x = self.first(x)
        for i in range(len(self.blocks)):
            x = self.between(self, i, x)
        return x.square().mean()


def _deep(between: Callable[[Deep, int, Tensor], Tensor], *blocks: nn.Module) -> Made:
    return Deep(between, list(blocks)), {"x": torch.zeros(4, WIDTH)}


def _plain(model: Deep, i: int, x: Tensor) -> Tensor:
    return model.blocks[i](x)


def plain() -> Made:
    return _deep(_plain)


def scaled_between() -> Made:
    """A parameter of the caller's is used after each block."""
    return _deep(lambda model, i, x: model.blocks[i](x) * model.scale)


def whole_model() -> Made:
    """Nothing but the run, called by no code of the user's."""
    model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    return model, {"input": torch.zeros(4, WIDTH)}


def batch_norms() -> Made:
    """Every block changes buffers."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(DEPTH)]
    return _deep(_plain, *blocks)


def causal_masks() -> Made:
    """Every block makes a mask of its own, whose dims no parameter has."""

    class Masked(Block):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(5, 5, device=x.device).tril().sum(0).cumsum(0)
            return super().forward(x) + mask.mean()

    return _deep(_plain, *(Masked() for _ in range(DEPTH)))


def period_of_two() -> Made:
    return _deep(_plain, *(Block(bias=i % 2 == 0) for i in range(DEPTH + 4)))


def two_masks() -> Made:
    """Every other block reads another tensor, as local and global attention do."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips = model.skips or [x.cos(), x.sin()]
        return model.blocks[i](x) + model.skips[i % 2]

    return _deep(between, *(Block() for _ in range(DEPTH + 3)))


def period_of_three_with_odd_ends() -> Made:
    kinds = [Block(bias=False), *(Block(bias=i % 3 == 0) for i in range(13)), nn.Tanh()]
    return _deep(_plain, *kinds)


def frozen_half() -> Made:
    model, inputs = _deep(_plain, *(Block() for _ in range(2 * DEPTH)))
    model.blocks[:DEPTH].requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
    return model, inputs


def frozen_start() -> Made:
    """Nothing before the blocks is trained, and neither is half of them."""
    model, inputs = frozen_half()
    model.first.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]
    return model, inputs


def _stack(model: Deep, i: int, x: Tensor) -> Tensor:
    """The second half reads what the first half wrote, in reverse."""
    if i < DEPTH // 2:
        model.skips.append(x)
    else:
        x = x + model.skips.pop()
    return model.blocks[i](x)


def u_net() -> Made:
    return _deep(_stack)


def reads_two_before() -> Made:
    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips.append(x)
        return model.blocks[i](x + model.skips[max(0, i - 2)])

    return _deep(between)


def dense_net() -> Made:
    """Every block reads all before it."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips.append(x)
        return model.blocks[i](torch.stack(model.skips).sum(0))

    return _deep(between)


def scaled_by_index() -> Made:
    return _deep(lambda model, i, x: model.blocks[i](x) * 0.9**i)


def odd_one_in_the_middle() -> Made:
    return _deep(lambda model, i, x: model.blocks[i](x) * (2.0 if i == DEPTH // 2 else 1.0))


def last_by_its_number() -> Made:
    """Knows how many blocks there are from elsewhere."""
    return _deep(lambda model, i, x: model.blocks[i](x) * (2.0 if i == DEPTH - 1 else 1.0))


def shared_blocks() -> Made:
    """Two modules, each at half of the places."""
    pair = Block(), Block()
    return _deep(_plain, *(pair[i % 2] for i in range(DEPTH)))


def tied_weights() -> Made:
    """The blocks are their own, but one weight is that of all."""
    blocks = [Block() for _ in range(DEPTH)]
    for block in blocks[1:]:
        block.linear.weight = blocks[0].linear.weight
    return _deep(_plain, *blocks)


def called_twice() -> Made:
    return _deep(lambda model, i, x: model.blocks[i](model.blocks[i](x)))


def called_backwards() -> Made:
    return _deep(lambda model, i, x: model.blocks[-1 - i](x))


def sum_of_all() -> Made:
    """Each block's output meets in the end."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips.append(model.blocks[i](x))
        return torch.stack(model.skips).mean(0) if i == DEPTH - 1 else model.skips[-1]

    return _deep(between)


def running_sum() -> Made:
    """A second value beside the first goes from block to block."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips = [model.skips[0] + x if model.skips else x]
        out = model.blocks[i](x)
        return out + model.skips[0] if i == DEPTH - 1 else out

    return _deep(between)


class _Slower(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * ctx.factor, None


def gradient_scaled_alike() -> Made:
    return _deep(lambda model, i, x: _Slower.apply(model.blocks[i](x), 0.5))  # pyright: ignore[reportArgumentType]


def gradient_scaled_in_the_middle() -> Made:
    """Forward, all blocks are alike."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        return _Slower.apply(model.blocks[i](x), 0.5 if i == DEPTH // 2 else 1.0)  # pyright: ignore[reportReturnType]

    return _deep(between)


def hook_in_the_middle() -> Made:
    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        out = model.blocks[i](x)
        if i == DEPTH // 2:
            out.register_hook(lambda grad: grad.clamp(-1, 1))
        return out

    return _deep(between)


def checkpointed() -> Made:
    """Every block is computed again in backward."""
    return _deep(lambda model, i, x: checkpoint(model.blocks[i], x, use_reentrant=False))  # pyright: ignore[reportReturnType]


def checkpointed_in_part() -> Made:
    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        if i % 4 == 1:
            return checkpoint(model.blocks[i], x, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return model.blocks[i](x)

    return _deep(between)


def half_in_bfloat16() -> Made:
    """Autocast is entered by the later blocks alone."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=i >= DEPTH // 2):
            return model.blocks[i](x)

    return _deep(between)


def without_gradients() -> Made:
    """Some blocks are run without gradients, though they could have some."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(i != DEPTH // 2):
            return model.blocks[i](x)

    return _deep(between)


def runs_within_blocks() -> Made:
    """Stages of unequal length, as in a Swin transformer."""
    stages = [nn.Sequential(*(Block() for _ in range(n))) for n in (2, 7, 9)]
    return _deep(_plain, *stages)


def runs_within_a_run() -> Made:
    stages = [nn.Sequential(*(Block() for _ in range(DEPTH))) for _ in range(DEPTH)]
    return _deep(_plain, *stages)


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

WHOLE: tuple[Callable[[], Made], ...] = (
    mixtral_with_balance,
    all_hidden_states,
    u_net,
    reads_two_before,
    dense_net,
    scaled_by_index,
    odd_one_in_the_middle,
    last_by_its_number,
    shared_blocks,
    tied_weights,
    called_twice,
    called_backwards,
    sum_of_all,
    running_sum,
    gradient_scaled_in_the_middle,
    hook_in_the_middle,
    checkpointed_in_part,
    half_in_bfloat16,
    without_gradients,
)
"""Models that only look as if they could be."""
