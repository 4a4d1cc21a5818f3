"""The inputs of a call: whole tensors on every rank, shards of a global batch, DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import AutoparError
from autopar.ir.sharding import InputSharding, P, R, S, Sharding
from autopar.runtime.dtensor_private import when_arrived
from autopar.runtime.process.layouts import check_arguments
from autopar.runtime.process.own_group import own_group
from autopar.runtime.process.world import World
from autopar.runtime.torch_private import TreeSpec, flatten

Inputs = str | Mapping[str, str]
"""`global`, `local`, or one of them per argument of the model's forward, by name."""

_KINDS = ("global", "local")


class Sharded(Protocol):
    """A tensor in shards that has the shape of the whole: a DTensor, or a model's output."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def requires_grad(self) -> bool: ...
    def full_tensor(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class InputShard:
    """A tensor of which this rank holds `local`. If that is not all of it, `source` is the whole as
    a DTensor or an output, and `input_sharding` is the sharding, if it is known. If ranks were
    passed rows of their own, `counts` is how many each."""

    local: Tensor
    source: Sharded | None = None
    input_sharding: InputSharding | None = None
    counts: tuple[int, ...] | None = None

    @property
    def shape(self) -> torch.Size:
        """That of the whole."""
        return self.local.shape if self.source is None else self.source.shape

    def whole(self) -> Tensor:
        """All of the tensor, on every rank. A collective call if it is in shards."""
        return self.local if self.source is None else self.source.full_tensor()

    def stand_in(self) -> Tensor:
        """A tensor to trace with, of the shape of the whole; without values if it is in shards."""
        if self.source is None:
            return self.local
        empty = torch.empty(self.shape, dtype=self.local.dtype, device="meta")
        return empty.requires_grad_(self.source.requires_grad)

    def describe(self) -> str:
        """`float32[8, 16]`, and its input sharding."""
        dtype = str(self.local.dtype).removeprefix("torch.")
        # An input that requires a gradient is refused in tracing.
        graded = "with gradient" if self.local.requires_grad and torch.is_grad_enabled() else ""
        return " ".join(f"{dtype}{list(self.shape)} {self.input_sharding or ''} {graded}".split())


def check_inputs(inputs: Inputs, model: nn.Module) -> None:
    """AutoparError unless `inputs` says "global" or "local", of the arguments of the model."""
    kinds = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    wrong = [kind for kind in kinds if kind not in _KINDS]
    if wrong:
        raise AutoparError(
            f'inputs={wrong[0]!r}: say "global" or "local", or one of them for each argument by '
            'name, {"input_ids": "local"}'
        )
    if isinstance(inputs, Mapping):
        names = _names(model)
        unknown = [name for name in inputs if name not in names]
        if unknown and "" not in names:
            raise AutoparError(
                f"inputs= speaks of {unknown[0]}, which {type(model).__name__} does not take; its "
                f"arguments are {', '.join(names)}"
            )


def take_inputs(
    model: nn.Module, inputs: Inputs, world: World, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], TreeSpec]:
    """The leaves of (args, kwargs), tensors as `InputShard`s on the device of `world`, and the spec
    of those."""
    leaves, spec = flatten((args, kwargs))
    check_arguments(model, leaves, args, kwargs, with_values=True)
    if isinstance(inputs, str):
        is_local: Iterable[bool] = repeat(inputs == "local", len(leaves))
    else:
        is_local = _which_are_local(inputs, _names(model), args, kwargs)
    input_leaves = [
        _take(leaf, local, world) if isinstance(leaf, Tensor) else leaf
        for leaf, local in zip(leaves, is_local, strict=True)
    ]
    return input_leaves, spec


def _which_are_local(
    inputs: Mapping[str, str], names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[bool]:
    """Whether each leaf of (args, kwargs) is a local input, of which ranks pass rows."""
    for position, value in [*enumerate(args), *kwargs.items()]:
        known = isinstance(position, int) and position < len(names)
        kind = inputs.get(names[position] if known else str(position), "global")
        yield from repeat(kind == "local", len(flatten(value)[0]))


def given_rows(leaves: Sequence[Any]) -> list[Tensor]:
    """The local inputs of a call: this rank's own rows."""
    return [
        leaf.local for leaf in leaves if isinstance(leaf, InputShard) and leaf.counts is not None
    ]


