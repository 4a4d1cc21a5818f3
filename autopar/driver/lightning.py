"""Strategies for Lightning's Trainer and Fabric (`pip install autopar[lightning]`).

    trainer = lightning.Trainer(strategy=AutoparStrategy(), accelerator="cpu", devices=2)
    fabric = lightning.Fabric(strategy=AutoparFabricStrategy(), accelerator="cpu", devices=2)

The user starts all processes with torchrun and compiles the model: `autopar.compile(net)` where a
LightningModule makes its `net`, or before `fabric.setup`. The strategies leave it unwrapped, and
give every rank the whole batch, with the size of all ranks together. Losses, outputs, metrics and
logs on every rank are thus those of one process. Checkpoints have whole tensors, as one process
would save them, and are loaded on any number of processes.
"""

# pyright: basic
# Lightning's own types are partly unknown.

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.saving import gather_on_rank_0
from autopar.runtime.module.module import CompiledModule
from autopar.runtime.module.params import as_stored
from autopar.runtime.process.world import join, place_of_process


class AutoparStrategy(ParallelStrategy):
    """For `lightning.Trainer`."""

    num_nodes = 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    def set_world_ranks(self) -> None:
        """Tell the environment which process this is. Lightning asks the environment later."""
        environment = self.cluster_environment
        assert environment is not None and self.parallel_devices is not None
        if not environment.creates_processes_externally and len(self.parallel_devices) > 1:
            raise AutoparError(
                "the processes that train a compiled model are to be there before the script makes "
                f"it: start it with torchrun --nproc-per-node {len(self.parallel_devices)}"
            )
        local_size = len(self.parallel_devices)
        environment.set_global_rank(self.node_rank * local_size + self.local_rank)
        environment.set_world_size(self.num_nodes * local_size)
        rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        join(self.root_device)

    def setup(self, trainer: Any) -> None:
        # Samplers draw from the default generator, and every rank is to draw the same rows.
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Nothing: a compiled model is on its device already."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        _check(model, self.world_size)
        return model

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum over ranks, or their mean, of a tensor; any other value as it is."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        total = tensor.clone()
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        dist.all_reduce(total, dist.ReduceOp.SUM if is_mean else _op(reduce_op), group)
        return total / dist.get_world_size(group) if is_mean else total

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0, nothing on the others. A collective call."""
        return _whole(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same of an optimizer."""
        return _whole_states(super().optimizer_state(optimizer))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state = as_stored(self.lightning_module, checkpoint["state_dict"])
        self.lightning_module.load_state_dict(state, strict=strict)

    def teardown(self) -> None:
        # A compiled model stays where it is, and so do its optimizer's states.
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()


class AutoparFabricStrategy(DDPStrategy):
    """For `lightning.Fabric`. Its options are those of DDPStrategy that speak of processes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control: Any = _NoSync()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None: loaders stay as they are."""
        return None

    def setup_module(self, module: nn.Module) -> Any:
        _check(module, self.world_size)
        return module

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole state on rank 0, nothing on the others. A collective call."""
        return _whole(super().get_module_state_dict(module))

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same of an optimizer."""
        return _whole_states(super().get_optimizer_state(optimizer))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        super().load_module_state_dict(module, as_stored(module, state_dict), strict)


class _NoSync:
    """Gradients are there after each backward: there is nothing to put off."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


def _op(name: Any) -> Any:
    return getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) else name


def _check(model: nn.Module, world_size: int) -> None:
    compiled = [part for part in model.modules() if type(part) is CompiledModule]
    inside = {id(param) for part in compiled for param in part.parameters()}
    outside = [name for name, param in model.named_parameters() if id(param) not in inside]
    if world_size > 1 and outside:
        raise AutoparError(
            f"parameter {outside[0]} is in no compiled model, so that nothing keeps it equal on "
            "all ranks: make it part of the module that is given to autopar.compile"
        )
    for part in compiled:
        if part._runner.world.size != world_size:
            raise AutoparError(
                f"the model was compiled by {part._runner.world.size} process, and {world_size} "
                "are to train it: start the script with torchrun, so that all of them compile it"
            )


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    return gather_on_rank_0(state, place_of_process()[0])


def _whole_states(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "state": {key: _whole(values) for key, values in state["state"].items()}}
