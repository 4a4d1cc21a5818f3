"""Calls of torch that are answered otherwise while a model is traced: attention, or a recurrent
layer, is one op, gradients are dense, what a mask picks is assigned without counting it, data that
is set is changed in place, and values that the model looks at are told if they do not depend on
data."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import GuardError
from autopar.tracer.attention import attend
from autopar.tracer.functions import SPELLED_OUT
from autopar.tracer.known import Known
from autopar.tracer.looks import look_of, users_frame
from autopar.tracer.recurrent import INSTEAD as _RECURRENT
from autopar.tracer.updates import put_into


class CallMode(TorchFunctionMode):
    """Answers the calls of `_INSTEAD`, and those that look at a tensor's value as far as it is
    `known`."""

    def __init__(self, known: Known | None = None) -> None:
        super().__init__()
        self._known = known
        # What decides whether a clamp stands, by its code and line.
        self._conditions: dict[tuple[CodeType, int], list[Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs is not None and isinstance(kwargs.get("generator"), torch.Generator):
            frame = users_frame()
            raise GuardError(
                f"{frame.f_code.co_filename}:{frame.f_lineno} draws from a generator of its own, "
                "whose state a program does not see: draw from the default one "
                "(torch.manual_seed), or hand the numbers in as an argument"
            )
        if func in _PICKS and self._picks_known(*args):
            # Where a known mask is true is known, and so how much it picks.
            assert self._known is not None
            args = args[0], self._known.look(_where, args[1]), *args[2:]
            return func(*args)
        if func in _INSTEAD:
            return _INSTEAD[func](*args, **(kwargs or {}))
        if func in _LOOKS:
            if self._known is not None and self._known.holds(args[0]):
                return self._known.look(func, args[0])
            frame = users_frame()
            look = look_of(frame)
            if look is not None:
                if look.clamps is not None:
                    met = args[0] if look.answer else args[0].logical_not()
                    self._conditions.setdefault((frame.f_code, look.clamps), []).append(met)
                is_bool = look.is_check and args[0].dtype is torch.bool
                return look.answer if is_bool else _Told(look.answer)
        if func is torch.clamp and self._conditions:
            frame = users_frame()
            conditions = self._conditions.pop((frame.f_code, frame.f_lineno), ())
            found = func(*args, **(kwargs or {}))
            for met in conditions:
                found = torch.where(met, found, args[0])
            return found
        return func(*args, **(kwargs or {}))

    def _picks_known(self, x: Tensor, index: Any, *value: Any) -> bool:
        """Whether a mask whose value is known picks from `x`, or takes what is not one value."""
        if self._known is None or not (isinstance(index, Tensor) and index.dtype is torch.bool):
            return False
        is_one = any(_is_one(given, x.dim() - index.dim()) for given in value)
        return not is_one and self._known.holds(index)


_PICKS = frozenset({Tensor.__getitem__, Tensor.__setitem__})


def _where(mask: Tensor) -> tuple[Tensor, ...]:
    return mask.nonzero(as_tuple=True)


class _Told:
    """A value of which nothing is known but what whoever looks at it is told: yes, or no."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def _tell(self, *_others: Any) -> bool:
        return self._answer

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _tell  # pyright: ignore[reportAssignmentType]
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _embedding(*args: Any, **kwargs: Any) -> Tensor:
    """Its gradient dense, which is the same numbers: a parameter in shards has no sparse one."""
    return F.embedding(*args[:6], **{**kwargs, "sparse": False})


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Its gradient dense; and bags of one length as a lookup and a sum, which can be sharded by
    bags, rows and columns."""
    norm = max_norm, norm_type, scale_grad_by_freq
    even = input.dim() == 2 and not input.is_floating_point() and bool(input.shape[1])
    even = even and offsets is None and padding_idx is None
    if even and (mode == "sum" or (mode == "mean" and per_sample_weights is None)):
        found = F.embedding(input, weight, None, *norm)
        if per_sample_weights is not None:
            found = found * per_sample_weights.unsqueeze(-1)
        return found.sum(1) if mode == "sum" else found.mean(1)
    rest = per_sample_weights, include_last_offset, padding_idx
    return F.embedding_bag(input, weight, offsets, *norm, mode, False, *rest)


def _is_one(value: Any, dims: int) -> bool:
    """Whether a value has no dim for what is picked, of which each has `dims`."""
    return value.dim() <= dims if isinstance(value, Tensor) else isinstance(value, int | float)


def _assign(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`. Of what a mask picks, all gets one value: how much it is need not be
    known, as it would be for the value's gradient."""
    picks = isinstance(index, Tensor) and index.dtype == torch.bool
    if picks and index.shape == x.shape[: index.dim()] and _is_one(value, x.dim() - index.dim()):
        mask = index[(..., *[None] * (x.dim() - index.dim()))]
        x.copy_(torch.where(mask, value, x))
    else:
        x[index] = value


def _is_no_mode_on(*_: Any) -> bool:
    return False


_OTHERWISE = {"scaled_dot_product_attention": attend, "has_torch_function": _is_no_mode_on}
_multi_head_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), **_OTHERWISE},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""PyTorch's own, whose attention is one op too: what a function of torch calls is not seen here,
nor by other modes, which it would be handed to as a whole."""

_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: attend,
    F.multi_head_attention_forward: _multi_head_attention,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    Tensor.__setitem__: _assign,
    Tensor.data.__set__: put_into,  # pyright: ignore[reportAttributeAccessIssue]
    **_RECURRENT,
    **SPELLED_OUT,
}

_LOOKS = frozenset(
    {
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__int__,
        Tensor.item,
        Tensor.tolist,
    }
)
"""What makes a number, or numbers, of a tensor."""
