"""Memory at peak candidates of a step, as rows of the problem.

Memory peaks during some op, of which the inputs and outputs are in memory beside all that is saved
before it. `PeakRows` states a lower bound of that memory, as a sum over decisions:

* parameters, gradients, optimizer states, and what is added up or put together from microbatches,
  all the time; the unsharded copy of a parameter, between its last use in forward and its first in
  backward;
* activations saved on the device, from their last use in forward to their first in backward;
* the output of an op, in the sharding the op makes it in, until its first use, unless it is
  partial;
* during the op itself, its inputs in the shardings it needs, its outputs, and its scratch memory;
* inputs of the step, and outputs of the step that are not read again;
* a shard, cut on every axis, of gradients and of tensors that are used both before and after.

Messages in flight are left out, and tensors in several shardings at once: the simulated step holds
no less at that op, whatever the decisions. Host memory is a row of its own (`host_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from autopar.cost_model.event_prices import GIVEN_ROLES
from autopar.cost_model.host_memory import host_row
from autopar.cost_model.lives import InFlight, Life, gradients, lives, results_in_order
from autopar.cost_model.offloads import ParamsOnHost
from autopar.cost_model.optimizer import ParamMemory
from autopar.cost_model.saved import Rounding, decision_key
from autopar.ir.casts import casts_of
from autopar.ir.choices import Choice, ParamChoice, Saved, shardings
from autopar.ir.graph import Node, Phase, Ref, Role
from autopar.ir.own_ops import RESTORE, is_optional, is_result
from autopar.ir.peak_candidates import ON_HOST, PeakCandidate, node_at
from autopar.ir.problem import IntArray, Label, Problem, Usage
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import SAVED, requirement, root_key, root_of
from autopar.plans.requests.request import PlanRequest
from autopar.rules.work import scratch_bytes


class PeakRows:
    """Adds rows to problems of a request. Problems of the same choices share them."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._rows: _Rows | None = None
        self._known: dict[PeakCandidate, dict[int, IntArray]] = {}

    def __call__(self, problem: Problem, asides: Mapping[PeakCandidate, int]) -> Problem:
        """`problem` with a row for each peak candidate of `asides`, behind the rows it has (the
        first is for the end of forward). The values of `asides` are bytes that are added to the
        row."""
        if not asides:
            return problem
        first = max(usage.stop for usages in problem.usages for usage in usages)
        held, limits = list[dict[int, IntArray]](), dict(problem.other_limits)
        for candidate, aside in asides.items():
            if candidate == ON_HOST:
                limits[first + len(held)] = self._request.host_memory_bytes
                held.append(host_row(self._request, problem, aside))
            else:
                held.append(self._row(problem, candidate, aside))
        return replace(
            problem,
            usages=tuple(
                usages
                + tuple(
                    Usage(time, time + 1, amounts[node])
                    for time, amounts in enumerate(held, first)
                    if node in amounts
                )
                for node, usages in enumerate(problem.usages)
            ),
            other_limits=limits,
        )

    def _row(self, problem: Problem, candidate: PeakCandidate, aside: int) -> dict[int, IntArray]:
        if self._rows is None or self._rows.stated.labels is not problem.labels:
            self._rows, self._known = _Rows(self._request, problem), {}
        place = node_at(self._request.step, candidate)
        if candidate not in self._known:
            row, others = self._rows.at(place), self._rows.others
            self._known[candidate] = row | {n: row.get(n, 0) + more for n, more in others.items()}
        row, number = self._known[candidate], self._rows.number_of(place)
        return {**row, number: row[number] + aside}


