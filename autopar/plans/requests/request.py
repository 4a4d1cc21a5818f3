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
"""The origin of constraints that the user did not give."""

_DIGEST_BYTES = 20
_PACKAGES = ("torch", "highspy", "pulp", "numpy", "numba", "networkx", "msgspec")
"""The packages that decide a plan, beside autopar."""


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """A graph, with the options for a plan of it. `constraints` are those of `options`, for the
    names in the graph. Made by `make_graph_request`."""

    graph: Graph
    cluster: Cluster
    options: Options
    constraints: tuple[Constraint, ...] = ()
    in_flight: int = 1
    """The most microbatches whose saved activations a device holds at once."""
    others: tuple[Waiting, ...] = ()
    """If backward has two parts, how many other microbatches wait for each meanwhile
    (`PipelineSchedule.others`)."""
    narrowed: Narrowed = ()
    """The choices that are settled, beside constraints."""
    tolerance: float = 0.0
    """The part by which a plan may take longer than another."""
    known_on_host: tuple[tuple[str, bool], ...] = ()
    """For some parameters, whether they live on the host. Other parts of the model settle that."""

    @property
    def memory_limit_bytes(self) -> int:
        """The most that each device may hold."""
        return self.options.memory_limit_bytes or self.cluster.device.memory_bytes

    def while_waiting(self, others: tuple[Waiting, ...], *, is_split: bool) -> GraphRequest:
        """The same for a stage that computes a microbatch while `others` wait. Backward has two
        parts if it `is_split`."""
        in_flight = 1 + max(each.backward for each in others)
        return replace(self, in_flight=in_flight, others=others if is_split else ())

    def of_part(
        self, graph: Graph, stored: Mapping[str, Sharding], known_on_host: Mapping[str, bool]
    ) -> GraphRequest:
        """The same for a part of the graph, with the constraints on its parameters only. From other
        parts it is known how some parameters are `stored`, or whether they are `known_on_host`."""
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
        """The same for segments, whose `graph` stands on `mesh` for those of all stages. Stages may
        have other meshes: constraints by position apply if they have as many axes as `mesh`.
        Parameters that are planned as one are stored as the first of them."""
        suited = [
            each
            for each in self.constraints
            if each.placement.positional is None or len(each.placement.positional) == len(mesh)
        ]
        keys = {node.target: node.key for node in graph.with_role(Role.PARAM)}
        first: dict[str, Constraint] = {}
        for each in suited:
            if each.origin == STORED and each.pattern in keys:
                first.setdefault(keys[each.pattern], each)
        mine = (each for each in suited if each.origin != STORED)
        alike = (replace(first[key], pattern=n) for n, key in keys.items() if key in first)
        return replace(self, graph=graph, constraints=(*mine, *alike))

    def on(self, mesh: Mesh) -> PlanRequest:
        """The same for a plan on `mesh`. UnsuitedMeshError if a constraint makes no sense there."""
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
        """The options that save memory, by the fields of `PlanRequest`."""
        graph, options = self.graph, self.options
        known = dict(self.known_on_host)
        free = _on_host(graph, options) - known.keys()
        on_host = free | {name for name, is_on_host in known.items() if is_on_host}
        recompute = as_written(graph) if options.given.memory.checkpoint == "as written" else ()
        return {"recompute": recompute, "offloaded": (), "params_on_host": on_host}

    def digest(self) -> str:
        """A hash of everything that decides the plan, including the source of autopar and the
        versions of its packages. If any of them changes, there may be another plan."""
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
    """A request for a plan on `mesh`, which is laid over the cluster. `imposed` has all constraints
    there, including those of the strategy. Made by `GraphRequest.on`."""

    mesh: Mesh
    imposed: tuple[MeshConstraint, ...]
    recompute: tuple[str, ...] | None = ()
    """The keys of ops that backward recomputes; None if the search decides."""
    offloaded: tuple[str, ...] = ()
    """The keys of activations that are offloaded."""
    microbatches: int = 1
    loss_chunks: int = 1
    params_on_host: frozenset[str] | None = frozenset()
    """The parameters that live on the host; None if the search decides."""

    @property
    def name(self) -> str:
        """The name of the candidate in a search."""
        mesh, count, chunks = self.mesh or "of one device", self.microbatches, self.loss_chunks
        parts = f" in {count} microbatches" if count > 1 else ""
        return f"mesh {mesh}{parts}" + (f", the loss in {chunks} chunks" if chunks > 1 else "")

    def without_savings(self) -> PlanRequest:
        """The same without any saving of memory but those of the options."""
        return replace(self, **self._savings())

    def opened(self) -> PlanRequest:
        """The same where the search decides all that saves memory: recompute and offload, and where
        parameters live unless that is given."""
        options = self.options
        recompute = None if options.given.memory.checkpoint == "planned" else self.recompute
        is_open = options.residency == "auto" and options.params_on_host is None
        return replace(
            self, recompute=recompute, params_on_host=None if is_open else self.params_on_host
        )

    @property
    def is_open(self) -> bool:
        """Whether the search decides any of that."""
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
        """Whether backward has two parts."""
        return bool(self.others)

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """The most other microbatches that wait during a microbatch."""
        return self.others or (Waiting(self.in_flight - 1),)

    @property
    def host_memory_bytes(self) -> int:
        """The share of its host's memory that each device may use."""
        return self.cluster.host.memory_bytes

    def within(self, limit_bytes: int, host_bytes: int | None = None) -> PlanRequest:
        """The same with another memory limit, and another share of the host's memory if given."""
        cluster = self.cluster if host_bytes is None else with_host_share(self.cluster, host_bytes)
        options = replace(self.options, memory_limit_bytes=limit_bytes)
        return replace(self, options=options, cluster=cluster)

    def with_only(self, origins: Collection[str]) -> PlanRequest:
        """The same without constraints of the user that are not among `origins`
        (`Options.imposed`)."""
        return replace(
            self, imposed=tuple(i for i in self.imposed if i.constraint.origin in origins)
        )

    def describe_imposed(self) -> tuple[str, ...]:
        """What the user imposed, as a plan records it. A strategy stands with its constraints.
        Backend, residency, checkpoints, outputs and saved dtype stand there unless they have their
        defaults."""
        written = {constraint.origin for constraint in self.options.constraints}
        strategy = (i.constraint for i in self.imposed if i.constraint.origin not in written)
        options = self.options
        others = (
            ("backend", options.given.backend, ""),
            ("residency", options.given.memory.residency or "cuda", "cuda"),
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
    return frozenset(name for names in can_be_on_host(graph).values() for name in names)


def make_graph_request(
    graph: Graph,
    cluster: Cluster,
    options: Options,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> GraphRequest:
    """The request for a plan of `graph` with `options`, in which inputs and outputs may have names
    of `aliases` (`matching.resolve_constraints`). ConstraintError if they name what does not
    exist."""
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
    """`cluster` with `share_bytes` of the host's memory for each device."""
    return replace(cluster, host=replace(cluster.host, memory_bytes=share_bytes))


def _check_loss(graph: Graph, options: Options) -> None:
    """Warns of losses that are not computed in chunks though the options say how many."""
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
    """Warns of checkpoints that are planned though the options say "as written"."""
    forward = (node for node in graph.with_role(Role.OP) if node.phase is Phase.FORWARD)
    kinds = grouped((node.key, node.checkpoint) for node in forward)
    selective = any("selective" in checkpoints for checkpoints in kinds.values())
    mixed = sorted(
        key
        for key, checkpoints in kinds.items()
        if "whole" in checkpoints and len({*checkpoints}) > 1
    )
    causes = ["a context_fn"] * selective
    if mixed:
        causes.append(f"some of several identical modules ({mixed[0].partition(':')[0]})")
    if causes:
        text = f'memory.checkpoint="as written" is not kept where it is of {" or ".join(causes)}'
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
