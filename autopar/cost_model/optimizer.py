"""The time of an optimizer's step on one rank, and the memory of parameters, gradients and states.

The optimizer's step is no part of the graph, but users wait for it, and it is shorter where
parameters are sharded. An optimizer of torch is a handful of kernels, each of which reads and
writes tensors as large as the local shard (`optimizer_kinds`). It has hardly any arithmetic, so
that its time is that of its memory traffic.

`foreach` kernels take many tensors at once: 65,536 elements to a chunk, up to 320 chunks and 30
tensors or more to a launch (ATen/native/cuda/MultiTensorApply.cuh; later CUDA takes seven times as
many). The host's part in a step, which is the same for every plan, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from autopar.cost_model.collectives import collective_s
from autopar.cost_model.optimizer_kinds import Optimizer, find_optimizers
from autopar.cost_model.roofline import matmul_s, stream_s
from autopar.ir.graph import Atom, Graph, Node, Role, TensorType, itemsize, per_graph
from autopar.ir.mesh import Device, Host, Mesh
from autopar.ir.redistribute import local_bytes, local_shape
from autopar.ir.sharding import Sharding
from autopar.plans.requests.request import PlanRequest

_CHUNK = 65_536
_CHUNKS_PER_LAUNCH = 320
_TENSORS_PER_LAUNCH = 30
_NEWTON_SCHULZ_STEPS = 5


_UPDATES_ON_HOST = 0.43
"""The part of a host's memory bandwidth that an optimizer reaches: Adam in one pass takes 2.57 s
for 10 billion parameters, 28 bytes each, where two processors have 256 GB/s (ZeRO-Offload, arXiv
2101.06840, table 4)."""


_CALL_ON_HOST_S = 5e-6
"""Seconds of any op of torch on a CPU, where optimizers step on one tensor after the other."""


def update_s(
    optimizer: Optimizer,
    tensor: TensorType,
    atoms: Sequence[Atom],
    storage: Sharding,
    mesh: Mesh,
    device: Device,
    host: Host | None = None,
) -> float:
    """Seconds of a step of `optimizer` on one rank for a parameter with this `storage`. With a
    `host`, the parameter is there, and the optimizer steps there."""
    if host is not None:
        passes, kernels = optimizer.passes("cpu")
        moved = passes * local_bytes(tensor, atoms, storage, mesh.sizes)
        return kernels * _CALL_ON_HOST_S + moved / (_UPDATES_ON_HOST * host.memory_bytes_per_s)
    if not optimizer.passes(device.kind)[1]:
        return 0.0
    if not optimizer.whole:
        shard = prod(local_shape(tensor, atoms, storage, mesh.sizes))
        return _kernels_s(optimizer, tensor, shard, device)
    whole = _kernels_s(optimizer, tensor, prod(tensor.shape), device)
    return whole + _gathers_s(optimizer, tensor, atoms, storage, mesh)


def state_bytes(
    optimizer: Optimizer,
    tensor: TensorType,
    atoms: Sequence[Atom],
    storage: Sharding,
    sizes: Sequence[int],
    device: str,
) -> tuple[int, ...]:
    """Bytes on one rank of each optimizer state of a parameter with this `storage`, on a mesh of
    `sizes` and a kind of `device` ("cuda", "cpu"). States of the parameter's shape are sharded like
    it, others are replicated (`runtime.optimizers`)."""
    return tuple(
        local_bytes(state, atoms, storage, sizes)
        if state.parts == tensor.parts and state.shape == tensor.shape
        else state.num_bytes
        for state in optimizer.states_of(tensor, device)
    )


def _kernels_s(optimizer: Optimizer, tensor: TensorType, elements: int, device: Device) -> float:
    """Seconds of the optimizer's kernels on `elements` elements of `tensor`."""
    passes, kernels = optimizer.passes(device.kind)
    launches = float(kernels)
    if device.kind == "cuda" and not optimizer.launches_each:
        chunks = -(-elements // _CHUNK)
        launches *= max(chunks / _CHUNKS_PER_LAUNCH, 1 / _TENSORS_PER_LAUNCH)
    moved = passes * elements * itemsize(tensor.dtype)
    launches_s = launches * device.floor_s(device.kernels.start_s)
    return launches_s + stream_s(moved, device) + _orthogonal_s(optimizer, tensor, device)


def _orthogonal_s(optimizer: Optimizer, tensor: TensorType, device: Device) -> float:
    """Seconds of Newton-Schulz steps on an m x n matrix, m <= n: m x n by n x m, m x m by m x m,
    m x m by m x n (`torch.optim.Muon`). Another optimizer steps on other tensors."""
    if not optimizer.orthogonal or len(tensor.shape) != 2:
        return 0.0
    m, n = sorted(tensor.shape)
    matmuls = ((m * m, n), (m * m, m), (m * n, m))
    start_s = device.floor_s(device.kernels.matmul_start_s)
    taken_s = (matmul_s(out, depth, 0.0, "bfloat16", device) for out, depth in matmuls)
    once_s = sum(max(0.0, each - start_s) for each in taken_s)
    return _NEWTON_SCHULZ_STEPS * once_s


def _gathers_s(
    optimizer: Optimizer,
    tensor: TensorType,
    atoms: Sequence[Atom],
    storage: Sharding,
    mesh: Mesh,
) -> float:
    """Seconds of gathering parameter, gradient and states, over one axis after the other: the axis
    that sharded last, which is the slowest, first."""
    seconds, held = 0.0, local_bytes(tensor, atoms, storage, mesh.sizes)
    for axis, placement in zip(mesh.axes, storage, strict=True):
        if placement.kind != "R":
            seconds += collective_s("all_gather", held, axis.size * held, axis)
            held *= axis.size
    alike = sum(
        (state.shape, state.parts) == (tensor.shape, tensor.parts)
        for state in optimizer.states_of(tensor, "")
    )
    return (2 + alike) * seconds


# Memory that a device holds all the time: parameters, their gradients and optimizer states.
# Gradients count in forward too: a loop that accumulates keeps them.


@per_graph
def trained(graph: Graph) -> frozenset[str]:
    """The names of parameters that have gradients. A graph without backward may be part of a model
    that is trained: all of its parameters may have gradients."""
    with_gradient = frozenset(node.target for node in graph.with_role(Role.GRAD))
    return with_gradient or frozenset(node.target for node in graph.with_role(Role.PARAM))


class ParamMemory:
    """Memory of a request's parameters, on its devices or another kind ("cuda", "cpu")."""

    def __init__(self, request: PlanRequest, device: str = "") -> None:
        self._graph, self._sizes = request.step, request.mesh.sizes
        self._device = device or request.cluster.device.kind
        self._optimizers = find_optimizers(request.options.given.optimizer)
        self._trained = trained(request.step)

    def optimizer(self, param: Node) -> Optimizer | None:
        """The optimizer of a parameter; None if the parameter is not trained."""
        return None if param.target not in self._trained else self._optimizers.of(param)

    def local_bytes(self, param: Node, storage: Sharding) -> int:
        """Bytes of a parameter with this storage on one rank."""
        return local_bytes(param.outputs[0], self._graph.atoms, storage, self._sizes)

    def gradient_bytes(self, param: Node, storage: Sharding) -> int:
        """Bytes of a parameter's gradient on one rank."""
        return self.local_bytes(param, storage) if self.optimizer(param) else 0

    def state_bytes(
        self, param: Node, storage: Sharding, rounded: Callable[[int], int] = int
    ) -> int:
        """Bytes of a parameter's optimizer states, each `rounded` as an allocator does."""
        optimizer, tensor = self.optimizer(param), param.outputs[0]
        if optimizer is None:
            return 0
        where = tensor, self._graph.atoms, storage, self._sizes, self._device
        return sum(map(rounded, state_bytes(optimizer, *where)))

    def at_rest(self, param: Node, storage: Sharding) -> int:
        """Bytes of parameter, gradient and optimizer states, without an allocator's rounding."""
        both = self.local_bytes(param, storage) + self.gradient_bytes(param, storage)
        return both + self.state_bytes(param, storage)
