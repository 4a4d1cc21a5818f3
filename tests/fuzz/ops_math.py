"""Draws of arithmetic: pointwise ops, broadcasting, comparisons, reductions, products."""

from __future__ import annotations

from tests.fuzz.drawing import Drawing

UNARY = (
    "torch.tanh({})", "torch.sigmoid({})", "F.gelu({})", "F.gelu({}, approximate='tanh')",
    "F.relu({})", "F.silu({})", "{}.square()", "{}.abs()", "-{}", "torch.exp(-{}.square())",
    "torch.sqrt({}.square() + 1)", "torch.rsqrt({}.square() + 0.5)", "torch.sin({})", "{}.cos()",
    "F.softplus({})", "F.leaky_relu({}, 0.1)", "F.elu({})", "{}.clamp(-0.5, 0.7)",
    "{}.clamp(min=0.1)", "1 / (1 + {}.square())", "{} ** 3", "torch.erf({})",
    "torch.log1p({}.square())", "{} + 1", "1.5 - {}", "{} * 2 - 0.5", "{} / 3", "{}.detach()",
    "F.hardtanh({})", "{}.clone()", "{}.contiguous()", "torch.zeros_like({})",
    "torch.ones_like({})", "F.mish({})", "{}.pow(2)", "torch.floor({})", "F.hardswish({})",
)  # fmt: skip

BINARY = (
    "{} + {}", "{} - {}", "{} * {}", "{} * {}", "{} / ({}.square() + 0.5)",
    "torch.maximum({}, {})", "torch.minimum({}, {})", "torch.add({}, {}, alpha=2)",
    "torch.sub({}, {}, alpha=0.5)", "torch.where({} > 0, {}, 0.25)", "torch.lerp({}, {}, 0.3)",
    "torch.atan2({}, {}.square() + 1)", "1 - {} * {}",
)  # fmt: skip

TERNARY = (
    "torch.where({0} > {1}, {0}, {2})", "torch.addcmul({}, {}, {}, value=0.5)",
    "torch.lerp({}, {}, {})", "{0} * {1} + {2}", "torch.addcdiv({}, {}, {}.square() + 1)",
    "{0}.masked_fill({1} < {2}, 0.1)", "{0}.masked_fill(({1} > 0) & ({2} > 0), -1.0)",
    "torch.where(torch.logical_or({1} > 0, {2} < 0), {0}, {1})",
)  # fmt: skip

REDUCTIONS = (
    "{}.sum({}, keepdim={})", "{}.mean({}, keepdim={})", "{}.amax({}, keepdim={})",
    "{}.amin({}, keepdim={})", "torch.logsumexp({}, {}, keepdim={})",
    "{}.square().sum({}, keepdim={})", "{}.var({}, keepdim={})", "{}.sum({}, keepdim={})",
    "{}.mean({}, keepdim={})", "torch.linalg.vector_norm({} + 0.1, 2, {}, keepdim={})",
    "{}.std({}, correction=0, keepdim={})",
)  # fmt: skip


def unary(d: Drawing) -> None:
    name = d.value()
    d.emit(d.pick(UNARY).format(*[name] * 2))


def binary(d: Drawing) -> None:
    name = d.value()
    pair = [name, d.operand(name)]
    if d.chance(30):
        pair.reverse()
    d.emit(d.pick(BINARY).format(*pair))


def ternary(d: Drawing) -> None:
    name = d.value()
    d.emit(d.pick(TERNARY).format(name, d.operand(name), d.operand(name)))


def reduction(d: Drawing) -> None:
    name = d.value(1)
    dims = d.some_dims(name)
    rank = d[name].dim()
    written = str([k - rank if d.chance(30) else k for k in dims])
    is_of_one = all(d.shape(name)[k] == 1 for k in dims)
    # Of one element there is no variance.
    found = [each for each in REDUCTIONS if not (is_of_one and ".var(" in each)]
    d.emit(d.pick(found).format(name, written, d.chance(50)))


def centred(d: Drawing) -> None:
    """A value beside its own statistics: two uses that ask for different shardings."""
    name = d.value(1)
    dims = d.some_dims(name)
    how = d.pick(("mean", "amax", "sum"))
    d.emit(f"{name} - {name}.{how}({dims}, keepdim=True)")


def whole_reduction(d: Drawing) -> None:
    d.emit(f"{d.value()}.{d.pick(('sum', 'mean', 'max', 'min'))}()")


def cumulative(d: Drawing) -> None:
    name = d.value(1)
    d.emit(f"{name}.cumsum({d.dim(name)})")


def ordered(d: Drawing) -> None:
    """Values by rank, or where the largest is."""
    name = d.value(1)
    dim = d.dim(name)
    how = d.pick(("max({})[0]", "sort({})[0]", "topk(1, {})[0]", "min({})[0]", "argmax({})"))
    d.emit(f"{name}.{how.format(dim)}")


def linear(d: Drawing) -> None:
    name = d.value(1)
    out = d.size()
    weight = d.parameter(out, d.shape(name)[-1])
    bias = f", {d.parameter(out)}" if d.chance(50) else ""
    d.emit(f"F.linear({name}, {weight}{bias})")


def matmul(d: Drawing) -> None:
    name = d.value(1)
    inner = d.shape(name)[-1]
    how = d.number(0, 4)
    if how == 0:
        d.emit(f"{name} @ {d.parameter(inner, d.size())}")
    elif how == 1:
        d.emit(f"{name} @ {d.parameter(inner)}")
    elif how == 2 and d[name].dim() > 1:
        d.emit(f"{name} @ {name}.transpose(-1, -2)")
    elif how == 3 and d[name].dim() > 2:
        d.emit(f"{name} @ {d.parameter(d.shape(name)[-3], inner, d.size())}")
    else:
        other = d.value(2, 3, lambda x: x.shape[-2] == inner)
        if other is not None and {d[name].dim(), d[other].dim()} <= {1, 2}:
            d.emit(f"{name} @ {other}")


def addmm(d: Drawing) -> None:
    name = d.value(2, 2)
    rows, inner = d.shape(name)
    out = d.size()
    added = d.pick(((out,), (rows, out), (1, out), (rows, 1)))
    scales = ", beta=0.5, alpha=2" if d.chance(40) else ""
    d.emit(f"torch.addmm({d.parameter(*added)}, {name}, {d.parameter(inner, out)}{scales})")


def einsum(d: Drawing) -> None:
    """A value times a parameter that has some of its dims and one of its own."""
    name = d.value(1, 3)
    letters = "abc"[: d[name].dim()]
    sizes = dict(zip(letters, d.shape(name), strict=True))
    common = [x for x in letters if d.chance(50)] or [letters[-1]]
    sizes["z"] = d.size()
    own = d.draw_order([*common, "z"])
    left = d.draw_order([x for x in (*letters, "z") if x not in common or d.chance(40)])
    weight = d.parameter(*(sizes[x] for x in own))
    d.emit(f"torch.einsum('{letters},{''.join(own)}->{''.join(left)}', {name}, {weight})")


def outer(d: Drawing) -> None:
    name = d.value(1, 1)
    d.emit(f"torch.outer({name}, {d.parameter(d.size())})")


OPS = (
    unary, unary, unary, binary, binary, binary, ternary, reduction, reduction, centred,
    whole_reduction, cumulative, ordered, linear, linear, linear, matmul, matmul, addmm, einsum,
    einsum, outer,
)  # fmt: skip
