"""Shardings and choices of ops in words, by the axes of the mesh; parameters by pattern.

Texts of files that do not parse are returned as they are: reading a plan checks only the shardings
of parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from autopar.ir.choices import Choice
from autopar.ir.graph import itemsize
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Mesh
from autopar.ir.patterns import compress, expand
from autopar.ir.sharding import Sharding
from autopar.plans.cluster_rates import LinkRates
from autopar.plans.plan import StagePlan
from autopar.plans.requests.matching import general
from autopar.plans.structure import Param

REPLICATED = "replicated"
_ON_HOST = ", in the host's memory"


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Identical parameters of one pattern. `total_bytes` is what all of them take in the whole
    model, `local_bytes` what their stored shards take on a device."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    storage: str
    for_backward: str
    total_bytes: int
    local_bytes: int
    on_host: bool

    @property
    def stored(self) -> str:
        """How, and where, they are stored."""
        return f"{self.storage}{_ON_HOST}" if self.on_host else self.storage


def param_groups(params: Mapping[str, Param], mesh: Mesh) -> tuple[ParamGroup, ...]:
    """Parameters by pattern, shape, dtype, storage and sharding for backward; the largest first."""
    classes = grouped(((general(name), param), name) for name, param in params.items())
    uses = Counter(shared for shared, _ in classes)
    groups: list[ParamGroup] = []
    for (shared, param), names in classes.items():
        texts = (shared,) if uses[shared] == 1 and len(names) > 1 else compress(names)
        members = [names] if len(texts) == 1 else map(expand, texts)
        groups += [_param_group(t, m, param, mesh) for t, m in zip(texts, members, strict=True)]
    return tuple(sorted(groups, key=lambda group: (-group.total_bytes, group.name)))


def _param_group(name: str, names: Sequence[str], param: Param, mesh: Mesh) -> ParamGroup:
    placed = param.choice
    return ParamGroup(
        name=name,
        count=len(names),
        shape=param.shape,
        dtype=param.dtype,
        storage=on_axes(placed.storage, mesh),
        for_backward=on_axes(placed.for_backward, mesh),
        total_bytes=len(names) * param.num_bytes,
        local_bytes=len(names) * shard_bytes(param.shape, param.dtype, placed.storage, mesh),
        on_host=param.residency == "cpu",
    )


def shard_bytes(shape: Sequence[int], dtype: str, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes of the largest shard of a tensor."""
    local = (
        ceil(size / prod(axis.size for axis, p in zip(mesh, sharding) if p.dim == dim))
        for dim, size in enumerate(shape)
    )
    return prod(local) * itemsize(dtype)


def on_axes(sharding: Sharding, mesh: Mesh) -> str:
    """`[S(1) on tp, S(0) on dp]`: what is not replicated, the fastest axis first (the order in
    which axes cut a parameter), or `replicated`."""
    placed = [
        f"{placement} on {axis.name}"
        for placement, axis in zip(sharding, mesh, strict=True)
        if placement.kind != "R"
    ]
    return f"[{', '.join(reversed(placed))}]" if placed else REPLICATED


def parsed(text: str, mesh: Mesh) -> Sharding | None:
    """The sharding on `mesh` that a text says; None if it says none."""
    try:
        sharding = Sharding.parse(text)
    except ValueError:
        return None
    return sharding if len(sharding) == len(mesh) else None


def sharding_text(text: str, mesh: Mesh) -> str:
    """`[S(1) on tp, S(0) on dp]` of `[S(0), S(1)]`."""
    sharding = parsed(text, mesh)
    return text if sharding is None else on_axes(sharding, mesh)


def param_text(param: Param, mesh: Mesh) -> str:
    """How and where a parameter is stored, and its sharding for backward if that is another."""
    stored = sharding_text(param.storage, mesh) + _ON_HOST * (param.residency == "cpu")
    if param.for_backward == param.storage:
        return stored
    return f"{stored}, for backward {sharding_text(param.for_backward, mesh)}"


def options_by_axis(choice: str) -> tuple[str, ...]:
    """The option of an op's choice on each axis; empty if the text is no choice."""
    try:
        return Choice.parse(choice).options
    except ValueError:
        return ()


def choice_text(choice: str, mesh: Mesh) -> str:
    """`n on tp, b on dp` of `b,n`, the fastest axis first: what an op shards."""
    options = options_by_axis(choice)
    if len(options) != len(mesh):
        return choice
    axes = [f"{o} on {axis.name}" for o, axis in zip(options, mesh) if o != "-"]
    return ", ".join(reversed(axes)) or REPLICATED


def route_text(arcs: Sequence[str], mesh: Mesh) -> str:
    """`[P on tp] to replicated; ...`: the steps of a route."""
    steps = (" to ".join(sharding_text(end, mesh) for end in arc.split(" -> ")) for arc in arcs)
    return "; ".join(steps)


def slowest_links(plan: StagePlan) -> dict[str, LinkRates]:
    """The slowest link that each axis crosses, as `mesh_shapes` lays axes over the levels of a
    cluster."""
    links: dict[str, LinkRates] = {}
    for k, axis in enumerate(plan.structure.mesh):
        stride = prod(plan.structure.mesh.sizes[k + 1 :])
        block, crossed = plan.structure.num_devices, list[LinkRates]()
        for link in plan.estimates.cluster.links:
            extent, block = block, max(1, block // max(1, link.size))
            if link.size > 1 and block % (stride * axis.size) and stride % extent:
                crossed.append(link)
        if crossed:
            links[axis.name] = min(crossed, key=lambda link: link.bytes_per_s)
    return links
