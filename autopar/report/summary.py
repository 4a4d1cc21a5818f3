"""What a person wants to know of a plan, gathered from its parts: the content of every report.

Figures are per device and per training step. Rows are ordered by what they cost, then by name, so
that the same plan always gives the same page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Phase
from autopar.plans.matching import general
from autopar.plans.plan import CollectiveTotal, Memory, MeshAxis, OpTotal, Plan
from autopar.report.cautions import cautions
from autopar.report.costs import WHOLE_MODEL, Cost, costs
from autopar.report.limits import find_limits, margin_text
from autopar.report.param_groups import ParamGroup, param_groups

TOP_COSTS = 12


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
class Summary:
    """The content of the page. `gap` and `utilisation` are fractions; `warnings` are sentences."""

    model: str
    cluster: str
    mesh: tuple[MeshAxis, ...]
    world_size: int
    optimizer: str
    inputs: tuple[str, ...]
    step_ns: int
    compute_ns: int
    communication_ns: int
    exposed_communication_ns: int
    hidden_communication_ns: int
    optimizer_ns: int
    flops: int
    tokens_per_s: int
    utilisation: float
    status: str
    objective_ns: int
    bound_ns: int
    gap: float
    margin: str
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
        optimizer=structure.optimizer,
        inputs=structure.inputs,
        step_ns=estimates.step_ns,
        compute_ns=estimates.compute_ns,
        communication_ns=estimates.communication_ns,
        exposed_communication_ns=estimates.exposed_communication_ns,
        hidden_communication_ns=estimates.hidden_communication_ns,
        optimizer_ns=estimates.optimizer_ns,
        flops=estimates.flops,
        tokens_per_s=estimates.tokens_per_s,
        utilisation=estimates.mfu_ppm / 1e6,
        status=provenance.status,
        objective_ns=provenance.objective_ns,
        bound_ns=provenance.bound_ns,
        gap=provenance.gap_ppm / 1e6,
        margin=margin_text(find_limits(plan), provenance.objective_ns) if provenance.margin else "",
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
        warnings=tuple(cautions(plan, params)),
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
