"""All private torch APIs that the training process uses.

`tests/runtime/test_torch_private.py` compares each one's signature with the torch installed.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C import DispatchKey, _disabled_torch_function_impl, _SetExcludeDispatchKeyGuard
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._C._distributed_c10d import TCPStore
from torch._C._functorch import (
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    maybe_current_level,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _world
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from autopar.runtime.replacing import replaced

__all__ = [
    "TorchDispatchMode",
    "TreeSpec",
    "as_batch",
    "assigned_by",
    "backend_of_two",
    "collectives_begun",
    "compose",
    "default_store",
    "differentiating",
    "flatten",
    "flatten_with_paths",
    "gloo_of_world",
    "hand_hooks",
    "has_own_ops",
    "in_backward",
    "inductor",
    "is_batched",
    "is_below_autograd",
    "is_forward_mode",
    "is_traced",
    "is_transformed",
    "is_transforming",
    "keeps_graph",
    "limit_waiting",
    "load_into",
    "loading_by",
    "map_tensors",
    "no_torch_function",
    "port_of",
    "reshape_wrapper",
    "rows_of_batch",
    "run_load_hooks",
    "step_next_to",
    "store_of_its_own",
    "take_over_collective",
    "timeout_of_world",
    "tree_map",
    "unflatten",
    "without_dynamo",
    "wrapper_of",
]


no_torch_function: Any = _disabled_torch_function_impl
"""For tensor classes that look below autograd alone."""


def default_store() -> Store:
    """The Store over which the default process group met."""
    return _get_default_store()


def store_of_its_own() -> Store:
    """Another connection to the default Store: a wait over one does not hold up the other."""
    store: Any = _get_default_store()
    return store.clone()


def port_of(store: Store) -> int | None:
    """The port at which a process keeps the Store; None if it is none that a process keeps."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


def gloo_of_world() -> dist.ProcessGroup:
    """A further process group of all ranks, on the host, with the timeout of the default one. A
    collective call."""
    group = dist.new_group(backend="gloo", timeout=timeout_of_world())
    assert isinstance(group, dist.ProcessGroup)
    return group


def timeout_of_world() -> timedelta:
    """How long a collective of the default process group may take."""
    group = dist.group.WORLD
    assert group is not None
    return group._get_backend(group._device_types[0]).options._timeout


def collectives_begun() -> int:
    """A number that grows with each collective, send or receive that this process begins, of any
    process group whose backend counts them, as gloo and NCCL do."""
    count = 0
    groups: list[Any] = [*_world.pg_map]
    for group in groups:
        with suppress(RuntimeError):  # the backend does not count
            count += group._get_sequence_number_for_group()
    return count


def backend_of_two(store: Store, place: int, device: torch.device) -> Any:
    """A backend that sends between two processes, of which this one is at `place`, with the timeout
    of the world: gloo, or NCCL for CUDA. It is no process group of torch's, which all processes
    would have to make together."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, place, 2, timeout_of_world())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout_of_world()
    return dist.ProcessGroupNCCL(store, place, 2, options)


def limit_waiting(group: dist.ProcessGroup) -> None:
    """Collectives of `group` may take as long as those of the default process group."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout_of_world())


def take_over_collective(name: str, device: str, collective: Callable[..., Tensor]) -> None:
    """From now on functional collective `name` on tensors of a kind of device, "CPU", is
    `collective(plain, *arguments)`, `plain` being what torch does."""
    op = getattr(torch.ops._c10d_functional, name).default

    def plain(*args: Any) -> Tensor:
        return op._op_dk(DispatchKey.CompositeExplicitAutograd, *args)

    _COLLECTIVES.impl(name, lambda *args: collective(plain, *args), device)


_COLLECTIVES = torch.library.Library("_c10d_functional", "IMPL")


def compose(name: str, function: Callable[..., Any]) -> None:
    """From now on an op of aten that is composed of others is composed by `function`."""
    with warnings.catch_warnings():  # which say that it is done
        warnings.simplefilter("ignore", UserWarning)
        _COMPOSED.impl(name, function, "CompositeImplicitAutograd", allow_override=True)


_COMPOSED = torch.library.Library("aten", "IMPL")


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_batched(x: Tensor) -> bool:
    """Whether a gradient stands for those of a batch, as with `is_grads_batched=True`."""
    return is_legacy_batchedtensor(x)


def _batch_level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def rows_of_batch(x: Tensor) -> Tensor:
    """All gradients of a batch, along dim 0."""
    return torch._remove_batch_dim(x, _batch_level(), 1, 0)  # pyright: ignore[reportPrivateImportUsage]


def as_batch(x: Tensor) -> Tensor:
    """The batched gradient for those along dim 0."""
    return torch._add_batch_dim(x, 0, _batch_level())  # pyright: ignore[reportPrivateImportUsage]


