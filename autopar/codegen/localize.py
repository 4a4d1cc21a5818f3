"""The arguments of an op on the tensors of one rank: those that speak of shapes follow the local.

`localize` knows nothing of plans or graphs: shapes of inputs and outputs, whole and local, and the
op's record are all it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.rules.op import LocalCall, Shapes
from autopar.rules.table import record_of

aten = torch.ops.aten


def localize(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Shapes
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(op, args, kwargs) that compute on local tensors what `target(*args, **kwargs)` computes on
    whole ones. Tensors among the arguments are not looked at, and stay where they are."""
    record = record_of(str(target))
    if record.reshapes:
        return aten.reshape.default, (args[0], list(shapes.local_outputs[0])), {}
    if record.local_args is None:
        return target, tuple(args), dict(kwargs)
    new_args, new_kwargs = list(args), dict(kwargs)
    for (position, keyword), value in record.local_args(LocalCall(args, kwargs, shapes)).items():
        if position < len(new_args):
            new_args[position] = value
        else:
            new_kwargs[keyword] = value
    return target, tuple(new_args), new_kwargs
