"""The numbers of microbatches, and of chunks of the loss, where they are open."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import gcd, isqrt, prod

from autopar.cost_model.least_memory import least_at_rest
from autopar.errors import MicrobatchError, NotImposedWarning
from autopar.ir.contractions import batch_atoms
from autopar.ir.graph import Graph, Role, itemsize
from autopar.ir.passes.losses import Head, heads_of
from autopar.ir.passes.microbatches import trains
from autopar.ir.uses import groups
from autopar.plans.estimates import StageEstimates
from autopar.plans.passes import StepForm, step_graph
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import PlanRequest


def dividing(options: Options, graph: Graph) -> Options:
    """`options` for another call of a model that was planned with them. The number of microbatches
    becomes the largest up to theirs that divides its batch. It is open, with a warning, if the
    batch cannot be divided at all."""
    requested = options.microbatches
    if requested is None or not (trains(graph) or options.is_staged):
        return options
    sizes = [graph.atoms[atom].size for atom in sorted(batch_atoms(graph))]
    count = next(n for n in range(requested, 0, -1) if all(size % n == 0 for size in sizes))
    try:
        step_graph(graph, StepForm(count))
    except MicrobatchError as error:
        warnings.warn(NotImposedWarning(f"microbatches={requested}: {error}"), stacklevel=2)
        return replace(options, microbatches=None)
    return replace(options, microbatches=count)


def possible_counts(graph: Graph, devices: int) -> Iterator[int]:
    """The numbers of microbatches to try, of those that divide the batch (`count_ladder`); 1 if the
    step cannot be split. Whether it can takes as long to know as a step in microbatches, and is
    asked after the 1 only."""
    yield 1
    size = gcd(*(graph.atoms[atom].size for atom in batch_atoms(graph)))
    counts = count_ladder(size, devices)[1:] if trains(graph) else ()
    if not counts:
        return
    try:
        step_graph(graph, StepForm(counts[0]))
    except MicrobatchError:
        return
    yield from counts


_MOST_STEP = 8
"""A number of microbatches so many times the one before holds far less than is needed."""


@cache
def count_ladder(size: int, devices: int) -> Sequence[int]:
    """The powers of two that divide `size` samples, and beyond them more divisors: one between each
    power of two and the next, if there is one. With that many microbatches most of the devices can
    share the samples of one evenly; of equals it is the smallest. No number leaves a device more
    samples than a smaller one, or is over `_MOST_STEP` times the one before."""
    below = [n for n in range(1, isqrt(size) + 1) if size % n == 0]
    octaves: dict[int, int] = {}
    for count in sorted({*below, *(size // n for n in below)}):
        octave = count.bit_length()
        known = octaves.setdefault(octave, count)
        is_power = known == 1 << (octave - 1)
        if not is_power and gcd(size // count, devices) > gcd(size // known, devices):
            octaves[octave] = count
    counts = [1]
    for count in octaves.values():
        last = counts[-1]
        if last < count <= _MOST_STEP * last and _on_each(count, size, devices) <= _on_each(
            last, size, devices
        ):
            counts.append(count)
    return tuple(counts)


def _on_each(count: int, size: int, devices: int) -> int:
    """The samples of a microbatch on a device, where as many devices as can share them evenly."""
    return size // count // gcd(size // count, devices)


_SAVED_BY_RECOMPUTE = 0.9
"""What recompute saves of all that is held for activations, at most: about a layer's input, and
the activations of one layer, are left."""


def likely_count(request: PlanRequest, free: StageEstimates, freed_bytes: int = 0) -> int:
    """The number of microbatches that is likely best, of those that are possible, where the plan
    `free` in one does not fit.

    Each holds its part of what that plan holds for activations, of which chunks of the loss hold
    `freed_bytes` less. What does not fit is recomputed: all of it in the time of forward, a third
    of the compute. Each microbatch beyond the first gathers parameters twice and reduces
    gradients, which the plan `free` does once each. What that holds whole of parameters without
    gradients is gathered then. A number is likely only if each axis of the mesh can still shard the
    samples.
    """
    memory, limit = free.memory, request.memory_limit_bytes
    active = max(1, memory.total - memory.at_rest - freed_bytes)
    room = max(0, limit - least_at_rest(request))
    counts, likely = [*even_counts(request)], list[tuple[float, int]]()
    more_ns = 1.5 * _params_ns(request, free) + 2 * _frozen_ns(request, free)
    for count in counts:
        missing = max(0.0, 1 - count * room / active)
        if missing <= _SAVED_BY_RECOMPUTE:
            likely.append(((count - 1) * more_ns + missing * free.compute_ns / 3, count))
    return min(likely)[1] if likely else counts[-1]


def even_counts(request: PlanRequest) -> Iterator[int]:
    """The possible numbers with which each axis of the mesh can shard the samples; at least 1."""
    atoms = batch_atoms(request.graph)
    for count in possible_counts(request.graph, request.cluster.num_devices):
        parts = [request.graph.atoms[atom].size // count for atom in atoms]
        if count == 1 or not any(size % axis.size for size in parts for axis in request.mesh):
            yield count


def _params_ns(request: PlanRequest, free: StageEstimates) -> int:
    """What collectives of parameters and of their gradients take in a plan."""
    graph = request.without_savings().step
    keys = {
        group.key
        for group in groups(graph)
        if graph.nodes[group.root.node].role is Role.PARAM
        or any(graph.nodes[use.node].role is Role.GRAD for use in group.uses)
    }
    return sum(each.time_ns for key in keys for each in free.sends.get(key, ()))


def _frozen_ns(request: PlanRequest, free: StageEstimates) -> float:
    """What it takes to gather parameters without gradients that a plan holds whole, over the
    slowest link of the mesh."""
    graph, rates = request.graph, [axis.link.bytes_per_s for axis in request.mesh if axis.link]
    trained = {node.target for node in graph.with_role(Role.GRAD)}
    num_bytes = {n.target: n.outputs[0].num_bytes for n in graph.with_role(Role.PARAM)}
    frozen = sum(size for name, size in num_bytes.items() if name not in trained)
    whole = free.memory.params - sum(num_bytes.values()) // request.cluster.num_devices
    return max(0, min(frozen, whole)) * 1e9 / min(rates) if rates else 0.0


_MANY = 64
"""Above so many chunks the ladder has wide steps."""


def chunk_count(request: PlanRequest) -> int:
    """The largest number of chunks that is of use, a power of two; 1 where chunks save little."""
    heads, limit = heads_of(request.graph), request.memory_limit_bytes
    policy = request.options.policy
    parts = request.cluster.num_devices * request.microbatches
    sizes = [_head_bytes(head) // parts for head in heads]
    if sum(sizes) * policy.chunks_worth < limit or not heads:
        return 1
    rows = max(head.matmul.outputs[0].shape[0] for head in heads) // parts
    count = 2
    while (
        max(sizes) * policy.chunks_smallest > limit * count and rows // count > policy.chunks_rows
    ):
        count *= 2
    return count


def chunk_ladder(request: PlanRequest) -> tuple[int, ...]:
    """The numbers of chunks to try, up to the `chunk_count`; none where chunks save little. Few
    come first: more hold less and take longer. Each launches kernels of its own, and adds to the
    weight's gradient once more."""
    count, policy = chunk_count(request), request.options.policy
    if count == 1:
        return ()
    step = policy.chunks_step if count <= _MANY else policy.chunks_wide_step
    counts = (count // step**k for k in reversed(range(policy.chunks_tries)))
    return tuple(each for each in counts if each > 1)


def most_saved_bytes(request: PlanRequest) -> int:
    """The most memory that chunks save on a device, if all devices share the scores: the scores,
    what the loss makes of them, and their gradient."""
    parts = request.cluster.num_devices * request.microbatches
    sizes = (_head_bytes(head, of_loss=2) for head in heads_of(request.graph))
    return sum(sizes) // parts


def in_chunks(request: PlanRequest) -> PlanRequest:
    """The request with as many chunks of the loss as are of use, if that is open and saves memory:
    no other plan holds less."""
    is_open = request.options.loss_chunks is None
    return replace(request, loss_chunks=chunk_count(request)) if is_open else request


def _head_bytes(head: Head, of_loss: int = 1) -> int:
    """Bytes of the scores, and of `of_loss` tensors that the loss makes of them."""
    scores, loss = head.matmul.outputs[0], head.loss.outputs[0]
    return prod(scores.shape) * (itemsize(scores.dtype) + of_loss * itemsize(loss.dtype))
