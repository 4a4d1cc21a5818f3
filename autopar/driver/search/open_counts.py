"""The numbers of microbatches, and of chunks of the loss, where they are open."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import prod

from autopar.errors import MicrobatchError, NotImposedWarning
from autopar.ir.contractions import batch_atoms
from autopar.ir.graph import Graph, itemsize
from autopar.ir.passes.losses import Head, heads_of
from autopar.ir.passes.microbatches import trains
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


def possible_counts(graph: Graph) -> tuple[int, ...]:
    """The powers of two that divide the batch; 1 if the step cannot be split."""
    sizes = [graph.atoms[atom].size for atom in sorted(batch_atoms(graph))]
    counts = [1]
    while trains(graph) and sizes and all(size % (2 * counts[-1]) == 0 for size in sizes):
        counts.append(2 * counts[-1])
    try:
        step_graph(graph, StepForm(min(2, counts[-1])))
    except MicrobatchError:
        return (1,)
    return tuple(counts)


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
