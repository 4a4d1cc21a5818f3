"""Whole parameters for a while: for evaluation, generation, saving, and changes by hand.

Inside, the model's modules hold plain, whole parameters, and calls go to the plain model. The
shards, to which optimizers refer, are set aside meanwhile. They are gathered one parameter after
the other, each over its own process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import cut_shard
from autopar.runtime.process.agreement import make_agreement
from autopar.runtime.process.digests import digest_values
from autopar.runtime.process.inputs import Inputs
from autopar.runtime.process.own_group import broadcast, own_group
from autopar.runtime.process.world import World
from autopar.runtime.torch_private import flatten, map_tensors


@dataclass(frozen=True, slots=True)
class Whole:
    """Runs calls meanwhile: the plain model, on ranks that have its parameters. All other
    attributes are those of `runner`."""

    model: nn.Module
    runner: Any
    here: bool
    runs_plain: bool = True

    def check(self) -> None:
        """AutoparError on a rank that has no parameters."""
        if not self.here:
            raise AutoparError(
                f"rank {self.runner.world.rank} has no parameters inside unsharded(rank=...): use "
                "the model there only if the context gives it (`if whole is not None:`)"
            )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check()
        args, kwargs = _on_device(self.runner.world, (args, kwargs))
        return self.model(*args, **kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AutoparError("no program can be made inside unsharded(): call prepare() outside")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


class _Held(NamedTuple):
    """A parameter or buffer, its first name, and the modules that hold it, with its name in
    each."""

    name: str
    tensor: Tensor
    places: list[tuple[nn.Module, str]]

    @property
    def now(self) -> Any:
        """The tensor in its place now."""
        module, leaf = self.places[0]
        return getattr(module, leaf, None)

    def put(self, tensor: Tensor) -> None:
        """Assign it as an attribute, so that modules that list their weights, such as `nn.LSTM`,
        notice."""
        for module, leaf in self.places:
            setattr(module, leaf, tensor)


@contextmanager
def whole_parameters(
    model: nn.Module, world: World, rank: int | None, writeback: bool
) -> Generator[bool, None, None]:
    """Inside, the parameters of `model` are plain and whole on `rank`, or on every rank for None.
    Yields whether they are so here. All ranks must enter and leave.

    Afterwards parameters are sharded as before. They and buffers have the values that `rank` (of
    all ranks, rank 0) left in them, or without `writeback` the values from before. AutoparError if
    a parameter has no values yet, if one was replaced or got a gradient inside, or if another rank
    failed there; all changes are undone then.
    """
    if rank is not None and not 0 <= rank < world.size:
        raise AutoparError(f"unsharded(rank={rank}): there are ranks 0 to {world.size - 1}")
    here = rank in (None, world.rank)
    if world.size == 1:
        yield here
        return
    params = [held for held in tensors_of(model, "_parameters") if isinstance(held.tensor, DTensor)]
    buffers = list(tensors_of(model, "_buffers"))
    for held in params:
        if held.tensor.is_meta:
            raise AutoparError(
                f"parameter {held.name} has no values before the first call: call "
                "model.prepare(**batch) first"
            )
    before = [held.tensor.clone() for held in buffers]
    whole: dict[str, Tensor] = {}
    keep = False
    try:
        with world.working("unsharded"):
            _gather(params, whole, here)
        yield here
        _check(params, buffers, whole)
        keep = writeback
    except Exception:
        _meet(world, failed=True)
        raise
    finally:
        values = whole | {held.name: held.now for held in buffers}
        for held in (*params, *buffers):
            held.put(held.tensor)
        if not keep:
            with torch.no_grad():
                for held, value in zip(buffers, before, strict=True):
                    held.tensor.copy_(value)
    _meet(world, failed=False)
    if keep:
        with world.working("unsharded"):
            _take(params, buffers, values, rank or 0)


def generate_tokens(
    own: Callable[..., Any],
    entire: AbstractContextManager[Any],
    world: World,
    inputs: Inputs,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`own(*args, **kwargs)`, the `generate` of a model of `transformers`, by every rank with whole
    parameters, which it has inside `entire`. Global inputs are checked to be equal. From these all
    ranks generate the same tokens, with the random numbers of rank 0's default generator. A
    collective call."""
    args, kwargs = _on_device(world, (args, kwargs))
    if inputs == "global" and world.pre_step_check is not None:
        values = digest_values(flatten((args, kwargs))[0])
        make_agreement(world).agree("what to generate from", {"inputs of generate": values})
        world.pre_step_check.draw_alike()
    with entire:
        return own(*args, **kwargs)


def tensors_of(model: nn.Module, kind: str) -> Iterator[_Held]:
    """The `_parameters` or `_buffers` of all modules, each once."""
    by_id: dict[int, _Held] = {}
    for path, module in model.named_modules():
        table: dict[str, Any] = vars(module)[kind]
        for leaf, tensor in table.items():
            if tensor is not None:
                name = f"{path}.{leaf}" if path else leaf
                by_id.setdefault(id(tensor), _Held(name, tensor, [])).places.append((module, leaf))
    yield from by_id.values()


@torch.no_grad()
def _gather(params: Sequence[_Held], whole: dict[str, Tensor], here: bool) -> None:
    for held in params:
        param = held.tensor
        assert isinstance(param, DTensor)
        value = param.full_tensor()
        if here:
            # For a replicated parameter, it is the stored tensor itself.
            stored = param.to_local().untyped_storage().data_ptr()
            if value.untyped_storage().data_ptr() == stored:
                value = value.clone()
            whole[held.name] = nn.Parameter(value, requires_grad=param.requires_grad)
            held.put(whole[held.name])


def _check(params: Sequence[_Held], buffers: Sequence[_Held], whole: Mapping[str, Tensor]) -> None:
    """AutoparError if a tensor was replaced inside, or got a gradient."""
    for held in (*params, *buffers):
        now, given = held.now, whole.get(held.name, held.now)
        like = isinstance(now, Tensor) and (now.shape, now.dtype) == (
            held.tensor.shape,
            held.tensor.dtype,
        )
        if not like or now is not given:
            raise AutoparError(
                f"{held.name} was replaced inside unsharded(): change its values in place"
            )
        if now.grad is not None and held.name in whole:
            raise AutoparError(
                f"{held.name} got a gradient inside unsharded(), where no optimizer finds it: call "
                "backward outside"
            )


def _meet(world: World, *, failed: bool) -> None:
    """Wait for all ranks; AutoparError if another failed."""
    flag = torch.tensor(int(failed), device=world.device)
    with world.working("end of unsharded"):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=own_group())
    if flag.item() and not failed:
        raise AutoparError(
            "another rank failed inside unsharded(); nothing that was changed there is kept"
        )


@torch.no_grad()
def _take(
    params: Sequence[_Held], buffers: Sequence[_Held], values: dict[str, Any], source: int
) -> None:
    """Store the values of rank `source` on all ranks."""
    for held in (*params, *buffers):
        tensor, value = held.tensor, values.pop(held.name, None)
        stored = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if value is None:
            value = torch.empty(tensor.shape, dtype=stored.dtype, device=stored.device)
        value = value.detach().contiguous()
        broadcast(value, source)
        if isinstance(tensor, DTensor):
            value = cut_shard(value, tensor.device_mesh, tensor.placements)
        stored.copy_(value)


def _on_device(world: World, given: Any) -> Any:
    return map_tensors(lambda x: x.to(world.device), given)