class _Rows:
    """Makes the rows for peak candidates of `problem`."""

    def __init__(self, request: PlanRequest, problem: Problem) -> None:
        graph, self.sizes, self.stated = request.step, request.mesh.sizes, problem
        self.graph = graph
        self.param_memory = ParamMemory(request)
        self.labels = dict(zip(problem.keys, problem.labels, strict=True))
        self.number = {key: i for i, key in enumerate(problem.keys)}
        self.results = [*filter(is_result, graph.nodes)]
        makers = (
            (each, root_of(graph, each[0].inputs[0])[0].node) for each in results_in_order(graph)
        )
        self.returned = [each for each, maker in makers if not is_result(graph.nodes[maker])]
        self.casts = casts_of(graph).copies
        self.offloaded = frozenset(request.offloaded)
        self.rounding = Rounding(request)
        self.residency = ParamsOnHost(request)
        self.lives = lives(graph)
        self.by_name = {n.name: n.index for n in graph.nodes if n.phase is Phase.FORWARD}
        self.last = {
            life.group.root: max(life.last, life.group.root.node)
            for life in self.lives
            if life.group.phase is Phase.FORWARD
        }
        """The last op of forward that reads a tensor, or that makes it."""
        self._known: dict[tuple[object, ...], IntArray] = {}
        self._row: dict[int, IntArray] = {}
        self.others = self._in_flight(problem, InFlight(request))
        """Bytes that other microbatches hold, per node of the problem and choice."""

    def number_of(self, place: int) -> int:
        """The node of the problem that decides on the op at `place`."""
        return self.number[decision_key(self.graph.nodes[place])]

    def at(self, place: int) -> dict[int, IntArray]:
        """Bytes per node of the problem and choice while the op at `place` is computed."""
        self._row = {}
        graph, node = self.graph, self.graph.nodes[place]
        for given in graph.with_role(*GIVEN_ROLES):
            self._add(given, self._output_bytes(given, 0))
        for param in graph.with_role(Role.PARAM):
            self._add(param, self._at_rest(param))
        for result in self.results:
            self._add(result, self._output_bytes(result, 0))
        for output in range(0 if is_result(node) else len(node.outputs)):
            self._add(node, self._output_bytes(node, output))
        self._add(node, self._scratch(node))
        for life in self.lives:
            root = graph.nodes[life.group.root.node]
            if is_result(root):
                continue
            if root.role is Role.PARAM:
                self._add_param(life, root, node)
            elif root.role is Role.OP and place in life.uses:
                self._add(node, self._read_bytes(life, node))
            elif root.role is Role.OP and is_optional(root):
                self._add_optional(life, root, node)
            elif root.role is Role.OP and life.start is None:
                self._add_saved(life, root, node)
            elif root.role is Role.OP and life.group.phase is node.phase:
                self._add_output(life, root, node)
        for output, last in self.returned:
            if last < place:
                self._add(output, self._returned(output))
        # Over microbatches, gradients are added up at once, and the sums count all the time.
        if node.phase is Phase.BACKWARD and graph.microbatches == 1:
            for params, gradient in gradients(graph):
                # If several parameters share a gradient, any of them may have it on the host.
                alone = len(params) == 1 or not any(map(self.residency.who, params))
                if gradient.node < place and alone:
                    self._add_gradient(params[0], gradient)
        return self._row

    def _in_flight(self, problem: Problem, known: InFlight) -> dict[int, IntArray]:
        if not any(known.others):
            return {}
        params = self.graph.with_role(Role.PARAM)
        at_rest = {decision_key(n) for n in (*params, *filter(is_result, self.graph.nodes))}
        row = {
            self.number[key]: known.amounts(key, self.labels[key], usages[0].amounts)
            for key, usages in zip(problem.keys, problem.usages, strict=True)
            if key not in at_rest
        }
        for param in params:
            node, copies = (
                self.number[param.key],
                known.others.backward * self._unsharded_bytes(param),
            )
            row[node] = row[node] + copies if node in row else copies
        return row

    def _add(self, node: Node, amounts: IntArray, key: str = "") -> None:
        number = self.number[key or decision_key(node)]
        self._row[number] = self._row[number] + amounts if number in self._row else amounts

    def _add_param(self, life: Life, param: Node, node: Node) -> None:
        """Adds the unsharded copy of a parameter, and the sharding in which the op `node` reads it:
        that may be the unsharded one, or the storage."""
        unsharded = self._unsharded_bytes(param)
        if not life.group.crosses or life.group.phase is Phase.FORWARD:
            is_unsharded = False
        elif node.phase is Phase.FORWARD:
            is_unsharded = node.index > self.last[life.group.root]
        else:
            # Casts of the parameter may come early.
            is_unsharded = node.index <= life.first and not any(
                use in self.casts for use in life.uses
            )
        if is_unsharded:
            self._add(param, unsharded)
        if node.index in life.uses:
            self._add(node, self._read_bytes(life, node))
            self._add(param, -self._output_bytes(param, 0) - (unsharded if is_unsharded else 0))

    def _add_optional(self, life: Life, copy: Node, node: Node) -> None:
        """Adds an output of an optional copy, if that is computed; else the saved original."""
        output, shard_bytes = life.group.root.output, self._shard_bytes(life.group.root)
        if node.phase is Phase.FORWARD:
            root = Ref(self.by_name[copy.name], output)
            if node.index > self.last.get(root, root.node):
                self._add(copy, self._saved(copy, output))
        elif node.index < life.first:
            # A copy is computed for the first op that reads it, which may come later than this one.
            self._add(copy, self._saved(copy, output))
        elif life.certain < node.index < life.last:
            self._add(copy, self._per_label(copy, ("piece", output), lambda _: shard_bytes))

    def _add_saved(self, life: Life, root: Node, node: Node) -> None:
        """Adds a saved activation while nothing reads it, and later a shard of it."""
        ref = life.group.root
        is_whole = (
            node.index > self.last.get(ref, ref.node)
            if node.phase is Phase.FORWARD
            else node.index < life.first
        )
        key = SAVED + root_key(self.graph, ref)
        if is_whole and root_key(self.graph, ref) in self.offloaded:
            return
        if is_whole and key in self.number:
            self._add(root, self._crossing(root, ref, key), key)
        elif is_whole:
            self._add(root, self._output_bytes(root, ref.output))
        elif node.phase is Phase.BACKWARD and node.index < life.last:
            self._add_shard(root, ref)

    def _add_output(self, life: Life, root: Node, node: Node) -> None:
        assert life.start is not None
        if root.index in self.casts or node.index <= life.start:
            return
        if root.op == RESTORE and node.index < life.certain:
            # The first op that is computed restores it, which may come later than this one.
            return
        if node.index < life.first:
            self._add(root, self._waiting(root, life.group.root.output))
        elif node.index < life.last:
            self._add_shard(root, life.group.root)

    def _add_gradient(self, param: Node, gradient: Ref) -> None:
        """Adds a shard of a gradient, unless it may be on the host already."""
        shard_bytes, residency = self._shard_bytes(gradient), self.residency

        def size(label: Label) -> int:
            assert isinstance(label, ParamChoice)
            return 0 if residency.is_on_host(param, label) else shard_bytes

        self._add(
            param, self._per_label(param, ("gradient", shard_bytes, residency.who(param)), size)
        )

    def _add_shard(self, root: Node, ref: Ref) -> None:
        self._add(
            root, np.full(len(self.labels[decision_key(root)]), self._shard_bytes(ref), np.int64)
        )

    def _shard_bytes(self, ref: Ref) -> int:
        return self.graph.type_of(ref).num_bytes // prod(self.sizes)

    def _at_rest(self, param: Node) -> IntArray:
        """Bytes of a parameter with its gradient and optimizer states, per choice."""

        def size(label: Label) -> int:
            assert isinstance(label, ParamChoice)
            if self.residency.is_elsewhere(param, label):
                return 0
            return self.param_memory.at_rest(param, label.storage)

        stepped = self.param_memory.optimizer(param)
        return self._per_label(param, ("at rest", stepped, self.residency.who(param)), size)

    def _output_bytes(self, node: Node, output: int) -> IntArray:
        """Bytes per choice of an output as the node makes it, or as a parameter is stored."""

        def size(label: Label) -> int:
            match label:
                case Choice():
                    state = shardings(node, label)[1][output]
                case ParamChoice():
                    if self.residency.is_elsewhere(node, label):
                        return 0
                    state = label.storage
                case Sharding():
                    state = label
                case _:
                    return 0
            return self._local(Ref(node.index, output), state)

        who = self.residency.who(node) if node.role is Role.PARAM else ""
        return self._per_label(node, ("made", output, who), size)

    def _waiting(self, node: Node, output: int) -> IntArray:
        """Bytes of an output before its first use: partial sums may be reduced to shards."""
        ref = Ref(node.index, output)

        def size(label: Label) -> int:
            if not isinstance(label, Choice):
                return 0
            state = shardings(node, label)[1][output]
            return self._shard_bytes(ref) if state.has_partial else self._local(ref, state)

        return self._per_label(node, ("waiting", output), size)

    def _saved(self, copy: Node, output: int) -> IntArray:
        ref = Ref(copy.index, output)

        def size(label: Label) -> int:
            if not isinstance(label, Saved) or not label.states or label.offloaded:
                return 0
            return self._saved_bytes(ref, label.states[output])

        return self._per_label(copy, ("saved", output), size)

    def _returned(self, output: Node) -> IntArray:
        """Bytes of an output of the graph, per choice."""

        def size(label: Label) -> int:
            assert isinstance(label, Sharding)
            return self._local(output.inputs[0], label)

        return self._per_label(output, ("returned",), size)

    def _unsharded_bytes(self, param: Node) -> IntArray:
        residency = self.residency

        def size(label: Label) -> int:
            assert isinstance(label, ParamChoice)
            is_copy = label.for_backward != label.storage or residency.stays(param, label)
            return self._local(Ref(param.index), label.for_backward) if is_copy else 0

        return self._per_label(param, ("kept", residency.who(param)), size)

    def _read_bytes(self, life: Life, user: Node) -> IntArray:
        """Bytes of a tensor in the sharding that an op reads it in, per choice of the op."""
        use, ref = life.uses[user.index], life.group.root
        views = tuple(self.graph.nodes[view].key for view in use.chain)

        def size(label: Label) -> int:
            if not isinstance(label, Choice):
                return 0
            state = requirement(self.graph, use, shardings(user, label)[0][use.arg])
            return 0 if state is None else self._local(ref, state)

        return self._per_label(user, (root_key(self.graph, ref), use.arg, views), size)

    def _scratch(self, node: Node) -> IntArray:
        def size(label: Label) -> int:
            if not isinstance(label, Choice):
                return 0
            return scratch_bytes(self.graph, node, label, self.sizes)

        return self._per_label(node, ("scratch",), size)

    def _per_label(
        self,
        node: Node,
        what: tuple[object, ...],
        size: Callable[[Label], int],
        decision: str = "",
    ) -> IntArray:
        """`size` of each choice of a node, or of another `decision`, cached by the node's key and
        `what`, which says what is measured."""
        if (node.key, *what) not in self._known:
            sizes = [size(label) for label in self.labels[decision or decision_key(node)]]
            self._known[node.key, *what] = np.array(sizes, np.int64)
        return self._known[node.key, *what]

    def _crossing(self, root: Node, ref: Ref, decision: str) -> IntArray:
        """Bytes of a tensor per choice of the decision on saving it."""

        def size(label: Label) -> int:
            return self._saved_bytes(ref, label) if isinstance(label, Sharding) else 0

        return self._per_label(root, ("crossing", ref.output), size, decision)

    def _saved_bytes(self, ref: Ref, state: Sharding) -> int:
        """Bytes of a saved tensor, in the dtype that it is saved in."""
        return local_bytes(self.rounding.saved_type(ref), self.graph.atoms, state, self.sizes)

    def _local(self, ref: Ref, state: Sharding) -> int:
        return local_bytes(self.graph.type_of(ref), self.graph.atoms, state, self.sizes)
