"""Calls of torch that are replaced while a model is traced.

Attention, or a recurrent layer, is one op. Gradients are dense. Assignment through a mask does not
count what the mask picks. Data that is set is changed in place. A value that the model looks at is
given if it does not depend on data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.errors import DenseGradientWarning, GuardError, listed
from autopar.runtime.process.world import place_of_process
from autopar.runtime.program.spent import leaves_graph
from autopar.tracer import torch_private
from autopar.tracer.attention import attend
from autopar.tracer.effects import CONTROL_FLOW_REMEDY
from autopar.tracer.functions import INSTEAD
from autopar.tracer.known import Known
from autopar.tracer.looks import Look, look_of
from autopar.tracer.places import users_place
from autopar.tracer.remedies import Refusal, function_name
from autopar.tracer.updates import put_into


def _ignore(_effect: str, _remedy: str) -> None:
    """Ignore an effect."""


class CallMode(TorchFunctionMode):
    """Replaces the calls of `_INSTEAD`, and those that look at a tensor's value if it is `known`.
    Effects of forward that its program will not have go to `note`: (effect, what to do)."""

    def __init__(
        self,
        known: Known | None = None,
        model: nn.Module | None = None,
        note: Callable[[str, str], None] = _ignore,
    ) -> None:
        super().__init__()
        self._known = known
        # Read now: later reads of modules would count as forward's (`watch`).
        modules = () if model is None else model.modules()  # A model may have a length of 0.
        self._parameters = [each._parameters for each in modules]
        self._note = note
        # The conditions of a clamp, by its code and line.
        self._conditions: dict[tuple[CodeType, int], list[Tensor]] = {}
        self._failed: tuple[BaseException, str] | None = None
        self.refused: Exception | None = None
        """The error of what cannot be traced. Eager raises none, so that a model that catches the
        error, and computes something else, would be another one."""
        self.spends_graphs = False
        """Whether `torch.autograd.grad` was called, and freed the graph for another backward."""

    def name_of(self, error: BaseException) -> str:
        """The function of torch that `error` came from, as it was called; "" if none."""
        return self._failed[1] if self._failed is not None and self._failed[0] is error else ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return self._answer(func, args, kwargs or {})
        except Exception as error:
            # The outermost comes last: what the model called.
            self._failed = error, function_name(func)
            if isinstance(error, (Refusal, *torch_private.DATA_DEPENDENT)):
                self.refused = error
            raise

    def _answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if getattr(func, "_name", "") in _CONTROL_FLOW:
            raise Refusal(f"torch's {function_name(func)}", CONTROL_FLOW_REMEDY)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise GuardError(
                f"{users_place().short} draws from a generator of its own, "
                "whose state a program does not see: draw from the default one "
                "(torch.manual_seed), or hand the numbers in as an argument"
            )
        if func in _PICKS and self._picks_known(*args):
            # Where a known mask is true is known, and so how much it picks.
            assert self._known is not None
            return func(args[0], self._known.look(_where, args[1]), *args[2:])
        if func in _INSTEAD:
            return _INSTEAD[func](*args, **kwargs)
        if func in _LOOKS or func in _SHOWS:
            if self._known is not None and self._known.holds(args[0]):
                return self._known.look(lambda value: func(value, *args[1:], **kwargs), args[0])
            look = look_of(users_place())
            if func in _SHOWS:
                return self._shown(args[0], look)
            if look is not None and func not in _ARRAYS:
                return self._answered(func, look, args[0])
        if func in _HOOKS and self._is_parameter(args[0]):
            raise Refusal(
                "a hook is put on a parameter at each call",
                "put it there once, before autopar.compile",
            )
        if func is torch.autograd.grad:
            self.spends_graphs |= not leaves_graph(*args, **kwargs)
        if func is torch.clamp and self._conditions:
            place = users_place()
            conditions = self._conditions.pop((place.code, place.line), ())
            clamped = func(*args, **kwargs)
            for met in conditions:
                clamped = torch.where(met, clamped, args[0])
            return clamped
        return func(*args, **kwargs)

    def _answered(self, func: Callable[..., Any], look: Look, tensor: Tensor) -> Any:
        """The answer to a look at `tensor`, in a line that has the same ops whatever the answer."""
        place = users_place()
        if look.clamps is not None:
            met = tensor if look.answer else tensor.logical_not()
            self._conditions.setdefault((place.code, look.clamps), []).append(met)
        if look.leaves_out:
            self._note(f"prints or logs what depends on values ({place.short})", _AS_OUTPUT)
        is_bool = look.is_check and tensor.dtype is torch.bool
        return look.answer if is_bool or func is Tensor.__bool__ else _Answer(look.answer)

    def _shown(self, tensor: Tensor, look: Look | None) -> str:
        """A tensor as text, without its values."""
        if look is None:
            self._note(f"makes text of a tensor ({users_place().short})", _AS_OUTPUT)
        return f"<a traced tensor of {tensor.dtype} and shape {list(tensor.shape)}>"

    def _is_parameter(self, tensor: Any) -> bool:
        return any(tensor is x for table in self._parameters for x in table.values())

    def _picks_known(self, x: Tensor, index: Any, *value: Any) -> bool:
        """Whether a known mask picks from `x`, or assigns more than one value to what it picks."""
        if self._known is None or not (isinstance(index, Tensor) and index.dtype is torch.bool):
            return False
        is_one = any(_is_one(given, x.dim() - index.dim()) for given in value)
        return not is_one and self._known.holds(index)


_AS_OUTPUT = "Return what is to be shown as an output of the model, and show it after the call"
_CONTROL_FLOW = frozenset({"cond", "while_loop", "scan", "map_impl"})
"""Ops that hold graphs of their own."""

_PICKS = frozenset({Tensor.__getitem__, Tensor.__setitem__})


def _where(mask: Tensor) -> tuple[Tensor, ...]:
    return mask.nonzero(as_tuple=True)


class _Answer:
    """An unknown value that gives one answer, True or False, to all that look at it."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def _tell(self, *_others: Any) -> bool:
        return self._answer

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _tell  # pyright: ignore[reportAssignmentType]
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _embedding(*args: Any, **kwargs: Any) -> Tensor:
    """`F.embedding` with a dense gradient, which has the same numbers: the gradient of a sharded
    parameter cannot be sparse."""
    if any(args[6:]) or kwargs.get("sparse"):
        _note_dense(kwargs["weight"] if "weight" in kwargs else args[1])
    return F.embedding(*args[:6], **{**kwargs, "sparse": False})


