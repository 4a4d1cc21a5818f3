"""All private torch APIs that the tracer uses.

Everything else in this package imports them from here; `tests/tracer/test_aot.py` holds the
signatures relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.compiler
from torch import fx, nn
from torch._decomp import core_aten_decompositions
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import _functional_collectives as functional_collectives
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from torch.utils.checkpoint import noop_context_fn

from autopar.ir.graph import Checkpointed
from autopar.runtime.replacing import replaced

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

__all__ = [
    "DATA_DEPENDENT",
    "AOTInput",
    "AnyBatchNorm",
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "TreeSpec",
    "annotate",
    "assertion",
    "compiling",
    "decomposition",
    "functional_collectives",
    "functionless",
    "is_functional",
    "joint_graph",
    "no_modes",
    "on_fakes",
    "ops_of",
    "renamed",
    "storage_of",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
    "weight_norm",
    "with_effects",
]

assertion = torch._assert
"""What is called with a condition and a message."""

weight_norm = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]
"""What the weight norms of `torch.nn.utils` call."""


def compiling(answer: bool = True) -> AbstractContextManager[None]:
    """What `torch.compiler.is_compiling` answers is yes, as under `torch.export`: models then leave
    out the branches that look at data. Or it is no, as in eager."""
    return replaced((torch.compiler, "_is_compiling_flag", answer))


def plain_checkpoints(
    label: Callable[[Checkpointed], AbstractContextManager[None]],
) -> AbstractContextManager[None]:
    """Inside, checkpoints that are not reentrant run what they wrap inside `label`, and save
    nothing of their own."""

    def run(
        _fn: Any, _preserve: bool = True, context_fn: Any = noop_context_fn, *_: Any, **__: Any
    ) -> Generator[None, None, None]:
        with label("whole" if context_fn is noop_context_fn else "selective"):
            yield

    return replaced((checkpointing, "_checkpoint_without_reentrant_generator", run))


def joint_graph(
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    fake_mode: FakeTensorMode,
    *,
    as_compiled: bool,
) -> fx.GraphModule:
    """The joint forward and backward ATen graph of `module(*args)`, whose parameters, buffers and
    arguments are fake; forward only where nothing requires grad. `as_compiled` is what the module
    is told where it asks whether it is being compiled. Flat inputs and outputs, each with its
    descriptor: `node.meta["desc"]`, one for a placeholder, a list for the output node."""
    with (
        ExitStack() as stack,
        fake_mode,
        compiling(as_compiled),
        preserve_node_meta(),
    ):
        gm = aot_export_joint_with_descriptors(stack, module, args).graph_module
    gm.graph.set_codegen(CodeGen())
    # Code is generated on demand: most graphs are read, not run.
    return _LazyGraphModule(gm, gm.graph)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return dict(core_aten_decompositions())


def decomposition(op: Any) -> Callable[..., Any] | None:
    """What torch makes of an op out of others; None if it is left as it is."""
    return _decompositions().get(op)


def is_functional(op: Any) -> bool:
    """Whether an op makes new tensors, and only that: none of its arguments is changed, and none of
    its results shares memory with one."""
    schema = getattr(op, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return all(result.alias_info is None for result in schema.returns)


def on_fakes(
    mode: FakeTensorMode, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a higher-order op gives on fake tensors, in a `mode` of a derived class, which torch
    does not look for."""
    if op in registered_hop_fake_fns:
        return FakeTensorMode.__torch_dispatch__(mode, op, (), args, kwargs)
    return op.python_key_table[FakeTensorMode](mode, *args, **kwargs)


def functionless(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of a model under functionalization stands for, as it is now."""
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)  # pyright: ignore[reportPrivateImportUsage]
        return torch._from_functional_tensor(tensor.elem)  # pyright: ignore[reportPrivateImportUsage]
    return tensor


def no_modes() -> AbstractContextManager[Any]:
    """Inside, ops are computed as if nothing were traced."""
    return _disable_current_modes()


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors on the same memory share, and no others while they are there."""
    return tensor.untyped_storage()._cdata


def renamed(desc: Any, rename: Callable[[str], str]) -> Any:
    """A descriptor of the parameter or buffer that has another name."""
    if isinstance(desc, ParamAOTInput | BufferAOTInput):
        return replace(desc, target=rename(desc.target))
    if isinstance(desc, GradAOTOutput):
        return replace(desc, grad_of=renamed(desc.grad_of, rename))
    if isinstance(desc, InputMutationAOTOutput):
        return replace(desc, mutated_input=renamed(desc.mutated_input, rename))
    return desc


def ops_of(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule | None:
    """The ops that `function` calls on fake tensors; None where it returns NotImplemented."""
    declined = False

    def call(*given: torch.Tensor) -> Any:
        nonlocal declined
        result = function(*given)
        declined = result is NotImplemented
        return None if declined else result

    with torch.no_grad():
        gm = make_fx(call)(*tensors)
    return None if declined else gm
