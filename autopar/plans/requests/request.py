"""All that decides a plan, and a short text that is equal only for equal ones."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.errors import LossChunksError, NotImposedWarning
from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.grouping import grouped
from autopar.ir.input_sharding import describe_inputs
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.offloading import can_be_on_host
from autopar.ir.passes.loss_chunks import SUITED
from autopar.ir.passes.losses import heads_of, other_losses
from autopar.ir.passes.microbatches import trains
from autopar.ir.passes.recompute import as_written
from autopar.ir.pipeline import Waiting
from autopar.ir.sharding import Sharding
from autopar.ir.units import exact_bytes
from autopar.plans.passes import StepForm, step_graph
from autopar.plans.requests.constraints import Constraint, MeshConstraint, on_mesh
from autopar.plans.requests.matching import general, matches, resolve_constraints
from autopar.plans.requests.options import STORED, Options
from autopar.plans.requests.strategies import expand_strategy, left_free

Narrowed = tuple[tuple[str, tuple[str, ...]], ...]
"""The labels that the choices of an op may have, by its key."""

_TIED = "weights as the stages that they are tied to store them"
"""The origin of constraints that nobody asked for."""

_DIGEST_BYTES = 20
_PACKAGES = ("torch", "highspy", "pulp", "numpy", "numba", "networkx", "msgspec")
"""What a plan passes through, beside autopar."""


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """A graph, and what is asked of a plan for it; `constraints` are those of `options`, speaking
    of what the graph has. Made by `make_graph_request`."""

    graph: Graph
    cluster: Cluster
    options: Options
    constraints: tuple[Constraint, ...] = ()
    in_flight: int = 1
    """Of how many microbatches a device holds what they have saved, at most at once."""
    others: tuple[Waiting, ...] = ()
    """Where backward comes in two parts, how many of them wait for each meanwhile
    (`PipelineSchedule.others`)."""
    narrowed: Narrowed = ()
    """As far as that is settled beside what is asked for."""
    tolerance: float = 0.0
    """By which part a plan may take longer than another."""
    known_on_host: tuple[tuple[str, bool], ...] = ()
    """Of some parameters whether they live on the host, which is settled by other parts of the
    model."""

    @property
    def memory_limit_bytes(self) -> int:
        """What each device may hold."""
        return self.options.memory_limit_bytes or self.cluster.device.memory_bytes

    def while_waiting(self, others: tuple[Waiting, ...], *, is_split: bool) -> GraphRequest:
        """The same of a stage that works on a microbatch while so many others wait, where backward
        comes in two parts if it `is_split`."""
        in_flight = 1 + max(each.backward for each in others)
        return replace(self, in_flight=in_flight, others=others if is_split else ())

    def of_part(
        self, graph: Graph, stored: Mapping[str, Sharding], known_on_host: Mapping[str, bool]
    ) -> GraphRequest:
        """The same of a part of the graph, of whose parameters alone constraints speak. Of some it
        is known from other parts how they are `stored`, or whether they are `known_on_host`."""
        params = [node for node in graph.with_role(Role.PARAM) if not node.external]
        own = {node.target for node in params}
        known = tuple((name, is_so) for name, is_so in known_on_host.items() if name in own)
        mine = tuple(
            each
            for each in self.constraints
            if each.kind != "param" or any(matches(each.pattern, name) for name in own)
        )
        here = replace(self, graph=graph, constraints=mine, known_on_host=known)
        if not stored:
            return here
        # What is planned as one is stored as one.
        by_key = {n.key: stored[n.target] for n in params if n.target in stored}
        pinned = {n.target: by_key[n.key] for n in params if n.key in by_key}
        alike = self.options.for_stored(self.options.mesh, pinned, _TIED)
        constraints = (*resolve_constraints(graph, alike.constraints), *mine)
        return replace(here, options=self.options.joined(alike), constraints=constraints)

    def standing_for(self, graph: Graph, mesh: Mesh) -> GraphRequest:
        """The same of segments, as `graph` has them, that stand on `mesh` for those of all stages,
        which may have meshes of their own: of shardings by position those of as many axes are
        wanted, and parameters that are planned as one as the first of them is stored."""
        fitting = [
            each
            for each in self.constraints
            if each.placement.positional is None or len(each.placement.positional) == len(mesh)
        ]
        keys = {node.target: node.key for node in graph.with_role(Role.PARAM)}
        first: dict[str, Constraint] = {}
        for each in fitting:
            if each.origin == STORED and each.pattern in keys:
                first.setdefault(keys[each.pattern], each)
        mine = (each for each in fitting if each.origin != STORED)
        alike = (replace(first[key], pattern=n) for n, key in keys.items() if key in first)
        return replace(self, graph=graph, constraints=(*mine, *alike))

    def on(self, mesh: Mesh) -> PlanRequest:
        """The same of a plan on `mesh`. UnsuitedMeshError if something that is asked for makes no
        sense there."""
        savings = self._savings()
        strategy = expand_strategy(self.options.strategy, self.graph, mesh)
        imposed = tuple(MeshConstraint(c, on_mesh(c, mesh)) for c in (*self.constraints, *strategy))
        return PlanRequest(
            **{each.name: getattr(self, each.name) for each in fields(GraphRequest)},
            **savings,
            mesh=mesh,
            imposed=imposed,
            microbatches=self.options.microbatches or 1
            if trains(self.graph)
            else self.graph.microbatches,
            loss_chunks=self.options.loss_chunks or 1 if heads_of(self.graph) else 1,
        )

    def _savings(self) -> dict[str, Any]:
        """What is asked for that saves memory, by the fields of `PlanRequest`."""
        graph, options = self.graph, self.options
        known = dict(self.known_on_host)
        free = _on_host(graph, options) - known.keys()
        hosted = free | {name for name, is_on_host in known.items() if is_on_host}
        again = as_written(graph) if options.given.memory.checkpoint == "as written" else ()
        return {"recompute": again, "offloaded": (), "params_on_host": hosted}

    def digest(self) -> str:
        """A hash of everything that decides the plan, down to the source of autopar and the
        versions of what it stands on: with any of them changed, there may be another plan."""
        return _digest(
            fingerprint(self.graph),
            self.graph.name,
            *describe_inputs(self.graph),
            repr(self.cluster),
            repr(self.options),
            repr(self.constraints),
            repr(self._savings()["recompute"]),
            *_versions(),
            source_digest(Path(__file__).parents[1]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(GraphRequest):
    """What is asked of a plan for a graph on `mesh`, which is laid over the cluster. `imposed` is
    all that constraints and strategy take away there. Made by `GraphRequest.on`."""

    mesh: Mesh
    imposed: tuple[MeshConstraint, ...]
    recompute: tuple[str, ...] | None = ()
    """The keys of ops that backward recomputes; None where that is to be decided."""
    offloaded: tuple[str, ...] = ()
    """The keys of activations that are offloaded."""
    microbatches: int = 1
    loss_chunks: int = 1
    params_on_host: frozenset[str] | None = frozenset()
    """The parameters that live on the host; None where that is to be decided."""

    @property
    def name(self) -> str:
        """What a candidate of the search is called."""
        mesh, count, chunks = self.mesh or "of one device", self.microbatches, self.loss_chunks
        parts = f" in {count} microbatches" if count > 1 else ""
        return f"mesh {mesh}{parts}" + (f", the loss in {chunks} chunks" if chunks > 1 else "")

    def without_savings(self) -> PlanRequest:
        """The same where nothing is decided that saves memory, but for what is asked for."""
        return replace(self, **self._savings())

    def opened(self) -> PlanRequest:
        """The same where all is to be decided that saves memory: what is recomputed, or offloaded,
        and where parameters live unless that is given."""
        options = self.options
        again = None if options.given.memory.checkpoint == "planned" else self.recompute
        is_open = options.residency == "auto" and options.params_on_host is None
        return replace(
            self, recompute=again, params_on_host=None if is_open else self.params_on_host
        )

    @property
    def is_open(self) -> bool:
        """Whether any of that is to be decided."""
        return self.recompute is None or self.params_on_host is None

    @property
    def step(self) -> Graph:
        """`graph` after all passes."""
        return step_graph(
            self.graph,
            StepForm(
                microbatches=self.microbatches,
                loss_chunks=self.loss_chunks,
                saved_dtype=self.options.saved_dtype,
                recompute=None if self.recompute is None else frozenset(self.recompute),
                is_split=self.is_split,
            ),
        )

    @property
    def is_split(self) -> bool:
        """Whether backward comes in two parts."""
        return bool(self.others)

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """How many other microbatches wait while one is worked on, at most."""
        return self.others or (Waiting(self.in_flight - 1),)

    @property
    def host_memory_bytes(self) -> int:
        """What each device may have in its host's memory: its share of that."""
        return self.cluster.host.memory_bytes

    def within(self, limit_bytes: int, host_bytes: int | None = None) -> PlanRequest:
        """The same with another memory limit, and another share of the host's memory if that is
        given."""
        cluster = self.cluster if host_bytes is None else with_host_share(self.cluster, host_bytes)
        options = replace(self.options, memory_limit_bytes=limit_bytes)
        return replace(self, options=options, cluster=cluster)

    def with_only(self, origins: Collection[str]) -> PlanRequest:
        """The same without what the user asked for and is not `origins` (`Options.imposed`)."""
        return replace(
            self, imposed=tuple(i for i in self.imposed if i.constraint.origin in origins)
        )

    def describe_imposed(self) -> tuple[str, ...]:
        """What the user asked for, as a plan records it: a strategy with what it came to, and the
        backend, residency, checkpoints, outputs and dtype of what is saved that are not the usual
        ones."""
        written = {constraint.origin for constraint in self.options.constraints}
        strategy = (i.constraint for i in self.imposed if i.constraint.origin not in written)
        options = self.options
        others = (
            ("backend", options.given.backend, ""),
            ("residency", options.residency, "cuda"),
            ("checkpoint", options.given.memory.checkpoint, "planned"),
            ("without outputs", ", ".join(options.given.outputs.unread), ""),
            ("saved dtype", options.saved_dtype, ""),
            ("host memory", exact_bytes(options.host_memory_bytes or 0), "0B"),
        )
        lines = [f"{each.origin}: {each}" for each in strategy]
        free = left_free(options.strategy, self.graph, self.mesh)
        if free:
            named = ", ".join(dict.fromkeys(map(general, free)))
            lines.append(f"strategy {options.strategy}: no rule for {named}: the solver's")
        more = (f"{name} {value}" for name, value, usual in others if value != usual)
        return (*(line for line in options.imposed if line != _TIED), *lines, *more)


