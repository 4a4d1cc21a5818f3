"""Host memory of a device: by holder, and as a row of the problem.

It has the parameters on the host, with their gradients and optimizer states, and the offloaded
activations of all microbatches in flight. All but the optimizer states are copied and therefore
pinned, and torch rounds pinned memory up to powers of two (CachingHostAllocator). The host of a CPU
has no memory beside the device's: what is there counts as the device's (`memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from autopar.cost_model.lives import InFlight
from autopar.cost_model.offloads import Offloads, ParamsOnHost
from autopar.cost_model.optimizer import ParamMemory
from autopar.ir.choices import Choice, ParamChoice, Saved, shardings
from autopar.ir.graph import Node, Ref, Role
from autopar.ir.problem import IntArray, Label, Problem
from autopar.ir.redistribute import local_bytes
from autopar.ir.schedule import Value
from autopar.ir.sharding import Sharding
from autopar.ir.uses import SAVED
from autopar.plans.estimates import NOTHING_ON_HOST, HostMemory
from autopar.plans.layout import Layout
from autopar.plans.requests.request import PlanRequest
from autopar.plans.scheduling.host_copies import on_host

_STEPS_ON = "cpu"
"""The kind of device on which the optimizer steps for parameters on the host."""


def host_memory(layout: Layout, request: PlanRequest, carried: Collection[Value]) -> HostMemory:
    """Bytes by holder, and the limit of one device. Microbatches that wait for the second part of
    backward hold those offloaded activations that it reads, which are in `carried`."""
    if (
        not (layout.streamed_params or layout.offloaded_tensors)
        or not request.cluster.has_host_memory
    ):
        return NOTHING_ON_HOST
    at_rest = ParamMemory(request, _STEPS_ON)
    params = gradients = optimizer = 0
    for each in layout.streamed_params:
        param = layout.graph.nodes[each.param.node]
        storage = layout.params[param.target].storage
        params += _pinned(at_rest.local_bytes(param, storage))
        gradients += _pinned(at_rest.gradient_bytes(param, storage))
        optimizer += at_rest.state_bytes(param, storage)
    sizes = Counter[bool]()
    for each in layout.offloaded_tensors:
        size = _pinned(layout.held_bytes(each.root, layout.for_backward(each.root)))
        sizes[on_host(each, layout) in carried] += size
    offloaded = max(
        (1 + others.backward) * sizes.total() + others.weights * sizes[True]
        for others in request.waiting
    )
    return HostMemory(
        params=params,
        gradients=gradients,
        optimizer=optimizer,
        offloaded=offloaded,
        limit=request.host_memory_bytes,
        devices=request.cluster.devices_of_node,
    )


def host_row(request: PlanRequest, problem: Problem, aside: int) -> dict[int, IntArray]:
    """Bytes of all holders together, per choice of each node of `problem`, which was stated for
    `request`. `aside` bytes are added to node 0. Where different numbers of microbatches may wait
    for each part of backward, the largest sum counts."""
    known = {key: place for place, key in enumerate(problem.keys)}
    row = {0: np.full(len(problem.labels[0]), aside, np.int64)}
    if not request.cluster.has_host_memory:
        return row

    def add(key: str, sizes: Sequence[int]) -> None:
        amounts = np.array(sizes, np.int64)
        row[known[key]] = row.get(known[key], 0) + amounts

    graph = request.step
    hosts, at_rest = ParamsOnHost(request), ParamMemory(request, _STEPS_ON)
    for param in graph.with_role(Role.PARAM):
        if param.key in hosts.members:
            labels = problem.labels[known[param.key]]
            add(param.key, [_of_param(at_rest, hosts, param, label) for label in labels])
    offloads, waiting = Offloads(request), InFlight(request)
    for key, offloaded in offloads.tensors.items():
        root = offloaded[0].root
        maker = graph.nodes[root.node]
        decision = next(k for k in (SAVED + key, SAVED + maker.key, maker.key) if k in known)
        tensor, times = offloads.rounding.saved_type(root), len(offloaded) * waiting.times(decision)
        labels = problem.labels[known[decision]]
        states = [_offloaded_in(maker, root, label, is_open=offloads.is_open) for label in labels]
        sizes = (
            0 if s is None else local_bytes(tensor, graph.atoms, s, request.mesh.sizes)
            for s in states
        )
        add(decision, [times * _pinned(size) for size in sizes])
    return row


def _of_param(at_rest: ParamMemory, hosts: ParamsOnHost, param: Node, label: Label) -> int:
    """Bytes of a parameter, its gradient and optimizer states; 0 if it is not on the host."""
    assert isinstance(label, ParamChoice)
    if not hosts.is_on_host(param, label):
        return 0
    pinned = at_rest.local_bytes(param, label.storage), at_rest.gradient_bytes(param, label.storage)
    return sum(map(_pinned, pinned)) + at_rest.state_bytes(param, label.storage)


def _offloaded_in(maker: Node, root: Ref, label: Label, *, is_open: bool) -> Sharding | None:
    """The sharding in which a choice offloads a tensor; None if it does not. Where offloading is no
    decision (not `is_open`), every choice offloads it."""
    match label:
        case Saved():
            states = label.states if label.offloaded else ()
            return states[root.output if len(states) > 1 else 0] if states else None
        case Sharding() if not is_open:
            return label
        case Choice() if not is_open:
            return shardings(maker, label)[1][root.output]
        case _:
            return None


def _pinned(num_bytes: int) -> int:
    """Bytes of pinned memory that a tensor of `num_bytes` takes."""
    return 1 << max(0, num_bytes - 1).bit_length() if num_bytes else 0
