"""What each optimizer keeps per parameter, and how long its step takes on one rank.

The step is no part of the graph, but it is part of what a user waits for, and it is shorter where
parameters are stored in shards. An optimizer of torch is a handful of kernels, each of which reads
and writes tensors as large as the local shard; it has hardly any arithmetic, so that its time is
that of its memory traffic. The passes are those of the `foreach` implementation, the default on
CUDA (`torch.optim`, "How to run optimizers"; counted by running each under a dispatch mode, in
tests). With `fused=True` Adam and AdamW read parameter, gradient and states and write all but the
gradient in one kernel, and have names of their own.

`foreach` kernels take many tensors at once: 65,536 elements to a chunk, up to 320 chunks and 30
tensors or more to a launch (ATen/native/cuda/MultiTensorApply.cuh; later CUDA takes seven times as
many). The host's part in a step, which is the same for every plan, is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from autopar.cost_model.collectives import collective_s
from autopar.cost_model.roofline import product_s, stream_s
from autopar.errors import AutoparError
from autopar.ir.graph import Atom, TensorType, itemsize
from autopar.ir.mesh import Device, Host, Mesh
from autopar.ir.redistribute import local_bytes, local_shape
from autopar.ir.sharding import Sharding

_CHUNK = 65_536
_CHUNKS_PER_LAUNCH = 320
_TENSORS_PER_LAUNCH = 30
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`states` tensors of a parameter's size and dtype are kept, as many as `passes` read or
    written in a step, by `kernels` kernels. One `by_tensor` steps on whole parameters, on every
    rank (`runtime.optimizers`); one that is `orthogonal` multiplies matrices."""

    states: int
    passes: int
    kernels: int
    by_tensor: bool = False
    orthogonal: bool = False


OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(0, 3, 1),
    "sgd-momentum": Optimizer(1, 8, 3),
    "adagrad": Optimizer(1, 13, 5),
    "rmsprop": Optimizer(1, 13, 5),
    "lion": Optimizer(1, 13, 5),
    "adam": Optimizer(2, 18, 7),
    "adam-fused": Optimizer(2, 7, 1),
    "adamw": Optimizer(2, 20, 8),
    "adamw-fused": Optimizer(2, 7, 1),
    "adamax": Optimizer(2, 16, 6),
    "nadam": Optimizer(2, 22, 8),
    "radam": Optimizer(2, 22, 9),
    "adadelta": Optimizer(2, 27, 11),
    "rprop": Optimizer(2, 41, 16),
    "asgd": Optimizer(1, 12, 4),
    "muon": Optimizer(1, 31, 17, by_tensor=True, orthogonal=True),
    "adafactor": Optimizer(0, 19, 11, by_tensor=True),
    "none": Optimizer(0, 0, 0),
}
"""By the name that users give. What Adafactor keeps is one row and one column; Muon and Adafactor
hold one whole parameter more while they step, and LBFGS, which is not listed, all of them whole.
Lion is not in torch: a step of five operations, as in its paper (arXiv 2302.06675, program 1)."""


def optimizer_name(given: Any) -> str:
    """The name in `OPTIMIZERS` of what a user gives: a name, an optimizer of torch or its class, or
    a `functools.partial` of that. AutoparError, listing them, if there is none."""
    if given is None:
        raise AutoparError('optimizer is None: leave it out for AdamW, or write "none" for none')
    if isinstance(given, str):
        find_optimizer(given)
        return given.lower()
    settings: Mapping[str, Any] = getattr(given, "defaults", {})
    if isinstance(given, partial):
        given, settings = given.func, given.keywords
    kind: type = given if isinstance(given, type) else type(given)
    names = [base.__name__.lower() for base in kind.__mro__]
    name = next((name for name in names if name in OPTIMIZERS), kind.__name__)
    find_optimizer(name)
    setting = {"sgd": "momentum", "adam": "fused", "adamw": "fused"}.get(name)
    return f"{name}-{setting}" if setting and settings.get(setting) else name


