"""A capture that failed, told to the user: which module, which line, what to do."""

from __future__ import annotations

import linecache
from types import FrameType
from typing import Any

from torch import nn

from autopar.errors import TraceError
from autopar.tracer import torch_private
from autopar.tracer.looks import NOT_THE_USERS
from autopar.tracer.loops import dropout_of_experts

_DATA_DEPENDENT_CURE = (
    "a value that is known only when the model runs (.item(), bool(tensor), nonzero, a mask as "
    "index) decides what it computes: compute both sides and choose with torch.where, or move the "
    "decision out of the model"
)
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
    "with momentum=None its running statistics are the average of all batches so far, whose number "
    "is known only when the model runs: give it a momentum, such as 0.1"
)
_LAYERDROP_CURE = (
    "it leaves out layers by chance, and a program has the same ops in every step: set its "
    "layerdrop, and that of its configuration (layerdrop, encoder_layerdrop, "
    "decoder_layerdrop), to 0"
)
_CURE = "call the model on these inputs without autopar first; if that works, rewrite this line"


def trace_error(error: Exception, paths: dict[nn.Module, str]) -> TraceError:
    """`error`, raised while the modules of `paths` were traced, as a TraceError."""
    module, place = _where(error, paths)
    cure = _CURE
    if is_data_dependent(error):
        running = [found for found, path in paths.items() if path == module]
        cure = _EXPERTS_CURE if "expert" in module else _DATA_DEPENDENT_CURE
        if any(map(_averages, running)):
            cure = _AVERAGE_CURE
        elif any(map(_drops_layers, running)):
            cure = _LAYERDROP_CURE
        elif any(map(dropout_of_experts, running)):
            cure = _EXPERTS_DROPOUT_CURE
    name = f"module {module!r}" if module else "the model"
    at = f" at {place}" if place else ""
    return TraceError(f"cannot capture {name}{at}: {type(error).__name__}: {error}\n  {cure}")


def _averages(module: nn.Module) -> bool:
    """Whether a norm's running statistics are averages of all batches so far."""
    return getattr(module, "num_batches_tracked", None) is not None and module.momentum is None


def _drops_layers(module: nn.Module) -> bool:
    """Whether a model of `transformers` leaves out some of its layers in training."""
    holders: tuple[Any, ...] = (module, getattr(module, "config", None))
    return module.training and any(getattr(holder, "layerdrop", 0) for holder in holders)


def is_data_dependent(error: BaseException | None) -> bool:
    """Whether `error` comes from a value that is known only when the model runs."""
    while error is not None:
        if isinstance(error, torch_private.DATA_DEPENDENT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _where(error: BaseException, paths: dict[nn.Module, str]) -> tuple[str, str]:
    """(path of the innermost module that was running, "file:line: text" of its user's code)."""
    module, place = "", ""
    for frame, line in _frames(error):
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in paths:
            module = paths[owner]
        file = frame.f_code.co_filename
        if not file.startswith(NOT_THE_USERS):
            text = linecache.getline(file, line).strip()
            place = f"{file}:{line}: {text}" if text else f"{file}:{line}"
    return module, place


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    found: list[tuple[FrameType, int]] = []
    trace = error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found
