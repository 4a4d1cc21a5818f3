"""All private APIs of DTensor that the training process uses.

`tests/runtime/test_torch_private.py` compares each one's signature with the torch installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_flatten

_DTENSOR: Any = DTensor
"""The class whose methods are replaced."""


def mesh_of_others(kind: str, ranks: Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh that this rank is no part of: without process groups."""
    return DeviceMesh(kind, ranks, mesh_dim_names=names, _init_backend=False)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """`local` as this rank's shard of a DTensor laid out as `like` is, whose local shape and
    strides it has. `DTensor.from_local` takes 7 times as long, for every gradient."""
    return DTensor(local, like._spec, requires_grad=False)


def dtensor_of(
    local: Tensor, like: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """`local`, on its own device, as this rank's shard of a DTensor of the shape of `like`, whose
    strides are those of a contiguous tensor. `DTensor.from_local` would move it to the mesh's kind
    of device."""
    meta = TensorMeta(like.shape, torch.empty(like.shape, device="meta").stride(), like.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def become(x: DTensor, other: DTensor) -> None:
    """`x` gets the shard and spec of `other`; its shape is changed apart from that."""
    x._local_tensor, x._spec = other._local_tensor, other._spec


def local_slices(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """The rectangle that this rank has of a DTensor of `shape`, even or not."""
    sizes, offsets = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def is_of(mesh: DeviceMesh) -> bool:
    """Whether this rank is one of the mesh's."""
    return mesh.get_coordinate() is not None


def parameter_of(data: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """`data` as a parameter. An op on a DTensor, as `nn.Parameter` does one, gives a rank that is
    not of its mesh a tensor on the CPU: autograd then finds gradients on another device."""
    if not isinstance(data, DTensor):
        return nn.Parameter(data, requires_grad=requires_grad)
    param: Any = dtensor_like(shard_of(data), data)
    param.requires_grad_(requires_grad)
    param._is_param = True
    return param


def shard_elsewhere(whole: Tensor, device: torch.device | str) -> Tensor:
    """The local tensor that torch has on a rank outside of a DTensor's mesh: empty, in one dim, or
    a zero."""
    return whole.new_zeros(0 if whole.dim() else (), device=device)


def cut_shard(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's shard of `whole` as a DTensor."""
    if not is_of(mesh):
        return shard_elsewhere(whole, whole.device)
    return whole[local_slices(whole.shape, mesh, placements)]


def take_over_whole_tensors(
    whole: Callable[[Callable[[], Tensor], DTensor], DTensor],
    norm: Callable[[Callable[..., Tensor], Sequence[Tensor], float], Tensor],
    concerns: Callable[[Tensor], bool],
) -> None:
    """From now on `whole` replicates DTensors that `concerns` is true of, as in `full_tensor`.
    `norm` computes the norm of gradients that have some of them. Both get torch's own function as
    their first argument."""
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
        total = norm(plain_norm, given, float(norm_type))
        if error_if_nonfinite:
            plain_norm([total], norm_type, error_if_nonfinite)  # in torch's own words
        return total

    DTensor.redistribute = redistribute
    clip_grad._get_total_norm = nn.utils.get_total_norm = total_norm


def redistribute_as_bytes(dtypes: Collection[torch.dtype]) -> None:
    """From now on a DTensor of one of `dtypes`, of a byte each, is redistributed as one of bytes:
    torch has no kernels that cut or join tensors of these."""
    plain = DTensor.redistribute

    @wraps(plain)
    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        if self.dtype not in dtypes:
            return plain(self, *args, **kwargs)
        like = torch.empty(self.shape, dtype=torch.uint8, device="meta")
        packed = shard_of(self).view(torch.uint8)
        out = plain(dtensor_of(packed, like, self.device_mesh, self.placements), *args, **kwargs)
        return dtensor_of(local_of(out).view(self.dtype), self, out.device_mesh, out.placements)

    DTensor.redistribute = redistribute


def has_strategy(op: Any) -> bool:
    """Whether DTensor knows an op: others it refuses, or takes apart."""
    known = DTensor._op_dispatcher.sharding_propagator
    return (
        op in known.op_strategy_funcs
        or op in known.op_single_dim_strategy_funcs
        or op in known.op_to_rules
    )


TorchCall = Callable[..., Any]
"""Torch's own op on its arguments."""


Handler = Callable[[TorchCall, Any, Sequence[Any], Mapping[str, Any]], Any]
"""Replaces an op: takes torch's own, the op and its arguments."""


_OF_TORCH_ITSELF = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
"""Namespaces of ops that DTensor is made of."""


def take_over_ops(handler_of: Callable[[Any], Handler | None], known: set[str]) -> None:
    """From now on ops on DTensors are done by their handlers, if they have one. Looks at the ops
    that exist by now and whose names are not `known` yet."""
    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    new = sorted({*torch._C._dispatch_get_all_op_names()} - known)
    known.update(new)
    for full_name in new:
        namespace, _, name = full_name.partition("::")
        name, _, overload = name.partition(".")
        if namespace in _OF_TORCH_ITSELF:
            continue
        packet = getattr(getattr(torch.ops, namespace), name, None)
        op = getattr(packet, overload or "default", None)
        handler = None if op is None else handler_of(op)
        if handler is not None:
            table[op] = _handled(table, op, table.get(op), handler)


def _handled(table: dict[Any, Any], op: Any, known: Any, handler: Handler) -> Any:
    def plain(*args: Any, **kwargs: Any) -> Any:
        if known is not None:
            return known(op, args, kwargs)
        table.pop(op, None)
        try:
            return _where_it_is(op(*args, **kwargs), (args, kwargs))
        finally:
            table[op] = handle

    def handle(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return handler(plain, op, args, kwargs)

    return handle


def _where_it_is(result: Any, given: Any) -> Any:
    """The result of an op on `given`, on the device of the rank's shards. On a rank outside of a
    DTensor's mesh torch puts it on the CPU: an optimizer would find its states on another device
    than parameters."""
    if isinstance(result, (list, tuple)):
        return type(result)([_where_it_is(each, given) for each in result])
    if not isinstance(result, DTensor) or is_of(result.device_mesh):
        return result
    first = next(x for x in tree_flatten(given)[0] if isinstance(x, DTensor))
    device = shard_of(first).device
    shard = shard_of(result)
    return result if shard.device == device else dtensor_like(shard.to(device), result)


def take_over_assignments(shard_for: Callable[[DTensor, Tensor], Tensor | None]) -> None:
    """From now on `dtensor.data = value` makes `shard_for(dtensor, value)` this rank's shard,
    unless that is None: with torch alone, ops go on reading the previous shard. For a plain
    `value`, `dtensor.grad = value` makes a gradient of that shard."""
    data, grad = (vars(torch._C.TensorBase)[name] for name in ("data", "grad"))

    def assign_data(self: DTensor, value: Tensor) -> None:
        shard = shard_for(self, value)
        if shard is None:
            data.__set__(self, value)
        else:
            self._local_tensor = shard

    def assign_grad(self: DTensor, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, DTensor):
            shard = shard_for(self, value)
            value = value if shard is None else dtensor_like(shard, self)
        grad.__set__(self, value)

    _DTENSOR.data = property(data.__get__, assign_data)
    _DTENSOR.grad = property(grad.__get__, assign_grad, grad.__delete__)


def take_over_copies(concerns: Callable[[DTensor], bool]) -> None:
    """From now on `copy.deepcopy` copies the shard of a DTensor that `concerns` is true of and that
    is no parameter. Torch would take it for a tensor that has memory itself."""
    plain = DTensor.__deepcopy__

    def copied(self: DTensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo or self.requires_grad or not concerns(self):
            return plain(self, memo)
        copy = memo[id(self)] = dtensor_like(shard_of(self).clone(), self)
        return copy

    _DTENSOR.__deepcopy__ = copied


def take_over_wholes(whole: Callable[[Callable[[DTensor], Tensor], DTensor], Tensor]) -> None:
    """From now on `dtensor.full_tensor()` is `whole(plain, dtensor)`, where `plain` is torch's
    own."""
    plain = DTensor.full_tensor

    @wraps(plain)
    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        return whole(lambda x: plain(x, *args, **kwargs), self)

    _DTENSOR.full_tensor = full_tensor


def take_over_readings(whole: Callable[[DTensor], Tensor | None]) -> None:
    """From now on a DTensor read as text, in a format or as an array reads as `whole(dtensor)`, a
    plain tensor, unless that is None. Torch alone shows this rank's shard, or refuses."""
    for name in ("__array__", "__dlpack__", "__format__", "__repr__", "numpy", "tolist"):
        setattr(_DTENSOR, name, _reading(getattr(DTensor, name), name, whole))


def take_over_pickling(
    whole: Callable[[DTensor], Tensor | None],
    storage_of: Callable[[Tensor, DTensor], torch.UntypedStorage],
) -> None:
    """From now on a DTensor is pickled as `whole(dtensor)`, a plain tensor, unless that is None.
    Libraries that ask which tensors share memory before they save get `storage_of` their shards.
    Processes share the shards: a DTensor has no storage itself, and torch crashes looking for it.

    The process of `dcp.async_save` gets DTensors: it writes this rank's shards of them, with those
    of the other ranks. A thread sends them there while the script trains on."""
    sends = threading.local()
    send = _AsyncCheckpointProcess._send

    @wraps(send)
    def send_shards(self: Any, data: Any) -> None:
        sends.shards = True
        try:
            send(self, data)
        finally:
            sends.shards = False

    def pickled(x: DTensor) -> Tensor | None:
        return None if getattr(sends, "shards", False) else whole(x)

    _DTENSOR.__reduce_ex__ = _reading(DTensor.__reduce_ex__, "__reduce_ex__", pickled)
    _DTENSOR.untyped_storage = lambda self: storage_of(shard_of(self), self)
    _DTENSOR.share_memory_ = _shared
    _DTENSOR.is_shared = lambda self: shard_of(self).is_shared()
    checkpoints: Any = _AsyncCheckpointProcess
    checkpoints._send = send_shards


def _shared(x: DTensor) -> DTensor:
    shard_of(x).share_memory_()
    return x


def _reading(plain: Any, name: str, whole: Callable[[DTensor], Tensor | None]) -> Any:
    @wraps(plain)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        tensor = whole(self)
        if tensor is None:
            return plain(self, *args, **kwargs)
        return getattr(tensor, name)(*args, **kwargs)

    return read


def shard_of(tensor: DTensor) -> Tensor:
    """This rank's shard of a stored DTensor, for which no collective is under way.
    `DTensor.to_local` takes 10 times as long, for every parameter."""
    return tensor._local_tensor


def local_of(tensor: DTensor) -> Tensor:
    """This rank's shard, a plain tensor, once no collective is under way for it."""
    return when_arrived(tensor.to_local())


def is_under_way(tensor: Tensor) -> bool:
    """Whether it is the result of a functional collective that may still be under way."""
    return isinstance(tensor, AsyncCollectiveTensor)


def when_arrived(tensor: Tensor) -> Tensor:
    """A plain tensor, once the collective that computes it is done."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
