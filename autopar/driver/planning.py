"""The request for a call of a model, and the plan that answers it."""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.cluster import parsing
from autopar.cluster.measured import measured_on
from autopar.cluster.profile import Profile
from autopar.compile import ModelCall, Say
from autopar.driver.search.finding import Finding
from autopar.driver.search.incumbent import Stopped, Trail
from autopar.driver.search.margin import find_margin
from autopar.driver.search.open_counts import possible_counts
from autopar.driver.search.shortage import FEW_COUNTS, fewest
from autopar.driver.search.stages_if_needed import best_of_all
from autopar.errors import (
    ArgumentError,
    AutoparError,
    ConstraintError,
    InfeasibleError,
    InterruptedSearchWarning,
)
from autopar.ir.fingerprint import fingerprint
from autopar.ir.mesh import Cluster
from autopar.ir.units import format_ns
from autopar.plans.compatibility import check_fit, undivided_batch
from autopar.plans.plan import Plan
from autopar.plans.provenance import INTERRUPTED, LIMITED
from autopar.plans.requests.matching import matches, unmatched
from autopar.plans.requests.options import AUTO, Options
from autopar.plans.requests.request import GraphRequest, make_graph_request
from autopar.plans.structure import Structure
from autopar.runtime.module.building import split_inputs
from autopar.runtime.torch_private import flatten
from autopar.tracer import OutputFilter, Traced, only_losses


def aliases(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """{"input:0": "input_ids"}, of a call of `model`: the argument of each leaf, with the leaf's
    number if the argument holds several."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    arguments: dict[str, str] = {}
    position = 0
    for key, value in [*enumerate(args), *kwargs.items()]:
        name = names[key] if isinstance(key, int) and key < len(names) else str(key)
        leaves = len(flatten(value)[0])
        for k in range(leaves):
            arguments[f"input:{position}"] = name if leaves == 1 else f"{name}.{k}"
            position += 1
    return arguments


def call_on(
    model: nn.Module, inputs: Any, options: Options, selects: OutputFilter = only_losses
) -> ModelCall:
    """A call of `model` on `inputs`: a tensor, a tuple of arguments or a mapping of keyword
    arguments."""
    return ModelCall(model, *split_inputs(inputs), options, selects)


def make_call_request(call: ModelCall, traced: Traced, cluster: Cluster) -> GraphRequest:
    """The request for a call. The user's options may name inputs and outputs as the call does."""
    known = aliases(call.model, call.args, call.kwargs)
    known |= {f"output:{i}": leaf.name for i, leaf in enumerate(traced.outputs)}
    return make_graph_request(traced.graph, cluster, call.options, known)


def answer(graph_request: GraphRequest, say: Say, *, stops: bool = False) -> Plan:
    """The best plan, with its margin if that is an option, and the outcomes of other candidates.
    InfeasibleError if none fits in memory, with what may help. A search that came to its limit of
    work has no margin.

    With `stops`, Ctrl-C ends the search with the best plan so far, if there is one, and an
    InterruptedSearchWarning."""
    search = graph_request.options.given.search
    trail = Trail(say, stops=stops, work_limit_s=search.work_limit)
    try:
        finding = best_of_all(graph_request, trail)
    except Stopped:
        raise KeyboardInterrupt from None
    except InfeasibleError as error:
        more = Trail(say, stops=stops)
        hint = undivided_batch(graph_request.graph, graph_request.cluster.num_devices)
        raise InfeasibleError(f"{error}{_more_microbatches(graph_request, more)}{hint}") from error
    margin = None
    if trail.is_stopped and not trail.is_limited:
        finding = replace(finding, bound_ns=0)
    elif search.margin and not trail.is_stopped:
        try:
            trail.go_on("plans of another structure")
            margin = find_margin(finding, trail)
        except (Stopped, KeyboardInterrupt) as error:
            if not trail.is_ended_by(error):
                raise
    if trail.is_limited:
        finding, margin = replace(finding, status=LIMITED), None
    elif trail.is_stopped:
        warnings.warn(InterruptedSearchWarning(_INTERRUPTED), stacklevel=2)
        finding, margin = replace(finding, status=INTERRUPTED), None
    return finding.plan(margin, trail.outcomes)


_INTERRUPTED = (
    "the search was interrupted: this is the best plan so far, and another one may be better; "
    "the same command without Ctrl-C looks at the rest"
)


def _more_microbatches(graph_request: GraphRequest, trail: Trail) -> str:
    """The fewest microbatches, if any, in which the requested stages fit."""
    options = graph_request.options
    if not options.is_staged or options.microbatches is None or options.actions is not None:
        return ""

    def planned_in(count: int) -> Finding | None:
        residency = AUTO if options.residency_if_needed else options.residency
        changed = replace(options, microbatches=count, residency=residency)
        try:
            return best_of_all(replace(graph_request, options=changed), trail)
        except (AutoparError, Stopped) as error:
            trail(f"{error}")
            return None

    trail("looking for microbatches that would do")
    possible = possible_counts(graph_request.graph, graph_request.cluster.num_devices)
    more = [n for n in possible if n > options.microbatches]
    first_fit = fewest(more[:FEW_COUNTS], planned_in)
    if first_fit is None:
        return ""
    count, best = first_fit
    return f". What would do: --microbatches {count} (a step of {format_ns(best.step_ns)})"


def planned_gradients(structure: Structure) -> OutputFilter:
    """Selects the outputs that have gradients in the graph of a plan: those that it does not return
    detached."""
    outputs = (key for each in structure.stages for key in each.outputs)
    detached = {int(key.partition(":")[2].partition("~")[0]) for key in outputs}
    return lambda position, _name: position not in detached


def checked_plan(plan: Plan, traced: Traced) -> Plan:
    """`plan`. PlanMismatchError, with the difference, if it is for another graph."""
    check_fit(plan.structure, traced.graph, fingerprint(traced.graph))
    return plan


def check_outputs(traced: Traced, options: Options) -> None:
    """ConstraintError, with close names, if a named output does not exist. ArgumentError if one is
    to have a gradient and to be left out."""
    for i, leaf in enumerate(traced.outputs):
        if options.wants_gradient(i, leaf.name) and options.leaves_out(i, leaf.name):
            raise ArgumentError(
                f"output {leaf.name} is among outputs.unread, which are None, and among "
                "outputs.differentiable, which backward goes through: name it in one of them"
            )
    names = [leaf.name for leaf in traced.outputs if leaf.item is not None]
    positions = [str(i) for i, leaf in enumerate(traced.outputs) if leaf.item is not None]
    left_out = [(leaf.name, str(i)) for i, leaf in enumerate(traced.outputs) if leaf.is_left_out]
    known = [*names, *positions]
    requested = [("outputs.differentiable", p, known) for p in options.given.outputs.differentiable]
    known = [*known, *(name for pair in left_out for name in pair)]
    requested += [("outputs.unread", p, known) for p in options.given.outputs.unread]
    for option, pattern, there in requested:
        if not any(matches(pattern, name) for name in there):
            raise ConstraintError(f"{option}: {unmatched(traced.graph.name, pattern, names)}")


def describe_cluster(
    cluster: Cluster | str, profile: Profile | str | os.PathLike[str] | None
) -> Cluster:
    """The cluster, with measured figures of the profile in place of presets."""
    parsed = parsing.parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if profile is None:
        return parsing.checked(parsed, f"cluster {parsed.name}")
    measured = profile if isinstance(profile, Profile) else Profile.load(profile)
    return parsing.checked(measured_on(parsed, measured), f"cluster {parsed.name} with its profile")
