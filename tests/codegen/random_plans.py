"""Random plans that fit a graph: any sharding that the rules allow anywhere, with the shortest
routes. They prove rules and code generation together, where an optimal plan would only ever show
the few shardings that pay."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from autopar.cost_model.limits import Limits
from autopar.cost_model.space import NodeClass, classes
from autopar.ir.graph import Graph, Phase, Role, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.passes.loss_chunks import in_loss_chunks
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.stages import in_two_parts
from autopar.ir.redistribute import is_legal, placements, step
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group, groups, is_saved, requirement, root_key
from autopar.plans.estimates import Memory, StageEstimates, of_one_stage
from autopar.plans.plan import SCHEMA_VERSION, Plan
from autopar.plans.provenance import Provenance
from autopar.plans.structure import MeshAxis, Param, Stage, Structure
from tests.redone import redecided
from tests.report.plans import NO_STEP

Space = tuple[tuple[Group, ...], dict[str, NodeClass]]

REPLICATED_WEIGHT = 0.1
"""How likely replication is, where there is another choice."""


def random_plan(
    graph: Graph,
    mesh: Mesh,
    seed: int,
    pins: Mapping[str, str] | None = None,
    microbatches: int = 1,
    hosted: Collection[str] = (),
    loss_chunks: int = 1,
    *,
    is_split: bool = False,
) -> Plan:
    """A plan for `graph` on `mesh`: every choice drawn at random, the same for the same seed. Nodes
    whose key matches a pattern of `pins` have its choice instead. The parameters `hosted` live on
    the host. Backward comes in two parts if it `is_split`."""
    step = in_loss_chunks(in_microbatches(graph, microbatches), loss_chunks)
    if is_split:
        step = in_two_parts(step)
    draw = _Draw(step, mesh, seed, frozenset(hosted))
    for pattern, label in (pins or {}).items():
        draw.pin(pattern, label)
    return draw.plan(loss_chunks)


SAVED_ELSEWHERE = 0.5
"""How likely an activation is saved in another state than its op leaves it in."""


_SPACES: dict[tuple[int, tuple[int, ...], frozenset[str]], tuple[Graph, Space]] = {}


def _space(graph: Graph, mesh: Mesh, hosted: frozenset[str]) -> Space:
    """The groups and classes of `graph`, worked out once for all plans on meshes of one shape."""
    key = id(graph), mesh.sizes, hosted
    if key not in _SPACES:
        found = groups(graph)
        counts = Counter(n.key for n in graph.with_role(Role.PARAM) if n.target in hosted)
        on_host = {key: (count,) for key, count in counts.items()}
        _SPACES[key] = graph, (found, classes(graph, mesh, found, Limits(graph, mesh), on_host))
    return _SPACES[key][1]


def _labels(entry: NodeClass) -> list[str]:
    return [str(choice) for choice in entry.choices]


class _Draw:
    def __init__(self, graph: Graph, mesh: Mesh, seed: int, hosted: frozenset[str]) -> None:
        self.graph, self.mesh, self.hosted = graph, mesh, hosted
        self.random = random.Random(seed)
        self.groups, self.classes = _space(graph, mesh, hosted)
        self.choice = {key: self._draw(e, _labels(e)) for key, e in self.classes.items()}
        self.saved: dict[str, Sharding] = {}

    def _draw(self, entry: NodeClass, labels: Iterable[str]) -> str:
        found = list(labels)
        idle = [label for label in found if set(label.split(",")) == {"-"}]
        others = [label for label in found if label not in idle]
        if idle and (not others or self.random.random() < REPLICATED_WEIGHT):
            return idle[0]
        return self.random.choice(others)

    def pin(self, pattern: str, label: str) -> None:
        found = [entry for key, entry in self.classes.items() if re.fullmatch(pattern, key)]
        assert found, f"{pattern} matches no node"
        for entry in found:
            assert label in _labels(entry), f"{entry.key} has no {label}: {_labels(entry)}"
            self.choice[entry.key] = label

    def plan(self, loss_chunks: int) -> Plan:
        self._repair()
        self._draw_saved()
        entries = self.classes.values()
        stage = Stage(
            axes=tuple(MeshAxis(a.name, a.size, a.bucket_bytes) for a in self.mesh),
            params={
                node.target: Param(
                    node.outputs[0].shape,
                    node.outputs[0].dtype,
                    *map(str, self._shardings(node.key)),
                    "cpu" if node.target in self.hosted else "cuda",
                )
                for node in self.graph.with_role(Role.PARAM)
            },
            ops={e.key: self.choice[e.key] for e in entries if e.node.role is Role.OP},
            outputs={e.key: self.choice[e.key] for e in entries if e.node.role is Role.DETACHED},
            routes=self._routes(),
            saved={key: str(state) for key, state in self.saved.items()},
            microbatches=self.graph.microbatches,
            loss_chunks=loss_chunks,
            is_split=self.graph.second_part is not None,
        )
        # What has two parts is a stage of a pipeline.
        read = Plan.from_bytes(as_plan(msgspec.structs.replace(stage, is_split=False)).to_bytes())
        return msgspec.structs.replace(read, structure=redecided(read.structure, stages=(stage,)))

    def _repair(self) -> None:
        """Nothing becomes partial on its way to a use: draw again, without partial inputs, what
        asks for that."""
        changed = True
        while changed:
            changed = False
            for group in self.groups:
                source = self._source(group)
                for use, state in zip(group.uses, self._asked(group), strict=False):
                    pairs = zip(source, state, strict=True)
                    if any(b.kind == "P" and a.kind != "P" for a, b in pairs):
                        entry = self.classes[self.graph.nodes[use.node].key]
                        plain = [x for x in _labels(entry) if "+" not in x]
                        self.choice[entry.key] = self._draw(entry, plain)
                        changed = True
                        break

    def _draw_saved(self) -> None:
        """Activations that cross are saved in any state without new partial sums that their op's
        can be brought into."""
        for group in self.groups:
            key = root_key(self.graph, group.root)
            if not is_saved(self.graph, group) or key in self.saved:
                continue
            alike = [g for g in self.groups if root_key(self.graph, g.root) == key]
            if all(g.crosses for g in alike) and self.random.random() < SAVED_ELSEWHERE:
                source = self._source(group)
                asked = {s for g in alike if g.phase is Phase.BACKWARD for s in self._asked(g)}
                if not any(state.has_partial for state in asked):
                    states = self._reached(self.graph.type_of(group.root), source)
                    self.saved[key] = self.random.choice(sorted((source, *states)))

    def _shardings(self, key: str) -> tuple[Sharding, ...]:
        entry = self.classes[key]
        return entry.outputs[_labels(entry).index(self.choice[key])]

    def _source(self, group: Group) -> Sharding:
        root = self.graph.nodes[group.root.node]
        if root.role is Role.PARAM:
            storage, kept = self._shardings(root.key)
            return kept if group.phase is Phase.BACKWARD else storage
        if is_saved(self.graph, group) and root_key(self.graph, group.root) in self.saved:
            return self.saved[root_key(self.graph, group.root)]
        return self._shardings(root.key)[group.root.output]

    def _asked(self, group: Group) -> list[Sharding]:
        found: list[Sharding] = []
        for use in group.uses:
            user = self.graph.nodes[use.node]
            if user.role is Role.GRAD:
                owner = next(n for n in self.graph.with_role(Role.PARAM) if n.target == user.target)
                wanted = self._shardings(owner.key)[0]
            else:
                entry = self.classes[user.key]
                wanted = entry.inputs[_labels(entry).index(self.choice[user.key])][use.arg]
            state = requirement(self.graph, use, wanted)
            assert state is not None
            found.append(state)
        root = self.graph.nodes[group.root.node]
        if root.role is Role.PARAM and group.phase is Phase.FORWARD:
            found.append(self._shardings(root.key)[1])
        elif group.crosses and group.phase is Phase.FORWARD:
            kept = self.saved.get(root_key(self.graph, group.root))
            found += [] if kept is None else [kept]
        return found

    def _routes(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, dict[str, None]] = {}
        for group in self.groups:
            tensor, source = self.graph.type_of(group.root), self._source(group)
            asked = self._asked(group)
            parents = self._reached(tensor, source, asked)
            moves = found.setdefault(group.key, {})
            for state in asked:
                while state != source:
                    moves[f"{parents[state]} -> {state}"] = None
                    state = parents[state]
        return {key: tuple(moves) for key, moves in found.items() if moves}

    def _reached(
        self, tensor: TensorType, source: Sharding, asked: Sequence[Sharding] | None = None
    ) -> Mapping[Sharding, Sharding]:
        """Each state that steps lead to from `source`, and the one before it on a shortest way; or
        as many as it takes to find those `asked`. Chunks are passed through only where something
        is asked for in them."""
        atoms, sizes = self.graph.atoms, self.mesh.sizes
        chunks = sorted({p for state in asked or () for p in state if p.kind == "C"})
        missing = None if asked is None else set(asked) - {source}
        parents: dict[Sharding, Sharding] = {}
        queue = deque([source])
        while queue and (missing is None or missing):
            state = queue.popleft()
            heads = [
                state.with_axis(axis, placement)
                for axis, size in enumerate(sizes)
                for placement in (*placements(tensor, atoms, size, partial=False), *chunks)
            ]
            self.random.shuffle(heads)
            for head in heads:
                new = head != source and head not in parents
                if (
                    new
                    and is_legal(tensor, atoms, head, sizes)
                    and step(tensor, atoms, state, head)
                ):
                    parents[head] = state
                    queue.append(head)
                    if missing is not None:
                        missing.discard(head)
        return parents


def as_plan(stage: Stage) -> Plan:
    """A plan of these decisions, with no figures, read back from its file."""
    none = dict.fromkeys(
        ("step_ns", "compute_ns", "communication_ns", "optimizer_ns", "flops", "memory_limit"), 0
    )
    figures = StageEstimates(
        **none, memory=Memory(0, 0, 0, 0, 0, 0), collectives=(), ops={}, **NO_STEP
    )
    plan = Plan(
        SCHEMA_VERSION,
        Structure("", "", "", "sgd", (), (stage,)),
        of_one_stage(figures),
        Provenance("", "", "", "", 0, 0, 0),
    )
    return Plan.from_bytes(plan.to_bytes())