def is_transforming() -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jacrev, jvp) is at work."""
    return maybe_current_level() is not None


def is_transformed(x: Tensor) -> bool:
    """Whether a tensor is wrapped by a transform of `torch.func`."""
    return is_functorch_wrapped_tensor(x)


def is_forward_mode() -> bool:
    """Whether there may be forward-mode derivatives: inside of a `dual_level`."""
    return forward_ad._current_level >= 0


def is_traced() -> bool:
    """Whether `make_fx` is tracing."""
    return get_proxy_mode() is not None


def assigned_by(kind: type[Tensor], assign: Callable[[Any, Tensor], None]) -> None:
    """From now on `x.data = value` is `assign(x, value)` for a class of tensors."""
    data: Any = vars(torch._C.TensorBase)["data"]
    owner: Any = kind
    owner.data = property(data.__get__, assign)


def is_below_autograd() -> bool:
    """Whether an op is being computed, whose derivatives autograd has seen to."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)


def keeps_graph() -> bool:
    """Inside a backward: whether the user asked for `retain_graph=True`."""
    return bool(_get_current_graph_task_keep_graph())


@contextmanager
def differentiating() -> Generator[None, None, None]:
    """Inside, autograd records, although this is the kernel of a custom op, below autograd."""
    with ExitStack() as stack, torch.enable_grad():
        for key in _AUTOGRAD:
            stack.enter_context(_SetExcludeDispatchKeyGuard(key, False))
        yield


_AUTOGRAD = (
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.ADInplaceOrView,
)


def loading_by(take: Callable[..., None]) -> AbstractContextManager[None]:
    """Inside, `take(module, state_dict, prefix, *more)` replaces torch's own loading of a module.
    The modules' own loading methods and hooks call it."""
    return replaced((nn.Module, "_load_from_state_dict", lambda *given: take(*given)))


def load_into(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Load one module as `load_state_dict` does, with the arguments for a file without a
    version."""
    module._load_from_state_dict(state, prefix, {}, True, [], [], [])


def run_load_hooks(module: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
    """The hooks that change a state dict before a module loads it."""
    for hook in module._load_state_dict_pre_hooks.values():
        hook(state, prefix, *more)


def hand_hooks(old: Tensor, new: Tensor) -> None:
    """The hooks that were registered on `old` for its gradient, on `new`; what `register_hook`
    returned removes them there."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    after: Any = old._post_accumulate_grad_hooks
    if after:
        new._post_accumulate_grad_hooks = after


def step_next_to(optimizer: Any, before: Any, after: Any) -> None:
    """From now on the hook of handle `before` is the last of an optimizer's hooks before a step,
    and that of `after` the first after it."""
    optimizer._optimizer_step_pre_hooks.move_to_end(before.id)
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested containers, and the form they were taken from."""
    return tree_flatten(tree)


def flatten_with_paths(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, leaf) of each leaf of nested containers: a step of a path prints as `[0]` or `['a']`,
    and has an `idx` or a `key`."""
    return tree_flatten_with_path(tree)[0]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Nested containers with what `function` makes of each tensor in them."""
    return tree_map_only(Tensor, function, tree)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of `flatten`."""
    return tree_unflatten(leaves, spec)


def wrapper_of(cls: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """A tensor of class `cls` that looks `like` another one, on `device`, and has no memory."""
    return Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )


def has_own_ops(tensor: Tensor) -> bool:
    """Whether its class computes ops by itself, and holds other tensors; False for torch's fake
    tensors."""
    kind, plain = (cast("Any", each) for each in (type(tensor), Tensor))
    own = kind.__torch_dispatch__ is not plain.__torch_dispatch__
    return own and not isinstance(tensor, FakeTensor)


def reshape_wrapper(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Give a tensor that has no memory itself (`wrapper_of`) the shape that it gets from `op`,
    which makes its argument a view of itself."""
    with no_dispatch():
        known = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            op(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(known)


def inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], *, reuses: bool = True
) -> Callable[[list[Any]], Sequence[Any]]:
    """`gm`, without gradients of its own, compiled by Inductor for inputs like `inputs`; if it does
    not `reuses` memory itself, all of that goes through torch's allocator. Random numbers are drawn
    by torch's kernels: Inductor's own would draw others from the same seed.

    Ops keep the order of the schedule. Inductor's own passes would start a copy or a gather where
    it is waited for, and recompute long before anything needs the result.

    The result takes one list, which it clears. Inductor frees inputs before the graph ends if they
    are in a list that is the graph's only input and marked to be stolen.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    graph = fx.Graph()
    boxed = graph.placeholder("boxed")
    boxed.meta["steal_arg"] = True
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = {
        node: graph.call_function(operator.getitem, (boxed, i)) for i, node in enumerate(given)
    }
    for node in gm.graph.nodes:
        if node.op == "output":
            graph.output(map_arg(node.args[0], values.__getitem__))
        elif node.op != "placeholder":
            values[node] = graph.node_copy(node, values.__getitem__)
    how = {
        "fallback_random": True,
        "allow_buffer_reuse": reuses,
        "inplace_buffers": reuses,
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
    }
    with torch.no_grad(), config.patch(how):
        given: Any = [list(inputs)]
        compiled: Any = compile_fx(fx.GraphModule(gm, graph), given)
    return compiled


def without_dynamo(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` made `model` from; `model` itself if it did not."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        return model.get_submodule("_orig_mod")
    return model
