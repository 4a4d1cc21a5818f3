"""The demands of a constraint on the axes of one mesh, and what meets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.errors import UnsuitedMeshError
from autopar.ir.graph import Node, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Placement, R, Sharding
from autopar.plans.constraints import EVERY_AXIS, Constraint, Demand


@dataclass(frozen=True, slots=True)
class Test:
    """`what`, a placement or a word of `constraints`, on mesh axis `axis`."""

    axis: int
    what: str | Placement
    excluded: bool = False

    @property
    def placement(self) -> Placement | None:
        """The placement that is asked for; None for a word."""
        return None if isinstance(self.what, str) else self.what


Tests = tuple[Test, ...]
"""Demands that must hold together."""


@dataclass(frozen=True, slots=True)
class MeshConstraint:
    """A constraint, and what it asks for on one mesh: any of `alternatives`."""

    constraint: Constraint
    alternatives: tuple[Tests, ...]


def on_mesh(constraint: Constraint, mesh: Mesh) -> tuple[Tests, ...]:
    """The alternatives of a constraint on `mesh`. What is whole, or must not be something, is so on
    an axis that the mesh lacks; on a single device, all is as wanted.

    UnsuitedMeshError if the mesh lacks an axis that something is to be sharded on.
    """
    wanted, names = constraint.wanted, mesh.names
    if wanted.positional is not None:
        if len(wanted.positional.placements) != len(names):
            raise UnsuitedMeshError(
                f"{constraint.origin}: {wanted.positional} is for "
                f"{len(wanted.positional.placements)} mesh axes, and mesh "
                f"{mesh or 'of one device'} has {len(names)}"
            )
        return (tuple(Test(k, p) for k, p in enumerate(wanted.positional)),)
    if not names:
        return ((),)
    return tuple(_tests(constraint, demands, mesh) for demands in wanted.alternatives)


def _tests(constraint: Constraint, demands: Sequence[Demand], mesh: Mesh) -> Tests:
    found: dict[int, list[Test]] = {}
    for demand in demands:
        if demand.axis != EVERY_AXIS and demand.axis not in mesh.names:
            if demand.excluded or demand.what in (R, "unmoved"):
                continue
            raise UnsuitedMeshError(
                f"{constraint.origin}: mesh {mesh} has no axis {demand.axis} (an axis of size 1 "
                "is left out)"
            )
        for axis, name in enumerate(mesh.names):
            if demand.axis in (EVERY_AXIS, name):
                found.setdefault(axis, []).append(Test(axis, demand.what, demand.excluded))
    if constraint.wanted.complete:
        for axis in range(len(mesh.names)):
            found.setdefault(axis, [Test(axis, R)])
    return tuple(test for axis in sorted(found) for test in found[axis])


def holds(test: Test, tensor: TensorType, batch: frozenset[int], state: Sharding) -> bool:
    """Whether `tensor` in `state` is what `test` asks for. A single element cannot be cut, and is
    what any shard of it would be."""
    if test.what == "unmoved":
        return True
    return _is(test, tensor, batch, state[test.axis]) != test.excluded


def _is(test: Test, tensor: TensorType, batch: frozenset[int], placement: Placement) -> bool:
    if test.what == "S":
        single = prod(tensor.shape) == 1 and not test.excluded
        return placement.kind in "SC" or single
    if test.what == "batch":
        is_shard = placement.kind == "S"
        return is_shard and tensor.parts[placement.dim][placement.part] in batch
    return _same(placement, test.placement)


def _same(one: Placement, other: Placement | None) -> bool:
    """Whether both are the same pieces, for DTensor: an uneven cut is a shard like another."""
    if other is None or one.kind not in "SC" or other.kind not in "SC":
        return one == other
    return one.slot == other.slot


def option_holds(
    test: Test, node: Node, option: str, batch: frozenset[int], roles: Mapping[str, str]
) -> bool:
    """Whether an op that does `option` on the axis of `test` is what it asks for: `R` shards
    nothing, `S` something, `batch` the batch and nothing with it."""
    factor = next((f for f in node.factors if f.name == option), None)
    if test.what in ("S", R):
        found = (factor is not None) == (test.what == "S")
    elif test.what == "batch":
        alone = factor is not None and factor.atom in batch and not factor.members
        found = is_batch(node, option, batch) if test.excluded else alone
    else:
        found = roles.get(option) == test.what
    return found != test.excluded


def is_batch(node: Node, option: str, batch: frozenset[int]) -> bool:
    """Whether `option` shards the batch, alone or with others."""
    cut = {f.name: f.members or (f.name,) for f in node.factors}
    return any(f.name in cut.get(option, ()) and f.atom in batch for f in node.factors)