def put_together(leaves: Sequence[Any], world: World, counts: Sequence[Sequence[int]]) -> list[Any]:
    """The leaves of a call, with the tensors of `given_rows` as shards of the rows of all ranks.
    `counts` has the rows of each tensor, per rank. A collective call."""
    given = iter(counts)

    def together(leaf: Any) -> Any:
        if not isinstance(leaf, InputShard) or leaf.counts is None:
            return leaf
        rank_counts = tuple(next(given))
        if len(set(rank_counts)) == 1:
            return leaf
        whole = gather_own_rows(leaf.local, rank_counts)
        if whole.shape[0] % world.size:
            return InputShard(whole, None, leaf.input_sharding, rank_counts)
        return _rows(whole.chunk(world.size)[world.rank].clone(), world, rank_counts)

    return [together(leaf) for leaf in leaves]


def _rows(local: Tensor, world: World, counts: tuple[int, ...]) -> InputShard:
    """A shard with equally many rows on every rank; ranks were passed `counts` rows."""
    assert world.device_mesh is not None
    source = DTensor.from_local(local, world.device_mesh, [Shard(0)], run_check=False)
    return InputShard(local, source, InputSharding(Sharding((S(0),)), (world.size,)), counts)


# An uneven batch, such as the last one of a loader, is gathered on all ranks, with its rows in
# order of rank.


def gather_own_rows(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks, in order of rank, `counts` of each. A collective call."""
    missing = max(counts) - rows.shape[0]
    padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)).contiguous()
    # As bytes: not every backend sends every dtype.
    mine = padded.reshape(-1).view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(parts, mine, group=own_group())
    wholes = (part.view(rows.dtype).reshape(padded.shape) for part in parts)
    return torch.cat([whole[:count] for whole, count in zip(wholes, counts, strict=True)])


def same_everywhere(leaves: Sequence[Any]) -> list[Tensor]:
    """The global inputs of a call: tensors that every rank has whole."""
    return [leaf.local for leaf in leaves if isinstance(leaf, InputShard) and leaf.source is None]


def _take(leaf: Tensor, is_local: bool, world: World) -> InputShard:
    if isinstance(leaf, DTensor):
        return _of_dtensor(leaf, world)
    if hasattr(leaf, "full_tensor"):
        return InputShard(leaf, cast("Sharded", leaf))
    leaf = when_arrived(leaf)
    if leaf.is_conj() or leaf.is_neg():
        # The conjugate and negative flags of a view are not in its bytes.
        leaf = leaf.resolve_conj().resolve_neg()
    # A copy to the CPU is read at once; the script may write to pinned memory after the call.
    is_awaited = world.device.type == "cpu" or leaf.is_pinned()
    local = leaf.to(world.device, non_blocking=not is_awaited)
    if world.device_mesh is None or not is_local or local.dim() == 0:
        return InputShard(local)
    return _rows(local, world, (local.shape[0],) * world.size)


def _of_dtensor(leaf: DTensor, world: World) -> InputShard:
    if world.size == 1 or all(p.is_replicate() for p in leaf.placements):
        return InputShard(leaf.to_local())
    return InputShard(leaf.to_local(), leaf, _input_sharding(leaf, world))


def _input_sharding(leaf: DTensor, world: World) -> InputSharding | None:
    """The sharding of a DTensor, if its mesh has the ranks in order."""
    mesh: DeviceMesh = leaf.device_mesh
    if mesh.mesh.flatten().tolist() != list(range(world.size)):
        return None
    placements = tuple(
        S(p.dim) if type(p) is Shard else R if p.is_replicate() else P for p in leaf.placements
    )
    sharding = Sharding(placements)
    return None if sharding.has_partial else InputSharding(sharding, tuple(mesh.mesh.shape))


def _names(model: nn.Module) -> list[str]:
    """The arguments of the model's forward, in order; one of them is empty if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    return ["" if p.kind is p.VAR_KEYWORD else p.name for p in parameters]
