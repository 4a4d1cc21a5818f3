"""What a person wants to know of a plan, gathered from its parts: the content of every report.

Figures are per device and per training step. Rows are ordered by what they cost, then by name, so
that the same plan always gives the same page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from autopar.graph import Phase, itemsize
from autopar.matching import general
from autopar.namesets import compress, expand
from autopar.plan import CollectiveTotal, Memory, MeshAxis, OpTotal, Param, Plan, Schedule, Stage
from autopar.report.costs import WHOLE_MODEL, Cost, costs
from autopar.sharding import Sharding
from autopar.units import format_bytes

REPLICATED = "replicated"
TOP_COSTS = 12
LARGE_SHARE = 0.01
"""Replicated parameters that take this share of the memory limit are worth a warning."""


@dataclass(frozen=True, slots=True)
class Block:
    """Modules of one pattern: `count` of them, times of all together, bytes saved for backward.
    `parts` are the children of a repeated block."""

    module: str
    count: int
    forward_ns: int
    backward_ns: int
    communication_ns: int
    optimizer_ns: int
    saved_bytes: int
    parts: tuple[Block, ...] = ()

    @property
    def total_ns(self) -> int:
        return self.forward_ns + self.backward_ns + self.communication_ns + self.optimizer_ns


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters of one pattern that lie alike. `total_bytes` is what all of them take in the whole
    model, `local_bytes` what their stored shards take on a device."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    storage: str
    kept: str
    total_bytes: int
    local_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of the page. `gap` and `utilisation` are fractions; `warnings` are sentences."""

    model: str
    cluster: str
    mesh: tuple[MeshAxis, ...]
    world_size: int
    stages: tuple[Stage, ...]
    schedule: Schedule
    optimizer: str
    inputs: tuple[str, ...]
    step_ns: int
    compute_ns: int
    communication_ns: int
    exposed_communication_ns: int
    hidden_communication_ns: int
    optimizer_ns: int
    bubble_ns: int
    flops: int
    tokens_per_s: int
    utilisation: float
    status: str
    objective_ns: int
    bound_ns: int
    gap: float
    meshes_tried: tuple[str, ...]
    imposed: tuple[str, ...]
    memory: Memory
    memory_bytes: int
    memory_limit_bytes: int
    blocks: tuple[Block, ...]
    top_costs: tuple[Cost, ...]
    collectives: tuple[CollectiveTotal, ...]
    params: tuple[ParamGroup, ...]
    warnings: tuple[str, ...]
    digest: str
    made_by: str

    def __str__(self) -> str:
        from autopar.report.plain import plain
        from autopar.report.text import page

        return plain(page(self))

    def _repr_html_(self) -> str:
        from autopar.report.notebook import fragment

        return fragment(self)


def summarize(plan: Plan) -> Summary:
    """The summary of a plan."""
    structure, estimates, provenance = plan.structure, plan.estimates, plan.provenance
    params = param_groups(structure.params, structure.mesh)
    return Summary(
        model=structure.model,
        cluster=structure.cluster,
        mesh=structure.mesh,
        world_size=plan.world_size,
        stages=structure.stages,
        schedule=structure.schedule,
        optimizer=structure.optimizer,
        inputs=structure.inputs,
        step_ns=estimates.step_ns,
        compute_ns=estimates.compute_ns,
        communication_ns=estimates.communication_ns,
        exposed_communication_ns=estimates.exposed_communication_ns,
        hidden_communication_ns=estimates.hidden_communication_ns,
        optimizer_ns=estimates.optimizer_ns,
        bubble_ns=estimates.bubble_ns,
        flops=estimates.flops,
        tokens_per_s=estimates.tokens_per_s,
        utilisation=estimates.mfu_ppm / 1e6,
        status=provenance.status,
        objective_ns=provenance.objective_ns,
        bound_ns=provenance.bound_ns,
        gap=provenance.gap_ppm / 1e6,
        meshes_tried=provenance.meshes_tried,
        imposed=provenance.imposed,
        memory=estimates.memory,
        memory_bytes=estimates.memory.total,
        memory_limit_bytes=estimates.memory_limit,
        blocks=blocks(tuple(estimates.ops.values())),
        top_costs=costs(estimates)[:TOP_COSTS],
        collectives=tuple(
            sorted(estimates.collectives, key=lambda c: (-c.time_ns, c.axis, c.kind, c.phase))
        ),
        params=params,
        warnings=_warnings(plan, params),
        digest=plan.digest,
        made_by=f"autopar {provenance.autopar}, torch {provenance.torch}, {provenance.solver}",
    )


def blocks(ops: Sequence[OpTotal]) -> tuple[Block, ...]:
    """Ops by module. A repeated module (`layers.*`) is one row, with its children as parts; any
    other module stands for itself."""
    rows: dict[str, dict[str, list[OpTotal]]] = {}
    for op in ops:
        row, part = _row_and_part(op.module)
        rows.setdefault(row, {}).setdefault(part, []).append(op)
    return _costliest_first(
        _block(row, [op for some in members.values() for op in some], members)
        for row, members in rows.items()
    )


