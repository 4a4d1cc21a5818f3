"""All private torch APIs that the training process uses.

`tests/runtime/test_torch_private.py` holds each one's signature against the torch installed.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C import DispatchKey, _disabled_torch_function_impl, _SetExcludeDispatchKeyGuard
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._C._distributed_c10d import HashStore
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.fx.node import map_arg
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "TorchCall",
    "TorchDispatchMode",
    "TreeSpec",
    "backend_of_two",
    "cut_piece",
    "default_store",
    "differentiating",
    "dtensor_like",
    "dtensor_of",
    "flatten",
    "gloo_of_world",
    "hand_hooks",
    "inductor",
    "is_of",
    "is_pointwise",
    "is_view",
    "keeps_graph",
    "limit_waiting",
    "local_of",
    "local_slices",
    "local_store",
    "map_tensors",
    "mesh_of_others",
    "no_torch_function",
    "piece_of",
    "signature_of",
    "store_of_its_own",
    "take_over_ops",
    "take_over_whole_tensors",
    "timeout_of_world",
    "tree_map",
    "unflatten",
    "without_dynamo",
    "wrapper_of",
    "written_by",
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


def backend_of_two(store: Store, place: int, device: torch.device) -> Any:
    """What sends between two processes, of which this one is at `place`, with the timeout of the
    world: gloo, or NCCL for CUDA. It is no process group of torch's: to make one, all processes
    would have to meet."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, place, 2, timeout_of_world())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout_of_world()
    return dist.ProcessGroupNCCL(store, place, 2, options)


def limit_waiting(group: dist.ProcessGroup) -> None:
    """Collectives of `group` may take as long as those of the default process group."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout_of_world())


def mesh_of_others(kind: str, ranks: Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh that this rank is no part of: without process groups."""
    return DeviceMesh(kind, ranks, mesh_dim_names=names, _init_backend=False)


def local_store() -> Store:
    """A Store of this process alone."""
    return HashStore()


def keeps_graph() -> bool:
    """Inside a backward: whether the user asked for `retain_graph=True`."""
    return bool(_get_current_graph_task_keep_graph())


@contextmanager
def differentiating() -> Generator[None, None, None]:
    """Inside the kernel of a custom op, which autograd has passed already, it records again."""
    with ExitStack() as stack, torch.enable_grad():
        for key in _AUTOGRAD:
            stack.enter_context(_SetExcludeDispatchKeyGuard(key, False))
        yield


_AUTOGRAD = (
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.ADInplaceOrView,
)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """`local` as this rank's piece of a DTensor laid out as `like` is, whose local shape and
    strides it has. `DTensor.from_local` takes seven times as long, for every gradient."""
    return DTensor(local, copy(like._spec), requires_grad=False)


