"""Why a plan is as it is: its problem solved anew with one thing changed.

A tensor's sharding is fixed and everything else may adapt. The problem is priced once, and its
relaxation continues from one basis for every alternative (`solver.sensitivity`). That settles most
alternatives in a fraction of a second. The others have a bound and are solved whole, those with the
lowest bounds first. All alternatives have the memory limit of the plan, without what its
temporaries need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import msgspec
import numpy as np
import numpy.typing as npt

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.compile import best_on
from autopar.cost_model.collectives import with_buckets
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.driver.search.finding import StageInStep
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.meshes import estimates_of, survey
from autopar.driver.search.pipelining import search_stages
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.choices import Choice, ParamChoice, shardings
from autopar.ir.graph import Graph, Node, Phase, Role
from autopar.ir.mesh import Axis, Cluster, Link, Mesh
from autopar.ir.problem import FORBIDDEN, Label, Problem, Solution, Status
from autopar.ir.units import format_bytes
from autopar.ir.uses import groups
from autopar.plans.explanation import Alternative, Benefit, Explanation
from autopar.plans.memory_refinement import Candidate
from autopar.plans.requests.matching import general
from autopar.plans.requests.request import GraphRequest
from autopar.solver.exact import MAX_CHOICES
from autopar.solver.search import silent
from autopar.solver.sensitivity import Sensitivity

GIB = 1 << 30
SOLVES = 4
"""How many alternatives of a tensor are solved whole by default."""

Allowed = Mapping[int, npt.NDArray[np.bool_]]
"""The choices that remain, for nodes of a problem that have fewer than before."""


@dataclass(frozen=True, slots=True)
class Explainer:
    """Answers about a stage of the best plan, or its only one; made by `make_explainer`."""

    place: StageInStep
    variations: Sensitivity | None
    """None for problems whose relaxation is too large to be solved at once."""

    @property
    def best(self) -> Candidate:
        """The plan of the stage."""
        return self.place.best

    @property
    def graph(self) -> Graph:
        """What is planned."""
        return self.best.request.step

    @property
    def cluster(self) -> Cluster:
        """The machines that it is planned for."""
        return self.place.step.graph_request.cluster

    def alternatives(self, name: str, solves: int = SOLVES) -> Explanation:
        """The step with every sharding that a tensor may have.

        `name` is one of these:

        - a parameter, as it is stored: "layers.3.mlp.up.weight", or "layers.*.mlp.up.weight" for
          equal blocks;
        - a module, for the output of its last op;
        - "input:0", as ops of the forward phase take that input;
        - the key of any decision, for its choices.

        Where the relaxation leaves a gap the alternative is solved whole, at most `solves` of them,
        those of the lowest bounds; others keep the gap. AutoparError if nothing has that name.
        """
        subject, table = self._find(name)
        known = {label: self._relaxed(label, allowed) for label, allowed in table.items()}
        for label in sorted(known, key=lambda label: (known[label].bound_ns, label)):
            if known[label].status is not Status.OPTIMAL and solves > 0:
                solves -= 1
                known[label] = self._solved(known[label], table[label])
        ordered = tuple(map(self._in_step, sorted(known.values(), key=_order)))
        before = self.place.step.objective_ns
        return Explanation(self.place.name + subject, self.best.mesh, before, ordered)

    def _in_step(self, alternative: Alternative) -> Alternative:
        """What the whole step takes with an alternative of the stage."""
        modelled_ns, bound_ns = alternative.modelled_ns, self.place.step_ns(alternative.bound_ns)
        if modelled_ns is not None:
            modelled_ns = self.place.step_ns(modelled_ns)
        return replace(alternative, modelled_ns=modelled_ns, bound_ns=bound_ns)

    def more_memory(self, more_bytes: int = GIB) -> Benefit:
        """What `more_bytes` beyond the memory limit of each device would save."""
        change = f"{format_bytes(more_bytes)} more memory per device"
        if len(self.place.step.stages) > 1:
            graph_request = self.place.step.graph_request
            limit = graph_request.memory_limit_bytes + more_bytes
            return self._replanned(
                change,
                replace(
                    graph_request, options=replace(graph_request.options, memory_limit_bytes=limit)
                ),
            )
        limit = self.best.request.memory_limit_bytes + more_bytes
        allowance = self.best.problem.usage_limit
        assert allowance is not None
        request = self.best.request
        if request != request.without_savings():
            # With more memory less is recomputed, offloaded, or on the host.
            after = best_on(self.best.request.within(limit), silent).solution
        else:
            after = self._fit(replace(self.best.problem, usage_limit=limit), limit)
        before = self.best.solution.objective
        return Benefit(
            change=change,
            before_ns=before,
            estimate_ns=(
                self.variations.bound_with_limit(allowance + more_bytes)
                if self.variations
                else None
            ),
            # The best plan so far fits as well.
            modelled_ns=min(before, after.objective),
            bound_ns=min(before, after.bound),
        )

    def faster_axis(self, name: str, times: float = 2.0) -> Benefit:
        """What a link `times` as fast under one mesh axis would save. AutoparError if the mesh has
        no such axis."""
        axes = self.best.mesh.axes
        if name not in self.best.mesh.names:
            raise AutoparError(_unknown("mesh axis", name, self.best.mesh.names))
        mesh = Mesh(tuple(_faster(axis, times) if axis.name == name else axis for axis in axes))
        return self._faster(f"{times:g} times the link of axis {name}", self.cluster, mesh)

    def faster_link(self, name: str, times: float = 2.0) -> Benefit:
        """What `times` the bandwidth of a link of the cluster, by name, would save. AutoparError if
        the cluster has no such link."""
        links = [level.link.name for level in self.cluster.levels]
        if name not in links:
            raise AutoparError(_unknown("link", name, links))
        levels = (
            replace(level, link=_sped_up(level.link, times)) if level.link.name == name else level
            for level in self.cluster.levels
        )
        cluster = replace(self.cluster, levels=tuple(levels))
        change = f"{times:g} times {name}"
        if len(self.place.step.stages) > 1:
            return self._replanned(change, replace(self.place.step.graph_request, cluster=cluster))
        mesh = with_buckets(parse_mesh(str(self.best.mesh), cluster), cluster.device)
        return self._faster(change, cluster, mesh)

    def _replanned(self, change: str, graph_request: GraphRequest) -> Benefit:
        """The step of all stages after a change, planned anew with the cuts that they have now."""
        step = self.place.step
        after = min(step.step_ns, search_stages(graph_request, Trail(silent)).step_ns)
        modelled_ns = max(0, step.objective_ns + after - step.step_ns)
        return Benefit(change, step.objective_ns, None, modelled_ns, 0)

    def _faster(self, change: str, cluster: Cluster, mesh: Mesh) -> Benefit:
        changed = replace(self.best.request, cluster=cluster, mesh=mesh)
        as_it_is = cost_breakdown(changed, self.best.structure).estimates.modelled_ns
        after = best_on(changed, silent).solution
        return Benefit(
            change=change,
            before_ns=self.best.solution.objective,
            estimate_ns=as_it_is,
            modelled_ns=min(as_it_is, after.objective),
            bound_ns=min(as_it_is, after.bound),
        )

    def _relaxed(self, label: str, allowed: Allowed) -> Alternative:
        """An alternative as the relaxation bounds it; the plan itself is known."""
        best = self.best.solution
        if all(left[best.choice[node]] for node, left in allowed.items()):
            return Alternative(label, True, best.objective, best.bound, best.status)
        variation = self.variations.with_only(allowed) if self.variations else None
        if not variation or not variation.solution or not self._fits(variation.solution):
            bound = best.bound if variation is None else variation.bound
            return Alternative(label, False, None, bound, Status.LIMIT)
        return Alternative(
            label, False, variation.solution.objective, variation.bound, variation.solution.status
        )

    def _solved(self, known: Alternative, allowed: Allowed) -> Alternative:
        """An alternative that is not settled yet, solved whole."""
        problem = restricted(self.best.problem, allowed)
        try:
            solution = self._fit(problem, self.best.request.memory_limit_bytes)
        except InfeasibleError:
            return replace(known, modelled_ns=None, status=Status.INFEASIBLE)
        bound = max(known.bound_ns, solution.bound)
        return replace(
            known, modelled_ns=solution.objective, bound_ns=bound, status=solution.status
        )

    def _fits(self, solution: Solution) -> bool:
        """Whether a plan is within the memory of the device, and its share of the host's."""
        held, best = estimates_of(self.best, solution), self.best
        most, share = best.request.memory_limit_bytes, best.request.host_memory_bytes
        return held.memory.total <= most and held.host_bytes <= share

    def _fit(self, problem: Problem, limit: int) -> Solution:
        return best_on(self.best.request.within(limit), silent, stated=problem).solution

    def _find(self, name: str) -> tuple[str, dict[str, Allowed]]:
        """The tensor or decision of a `name` in words, and the choices that remain for each
        alternative."""
        node = self._node(name)
        if node is not None and node.role is Role.INPUT:
            return f"input {node.target}, as it is used", self._uses(node)
        if node is not None and node.role is Role.OP:
            module = node.module or "(model)"
            number = self.best.problem.keys.index(node.key)
            labels = self.best.problem.labels[number]
            output_shardings = [shardings(node, c)[1][0] for c in labels if isinstance(c, Choice)]
            return f"{module}, as {node.op} makes it", _alike(number, output_shardings)
        key = node.key if node is not None else name
        if key not in self.best.problem.keys:
            targets = [n.target for n in self.graph.with_role(Role.PARAM)]
            modules = [n.module for n in self.graph.with_role(Role.OP)]
            known = dict.fromkeys(map(general, (*targets, *modules, *self.best.problem.keys)))
            raise AutoparError(_unknown("parameter, module, input or decision", name, list(known)))
        number = self.best.problem.keys.index(key)
        labels = self.best.problem.labels[number]
        if node is None:
            return f"decision {key}", _alike(number, labels)
        stored = [c.storage for c in labels if isinstance(c, ParamChoice)]
        return f"{node.target}, as it is stored", _alike(number, stored)

    def _node(self, name: str) -> Node | None:
        """The parameter, the input, or the last forward op of the module called `name`. Any of
        equal blocks, if `name` is a pattern or that block itself is not in the graph."""
        return self._named(name, lambda text: text) or self._named(general(name), general)

    def _named(self, name: str, as_called: Callable[[str], str]) -> Node | None:
        graph = self.graph
        held = [n for n in graph.with_role(Role.PARAM) if as_called(n.target) == name]
        held += [n for n in graph.with_role(Role.INPUT) if f"input:{n.target}" == name]
        if held:
            return held[0]
        ops = (n for n in graph.with_role(Role.OP) if n.phase is Phase.FORWARD and not n.view)
        inside = [n for n in ops if f"{as_called(n.module)}.".startswith(f"{name}.")]
        return inside[-1] if inside else None

    def _uses(self, node: Node) -> dict[str, Allowed]:
        """Per state of an input, the choices of the forward ops that take it so."""
        problem = self.best.problem
        mine = {g.key for g in groups(self.graph) if g.root.node == node.index}
        flows = [f for f in problem.flows if f.key in mine and f.key.endswith("@forward")]
        table: dict[str, dict[int, npt.NDArray[np.bool_]]] = {}
        for flow in flows:
            for number, state in enumerate(flow.states):
                left: dict[int, npt.NDArray[np.bool_]] = {}
                for sink in flow.sinks:
                    asks = sink.state == number
                    left[sink.node] = left.get(sink.node, np.ones_like(asks)) & asks
                if all(asks.any() for asks in left.values()):
                    table[state] = left
        return dict(table)


