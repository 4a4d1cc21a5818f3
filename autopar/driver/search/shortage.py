"""Where no plan is within the memory limit: what is missing, and the smallest-memory plan.

Everything is tried out. The smallest-memory plan on the mesh, on more devices, and of a smaller
batch is one small problem each, with the choices of least memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from autopar.plans.requests.options import AUTO
from autopar.plans.requests.request import GraphRequest, PlanRequest
from autopar.report.costs import HOLDER_TITLES
from autopar.report.names import tensor_name
from autopar.solver.memory import total_usages


def smallest_memory(request: PlanRequest, say: Say, stated: Problem | None = None) -> Candidate:
    """The best of the plans that hold least when forward ends, whatever their peak. If those are
    over their share of the host's memory, the best of plans with nothing on the host. `stated` is
    the problem with open recompute, if there is one already. InfeasibleError if constraints, or the
    host, leave no plan at all."""
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
    """`problem` with nothing on the host; itself if nothing might be there, or something has to
    be."""
    is_on_host = [np.array([_is_on_host(label) for label in labels]) for labels in problem.labels]
    if not any(map(np.any, is_on_host)) or any(map(np.all, is_on_host)):
        return problem
    pairs = zip(problem.costs, is_on_host, strict=True)
    costs = tuple(np.where(on_host, FORBIDDEN, cost) for cost, on_host in pairs)
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
    """The costs of a node, with every choice but those of least memory forbidden. What only copies
    read is saved, since nothing could be recomputed without it."""
    is_copy = any(isinstance(label, Choice) for label in labels)
    is_open = (costs < FORBIDDEN) & np.array([is_copy or label != Saved() for label in labels])
    return np.where(is_open & (sizes == sizes[is_open].min(initial=FORBIDDEN)), costs, FORBIDDEN)


_Answer = TypeVar("_Answer")

_TRIES = 3
"""How many numbers of devices, and batches, are tried: the memory that is needed is known to a
factor."""
FEW_COUNTS = 6
"""How many numbers of microbatches, up to 64, are tried before larger ones, which are slow to
simulate."""
_MAX_DEVICES = 1 << 20
_NAMED = 3


def explain_shortage(
    graph_request: GraphRequest, request: PlanRequest, why: InfeasibleError, say: Say
) -> str:
    """Why there is no plan for `request`, which is `graph_request` on a mesh. The text says how
    much of the device's memory, or of the host's share, the smallest-memory plan lacks, and what
    would do. It is that of `why` if memory is not missing."""
    say("looking for what would do")
    limit, share = request.memory_limit_bytes, request.host_memory_bytes
    roomy = _smallest_memory(request.within(limit, BOUNDLESS_BYTES), say)
    if roomy is None:
        return str(why)
    smallest = roomy if _on_host(roomy) <= share else _smallest_memory(request, say)
    if smallest is not None and _peak(smallest) <= limit:
        return str(why)
    peak = limit if smallest is None else _peak(smallest)
    remedies = (
        *([f"--memory-limit {_at_least(peak)}"] if smallest is not None else ()),
        *_more_host_memory(request, say),
        *_first_within(_on_more_devices(graph_request, request, peak), say),
        *_with_residency(request, say),
        *_microbatches(request, say),
        *_first_within(_in_smaller_batches(request, (smallest or roomy).estimates), say),
    )
    missing = _missing(peak, "", "the memory limit", limit)
    if smallest is None:
        missing = _missing(_on_host(roomy), " in its host's memory", "its share", share)
    return (
        f"mesh {request.mesh or 'of one device'}: the smallest-memory plan found {missing}. It "
        f"holds {_holders((smallest or roomy).estimates)}. "
        f"What would do: {'; '.join(remedies)}{_looked_for(graph_request)}"
    )


def _missing(held: int, where: str, limit_is: str, limit: int) -> str:
    return (
        f"peaks at {format_bytes(held)} per device{where} where {limit_is} is "
        f"{format_bytes(limit)}: {format_bytes(held - limit)} is missing"
    )


def _smallest_memory(request: PlanRequest, say: Say) -> Candidate | None:
    """The smallest-memory plan; None if the mesh has no plan at all, or none is found in time."""
    try:
        return smallest_memory(in_chunks(request), say)
    except AutoparError:
        return None


def _peak(candidate: Candidate) -> int:
    return candidate.estimates.memory.total


def _on_host(candidate: Candidate) -> int:
    return candidate.estimates.host_bytes


def _more_host_memory(request: PlanRequest, say: Say) -> Iterator[str]:
    """The host memory of a node that the best plan within the device's memory needs, if the host's
    memory is too small."""
    opened = in_chunks(request).opened()
    most = sum(int(amounts.max()) for amounts in host_row(opened, price(opened), 0).values())
    if most <= request.host_memory_bytes:
        return
    try:
        best = best_on(in_chunks(request).within(request.memory_limit_bytes, BOUNDLESS_BYTES), say)
    except (InfeasibleError, SolverError):
        return
    of_node = _on_host(best) * request.cluster.devices_of_node
    yield f"--memory-host {_at_least(of_node)} ({format_bytes(_on_host(best))} per device)"


def _holders(estimates: StageEstimates) -> str:
    """What holds the peak, with the largest of activations and of temporaries."""
    parts: list[str] = []
    for holder, title in HOLDER_TITLES.items():
        size = getattr(estimates.memory, holder)
        largest = [h for h in estimates.peak_holders if h.holder == holder][:_NAMED]
        each = (f"{tensor_name(estimates, h.key)} {format_bytes(h.num_bytes)}" for h in largest)
        named = f" ({', '.join(each)})" if largest else ""
        parts += [f"{title} {format_bytes(size)}{named}"] if size else []
    return ", ".join(parts)


def _within_limit(request: PlanRequest, say: Say) -> Candidate | None:
    """The smallest-memory plan, if it is within the memory limit."""
    smallest = _smallest_memory(request, say)
    is_within = smallest is not None and _peak(smallest) <= request.memory_limit_bytes
    return smallest if is_within else None


def _first_within(remedies: Iterable[tuple[PlanRequest, str]], say: Say) -> Iterator[str]:
    """The first of `remedies`, if any, whose smallest-memory plan is within the memory limit: its
    text, with the peak of that plan."""
    for request, text in remedies:
        smallest = _within_limit(request, say)
        if smallest is not None:
            yield f"{text}{format_bytes(_peak(smallest))})"
            return


def _factors(times: float) -> Iterator[int]:
    """Powers of two from `times` on, at least 2."""
    least = 1 << max(1, ceil(log2(times)))
    return (least << k for k in range(_TRIES))


def _on_more_devices(
    graph_request: GraphRequest, request: PlanRequest, peak: int
) -> Iterator[tuple[PlanRequest, str]]:
    """Requests on more devices, the fewest first: the slowest axis of the mesh is made longer by a
    power of two."""
    for factor in _factors(peak / request.memory_limit_bytes):
        devices = request.cluster.num_devices * factor
        if devices > _MAX_DEVICES:
            return
        more = _on_more(graph_request, request, factor)
        yield more, f"{devices} of these devices (mesh {more.mesh}: "


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


_BACKENDS = "in process groups of cpu:gloo,cuda:nccl"
"""Norms of gradients on hosts are collectives there."""


def _with_residency(request: PlanRequest, say: Say) -> Iterator[str]:
    """Parameters on the host, if the smallest-memory plan is within the limit then."""
    options = request.options
    if options.residency == "cuda" and options.params_on_host is None:
        auto = replace(request, options=replace(options, residency="auto"))
        smallest = _within_limit(auto, say)
        if smallest is not None and _on_host(smallest) > 0:
            backends = "" if request.cluster.num_devices == 1 else f", {_BACKENDS}"
            yield f"--memory-residency auto ({format_bytes(_peak(smallest))}{backends})"


def _microbatches(request: PlanRequest, say: Say) -> Iterator[str]:
    """The fewest microbatches, if any, whose smallest-memory plan is within the limit: more of them
    never hold more."""
    if request.options.microbatches is None:
        return
    possible = possible_counts(request.graph, request.cluster.num_devices)
    counts = [n for n in possible if n > request.microbatches]
    for some in (counts[:FEW_COUNTS], counts[FEW_COUNTS:]):
        fit = fewest(some, lambda n: _within_limit(replace(request, microbatches=n), say))
        if fit is not None:
            count, smallest = fit
            yield f"--microbatches {count} ({format_bytes(_peak(smallest))})"
            return


def fewest(
    counts: Sequence[int], attempt: Callable[[int], _Answer | None]
) -> tuple[int, _Answer] | None:
    """The first of `counts`, ascending, for which `attempt` has a result, with that. None if not
    even the last has one. If a count has a result, so have all larger ones."""
    fit: tuple[int, _Answer] | None = None
    while counts:
        middle = len(counts) - 1 if fit is None else len(counts) // 2
        here = attempt(counts[middle])
        if here is not None:
            fit, counts = (counts[middle], here), counts[:middle]
        elif fit is None:
            return None
        else:
            counts = counts[middle + 1 :]
    return fit


def _looked_for(graph_request: GraphRequest) -> str:
    """What the search has tried by itself before this error."""
    options, tried = graph_request.options, list[str]()
    graph, devices = graph_request.graph, graph_request.cluster.num_devices
    if options.microbatches is None and len([*possible_counts(graph, devices)]) > 1:
        tried.append("microbatches")
    if (
        options.stages_if_needed
        and trains(graph_request.graph)
        and graph_request.cluster.num_devices > 1
    ):
        tried.append("stages")
    if options.residency_if_needed and options.residency == AUTO:
        tried.append("parameters on the host")
    *some, last = tried or [""]
    text = f"{', '.join(some)} and {last}" if some else last
    return f". Looked for as well: {text}, and none fit" if tried else ""


def _in_smaller_batches(
    request: PlanRequest, estimates: StageEstimates
) -> Iterator[tuple[PlanRequest, str]]:
    """Requests for a power of two of this batch, the largest first, from the one on for which there
    may be room."""
    memory = estimates.memory
    shrinks = memory.saved + memory.transient
    room = request.memory_limit_bytes - (memory.total - shrinks)
    if room <= 0:
        return
    for factor in _factors(shrinks / room):
        graph = with_smaller_batch(request.graph, factor)
        if graph is None:
            return
        before, after = _batch(request.graph), _batch(graph)
        yield replace(request, graph=graph), f"a batch of {after} instead of {before} ("


def with_smaller_batch(graph: Graph, factor: int) -> Graph | None:
    """The graph with a batch that is smaller by `factor`. None if the batch is not known, or would
    be a single sample or less. Arguments of ops are those of the whole batch still."""
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
    """A size in text that is not below `num_bytes`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 10**5:
            return f"{num_bytes}{unit}"
        num_bytes = -(-num_bytes // 1024)
    return f"{num_bytes}GiB"
