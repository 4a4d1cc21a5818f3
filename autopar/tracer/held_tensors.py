"""Tensors that a forward finds in the model, or around it, and that a program cannot train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar.errors import TraceError
from autopar.runtime.program.guards import Guard, Read
from autopar.runtime.program.sharded import ShardedOutput
from autopar.tracer import torch_private

_UNSEEN = (
    "forward reads {name}, which requires a gradient, in a way that autopar cannot follow, and the "
    "gradient would be lost: make it a parameter of a module (self.w = nn.Parameter(w)), pass it "
    "as an attribute of one (self.w = w), or detach() it"
)
_PLAIN = frozenset({Tensor, nn.Parameter, DTensor, ShardedOutput})


def check_constants(gm: fx.GraphModule, model: nn.Module) -> None:
    """TraceError if the graph holds a parameter or buffer of the model as a constant: the model
    found it where its state is not looked for, and would never see it change."""
    named = (*model.named_parameters(), *model.named_buffers())
    plain = (Tensor, nn.Parameter)
    names = {torch_private.storage_of(x): name for name, x in named if type(x) in plain}
    for node in gm.graph.find_nodes(op="get_attr"):
        value: Any = getattr(gm, node.target, None)
        name = names.get(torch_private.storage_of(value)) if type(value) in plain else None
        if name is not None:
            raise TraceError(
                f"forward reads {name} through a list or another object, "
                "where it would stay what it is now: read it as an attribute of its module, or "
                "keep the list as nn.ParameterList"
            )
        if type(value) in _PLAIN and value.requires_grad:
            raise TraceError(_UNSEEN.format(name=f"a tensor of shape {tuple(value.shape)}"))


def check_followed(model: nn.Module, reads: Iterable[Read], externals: Sequence[Tensor]) -> None:
    """TraceError if a tensor of the script's is where no guard sees which one is there later."""
    seen = Guard(model, reads).trained if externals else ()
    for tensor in externals:
        if not any(tensor is each for each in seen):
            raise TraceError(_UNSEEN.format(name=f"a tensor of shape {tuple(tensor.shape)}"))


def check_paths(outputs: Iterable[Any]) -> None:
    """TraceError if a gradient of an output would leave the trace for a tensor of the script's,
    which forward has come by unseen."""
    pending = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        leaf: Any = getattr(node, "variable", None)
        if type(leaf) in _PLAIN:
            raise TraceError(_UNSEEN.format(name=f"a tensor of shape {tuple(leaf.shape)}"))
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                pending.append(after)