def make_explainer(graph_request: GraphRequest, stage: int = 0) -> Explainer:
    """An `Explainer` for a stage of the best plan. The options must name the mesh or the meshes,
    not "auto". What is imposed on the plan is imposed on the alternatives too.

    InfeasibleError if no plan fits; ClusterError if the mesh does not fit the cluster.
    """
    trail = Trail(silent)
    # All choices of its stages are tried, whatever policy the plan was found with.
    policy = msgspec.structs.replace(graph_request.options.policy, estimate_slack=0.0)
    graph_request = replace(graph_request, options=replace(graph_request.options, policy=policy))
    step = (
        search_stages(graph_request, trail)
        if graph_request.options.is_staged
        else survey(graph_request, trail)
    )
    place = StageInStep(step, stage)
    problem = place.best.problem
    is_small = sum(map(len, problem.costs)) <= MAX_CHOICES
    return Explainer(place, Sensitivity(problem) if is_small else None)


def restricted(problem: Problem, allowed: Allowed) -> Problem:
    """`problem` with the other choices of these nodes forbidden."""
    costs = list(problem.costs)
    for node, left in allowed.items():
        costs[node] = np.where(left, costs[node], FORBIDDEN)
    return replace(problem, costs=tuple(costs))


def _alike(node: int, states: Sequence[Label]) -> dict[str, Allowed]:
    """Per state, the choices of `node` that are in it."""
    names = np.array([str(state) for state in states])
    return {state: {node: names == state} for state in dict.fromkeys(names.tolist())}


def _faster(axis: Axis, times: float) -> Axis:
    inner = _sped_up(axis.inner, times) if axis.inner else None
    return replace(axis, link=_sped_up(axis.crossed, times), inner=inner)


def _sped_up(link: Link, times: float) -> Link:
    return replace(link, bytes_per_s=times * link.bytes_per_s)


def _order(alternative: Alternative) -> tuple[int, int, str]:
    kind = (alternative.modelled_ns is None) + (alternative.status is Status.INFEASIBLE)
    return kind, alternative.modelled_ns or alternative.bound_ns, alternative.sharding


def _unknown(what: str, name: str, known: list[str] | tuple[str, ...]) -> str:
    close = get_close_matches(name, known, n=3) or list(dict.fromkeys(known))[:10]
    return f"there is no {what} {name!r}: close to it are {', '.join(close)}"
