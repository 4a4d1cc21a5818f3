"""Models whose blocks only look as if they repeated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.tracer.deep_models import (
    DEPTH,
    Block,
    Deep,
    Made,
    Slower,
    deep,
    llama,
    mixtral,
    one_by_one,
)


def mixtral_with_balance() -> Made:
    """The logits of all routers meet in one loss."""
    return mixtral(output_router_logits=True)


def all_hidden_states() -> Made:
    model, inputs = llama()
    return model, {**inputs, "output_hidden_states": True}


def _stack(model: Deep, i: int, x: Tensor) -> Tensor:
    """The second half reads what the first half wrote, in reverse."""
    if i < DEPTH // 2:
        model.skips.append(x)
    else:
        x = x + model.skips.pop()
    return model.blocks[i](x)


def u_net() -> Made:
    return deep(_stack)


def reads_two_before() -> Made:
    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips.append(x)
        return model.blocks[i](x + model.skips[max(0, i - 2)])

    return deep(between)


def dense_net() -> Made:
    """Every block reads all before it."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips.append(x)
        return model.blocks[i](torch.stack(model.skips).sum(0))

    return deep(between)


def scaled_by_index() -> Made:
    return deep(lambda model, i, x: model.blocks[i](x) * 0.9**i)


def odd_one_in_the_middle() -> Made:
    return deep(lambda model, i, x: model.blocks[i](x) * (2.0 if i == DEPTH // 2 else 1.0))


def last_by_its_number() -> Made:
    """Knows how many blocks there are from elsewhere."""
    return deep(lambda model, i, x: model.blocks[i](x) * (2.0 if i == DEPTH - 1 else 1.0))


def shared_blocks() -> Made:
    """Two modules, each at half of the places."""
    pair = Block(), Block()
    return deep(one_by_one, *(pair[i % 2] for i in range(DEPTH)))


def tied_weights() -> Made:
    """The blocks are their own, but one weight is that of all."""
    blocks = [Block() for _ in range(DEPTH)]
    for block in blocks[1:]:
        block.linear.weight = blocks[0].linear.weight
    return deep(one_by_one, *blocks)


def called_twice() -> Made:
    return deep(lambda model, i, x: model.blocks[i](model.blocks[i](x)))


def called_backwards() -> Made:
    return deep(lambda model, i, x: model.blocks[-1 - i](x))


def sum_of_all() -> Made:
    """Each block's output meets in the end."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips.append(model.blocks[i](x))
        return torch.stack(model.skips).mean(0) if i == DEPTH - 1 else model.skips[-1]

    return deep(between)


def running_sum() -> Made:
    """A second value beside the first goes from block to block."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        model.skips = [model.skips[0] + x if model.skips else x]
        out = model.blocks[i](x)
        return out + model.skips[0] if i == DEPTH - 1 else out

    return deep(between)


def gradient_scaled_in_the_middle() -> Made:
    """Forward, all blocks are alike."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        return Slower.apply(model.blocks[i](x), 0.5 if i == DEPTH // 2 else 1.0)  # pyright: ignore[reportReturnType]

    return deep(between)


def hook_in_the_middle() -> Made:
    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        out = model.blocks[i](x)
        if i == DEPTH // 2:
            out.register_hook(lambda grad: grad.clamp(-1, 1))
        return out

    return deep(between)


def checkpointed_in_part() -> Made:
    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        if i % 4 == 1:
            return checkpoint(model.blocks[i], x, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return model.blocks[i](x)

    return deep(between)


def half_in_bfloat16() -> Made:
    """Autocast is entered by the later blocks alone."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=i >= DEPTH // 2):
            return model.blocks[i](x)

    return deep(between)


def without_gradients() -> Made:
    """Some blocks are run without gradients, though they could have some."""

    def between(model: Deep, i: int, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(i != DEPTH // 2):
            return model.blocks[i](x)

    return deep(between)


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