def dtensor_of(
    local: Tensor, like: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """`local`, wherever it is, as this rank's piece of a DTensor of the shape of `like`, whose
    strides are those of a tensor without gaps. `DTensor.from_local` brings it to the mesh's kind of
    device."""
    stride = torch.empty(like.shape, device="meta").stride()
    meta = TensorMeta(like.shape, stride, like.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def local_slices(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """Which rectangle of a tensor of `shape` this rank has of it as a DTensor, even or not."""
    sizes, offsets = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def is_of(mesh: DeviceMesh) -> bool:
    """Whether this rank is one of the mesh's."""
    return mesh.get_coordinate() is not None


def cut_piece(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What this rank has of `whole` as a DTensor; nothing, in one dim, if it is not of the mesh, as
    torch has it there."""
    if not is_of(mesh):
        return whole.new_empty(0)
    return whole[local_slices(whole.shape, mesh, placements)]


def take_over_whole_tensors(
    whole: Callable[[Callable[[], Tensor], DTensor], DTensor],
    norm: Callable[[Callable[..., Tensor], Sequence[Tensor], float], Tensor],
    concerns: Callable[[Tensor], bool],
) -> None:
    """From now on a DTensor that `concerns` is true of is `whole` where it is to be replicated, as
    in `full_tensor`, and `norm` is the norm of gradients among which there are some; both are given
    what torch would make."""
    plain, plain_norm = DTensor.redistribute, clip_grad._get_total_norm

    @wraps(plain)
    def redistribute(
        self: DTensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        same = device_mesh is None or device_mesh == self.device_mesh
        replicated = placements is not None and all(p.is_replicate() for p in placements)
        if same and replicated and concerns(self):
            detached: Any = self.detach()
            return whole(lambda: local_of(plain(detached, placements=placements)), self)
        return plain(self, device_mesh, placements, **kwargs)

    @wraps(plain_norm)
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not any(map(concerns, given)):
            return plain_norm(given, norm_type, error_if_nonfinite, foreach)
        found = norm(plain_norm, given, float(norm_type))
        if error_if_nonfinite:
            plain_norm([found], norm_type, error_if_nonfinite)  # in torch's own words
        return found

    DTensor.redistribute = redistribute
    clip_grad._get_total_norm = nn.utils.get_total_norm = total_norm


TorchCall = Callable[..., Any]
"""What torch makes of an op's arguments."""


Handler = Callable[[TorchCall, Sequence[Any], Mapping[str, Any]], Any]


def take_over_ops(handlers: Mapping[str, Handler]) -> None:
    """From now on ops on DTensors whose names ("aten::_foreach_add_") begin so are done by
    `handlers`, which are told what torch would do, and with which arguments."""
    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        prefix = next((each for each in handlers if full_name.startswith(each)), None)
        if prefix is None:
            continue
        name, _, overload = full_name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        table[op] = _handled(table, op, table.get(op), handlers[prefix])


def _handled(table: dict[Any, Any], op: Any, known: Any, handler: Any) -> Any:
    def plain(*args: Any, **kwargs: Any) -> Any:
        if known is not None:
            return known(op, args, kwargs)
        del table[op]
        try:
            return op(*args, **kwargs)
        finally:
            table[op] = handle

    def handle(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return handler(plain, args, kwargs)

    return handle


def hand_hooks(old: Tensor, new: Tensor) -> None:
    """The hooks that were registered on `old` for its gradient, on `new`; what `register_hook`
    returned removes them there."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    after: Any = old._post_accumulate_grad_hooks
    if after:
        new._post_accumulate_grad_hooks = after


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested containers, and the form they were taken from."""
    return tree_flatten(tree)


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


def piece_of(tensor: DTensor) -> Tensor:
    """This rank's piece of a DTensor that is stored: no collective is under way for it.
    `DTensor.to_local` takes ten times as long, for every parameter."""
    return tensor._local_tensor


def local_of(tensor: DTensor) -> Tensor:
    """This rank's piece, plain, once it is there."""
    local = tensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def is_pointwise(op: Any) -> bool:
    """Whether an op makes each element of what stands in its place, and of nothing random."""
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


def is_view(op: Any) -> bool:
    """Whether what an op makes has the memory of an argument."""
    return any(result.alias_info is not None for result in op._schema.returns)


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments that an op writes to."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_flatten(given)[0] if isinstance(x, Tensor))


def signature_of(op: Any) -> tuple[str, list[str]]:
    """The arguments of an op and the types of its results, as schemas write them:
    ("Tensor input, float p, bool? train", ["Tensor", "Tensor"])."""
    text = str(op._schema)
    given, _, _ = text.partition("(")[2].rpartition(") -> ")
    return given, [str(result.type) for result in op._schema.returns]


def inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], *, reuses: bool = True
) -> Callable[[list[Any]], Sequence[Any]]:
    """`gm`, without gradients of its own, compiled by Inductor for inputs like `inputs`; if it does
    not `reuses` memory itself, all of that goes through torch's allocator.

    Takes one list, which it clears: a graph whose only input is a list, marked to be stolen, is the
    form in which Inductor lets go of inputs before the graph ends.
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
    with torch.no_grad(), config.patch(allow_buffer_reuse=reuses, inplace_buffers=reuses):
        given: Any = [list(inputs)]
        compiled: Any = compile_fx(fx.GraphModule(gm, graph), given)
    return compiled


def without_dynamo(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` made `model` from; `model` itself if it did not."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        return model.get_submodule("_orig_mod")
    return model
