"""Calls of a compiled model: each runs its program, which is made by the first such call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from autopar.errors import ManyProgramsWarning
from autopar.runtime.module.accelerated import Terms, accept, own_lengths
from autopar.runtime.module.executable import (
    Executable,
    ProgramEntry,
    Signature,
    check_transforms,
    describe_argument,
    objects_among,
    remake,
)
from autopar.runtime.process.alone import keep_readable
from autopar.runtime.process.beside import know_rows_differ
from autopar.runtime.process.brought import NEW
from autopar.runtime.process.digests import modes
from autopar.runtime.process.inputs import (
    Inputs,
    InputShard,
    gather_own_rows,
    given_rows,
    put_together,
    same_everywhere,
    take_inputs,
)
from autopar.runtime.process.stage_groups import StageGroups
from autopar.runtime.process.world import Groups, World
from autopar.runtime.program.function import RefrozenError, local
from autopar.runtime.program.leavings import Leavings
from autopar.runtime.program.sharded import ShardedOutput, whole_of
from autopar.runtime.program.widening import Ready, impossible, remember
from autopar.runtime.torch_private import TreeSpec, flatten, is_forward_mode, unflatten

# Results of a call to which each rank passed rows of its own: each rank gets its rows.
#
# A script uses them as under `DistributedDataParallel`: its labels are for the same rows, and its
# loss is that of these rows. The gradient is that of the mean of the ranks' losses. Results without
# rows, such as a loss that the model computes, are those of the whole batch.


def rows_of_rank(value: Tensor, world: World, dim: int, counts: tuple[int, ...] | None) -> Tensor:
    """This rank's rows of a result whose `dim` has the rows of all ranks. Ranks passed `counts`
    rows each, or equally many for None. A result may have several per row, such as one per
    token."""
    if world.size == 1:
        return value
    size = value.shape[dim]
    shares = counts or (1,) * world.size
    each = size // sum(shares)
    return _Rows.apply(value, world, dim, tuple(each * count for count in shares))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, whole: Tensor, world: World, dim: int, counts: tuple[int, ...]
    ) -> Tensor:
        ctx.of = world, dim, counts  # pyright: ignore[reportAttributeAccessIssue]
        is_even = len(set(counts)) == 1
        if is_even and isinstance(whole, ShardedOutput) and _is_by_rows(whole, world, dim):
            return whole.shard.detach()
        return whole_of(whole).split(counts, dim)[world.rank].clone()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, tangent: Tensor
    ) -> tuple[Tensor, None, None, None]:
        world, dim, counts = ctx.of  # pyright: ignore[reportAttributeAccessIssue]
        gathered = gather_own_rows(tangent.movedim(dim, 0), counts).movedim(0, dim)
        return gathered / world.size, None, None, None


def _is_by_rows(value: ShardedOutput, world: World, dim: int) -> bool:
    """Whether this rank's shard of it are its rows."""
    mesh, placements = value.device_mesh, value.placements
    in_order = mesh is not None and mesh.mesh.flatten().tolist() == list(range(world.size))
    is_even = value.shape[dim] % world.size == 0
    return in_order and is_even and all(p.is_shard(dim) for p in placements)


_MANY = 8
_NUMBERS = count()


class Build(Protocol):
    """Makes a program for a call; an input that is in shards is a meta tensor of the whole's shape.
    The groups are those of earlier programs, whose mesh it must share. They are None for the first
    program, for which the model's parameters are then sharded. `differentiable` are the names of
    outputs that backwards have gone through."""

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
        groups: Groups | StageGroups | None,
        differentiable: frozenset[str],
    ) -> Executable: ...

    def copied(self, model: nn.Module) -> Build:
        """The same for a copy of the model, whose parameters are stored alike."""
        ...


