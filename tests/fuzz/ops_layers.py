"""Draws of layers: norms, softmax, embeddings, losses, attention, convolutions, whole blocks."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz import ops_math, ops_shape, ops_state
from tests.fuzz.drawing import Drawing

Op = Callable[[Drawing], None]


def softmax(d: Drawing) -> None:
    name = d.value(1)
    d.emit(f"F.{d.pick(('softmax', 'log_softmax'))}({name}, {d.dim(name)})")


def layer_norm(d: Drawing) -> None:
    name = d.value(1, 4, lambda x: x.shape[-1:].numel() > 1 and x.dim() > 0)
    if name is None:
        return
    shape = list(d.shape(name))[-d.number(1, min(2, d[name].dim())) :]
    weight = d.parameter(*shape) if d.chance(60) else None
    if d.chance(60):
        bias = d.parameter(*shape) if d.chance(60) else None
        d.emit(f"F.layer_norm({name}, {shape}, {weight}, {bias}, 0.01)")
    else:
        d.emit(f"F.rms_norm({name}, {shape}, {weight}, 0.01)")


def group_norm(d: Drawing) -> None:
    name = d.value(3, 4)
    channels = d.shape(name)[1]
    if d[name].numel() == 1:
        return
    many = [k for k in range(1, channels + 1) if channels % k == 0 and d[name].numel() > k]
    groups = d.pick(many)
    scale = f", {d.parameter(channels)}, {d.parameter(channels)}" if d.chance(50) else ", None"
    d.emit(f"F.group_norm({name}, {groups}{scale}, eps=0.01)")


def batch_norm(d: Drawing) -> None:
    name = d.value(2, 4)
    channels = d.shape(name)[1]
    if d[name].numel() == channels:
        return
    if 1 in d.shape(name)[2:] and not d[name].is_contiguous():
        # Whose gradients are wrong in eager (findings/batch_norm_of_a_sequence.sh).
        name = d.emit(f"{name}.contiguous()")
    mean, var = d.buffer(channels), d.buffer(channels)
    scale = f"{d.parameter(channels)}, {d.parameter(channels)}" if d.chance(60) else "None, None"
    training = d.chance(75)
    var = var if training else f"{var}.abs()"
    d.emit(f"F.batch_norm({name}, {mean}, {var}, {scale}, {training}, 0.1, 0.01)")


def embedding(d: Drawing) -> None:
    rows = d.pick((8, 12, 7, 10, 6))
    shape = [d.size() for _ in range(d.number(1, 2))]
    padding = f", padding_idx={d.number(0, rows - 1)}" if d.chance(25) else ""
    d.emit(f"F.embedding({d.integers(rows, *shape)}, {d.parameter(rows, d.size())}{padding})")


def cross_entropy(d: Drawing) -> None:
    name = d.value(2, 3)
    shape = list(d.shape(name))
    classes = shape.pop(1)
    target = d.integers(classes, *shape)
    weight = f"{d.buffer(classes)}.abs()" if d.chance(25) else "None"
    reduction = d.pick(("mean", "mean", "sum", "none"))
    smoothing = ", label_smoothing=0.1" if d.chance(15) else ""
    ignored = f", ignore_index={d.number(0, classes - 1)}" if d.chance(50) else ""
    # Where all targets are ignored, the mean is 0 / 0.
    if reduction == "mean" and (d[target] == d[target].flatten()[0]).all():
        ignored = ""
    d.emit(
        f"F.cross_entropy({name}, {target}, {weight}, reduction='{reduction}'{ignored}{smoothing})"
    )


def distance(d: Drawing) -> None:
    """Losses between a value and a buffer, or between two values."""
    name = d.value(1)
    other = d.value(1, 4, lambda x: tuple(x.shape) == d.shape(name)) if d.chance(50) else None
    other = other or d.buffer(*d.shape(name))
    how = d.pick(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"))
    d.emit(f"F.{how}({name}, {other}, reduction='{d.pick(('mean', 'sum', 'none'))}')")


def binary_cross_entropy(d: Drawing) -> None:
    name = d.value(1)
    d.emit(f"F.binary_cross_entropy_with_logits({name}, torch.sigmoid({d.buffer(*d.shape(name))}))")


def attention(d: Drawing) -> None:
    """Projections of a value of three dims, in heads that may be shared."""
    name = d.value(3, 3)
    batch, length, width = d.shape(name)
    heads, shared, size = d.pick(((2, 2, 2), (4, 2, 2), (4, 4, 1), (3, 3, 2), (6, 3, 2), (2, 1, 4)))

    def projected(count: int) -> str:
        flat = f"F.linear({name}, {d.parameter(count * size, width)})"
        return f"{flat}.reshape({batch}, {length}, {count}, {size}).transpose(1, 2)"

    q, k, v = (d.emit(projected(n)) for n in (heads, shared, shared))
    d.used |= {q, k, v}
    extra = ", is_causal=True" if d.chance(50) else ""
    if not extra and d.chance(40):
        mask = d.pick(((length, length), (batch, 1, length, length), (1, 1, 1, length)))
        extra = f", attn_mask={d.buffer(*mask)}"
    grouped = ", enable_gqa=True" if heads != shared else ""
    d.emit(f"F.scaled_dot_product_attention({q}, {k}, {v}{extra}{grouped})")


def convolution(d: Drawing) -> None:
    name = d.value(3, 4)
    space = d[name].dim() - 2
    channels = d.shape(name)[1]
    groups = d.pick([k for k in (1, 1, 2, 3) if channels % k == 0])
    out = groups * d.pick((1, 2, 4, 3))
    kernel = d.pick((1, 3, 3))
    strided = ", stride=2" if d.chance(20) else ""
    if d.chance(80) or groups > 1:
        bias = f"{d.parameter(out)}" if d.chance(50) else "None"
        weight = d.parameter(out, channels // groups, *[kernel] * space)
        d.emit(
            f"F.conv{space}d({name}, {weight}, {bias}{strided}, padding={kernel // 2}, "
            f"groups={groups})"
        )
    else:
        weight = d.parameter(channels, out, *[kernel] * space)
        d.emit(f"F.conv_transpose{space}d({name}, {weight}, None{strided}, padding={kernel // 2})")


POOLINGS = (
    "avg_pool2d({}, 2)", "max_pool2d({}, 2)", "adaptive_avg_pool2d({}, 1)",
    "avg_pool2d({}, 2, stride=1, padding=1)", "max_pool2d({}, 2, stride=1)",
)  # fmt: skip


def pooling(d: Drawing) -> None:
    name = d.value(4, 4, lambda x: x.dim() == 4 and min(x.shape[2:]) > 1)
    if name is None:
        return
    how = d.pick(POOLINGS)
    d.emit(f"F.{how.format(name)}")


def blocks(d: Drawing) -> None:
    """Layers of one class: their ops take one decision."""
    if d.scope:
        return
    inside = (*ops_math.OPS, *ops_shape.OPS, softmax, layer_norm, ops_state.in_place, linear_pair)

    def body(inner: Drawing) -> None:
        for _ in range(inner.number(1, 4)):
            inner.pick(inside)(inner)

    d.block(d.value(1), body, d.pick((2, 3)))


def linear_pair(d: Drawing) -> None:
    """Up, a pointwise op, and down, as in a transformer."""
    name = d.value(1)
    width, inner = d.shape(name)[-1], 2 * d.size()
    up, down = d.parameter(inner, width), d.parameter(width, inner)
    d.emit(f"F.linear(F.gelu(F.linear({name}, {up})), {down}) + {name}")


OPS: tuple[Op, ...] = (
    softmax, softmax, layer_norm, layer_norm, group_norm, batch_norm, embedding, embedding,
    cross_entropy, cross_entropy, distance, binary_cross_entropy, attention, attention,
    convolution, convolution, pooling, blocks, blocks, blocks, linear_pair,
)  # fmt: skip
