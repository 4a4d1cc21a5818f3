"""The ways to train one model on several processes that `step_time` and `emulated` compare.

Each takes a model, the same on every rank, and returns how a step computes its loss. DDP and
fully_shard are handed this rank's slice of the batch, as their users do; the hand-written plan and
autopar the whole of it, and what they do to take their part counts as theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.runtime.module.module import CompiledModule

ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


Parallelize = Callable[[nn.Module, DeviceMesh], None]


@dataclass(frozen=True)
class Case:
    """A model to train: how to build it and its global batch, its loss, its blocks, and the plan
    that is written by hand."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Loss
    blocks: Callable[[Any], Iterable[nn.Module]]
    by_hand: Parallelize


def given_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss among the outputs of a language model."""
    return model(**batch).loss


def returned_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a model returns."""
    return model(**batch)


def resnet_blocks(model: Any) -> Iterable[nn.Module]:
    """The blocks of all stages."""
    return (block for stage in model.stages for block in stage)


@dataclass
class Contender:
    """A model as one of the ways trains it, on this rank."""

    name: str
    module: nn.Module
    batch: Batch
    loss: Loss
    is_local: bool
    tells_loss: bool = False
    """Whether a step works out the loss of the whole batch on every rank, where `loss` is local."""

    def __post_init__(self) -> None:
        self.optimizer = optimizer(self.module.parameters())

    def step(self) -> Tensor:
        """One training step; the loss of what this rank was handed, before the step."""
        self.optimizer.zero_grad()
        loss = self.loss(self.module, self.batch)
        if self.tells_loss:
            dist.all_reduce(loss.detach().clone())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def global_loss(self) -> float:
        """One step, and the loss of the whole batch."""
        loss = self.step()
        if self.is_local:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss.item()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in one fused call per kind of tensor: DTensors and plain ones do not mix in it."""
    found = list(params)
    kinds = (
        [p for p in found if isinstance(p, DTensor)],
        [p for p in found if not isinstance(p, DTensor)],
    )
    groups = [{"params": kind} for kind in kinds if kind]
    return ADAMW(groups)


def slice_of(batch: Batch) -> Batch:
    """This rank's part of every tensor's dim 0. ValueError if there are no equal ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, x in batch.items():
        if x.shape[0] % size:
            raise ValueError(f"{name}: {x.shape[0]} samples do not divide by {size}")
    return {name: x.chunk(size)[rank].contiguous() for name, x in batch.items()}


def data_parallel(model: nn.Module, batch: Batch, loss: Loss) -> Contender:
    """DistributedDataParallel with its defaults."""
    return Contender("DDP", DistributedDataParallel(model), slice_of(batch), loss, True)


def data_parallel_telling(model: nn.Module, batch: Batch, loss: Loss) -> Contender:
    """The same with the loss of the whole batch on every rank, as autopar gives it."""
    ours = DistributedDataParallel(model)
    return Contender("DDP, loss reduced", ours, slice_of(batch), loss, True, True)


_HYBRID = "replicate", "shard"


