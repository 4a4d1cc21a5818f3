"""The error of a capture that failed: which module, which line, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.runtime.process.layouts import sparse_remedy
from autopar.tracer import torch_private
from autopar.tracer.effects import COLLECTIVE_REMEDY, collective_of
from autopar.tracer.experts import dropout_of_experts
from autopar.tracer.functions import averages
from autopar.tracer.places import StackLocation, frames_of, is_users
from autopar.tracer.remedies import Refusal, called, remedy_of_call, remedy_of_value

_EXPERTS_CURE = (
    "how many tokens each expert has is known only when the model runs, and decides what it "
    "computes: write the layer with autopar.experts (docs/experts.md), which takes all experts at "
    "once"
)
_EXPERTS_DROPOUT_CURE = (
    "experts are one op where they have no dropout, which would be drawn for the tokens that each "
    "has: set the dropout in them (config.dropout_rate) to 0"
)
_AVERAGE_CURE = (
    "its running statistics are the average of all batches so far (momentum=None), whose number it "
    "reads as a number, known only when the model runs: compute with num_batches_tracked as a "
    "tensor, as in running_mean.lerp_(mean, 1 / num_batches_tracked), or let it call the forward "
    "of nn.BatchNorm1d, 2d or 3d"
)
_LAYERDROP_CURE = (
    "it leaves out layers by chance, and a program has the same ops in every step: set its "
    "layerdrop, and that of its configuration (layerdrop, encoder_layerdrop, "
    "decoder_layerdrop), to 0"
)
_CURES = {
    "TorchScript": "what torch.jit.script made cannot be looked into: call the plain function, "
    "without the decorator",
    "no fake impl": "say of what shape the results of the op are: @op.register_fake",
    "nested_tensor": "nested tensors cannot be sharded: pad with torch.nn.utils.rnn.pad_sequence, "
    "and use a mask",
    "invalid python storage": "a tensor has no values while the model is traced: return it as an "
    "output of the model, and save it after the call",
}
_SPARSE_CURE = "a program has no sparse tensors. " + sparse_remedy(
    "compute with dense ones (to_dense(), torch.zeros)", "keep rows, columns and values as tensors"
)
_CURE = "call the model on these inputs without autopar first; if that works, rewrite this line"


def trace_error(
    error: Exception, paths: dict[nn.Module, str], name_of: Callable[[BaseException], str]
) -> TraceError:
    """`error`, raised while the modules of `paths` were traced, as a TraceError. `name_of` gives
    the name of the function of torch that an error came from, "" if there is none."""
    module, place = _where(error, paths)
    who = f"module {module!r}" if module else "the model"
    at = f" at {place}" if place else ""
    what, remedy = _message(error, paths, module, place, name_of)
    return TraceError(f"cannot capture {who}{at}: {what}\n  {remedy}")


def _message(
    error: Exception,
    paths: dict[nn.Module, str],
    module: str,
    place: StackLocation | None,
    name_of: Callable[[BaseException], str],
) -> tuple[str, str]:
    """(what went wrong, what to write)."""
    chain = list(_chain(error))
    refusal = next((each for each in chain if isinstance(each, Refusal)), None)
    if refusal is not None:
        return refusal.what, refusal.remedy
    collective = next((name for each in chain if (name := collective_of(each))), "")
    if collective:
        return f"{collective} talks to other ranks", COLLECTIVE_REMEDY
    name = next((name for each in chain if (name := name_of(each))), "")
    message = f"{type(error).__name__}: {error}"
    what = f"{called(name, place)}: {message}" if name else message
    if is_data_dependent(error):
        running = [each for each, path in paths.items() if path == module]
        cure = _cure_of_module(running, module) or remedy_of_call(name)
        return what, cure or remedy_of_value(place, message)
    return what, remedy_of_call(name) or _cure_of_error(message, place)


def _cure_of_module(running: list[nn.Module], path: str) -> str | None:
    if any(map(averages, running)):
        return _AVERAGE_CURE
    if any(map(_drops_layers, running)):
        return _LAYERDROP_CURE
    if any(map(dropout_of_experts, running)):
        return _EXPERTS_DROPOUT_CURE
    return _EXPERTS_CURE if "expert" in path else None


def _cure_of_error(message: str, place: StackLocation | None) -> str:
    if "sparse" in f"{message} {place}".lower():
        return _SPARSE_CURE
    return next((cure for text, cure in _CURES.items() if text in message), _CURE)


def layout_error(op: str, tensor: Tensor, module: str, line: str) -> TraceError:
    """The error of an op of forward that makes a sparse tensor. It could be captured, but a sparse
    tensor has no shards, and its stand-in no values."""
    where = f"module {module!r}" if module else "the model"
    at = f" at {line}" if line else ""
    return TraceError(
        f"cannot capture {where}{at}: {op} makes a tensor of layout {tensor.layout}\n"
        f"  {_SPARSE_CURE}"
    )


def _drops_layers(module: nn.Module) -> bool:
    """Whether a model of `transformers` leaves out some of its layers in training."""
    holders: tuple[Any, ...] = (module, getattr(module, "config", None))
    return module.training and any(getattr(holder, "layerdrop", 0) for holder in holders)


def is_data_dependent(error: BaseException | None) -> bool:
    """Whether `error` comes from a value that is known only when the model runs."""
    return any(isinstance(each, torch_private.DATA_DEPENDENT) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _where(error: BaseException, paths: dict[nn.Module, str]) -> tuple[str, StackLocation | None]:
    """(path, location): the innermost module that was running, and the innermost line of the user's
    code."""
    module: str = ""
    innermost: StackLocation | None = None
    for frame, place in frames_of(error):
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in paths:
            module = paths[owner]
        if is_users(frame.f_code.co_filename):
            innermost = place
    return module, innermost