def _on_host(graph: Graph, options: Options) -> frozenset[str]:
    """The parameters that live on the host, as far as that is known."""
    if options.params_on_host is not None:
        return frozenset(options.params_on_host) & {n.target for n in graph.with_role(Role.PARAM)}
    if options.residency != "cpu":
        return frozenset()
    return frozenset(name for found in can_be_on_host(graph).values() for name in found)


def make_graph_request(
    graph: Graph,
    cluster: Cluster,
    options: Options,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> GraphRequest:
    """What `options` ask of a plan for `graph`, whose inputs and outputs may be named as in
    `aliases` (`matching.resolve_constraints`). ConstraintError if they speak of what is not
    there."""
    cluster = _with_host_memory(cluster, options)
    if options.given.memory.checkpoint == "as written":
        _check_regions(graph)
    _check_loss(graph, options)
    constraints = resolve_constraints(graph, options.constraints, aliases)
    return GraphRequest(graph, cluster, options, constraints)


def _with_host_memory(cluster: Cluster, options: Options) -> Cluster:
    """`cluster` whose devices share as much of a node's memory as `options` say."""
    if options.host_memory_bytes is None:
        return cluster
    if not cluster.has_host_memory:
        text = "memory.host: the host of a CPU has no other memory; memory.limit is for all of it"
        warnings.warn(NotImposedWarning(text), stacklevel=3)
        return cluster
    return with_host_share(cluster, options.host_memory_bytes // cluster.devices_of_node)


def with_host_share(cluster: Cluster, share_bytes: int) -> Cluster:
    """`cluster` where each device may have so much in its host's memory."""
    return replace(cluster, host=replace(cluster.host, memory_bytes=share_bytes))


def _check_loss(graph: Graph, options: Options) -> None:
    """Warns of losses that are not worked on in chunks though that is asked for."""
    chunks = options.loss_chunks
    if chunks is None or chunks == 1 or not trains(graph):
        return
    try:
        step_graph(graph, StepForm(loss_chunks=chunks))
    except LossChunksError as error:
        warnings.warn(NotImposedWarning(f"{error}"), stacklevel=3)
        return
    whole = [f"{n.name} of {n.module}" if n.module else n.name for n in other_losses(graph)]
    if whole:
        names = ", ".join(whole)
        text = f"memory.loss_chunks={chunks}: {names} stays whole: in chunks can be {SUITED}"
        warnings.warn(NotImposedWarning(text), stacklevel=3)


def _check_regions(graph: Graph) -> None:
    """Warns of checkpoints that are planned all the same."""
    forward = (node for node in graph.with_role(Role.OP) if node.phase is Phase.FORWARD)
    kinds = grouped((node.key, node.checkpoint) for node in forward)
    selective = any("selective" in found for found in kinds.values())
    mixed = sorted(key for key, found in kinds.items() if "whole" in found and len({*found}) > 1)
    told = ["a context_fn"] * selective
    if mixed:
        told.append(f"some of several identical modules ({mixed[0].partition(':')[0]})")
    if told:
        text = f'memory.checkpoint="as written" is not kept where it is of {" or ".join(told)}'
        warnings.warn(NotImposedWarning(text), stacklevel=2)


@cache
def source_digest(package: Path) -> str:
    """A hash of the Python files of a package, names and contents."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    return (f"python {platform.python_version()}", *_installed())


def _installed() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name}: none"


def _digest(*parts: str) -> str:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        raw = part.encode(errors="surrogatepass")
        digest.update(b"%d " % len(raw))
        digest.update(raw)
    return digest.hexdigest()
