"""Constraints of the user on a plan: tensors and ops pinned to a sharding, axes forbidden to them.

A constraint is a line of text, `PATTERN = SHARDING`. The kind of thing may stand before the
pattern: `layers.*.down_proj.weight = S(1) on tp`, `module:layers.*.mlp = S(1) on tp`. Patterns are
those of the shell (`fnmatch`), over dotted names. `SHARDING` is one of

* placements on named axes, `S(1) on tp, R on dp`: the axes that are not named are left open;
* the same in brackets, as `autopar show` prints it, `[S(1) on tp]`: axes not named replicate;
* a sharding as plan files write it, `[R, S(1)]`: one placement per axis of the mesh;
* `R`, or `replicated`: whole on every axis;

or several of the first kind joined by `or`. `*` is every axis of the mesh. Some words are allowed
in place of placements: `S` is a shard of any dim, and `batch` a shard of the batch. `in` and `out`
are a shard of the input or output features of a layer's weight. `unmoved` is a tensor that is used
as it is stored. `not` before a word excludes it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar, cast

from autopar.errors import ConstraintError, OldNameWarning, UnsuitedMeshError
from autopar.ir.graph import Node, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Placement, R, Sharding

STRATEGIES = ("ddp", "fsdp", "megatron", "2d", "2.5d", "3d")

_KINDS = (
    "param", "for_backward", "input", "output", "module", "saved", "ops", "batched", "casts",
    "unbatched", "matmul",
)  # fmt: skip
"""The kinds of things that a pattern can name:

* parameters as stored (`param`) and as they are from forward to backward (`for_backward`);
* `input` and `output` of the model, what a `module` returns, activations `saved` for backward;
* all `ops` of modules, or some: `batched` ones with the batch, `matmul` ones with weights. Of those
  without the batch, `casts` cast or add up parameters and gradients, and `unbatched` are the rest.
"""

_BEFORE = {"kept": "for_backward", "product": "matmul"}
"""Kinds as they were named in the last release."""
OP_KINDS = ("ops", "batched", "casts", "unbatched", "matmul")
EVERY_AXIS = "*"
_WORDS = ("S", "batch", "in", "out", "unmoved")
_AXIS = re.compile(r"\*|[A-Za-z_]\w*", re.ASCII)
_EXAMPLE = "for example 'S(0) on tp', '[S(1) on tp, S(0) on dp]', '[R, S(0)]' or 'R'"

Pins = Mapping[str, str] | Sequence[str] | None
"""Sharding by pattern, or lines `PATTERN=SHARDING`, or one line."""

Forbidden = Mapping[str, str | Sequence[str]] | Sequence[str] | None
"""Pattern or patterns by axis, or lines `AXIS:PATTERN`, or one line."""


AxisT = TypeVar("AxisT", str, int)


@dataclass(frozen=True, slots=True)
class Demand(Generic[AxisT]):
    """`what`, a placement or a word, on an axis of the mesh: by name, as the user writes it, or by
    number, for one mesh."""

    what: str | Placement
    axis: AxisT
    excluded: bool = False

    def __str__(self) -> str:
        return f"{'not ' * self.excluded}{self.what} on {self.axis}"

    @property
    def placement(self) -> Placement | None:
        """The placement, if `what` is one; None for a word."""
        return None if isinstance(self.what, str) else self.what


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """One of `alternatives` must hold, with all of its demands. If `complete`, axes that are not
    named replicate. `positional` is a sharding with one placement per axis of the mesh instead."""

    alternatives: tuple[tuple[Demand[str], ...], ...] = ((),)
    complete: bool = False
    positional: Sharding | None = None

    def __str__(self) -> str:
        if self.positional is not None:
            return str(self.positional)
        texts = [", ".join(map(str, demands)) for demands in self.alternatives]
        if self.complete:
            return f"[{texts[0]}]" if texts[0] else "replicated"
        return " or ".join(texts)

    @property
    def shards(self) -> bool:
        """Whether such a tensor is sharded on some axis."""
        demands = [demand for some in self.alternatives for demand in some if not demand.excluded]
        return any(placement.kind != "R" for placement in self.positional or ()) or any(
            demand.what not in (R, "unmoved") for demand in demands
        )

    @staticmethod
    def parse(text: str) -> PlacementSpec:
        """The inverse of `str`; ValueError, with what is allowed, on anything else."""
        text = text.strip()
        if text in ("R", "replicated"):
            return PlacementSpec(complete=True)
        if text.startswith("[") and text.endswith("]"):
            if " on " in text:
                return PlacementSpec((_demands(text[1:-1]),), complete=True)
            return PlacementSpec(positional=Sharding.parse(text))
        return PlacementSpec(tuple(map(_demands, re.split(r"\s+or\s+", text))))


def _demands(text: str) -> tuple[Demand[str], ...]:
    return tuple(map(_demand, text.split(",")))


def _demand(text: str) -> Demand[str]:
    what, on, axis = (part.strip() for part in text.strip().partition(" on "))
    excluded = what.startswith("not ")
    what = what.removeprefix("not ").strip()
    if not on or not _AXIS.fullmatch(axis):
        raise ValueError(f"{text.strip()!r} is not a placement on an axis ({_EXAMPLE})")
    return Demand(what if what in _WORDS else Placement.parse(what), axis, excluded)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Things of a `kind`, whose names match `pattern`, must be as `placement` says. An empty kind
    follows from what the pattern matches. `origin` is what the user wrote, and could take back."""

    kind: str
    pattern: str
    placement: PlacementSpec
    origin: str

    def __str__(self) -> str:
        return f"{self.kind}{':' * bool(self.kind)}{self.pattern} = {self.placement}"

    @property
    def is_forbidden(self) -> bool:
        """Whether it excludes placements, for all that the pattern covers."""
        demands = [demand for some in self.placement.alternatives for demand in some]
        return not self.kind and bool(demands) and all(demand.excluded for demand in demands)

    @staticmethod
    def parse(text: str, origin: str = "") -> Constraint:
        """The inverse of `str`; ConstraintError, with the mistake, on anything else."""
        name, equals, sharding = (part.strip() for part in text.partition("="))
        origin = origin or (f"pin {name}={sharding}" if equals else f"pin {text}")
        if not (name and equals and sharding):
            raise ConstraintError(f"{origin}: {text!r} is not PATTERN=SHARDING ({_EXAMPLE})")
        kind, pattern = _split_kind(name, origin)
        try:
            spec = PlacementSpec.parse(sharding)
        except ValueError as error:
            raise ConstraintError(f"{origin}: {error}") from None
        check_kind(kind, spec, origin)
        return Constraint(kind, pattern, spec, origin)