@dataclass
class Runner:
    """Runs the program for a call's signature, which is made by the first such call."""

    model: nn.Module
    world: World
    build: Build
    inputs: Inputs | None = None
    terms: Terms | None = None
    entries: dict[tuple[str, ...], list[ProgramEntry]] = field(default_factory=dict)
    """By the inputs' types, those that ran last first."""
    groups: Groups | StageGroups | None = None
    differentiable: frozenset[str] = frozenset()
    """The names of outputs that backwards have gone through."""
    runs_plain: bool = False
    """A program is being made, for which the model itself runs."""
    with_values: bool = False
    """Programs are made from the values of a batch, gathered if it is in shards."""

    def __post_init__(self) -> None:
        kinds = self.inputs.values() if isinstance(self.inputs, Mapping) else [self.inputs]
        self._leavings, self._has_rows = Leavings(), "local" in kinds  # of their own, the ranks
        if self._has_rows:
            know_rows_differ()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.runs_plain:
            return self.model(*args, **kwargs)
        check_transforms(flatten((args, kwargs))[0] if is_forward_mode() else ())
        if self.terms is None:
            return self._run(args, kwargs)
        taken = self.terms.take(kwargs)
        lengths = own_lengths(kwargs, taken, len(flatten(args)[0]))
        with self.terms.autocast():
            return self.terms.give(self._run(args, taken, lengths), taken)

    @property
    def results_in_order(self) -> Inputs:
        """How inputs are passed. The default is global, or local under accelerate."""
        return self.inputs or ("local" if self.terms else "global")

    def accept_accelerate(self) -> None:
        """From now on the model is one that accelerate has prepared (`accelerated`)."""
        self.terms = self.terms or accept(self.model, self.world)
        self._has_rows |= not self.inputs
        know_rows_differ()

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lengths: Mapping[int, int] = MappingProxyType({}),
        *,
        exact: bool = False,
    ) -> Any:
        self._leavings.enter()
        leaves, entry = self.prepare(args, kwargs, exact=exact)
        executable = entry.executable
        step, params, others, random = ready = self._ready(entry, leaves)
        past = None
        if step.cut and step.is_differentiated:
            wider = self._leavings.rerun(executable.leavings, partial(self._wider, entry, leaves))
            past = remember(ready, leaves, executable.names, wider)
        results: dict[str, Tensor] | None = None
        with suppress(RefrozenError), random.drawn_from() if random else nullcontext():
            results = step(params, others, past, entry.trained)
        if results is None:
            return self._run(args, kwargs, lengths, exact=True)
        with torch.no_grad():
            for name in [name for name in results if name.startswith(("mutation:", "update:"))]:
                local(entry.tensor(self.model, name.partition(":")[2])).copy_(results.pop(name))
        remake(entry.recreated)
        if self._has_rows:
            for name, (dim, source) in executable.rows.items():
                own = rows_of_rank(results[name], self.world, dim, leaves[source].counts)
                padded = [lengths[k] for k in executable.sequences.get(name, ()) if k in lengths]
                results[name] = own[:, : padded[0]] if padded else own
        leaves = [r.value if r.name is None else results[r.name] for r in executable.results]
        self._leavings.leave(executable.leavings)
        keep_readable(self.model, leaves)
        return unflatten(leaves, executable.out_spec)

    def _ready(self, entry: ProgramEntry, leaves: list[Any]) -> Ready:
        executable = entry.executable
        # A tensor that is a plain attribute may be on another device.
        others = {name: x.to(self.world.device) for name, x in entry.buffers.items()}
        for name in executable.step.forward_inputs:
            if name.startswith("input:"):
                shard: InputShard = leaves[int(name.removeprefix("input:"))]
                others[name] = shard.local if name in executable.sharded_inputs else shard.whole()
        random = self.terms.random(executable.random) if self.terms else executable.random
        params = entry.ready_params(self.world.device)
        if is_forward_mode():
            check_transforms([*params.values(), *others.values()])
        return Ready(executable.step, params, others, random)

    def _wider(self, entry: ProgramEntry, leaves: list[Any], outputs: frozenset[str]) -> Ready:
        """What to run for a call of `entry`, with a program that has gradients of `outputs`."""
        signature = self._signature(leaves, entry.executable.in_spec)
        current = self._known(signature)
        if current is None or current.executable.origin is not entry.executable.origin:
            raise impossible(outputs, "the model was changed since, as by train() or eval()")
        names, cut = current.executable.names, current.executable.step.cut_positions
        if any(names[position] in outputs for position in cut):
            self.differentiable |= outputs
            self.entries[signature.inputs].remove(current)
            current = self._new(leaves, signature, current)
        return self._ready(current, leaves)

    @property
    def programs(self) -> tuple[Executable, ...]:
        """The programs made so far, in their order."""
        entries = [each for same in self.entries.values() for each in same]
        return tuple(each.executable for each in sorted(entries, key=lambda each: each.number))

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, exact: bool = False
    ) -> tuple[list[Any], ProgramEntry]:
        """The leaves of a call, and the program for it, made if there is none yet; `exact` as in
        `_known`."""
        # The order of keywords must not make another program.
        kwargs = dict(sorted(kwargs.items()))
        leaves, spec = take_inputs(self.model, self.results_in_order, self.world, args, kwargs)
        signature = self._signature(leaves, spec)
        entry = self._known(signature, exact=exact)
        own_rows = given_rows(leaves) if self._has_rows else None
        counts = self._meet(entry, leaves, signature, own_rows)
        if counts:
            leaves = put_together(leaves, self.world, counts)
            signature = self._signature(leaves, spec)
            entry = self._known(signature, exact=exact)
            self._meet(entry, leaves, signature)
        return leaves, self._new(leaves, signature) if entry is None else entry

    def _meet(
        self,
        entry: ProgramEntry | None,
        leaves: list[Any],
        signature: Signature,
        own_rows: Sequence[Tensor] | None = None,
    ) -> list[list[int]]:
        if self.world.pre_step_check is None:
            return []
        number = NEW if entry is None else entry.number
        facts = partial(self._facts, signature)
        batch, alike = same_everywhere(leaves), not (self.terms or self._has_rows)
        return self.world.pre_step_check.meet(number, batch, facts, own_rows, draws_alike=alike)

    def _facts(self, signature: Signature) -> dict[str, str]:
        suited = [each for each in self.entries[signature.inputs] if each.signature == signature]
        changed = suited[0].guard.changed()[:3] if suited else []
        changes = {"changes since the call before": ", ".join(changed) or "none"}
        return signature.facts() | modes(self.model) | changes

    def copied(self, model: nn.Module) -> Runner:
        """The same for a copy of the model, with no programs yet."""
        return Runner(
            model, self.world, self.build.copied(model), self.inputs, with_values=self.with_values
        )

    def _known(self, signature: Signature, *, exact: bool = False) -> ProgramEntry | None:
        """The program for a call, if the model is as it was when that was made. Without `exact`,
        parameters may have been frozen since: results stay right."""
        same = self.entries.setdefault(signature.inputs, [])
        suited = [each for each in same if each.signature == signature]
        entry = next((each for each in suited if not exact and each.guard.holds()), None)
        if entry is None:
            entry = next(
                (p for p in suited if p.guard.holds_after_all(partial(p.is_stored, self.model))),
                None,
            )
            if entry is not None:
                entry.collect(self.model)
        if entry is not None and entry is not same[0]:
            same.remove(entry)
            same.insert(0, entry)
        if entry is None and len(suited) >= _MANY:
            _tell_many(suited)
        return entry

    def _new(
        self, leaves: list[Any], signature: Signature, instead: ProgramEntry | None = None
    ) -> ProgramEntry:
        """A new program for a call, which replaces `instead` if that is given."""
        stand_ins = [
            self._stand_in(leaf) if isinstance(leaf, InputShard) else leaf for leaf in leaves
        ]
        args, kwargs = unflatten(stand_ins, signature.spec)
        self.runs_plain = True
        try:
            with self.world.working("compilation"):
                executable = self.build(args, kwargs, signature, self.groups, self.differentiable)
        finally:
            self.runs_plain = False
        if instead is not None:
            executable = replace(executable, origin=instead.executable.origin)
        self.groups = executable.groups
        number = next(_NUMBERS) if instead is None else instead.number
        entry = ProgramEntry.of(number, signature, self.model, executable)
        self.entries[signature.inputs].insert(0, entry)
        return entry

    def _stand_in(self, shard: InputShard) -> Tensor:
        return shard.whole() if self.with_values else shard.stand_in()

    def _signature(self, leaves: list[Any], spec: TreeSpec) -> Signature:
        return Signature(
            inputs=tuple(map(describe_argument, leaves)),
            input_shardings=tuple(
                leaf.input_sharding if isinstance(leaf, InputShard) else None for leaf in leaves
            ),
            objects=tuple(objects_among(leaves)),
            spec=spec,
            autocast=tuple(
                f"{device} {torch.get_autocast_dtype(device)}"
                for device in ("cpu", "cuda")
                if torch.is_autocast_enabled(device)
            ),
        )


def _tell_many(suited: list[ProgramEntry]) -> None:
    what = ", ".join(suited[0].guard.changed()[:3]) or "an argument that is an object"
    warnings.warn(
        ManyProgramsWarning(
            f"{len(suited)} programs were made for inputs of one shape, since {what} changed, and "
            "one more is being made, which takes as long as the first: pass what changes often as "
            "a tensor, or keep it in a buffer"
        ),
        stacklevel=2,
    )