def sharded(
    blocks: Callable[[nn.Module], Iterable[nn.Module]], nodes: int = 1
) -> Callable[..., Contender]:
    """fully_shard of every block and of what is left, with its defaults: over all ranks, or, where
    there are several `nodes`, over those of each, with copies between them (HSDP)."""

    def make(model: nn.Module, batch: Batch, loss: Loss) -> Contender:
        size = dist.get_world_size()
        shape, names = ((size,), ("shard",)) if nodes == 1 else ((nodes, size // nodes), _HYBRID)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        name = "fully_shard" if nodes == 1 else "fully_shard, hybrid"
        return Contender(name, model, slice_of(batch), loss, True)

    return make


def by_hand(parallelize: Parallelize) -> Callable[..., Contender]:
    """A plan of `parallelize_module` over all ranks."""

    def make(model: nn.Module, batch: Batch, loss: Loss) -> Contender:
        parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        return Contender("parallelize_module", model, batch, loss, False)

    return make


def planned(name: str = "autopar", **options: Any) -> Callable[..., Contender]:
    """autopar, told of the optimizer; with its defaults, but for these options of
    `autopar.compile`."""

    def make(model: nn.Module, batch: Batch, loss: Loss) -> Contender:
        found = autopar.compile(model, optimizer=ADAMW, **options)
        return Contender(name, found, batch, loss, False)

    return make


def plan_of(contender: Contender) -> autopar.Plan | None:
    """What autopar chose, once it has run; None where it was not asked."""
    if not isinstance(contender.module, CompiledModule):
        return None
    (found,) = contender.module.plans
    return found


class Conv1DParallel(ParallelStyle):
    """transformers' Conv1D, whose weight is `[in, out]`: columns (out) or rows (in) over the mesh.

    `parts` tensors that stand side by side in `out` (query, key, value) are each cut.
    """

    def __init__(self, *, columns: bool, parts: int = 1) -> None:
        self.columns, self.parts = columns, parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._take, self._give)

    def _cut(self, name: str, module: Any, mesh: DeviceMesh) -> None:
        weight, bias = module.weight.detach(), module.bias.detach()
        if self.columns:
            weight, bias = (self._by_rank(x, mesh.size()) for x in (weight, bias))
        places = (Shard(1), Shard(0)) if self.columns else (Shard(0), Replicate())
        for key, whole, place in zip(("weight", "bias"), (weight, bias), places, strict=True):
            setattr(module, key, nn.Parameter(distribute_tensor(whole, mesh, [place])))

    def _by_rank(self, x: Tensor, size: int) -> Tensor:
        """The columns in the order of the ranks that get them."""
        split = x.unflatten(-1, (self.parts, size, -1))
        return split.transpose(-2, -3).flatten(-3).contiguous()

    def _take(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        place = Replicate() if self.columns else Shard(-1)
        return (DTensor.from_local(inputs[0], mesh, [place], run_check=False),)

    def _give(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local() if self.columns else output.full_tensor()


def gpt2_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Megatron's plan: heads and the hidden dim of the MLP over the ranks, words too; logits are
    gathered."""
    whole: Any = model
    body = whole.transformer
    plan: dict[str, ParallelStyle] = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i, block in enumerate(body.h):
        plan |= {
            f"transformer.h.{i}.attn.c_attn": Conv1DParallel(columns=True, parts=3),
            f"transformer.h.{i}.attn.c_proj": Conv1DParallel(columns=False),
            f"transformer.h.{i}.mlp.c_fc": Conv1DParallel(columns=True),
            f"transformer.h.{i}.mlp.c_proj": Conv1DParallel(columns=False),
        }
        block.attn.split_size //= mesh.size()
    parallelize_module(model, mesh, plan)
    whole.lm_head.weight = body.wte.weight


def llama_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """The plan of torch's tutorial on tensor parallelism, without sequence shards; logits are
    gathered."""
    plan = _heads_and_words(model)
    for i in range(_num_layers(model)):
        mlp = f"model.layers.{i}.mlp"
        plan |= {f"{mlp}.{x}_proj": ColwiseParallel() for x in ("gate", "up")}
        plan[f"{mlp}.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def mixtral_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Heads, and words in embedding and head, over the ranks; every rank computes all experts."""
    parallelize_module(model, mesh, _heads_and_words(model))


def _heads_and_words(model: nn.Module) -> dict[str, ParallelStyle]:
    """Attention by heads, embedding and head by words, of a Llama or a Mixtral."""
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(_num_layers(model)):
        attention = f"model.layers.{i}.self_attn"
        plan |= {f"{attention}.{x}_proj": ColwiseParallel() for x in "qkv"}
        plan[f"{attention}.o_proj"] = RowwiseParallel()
    return plan


def _num_layers(model: Any) -> int:
    return len(model.model.layers)


def resnet_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """The head by columns. `parallelize_module` has no style for convolutions: every rank computes
    them for the whole batch."""
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