def _split_kind(name: str, origin: str) -> tuple[str, str]:
    kind, colon, pattern = name.partition(":")
    if not colon:
        return "", name
    if kind in _BEFORE:
        text = f"{kind}: goes with the next release: write {_BEFORE[kind]}:{pattern}"
        warnings.warn(OldNameWarning(text), stacklevel=2)
        kind = _BEFORE[kind]
    if kind not in _KINDS or not pattern:
        raise ConstraintError(
            f"{origin}: {kind!r} is not a kind of thing to constrain: {', '.join(_KINDS)}"
        )
    return kind, pattern


def check_kind(kind: str, spec: PlacementSpec, origin: str) -> None:
    """ConstraintError if that kind of thing cannot have this placement."""
    if len(spec.alternatives) > 1 and kind not in OP_KINDS:
        raise ConstraintError(f"{origin}: {kind or 'it'} cannot be one of several")
    for demand in (demand for demands in spec.alternatives for demand in demands):
        placement = demand.placement
        if kind in OP_KINDS:
            allowed = demand.what in ("S", "batch", "in", "out", R)
        elif demand.what == "unmoved":
            allowed = kind == "param"
        else:
            words = ("S", "batch") if kind not in ("param", "for_backward") else ("S",)
            allowed = demand.what in words if placement is None else _whole(placement)
        if not allowed:
            raise ConstraintError(f"{origin}: {kind or 'it'} cannot be {demand}")
    if spec.positional is not None and (kind in OP_KINDS or not all(map(_whole, spec.positional))):
        raise ConstraintError(f"{origin}: {kind or 'it'} cannot be {spec.positional}")


def _whole(placement: Placement) -> bool:
    return placement.kind != "P"


def parse_pins(pins: Pins) -> tuple[Constraint, ...]:
    """A constraint for each of `pins`; ConstraintError on what cannot be read."""
    lines = [f"{k}={v}" for k, v in pins.items()] if isinstance(pins, Mapping) else pins
    return tuple(map(Constraint.parse, _lines(lines, "pins", "a mapping of pattern to sharding")))


def parse_forbidden(forbidden: Forbidden) -> tuple[Constraint, ...]:
    """A constraint for each of `forbidden`; ConstraintError on what cannot be read."""
    expected = "a mapping of axis to patterns"
    lines = forbidden
    if isinstance(forbidden, Mapping):
        lines = [
            f"{axis}:{pattern}"
            for axis, patterns in forbidden.items()
            for pattern in _lines(patterns, "forbid", expected)
        ]
    return tuple(map(_forbidden, _lines(lines, "forbid", expected)))


