"""Where no plan is within the memory limit: what is missing, and the plan that holds least.

All is found by trying. The smallest-memory plan on the mesh, on more devices, and of a smaller
batch is one small problem each, in which every choice is one of those that hold least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil, log2, prod
from typing import TypeVar

import numpy as np

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.compile import Say, best_on
from autopar.cost_model.collectives import with_buckets
from autopar.cost_model.host_memory import host_row
from autopar.cost_model.price import price
from autopar.driver.search.infeasible_subset import BOUNDLESS_BYTES
from autopar.driver.search.open_counts import in_chunks, possible_counts
from autopar.errors import AutoparError, InfeasibleError, SolverError
from autopar.ir.choices import Choice, ParamChoice, Saved
from autopar.ir.contractions import batch_atoms
from autopar.ir.graph import Graph, Role, TensorType
from autopar.ir.passes.microbatches import trains
from autopar.ir.problem import FORBIDDEN, IntArray, Label, Problem
from autopar.ir.units import format_bytes
from autopar.plans.estimates import StageEstimates
from autopar.plans.memory_refinement import Candidate
from autopar.plans.requests.request import GraphRequest, PlanRequest
from autopar.report.costs import HOLDER_TITLES
from autopar.report.names import tensor_name
from autopar.solver.memory import total_usages


def smallest_memory(request: PlanRequest, say: Say, stated: Problem | None = None) -> Candidate:
    """The best of the plans that hold least when forward ends, whatever their peak; if those have
    more on the host than their share, of the plans with nothing there. `stated` is the problem that
    is open about what is recomputed, if there is one already. InfeasibleError if what is imposed,
    or the host, leaves no plan at all."""
    request = request.opened().within(BOUNDLESS_BYTES)
    problem = replace(stated or price(request), usage_limit=None)
    try:
        return best_on(request, say, None, _smallest_memory_problem(problem))
    except InfeasibleError:
        on_device = _on_device(problem)
        if on_device is problem:
            raise
        return best_on(request, say, None, _smallest_memory_problem(on_device))


def _on_device(problem: Problem) -> Problem:
    """`problem` with nothing on the host; itself where nothing might be, or something has to be."""
    is_on_host = [np.array([_is_on_host(label) for label in labels]) for labels in problem.labels]
    if not any(map(np.any, is_on_host)) or any(map(np.all, is_on_host)):
        return problem
    pairs = zip(problem.costs, is_on_host, strict=True)
    costs = tuple(np.where(hosted, FORBIDDEN, cost) for cost, hosted in pairs)
    return replace(problem, costs=costs)


def _is_on_host(label: Label) -> bool:
    match label:
        case Saved():
            return label.offloaded
        case ParamChoice():
            return bool(label.num_on_host)
        case _:
            return False


def _smallest_memory_problem(problem: Problem) -> Problem:
    triples = zip(problem.costs, total_usages(problem), problem.labels, strict=True)
    return replace(problem, costs=tuple(_only_smallest(*each) for each in triples))


def _only_smallest(costs: IntArray, sizes: IntArray, labels: Sequence[Label]) -> IntArray:
    """The costs of a node with all forbidden but what holds least. What copies alone read is saved,
    since nothing could be recomputed without it."""
    is_copy = any(isinstance(label, Choice) for label in labels)
    is_open = (costs < FORBIDDEN) & np.array([is_copy or label != Saved() for label in labels])
    return np.where(is_open & (sizes == sizes[is_open].min(initial=FORBIDDEN)), costs, FORBIDDEN)


_Answer = TypeVar("_Answer")

_TRIES = 3
"""How many numbers of devices, and batches, are tried: what need be held is known to a factor."""
FEW_COUNTS = 6
"""How many numbers of microbatches, up to 64, are tried before larger ones: steps of those are slow
to play."""
_MAX_DEVICES = 1 << 20
_NAMED = 3


def explain_shortage(
    graph_request: GraphRequest, request: PlanRequest, why: InfeasibleError, say: Say
) -> str:
    """Why there is no plan for `request`, a mesh of what is `graph_request`: what the
    smallest-memory plan found lacks, of the device's memory or of its share of the host's, and what
    would do. The text of `why` if it is not memory that is missing."""
    say("looking for what would do")
    limit, share = request.memory_limit_bytes, request.host_memory_bytes
    roomy = _smallest_memory(request.within(limit, BOUNDLESS_BYTES), say)
    if roomy is None:
        return str(why)
    found = roomy if _on_host(roomy) <= share else _smallest_memory(request, say)
    if found is not None and _peak(found) <= limit:
        return str(why)
    peak = limit if found is None else _peak(found)
    remedies = (
        *([f"--memory-limit {_at_least(peak)}"] if found is not None else ()),
        *_more_host_memory(request, say),
        *_more_devices(graph_request, request, peak, say),
        *_with_residency(request, say),
        *_microbatches(request, say),
        *_smaller_batch(request, (found or roomy).estimates, say),
    )
    missing = _missing(peak, "", "the memory limit", limit)
    if found is None:
        missing = _missing(_on_host(roomy), " in its host's memory", "its share", share)
    return (
        f"mesh {request.mesh or 'of one device'}: the smallest-memory plan found {missing}. It "
        f"holds {_holders((found or roomy).estimates)}. "
        f"What would do: {'; '.join(remedies)}{_looked_for(graph_request)}"
    )


def _missing(held: int, where: str, limit_is: str, limit: int) -> str:
    return (
        f"peaks at {format_bytes(held)} per device{where} where {limit_is} is "
        f"{format_bytes(limit)}: {format_bytes(held - limit)} is missing"
    )


def _smallest_memory(request: PlanRequest, say: Say) -> Candidate | None:
    """None where there is no plan on the mesh at all, or none is found in time."""
    try:
        return smallest_memory(in_chunks(request), say)
    except AutoparError:
        return None


def _peak(candidate: Candidate) -> int:
    return candidate.estimates.memory.total


def _on_host(candidate: Candidate) -> int:
    return candidate.estimates.host_bytes


def _more_host_memory(request: PlanRequest, say: Say) -> Iterator[str]:
    """What a node would need for the best plan within the device's memory, if the host's is what
    lacks."""
    opened = in_chunks(request).opened()
    most = sum(int(amounts.max()) for amounts in host_row(opened, price(opened), 0).values())
    if most <= request.host_memory_bytes:
        return
    try:
        found = best_on(in_chunks(request).within(request.memory_limit_bytes, BOUNDLESS_BYTES), say)
    except (InfeasibleError, SolverError):
        return
    of_node = _on_host(found) * request.cluster.devices_of_node
    yield f"--memory-host {_at_least(of_node)} ({format_bytes(_on_host(found))} per device)"


def _holders(estimates: StageEstimates) -> str:
    """What holds the peak, and the largest of each activations and temporaries."""
    parts: list[str] = []
    for holder, title in HOLDER_TITLES.items():
        size = getattr(estimates.memory, holder)
        largest = [h for h in estimates.peak_holders if h.holder == holder][:_NAMED]
        each = (f"{tensor_name(estimates, h.key)} {format_bytes(h.num_bytes)}" for h in largest)
        named = f" ({', '.join(each)})" if largest else ""
        parts += [f"{title} {format_bytes(size)}{named}"] if size else []
    return ", ".join(parts)


def _more_devices(
    graph_request: GraphRequest, request: PlanRequest, peak: int, say: Say
) -> Iterator[str]:
    """The fewest devices, if any are found, that hold the smallest-memory plan: the slowest axis of
    the mesh is made longer by a power of two."""
    limit = request.memory_limit_bytes
    times = 1 << max(1, ceil(log2(peak / limit)))
    for factor in (times << k for k in range(_TRIES)):
        devices = request.cluster.num_devices * factor
        if devices > _MAX_DEVICES:
            return
        found = _smallest_memory(_on_more(graph_request, request, factor), say)
        if found is not None and _peak(found) <= limit:
            yield f"{devices} of these devices (mesh {found.mesh}: {format_bytes(_peak(found))})"
            return


def _on_more(graph_request: GraphRequest, request: PlanRequest, factor: int) -> PlanRequest:
    outer, *inner = request.cluster.levels
    levels = (replace(outer, size=outer.size * factor), *inner)
    cluster = replace(request.cluster, levels=levels)
    axes = dict(zip(request.mesh.names, request.mesh.sizes, strict=True))
    slowest = next(iter(axes), None)
    text = str(cluster.num_devices)
    if slowest is not None:
        axes[slowest] *= factor
        text = ",".join(f"{name}={size}" for name, size in axes.items())
    mesh = with_buckets(parse_mesh(text, cluster), cluster.device)
    return replace(graph_request, cluster=cluster).on(mesh)


def _with_residency(request: PlanRequest, say: Say) -> Iterator[str]:
    """Parameters on the host, if the smallest-memory plan is within the limit then."""
    options = request.options
    if options.residency == "cuda" and options.params_on_host is None:
        found = _smallest_memory(replace(request, options=replace(options, residency="auto")), say)
        is_new = found is not None and _on_host(found) > 0
        if found is not None and is_new and _peak(found) <= request.memory_limit_bytes:
            yield f"--memory-residency auto ({format_bytes(_peak(found))})"


def _microbatches(request: PlanRequest, say: Say) -> Iterator[str]:
    """The fewest microbatches, if any are found, whose smallest-memory plan is within the limit:
    more of them never hold more."""
    if request.options.microbatches_if_needed:
        return
    counts = [n for n in possible_counts(request.graph) if n > request.microbatches]

    def within_the_limit(count: int) -> Candidate | None:
        found = _smallest_memory(replace(request, microbatches=count), say)
        return found if found and _peak(found) <= request.memory_limit_bytes else None

    for few in (counts[:FEW_COUNTS], counts[FEW_COUNTS:]):
        found = fewest(few, within_the_limit)
        if found is not None:
            yield f"--microbatches {found[0]} ({format_bytes(_peak(found[1]))})"
            return


def fewest(
    counts: Sequence[int], attempt: Callable[[int], _Answer | None]
) -> tuple[int, _Answer] | None:
    """The first of `counts`, ascending, for which an attempt finds something, with that; None if
    not even the last does. What one does, all larger ones do."""
    found: tuple[int, _Answer] | None = None
    while counts:
        middle = len(counts) - 1 if found is None else len(counts) // 2
        here = attempt(counts[middle])
        if here is not None:
            found, counts = (counts[middle], here), counts[:middle]
        elif found is None:
            return None
        else:
            counts = counts[middle + 1 :]
    return found


def _looked_for(graph_request: GraphRequest) -> str:
    """What nobody asked for and was looked for before there is this error."""
    options, found = graph_request.options, list[str]()
    if options.microbatches_if_needed and len(possible_counts(graph_request.graph)) > 1:
        found.append("microbatches")
    if (
        options.stages_if_needed
        and trains(graph_request.graph)
        and graph_request.cluster.num_devices > 1
    ):
        found.append("stages")
    return f". Looked for as well: {' and '.join(found)}, and none fit" if found else ""


def _smaller_batch(request: PlanRequest, estimates: StageEstimates, say: Say) -> Iterator[str]:
    """The largest batch, if any is found, whose smallest-memory plan is within the limit: a part of
    this one."""
    memory, limit = estimates.memory, request.memory_limit_bytes
    shrinks = memory.saved + memory.transient
    room = limit - (memory.total - shrinks)
    if room <= 0:
        return
    times = 1 << max(1, ceil(log2(shrinks / room)))
    for factor in (times << k for k in range(_TRIES)):
        graph = with_smaller_batch(request.graph, factor)
        if graph is None:
            return
        found = _smallest_memory(replace(request, graph=graph), say)
        if found is not None and _peak(found) <= limit:
            before, after = (_batch(each) for each in (request.graph, graph))
            yield f"a batch of {after} instead of {before} ({format_bytes(_peak(found))})"
            return


def with_smaller_batch(graph: Graph, factor: int) -> Graph | None:
    """The graph of a batch that is smaller by `factor`; None if the batch is not known, or would be
    a single sample or a part of one. Arguments of ops still speak of the batch as it was."""
    batch = batch_atoms(graph)
    sizes = [graph.atoms[k].size for k in batch]
    if not sizes or any(size % factor or size == factor for size in sizes):
        return None
    atoms = tuple(
        replace(atom, size=atom.size // factor) if k in batch else atom
        for k, atom in enumerate(graph.atoms)
    )

    def smaller(tensor: TensorType) -> TensorType:
        shape = tuple(prod(atoms[k].size for k in parts) for parts in tensor.parts)
        return replace(tensor, shape=shape)

    nodes = tuple(replace(node, outputs=tuple(map(smaller, node.outputs))) for node in graph.nodes)
    return replace(graph, nodes=nodes, atoms=atoms)


def _batch(graph: Graph) -> int:
    batch = batch_atoms(graph)
    types = (node.outputs[0] for node in graph.with_role(Role.INPUT))
    return next(t.shape[0] for t in types if t.parts and batch & {*t.parts[0]})


def _at_least(num_bytes: int) -> str:
    """A size that is not below `num_bytes`, as it is written."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 10**5:
            return f"{num_bytes}{unit}"
        num_bytes = -(-num_bytes // 1024)
    return f"{num_bytes}GiB"
