"""Reads of a tensor in shards without an op: all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.process.stack_lines import is_read_by_script
from autopar.runtime.torch_private import is_forward_mode, is_traced

_STORAGE = (
    "this rank has the memory of its shard alone, and no storage of the whole tensor: read "
    "x.full_tensor().untyped_storage()"
)


_LINEARIZED = (
    "torch.func.linearize keeps values of a tensor in shards, as this rank has them: take "
    "torch.func.jvp, or linearize at x.full_tensor()"
)


def check_derivatives_of(op: Any) -> None:
    """AutoparError if an op on shards is traced for later, as by `torch.func.linearize`."""
    if is_forward_mode() and is_traced():
        raise AutoparError(f"{op}: {_LINEARIZED}")


def storage_of_shard(shard: Tensor, *, in_shards: bool) -> torch.UntypedStorage:
    """The memory of this rank's shard, for libraries that ask whether tensors share it.
    AutoparError for a script, which would take it for that of the whole tensor."""
    if in_shards and is_read_by_script():
        raise AutoparError(_STORAGE)
    return shard.untyped_storage()


class ReadsWhole:
    """Text, arrays, lists, copies and files of a whole tensor, of which this rank has a `shard`."""

    shard: Tensor
    in_shards: bool

    def full_tensor(self) -> Tensor:
        """The whole, plain tensor on every rank."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.full_tensor())

    def __format__(self, spec: str) -> str:
        return self.full_tensor().__format__(spec)

    def numpy(self, *, force: bool = False) -> Any:
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.full_tensor().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.full_tensor().__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = memo[id(self)] = self.full_tensor().__deepcopy__(memo)
        return copy

    def untyped_storage(self) -> torch.UntypedStorage:
        return storage_of_shard(self.shard, in_shards=self.in_shards)

    def share_memory_(self) -> Any:
        """Move this rank's shard to memory that processes share."""
        self.shard.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.shard.is_shared()