def _lines(given: Any, name: str, expected: str) -> tuple[str, ...]:
    """The texts of a list, or the only one. ConstraintError on anything else."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    several = isinstance(given, Iterable)
    lines = list(cast("Iterable[Any]", given)) if several else [given]
    for line in lines:
        if not isinstance(line, str):
            raise ConstraintError(f"{name}: {line!r} is no text; give texts, or {expected}")
    return tuple(lines)


def _forbidden(line: str) -> Constraint:
    origin = f"forbid {line.strip()}"
    axis, _, name = (part.strip() for part in line.partition(":"))
    if not (_AXIS.fullmatch(axis) and name):
        raise ConstraintError(f"{origin}: this is not AXIS:PATTERN, for example tp:lm_head")
    kind, pattern = _split_kind(name, origin)
    return Constraint(kind, pattern, PlacementSpec(((Demand("S", axis, excluded=True),),)), origin)


def check_strategy(strategy: str | None) -> str:
    """`strategy` as autopar spells it, empty for None and "auto"; ConstraintError if there is none
    of that name."""
    name = strategy.lower() if isinstance(strategy, str) else strategy
    if not name or name == "auto":
        return ""
    if name not in STRATEGIES:
        raise ConstraintError(
            f"there is no strategy {strategy!r}: choose {', '.join(STRATEGIES)}, or leave it out "
            "and the solver finds the best of all"
        )
    return name


Test = Demand[int]
"""A demand on an axis of one mesh."""

Tests = tuple[Test, ...]
"""Demands that must hold together."""


@dataclass(frozen=True, slots=True)
class MeshConstraint:
    """A constraint on one mesh: any of `alternatives` must hold."""

    constraint: Constraint
    alternatives: tuple[Tests, ...]


def on_mesh(constraint: Constraint, mesh: Mesh) -> tuple[Tests, ...]:
    """The alternatives of a constraint on `mesh`. On an axis that the mesh lacks, replicated or
    excluded placements hold; on a single device, everything holds.

    UnsuitedMeshError if the mesh lacks an axis that something is to be sharded on.
    """
    spec, names = constraint.placement, mesh.names
    if spec.positional is not None:
        if len(spec.positional) != len(names):
            raise UnsuitedMeshError(
                f"{constraint.origin}: {spec.positional} is for "
                f"{len(spec.positional)} mesh axes, and mesh "
                f"{mesh or 'of one device'} has {len(names)}"
            )
        return (tuple(Demand(p, k) for k, p in enumerate(spec.positional)),)
    if not names:
        return ((),)
    return tuple(_tests(constraint, demands, mesh) for demands in spec.alternatives)


def _tests(constraint: Constraint, demands: Sequence[Demand[str]], mesh: Mesh) -> Tests:
    tests: dict[int, list[Test]] = {}
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
                tests.setdefault(axis, []).append(Demand(demand.what, axis, demand.excluded))
    if constraint.placement.complete:
        for axis in range(len(mesh.names)):
            tests.setdefault(axis, [Demand(R, axis)])
    return tuple(test for axis in sorted(tests) for test in tests[axis])


def holds(test: Test, tensor: TensorType, batch: frozenset[int], state: Sharding) -> bool:
    """Whether `tensor` in `state` passes `test`. A single element cannot be sharded, and counts as
    any shard of it."""
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
    """Whether both have the same shards in DTensor: an uneven shard is like any other."""
    if other is None or one.kind not in "SC" or other.kind not in "SC":
        return one == other
    return one.slot == other.slot


def option_holds(
    test: Test, node: Node, option: str, batch: frozenset[int], roles: Mapping[str, str]
) -> bool:
    """Whether an op that does `option` on the axis of `test` passes it. `R` shards nothing, `S`
    something, `batch` the batch and nothing with it."""
    factor = next((f for f in node.factors if f.name == option), None)
    if test.what in ("S", R):
        is_met = (factor is not None) == (test.what == "S")
    elif test.what == "batch":
        alone = factor is not None and factor.atom in batch and not factor.members
        is_met = is_batch(node, option, batch) if test.excluded else alone
    else:
        is_met = roles.get(option) == test.what
    return is_met != test.excluded


def is_batch(node: Node, option: str, batch: frozenset[int]) -> bool:
    """Whether `option` shards the batch, alone or with others."""
    cut = {f.name: f.members or (f.name,) for f in node.factors}
    return any(f.name in cut.get(option, ()) and f.atom in batch for f in node.factors)
