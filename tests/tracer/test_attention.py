"""`autopar::sdpa` is `F.scaled_dot_product_attention`, forward and backward, on every path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode

from autopar.runtime.ops import attention
from autopar.runtime.ops.attention import sdpa, sdpa_backward
from autopar.tracer.calls import CallMode

FLOAT64_ATOL = 1e-12
LENGTHS = {"square": (8, 8), "wide": (5, 9), "tall": (9, 5)}


@pytest.fixture(params=["kernel", "formulas"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device's kernel where it applies, and the formulas everywhere."""
    if request.param == "formulas":
        monkeypatch.setattr(attention, "_flash_cpu", lambda *_: False)
    yield request.param


def tensors(num_kv_heads: int, lengths: str, value_dim: int = 16) -> tuple[Tensor, ...]:
    s, t = LENGTHS[lengths]
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, s, 4, 16), (2, t, num_kv_heads, 16), (2, t, num_kv_heads, value_dim))
    return tuple(
        torch.randn(shape, dtype=torch.float64, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for shape in shapes
    )


def a_mask(kind: str, lengths: str) -> Tensor | None:
    s, t = LENGTHS[lengths]
    generator = torch.Generator().manual_seed(1)
    if kind == "bool":
        mask = torch.rand(2, 1, s, t, generator=generator) > 0.4
        mask[0, :, 0] = False  # a row that attends to nothing
        return mask
    if kind == "added":
        return torch.randn(1, 4, s, t, dtype=torch.float64, generator=generator)
    return None


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", ["full", "causal", "bool", "added"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("value_dim", [16, 8])
def test_like_torch(path: str, lengths: str, kind: str, num_kv_heads: int, value_dim: int) -> None:
    inputs = tensors(num_kv_heads, lengths, value_dim)
    mask, causal = a_mask(kind, lengths), kind == "causal"
    expected = F.scaled_dot_product_attention(
        *inputs, attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    actual, lse = sdpa(*inputs, mask, causal, None)
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    close(actual, expected)
    close(lse, scores(*inputs[:2], mask, causal).logsumexp(-1))
    for got, want in zip(
        torch.autograd.grad((actual * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        close(got, want)


def scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        future = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1)
        found = found.masked_fill(future, -torch.inf)
    if mask is not None:
        found = found.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else found + mask
    return found


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=FLOAT64_ATOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("added", [-1e4, -1e9, None])
def test_rows_that_a_finite_mask_leaves_nothing(
    path: str, dtype: torch.dtype, added: float | None
) -> None:
    """Every column of such a row has the same part in it. What is added leaves no room for the log
    of a sum beside it, so torch's fused kernel for CPUs has wrong gradients there."""
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in tensors(2, "square"))
    mask = torch.zeros(2, 1, 8, 8, dtype=dtype)
    mask[0, :, :2] = torch.finfo(dtype).min if added is None else added
    mask[1, :, 3, 2:] = mask[0, 0, 0, 0]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    actual = sdpa(*inputs, mask, False, None)[0]
    eps, size = torch.finfo(dtype).eps, abs(mask.min().item())
    scores_round = 2 * eps * size if eps * size < 1 else 0  # or all of a score is lost
    for got, want in zip(
        (actual, *torch.autograd.grad(actual.square().sum(), inputs)),
        (expected, *torch.autograd.grad(expected.square().sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0.0, atol=64 * eps + scores_round)


def test_scale(path: str) -> None:
    inputs = tensors(2, "square")
    expected = F.scaled_dot_product_attention(*inputs, scale=0.7, enable_gqa=True)
    close(sdpa(*inputs, None, False, 0.7)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_sums_in_float32(path: str, dtype: torch.dtype) -> None:
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in tensors(2, "square"))
    out, lse = sdpa(*inputs, None, True, None)
    exact = sdpa(*(x.double() for x in inputs), None, True, None)[0]
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=0.0, atol=4 * torch.finfo(dtype).eps)
    assert [g.dtype for g in torch.autograd.grad(out.sum(), inputs)] == [dtype] * 3


@pytest.mark.parametrize("kind", ["full", "causal", "bool", "added"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_fakes_have_the_shapes_and_strides_of_results(kind: str, num_kv_heads: int) -> None:
    inputs = tensors(num_kv_heads, "square", 8 if kind == "full" else 16)
    q, k, v = (x.detach() for x in inputs)
    mask, causal = a_mask(kind, "square"), kind == "causal"
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(sdpa.op, (q, k, v, mask, causal, None), test_utils=checks)
    out, lse = sdpa(q, k, v, mask, causal, None)
    rest = (mask, causal, None)
    torch.library.opcheck(sdpa_backward.op, (out, q, k, v, out, lse, *rest), test_utils=checks)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("mask_kind", ["full", "bool"])
def test_calls_of_torch_become_the_op(mask_kind: str) -> None:
    inputs = tensors(2, "square")
    mask = a_mask(mask_kind, "square")
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    with CallMode(), torch.profiler.profile() as profile:
        actual = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    assert "autopar::sdpa" in {event.name for event in profile.events()}
    close(actual, expected)


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "encoder": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "attention": lambda x: nn.MultiheadAttention(8, 2)(x, x, x, need_weights=False)[0],
    "decoder": lambda x: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0)(x, x),
}


@pytest.mark.parametrize("name", LAYERS)
def test_so_does_that_of_torchs_own_layers(name: str) -> None:
    """Inside of a function of torch; other modes, as those of a trace, are on as well."""
    x = torch.randn(2, 4, 8, requires_grad=True)

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        out = LAYERS[name](x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    expected = run()
    with CallMode(), BaseTorchFunctionMode(), torch.profiler.profile() as profile:
        actual = run()
    names = {event.name for event in profile.events()}
    assert "autopar::sdpa" in names and "aten::scaled_dot_product_attention" not in names
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rank", [3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_other_ranks(rank: int, masked: bool) -> None:
    shape = (2, 3, 4, 5, 8)[5 - rank :]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3)]
    mask = torch.randn(*shape[:-1], 5, dtype=torch.float64) if masked else None
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    with CallMode():
        close(F.scaled_dot_product_attention(*inputs, attn_mask=mask), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_that_are_learned_have_gradients(causal: bool) -> None:
    inputs = (*tensors(4, "square"), torch.randn(1, 4, 8, 8, dtype=torch.float64).requires_grad_())
    if causal:
        inputs = inputs[:3]

    def loss() -> Tensor:
        mask = inputs[3] if len(inputs) == 4 else None
        return (
            F.scaled_dot_product_attention(*inputs[:3], attn_mask=mask, is_causal=causal)
            .square()
            .sum()
        )

    with CallMode():
        actual = torch.autograd.grad(loss(), inputs)
    for got, want in zip(actual, torch.autograd.grad(loss(), inputs), strict=True):
        close(got, want)


def test_dropout_is_applied_to_the_weights() -> None:
    """What eager draws is drawn, number by number."""
    inputs = tensors(2, "square")

    def dropped(dropout_p: float) -> Tensor:
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(*inputs, None, dropout_p, True, enable_gqa=True)

    with CallMode():
        everything, half = dropped(1.0), dropped(0.5)
    assert everything.abs().max() == 0
    close(half, dropped(0.5))
    assert not torch.equal(half, dropped(0.0))


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_dropout_of_rows_that_attend_to_nothing(kind: str) -> None:
    inputs = tensors(2, "square")
    mask = a_mask("bool", "square")
    if kind == "added":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        out = F.scaled_dot_product_attention(*inputs, mask, 0.3, enable_gqa=True)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    with CallMode():
        actual = run()
    for got, want in zip(actual, run(), strict=True):
        close(got, want)


def test_gradients_of_gradients_of_attention_are_refused() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out, _ = sdpa(q, q, q, None, True, None)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="sdpa_backward has no derivative"):
        first.sum().backward()