_dense_shapes: ContextVar[dict[str, None]] = ContextVar("_dense_shapes")
"""The shapes of embeddings whose sparse gradients are dense in the program, each once."""


@contextmanager
def noting_dense_gradients() -> Generator[None]:
    """Within it a model is traced. Rank 0 warns of gradients that are sparse in the script."""
    token = _dense_shapes.set({})
    try:
        yield
        shapes = [*_dense_shapes.get()]
    finally:
        _dense_shapes.reset(token)
    if shapes and place_of_process()[0] == 0:
        text = (
            f"the script asks for sparse gradients of embeddings ({listed(shapes)}). Those of the "
            "program are dense, and the optimizer steps all rows: the numbers are the same, and "
            "memory and time are those of dense ones. SparseAdam does not take them, Adam does"
        )
        warnings.warn(DenseGradientWarning(text), stacklevel=3)


def _note_dense(weight: Tensor) -> None:
    if weight.requires_grad:
        _dense_shapes.get({})["x".join(map(str, weight.shape))] = None


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
    """`F.embedding_bag` with a dense gradient. Bags of one length become a lookup and a sum, which
    can be sharded by bags, rows and columns."""
    if sparse:
        _note_dense(weight)
    norm = max_norm, norm_type, scale_grad_by_freq
    even = input.dim() == 2 and not input.is_floating_point() and bool(input.shape[1])
    even = even and offsets is None and padding_idx is None
    if even and (mode == "sum" or (mode == "mean" and per_sample_weights is None)):
        rows = F.embedding(input, weight, None, *norm)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    rest = per_sample_weights, include_last_offset, padding_idx
    return F.embedding_bag(input, weight, offsets, *norm, mode, False, *rest)


def _is_one(value: Any, dims: int) -> bool:
    """Whether a value is one for all items that are picked, each of which has `dims`."""
    return value.dim() <= dims if isinstance(value, Tensor) else isinstance(value, int | float)


def _assign(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`. With a mask and one value for all that it picks, this is a `where`: the
    number of picked items need not be known."""
    picks = isinstance(index, Tensor) and index.dtype == torch.bool
    if picks and index.shape == x.shape[: index.dim()] and _is_one(value, x.dim() - index.dim()):
        mask = index[(..., *[None] * (x.dim() - index.dim()))]
        x.copy_(torch.where(mask, value, x))
    else:
        x[index] = value


def _hold(condition: Any, message: str) -> None:
    """An assertion, which holds if it is of a tensor."""
    assert isinstance(condition, Tensor) or condition, message


def _tensor(data: Any, **options: Any) -> Tensor:
    """`torch.tensor` of a list, which may hold tensors without dims; without gradient."""
    leaves = torch_private.tree_flatten(data)[0] if isinstance(data, list | tuple) else []
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return torch.tensor(data, **options)
    kinds = (x.dtype if isinstance(x, Tensor) else torch.tensor(x).dtype for x in leaves)
    dtype = options.pop("dtype", None) or reduce(torch.promote_types, kinds)
    graded = options.pop("requires_grad", False)
    return _stacked(data, {**options, "dtype": dtype}).requires_grad_(graded)


def _stacked(data: Any, options: dict[str, Any]) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(item, options) for item in data])
    return (
        data.detach().to(**options) if isinstance(data, Tensor) else torch.tensor(data, **options)
    )


_multi_head_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {
        **vars(F),
        "scaled_dot_product_attention": attend,
        "has_torch_function": lambda *_: False,  # pyright: ignore[reportUnknownLambdaType]
    },
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""PyTorch's own function, with attention as one op. Calls inside a function of torch are not seen
here: modes only see the function as a whole."""

_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: attend,
    F.multi_head_attention_forward: _multi_head_attention,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    Tensor.__setitem__: _assign,
    torch.tensor: _tensor,
    torch_private.assertion: _hold,
    Tensor.data.__set__: put_into,  # pyright: ignore[reportAttributeAccessIssue]
    **INSTEAD,
}

_ARRAYS = frozenset({Tensor.numpy, Tensor.__array__})

_LOOKS = frozenset(
    {
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__int__,
        Tensor.item,
        Tensor.tolist,
        *_ARRAYS,
    }
)
"""Methods that turn a tensor into a number, or numbers."""

_SHOWS = frozenset({Tensor.__repr__, Tensor.__format__})
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