def _row_and_part(module: str) -> tuple[str, str]:
    """(row, part) that the ops of a module count to; the part is empty for a row's own ops."""
    names = general(module).split(".")
    if "*" not in names:
        return module or WHOLE_MODEL, ""
    end = names.index("*") + 1
    return ".".join(names[:end]), "".join(names[end : end + 1])


def _block(module: str, ops: Sequence[OpTotal], parts: Mapping[str, Sequence[OpTotal]]) -> Block:
    forward = sum(op.compute_ns for op in ops if op.phase == Phase.FORWARD)
    return Block(
        module=module,
        count=max(1, *(op.count for op in ops)),
        forward_ns=forward,
        backward_ns=sum(op.compute_ns for op in ops) - forward,
        communication_ns=sum(op.communication_ns for op in ops),
        optimizer_ns=sum(op.optimizer_ns for op in ops),
        saved_bytes=sum(op.saved_bytes for op in ops),
        parts=_costliest_first(_block(name, some, {}) for name, some in parts.items() if name),
    )


def _costliest_first(rows: Iterable[Block]) -> tuple[Block, ...]:
    return tuple(sorted(rows, key=lambda block: (-block.total_ns, block.module)))


def param_groups(params: Mapping[str, Param], mesh: Sequence[MeshAxis]) -> tuple[ParamGroup, ...]:
    """Parameters by pattern, shape, dtype, storage and what is kept; the largest first."""
    groups: dict[tuple[str, Param], list[str]] = {}
    for name, param in params.items():
        groups.setdefault((general(name), param), []).append(name)
    uses = Counter(shared for shared, _ in groups)
    found: list[ParamGroup] = []
    for (shared, param), names in groups.items():
        texts = (shared,) if uses[shared] == 1 and len(names) > 1 else compress(names)
        members = [names] if len(texts) == 1 else map(expand, texts)
        found += [_param_group(t, m, param, mesh) for t, m in zip(texts, members, strict=True)]
    return tuple(sorted(found, key=lambda group: (-group.total_bytes, group.name)))


def _param_group(
    name: str, names: Sequence[str], param: Param, mesh: Sequence[MeshAxis]
) -> ParamGroup:
    storage = Sharding.parse(param.storage)
    return ParamGroup(
        name=name,
        count=len(names),
        shape=param.shape,
        dtype=param.dtype,
        storage=on_axes(storage, mesh),
        kept=on_axes(Sharding.parse(param.kept), mesh),
        total_bytes=len(names) * prod(param.shape) * itemsize(param.dtype),
        local_bytes=len(names) * local_bytes(param.shape, param.dtype, storage, mesh),
    )


def local_bytes(
    shape: Sequence[int], dtype: str, sharding: Sharding, mesh: Sequence[MeshAxis]
) -> int:
    """Bytes of the largest shard of a tensor."""
    local = (
        ceil(size / prod(axis.size for axis, p in zip(mesh, sharding) if p.dim == dim))
        for dim, size in enumerate(shape)
    )
    return prod(local) * itemsize(dtype)


def on_axes(sharding: Sharding, mesh: Sequence[MeshAxis]) -> str:
    """`[S(1) on tp, S(0) on dp]`: what is not replicated, the fastest axis first (the order in
    which axes cut a parameter), or `replicated`."""
    placed = [
        f"{placement} on {axis.name}"
        for placement, axis in zip(sharding, mesh, strict=True)
        if placement.kind != "R"
    ]
    return f"[{', '.join(reversed(placed))}]" if placed else REPLICATED


def _warnings(plan: Plan, params: Sequence[ParamGroup]) -> tuple[str, ...]:
    found: list[str] = []
    unknown = plan.structure.replicated_unknown_ops
    if unknown:
        found.append(
            f"{', '.join(unknown)}: no sharding rule, so every device computes all of it; "
            "a line in autopar/rules.py describes an op"
        )
    whole = [group for group in params if group.storage == REPLICATED]
    whole_bytes = sum(group.local_bytes for group in whole)
    if plan.world_size > 1 and whole_bytes >= LARGE_SHARE * plan.estimates.memory_limit > 0:
        found.append(
            f"every device holds {format_bytes(whole_bytes)} of parameters whole, "
            f"{whole[0].name} the largest ({format_bytes(whole[0].local_bytes)})"
        )
    found += _fragile(plan)
    if plan.provenance.gap_ppm:
        found.append(
            f"not proven optimal: a plan up to {plan.provenance.gap_ppm / 1e4:.3g} % faster may "
            "exist"
        )
    return tuple(found)


def _fragile(plan: Plan) -> list[str]:
    """That another plan is, or may be, nearly as good."""
    margin, is_fragile = plan.provenance.margin, plan.provenance.is_fragile
    if margin is None or is_fragile is False:
        return []
    least = max(1, plan.provenance.objective_ns)
    if is_fragile and margin.step_ns is not None:
        more = 100 * (margin.step_ns - least) / least
        return [f"fragile: a plan of another structure is {more:.2g} % slower: {margin.rival}"]
    more = 100 * max(0, margin.bound_ns - least) / least
    return [f"may be fragile: plans of another structure are only proven to be {more:.2g} % slower"]