def find_optimizer(name: str) -> Optimizer:
    """The entry of `OPTIMIZERS`; AutoparError, listing them, for another name."""
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        known = ", ".join(OPTIMIZERS)
        raise AutoparError(
            f"optimizer {name!r} is not known: name the one most like it of {known}"
        ) from None


_UPDATES_ON_HOST = 0.43
"""What an optimizer comes to of what a host's memory reads and writes: 10 billion parameters in
2.57 s by Adam in one pass, 28 bytes each, where two processors have 256 GB/s (ZeRO-Offload, arXiv
2101.06840, table 4)."""


_CALL_ON_HOST_S = 5e-6
"""What an op of torch takes on a CPU however little it does; one tensor after the other, as
optimizers step there."""


def update_s(
    optimizer: Optimizer,
    tensor: TensorType,
    atoms: Sequence[Atom],
    storage: Sharding,
    mesh: Mesh,
    device: Device,
) -> float:
    """Seconds that a step of `optimizer` takes for a parameter stored so, on one rank."""
    if not optimizer.kernels:
        return 0.0
    if not optimizer.by_tensor:
        shard = prod(local_shape(tensor, atoms, storage, mesh.sizes))
        return _kernels_s(optimizer, tensor, shard, device)
    whole = _kernels_s(optimizer, tensor, prod(tensor.shape), device)
    return whole + _gathers_s(optimizer, tensor, atoms, storage, mesh)


def host_update_s(
    optimizer: Optimizer,
    tensor: TensorType,
    atoms: Sequence[Atom],
    storage: Sharding,
    mesh: Mesh,
    host: Host,
) -> float:
    """The same for one that lives on the host, which steps there."""
    moved = optimizer.passes * local_bytes(tensor, atoms, storage, mesh.sizes)
    streamed_s = moved / (_UPDATES_ON_HOST * host.memory_bytes_per_s)
    return optimizer.kernels * _CALL_ON_HOST_S + streamed_s


def _kernels_s(optimizer: Optimizer, tensor: TensorType, elements: int, device: Device) -> float:
    """The kernels on so many elements of `tensor`."""
    launches = float(optimizer.kernels)
    if device.kind == "cuda" and not optimizer.by_tensor:
        chunks = -(-elements // _CHUNK)
        launches *= max(chunks / _CHUNKS_PER_LAUNCH, 1 / _TENSORS_PER_LAUNCH)
    moved = optimizer.passes * elements * itemsize(tensor.dtype)
    launches_s = launches * device.floor_s(device.kernels.start_s)
    return launches_s + stream_s(moved, device) + _orthogonal_s(optimizer, tensor, device)


def _orthogonal_s(optimizer: Optimizer, tensor: TensorType, device: Device) -> float:
    """Newton-Schulz steps on an m x n matrix, m <= n: m x n by n x m, m x m by m x m, m x m by
    m x n (`torch.optim.Muon`). Tensors that are no matrices are left to another optimizer."""
    if not optimizer.orthogonal or len(tensor.shape) != 2:
        return 0.0
    m, n = sorted(tensor.shape)
    products = ((m * m, n), (m * m, m), (m * n, m))
    start_s = device.floor_s(device.kernels.product_start_s)
    taken_s = (product_s(made, k, 0.0, "bfloat16", device) for made, k in products)
    once_s = sum(max(0.0, each - start_s) for each in taken_s)
    return _NEWTON_SCHULZ_STEPS * once_s


def _gathers_s(
    optimizer: Optimizer,
    tensor: TensorType,
    atoms: Sequence[Atom],
    storage: Sharding,
    mesh: Mesh,
) -> float:
    """Parameter, gradient and states are made whole, over one axis after the other: that which cut
    last, the slowest, first."""
    seconds, held = 0.0, local_bytes(tensor, atoms, storage, mesh.sizes)
    for axis, placement in zip(mesh.axes, storage, strict=True):
        if placement.kind != "R":
            seconds += collective_s("all_gather", held, axis.size * held, axis)
            held *= axis.size
    return (2 + optimizer.states) * seconds
