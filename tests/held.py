"""How much memory a program holds while all its ranks run in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode


class Held(TorchFunctionMode):
    """Watches what ops make: `largest` has the bytes of the largest tensor, `peak` the most bytes
    that were held at a time, beside what is `given`. What an op needs for itself alone is not
    seen."""

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.given = {x.untyped_storage()._cdata for x in given}
        self.largest = 0
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata in self.given:
                    continue
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._live = {k: held for k, held in self._live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._live.values()))
        return result


class HandedOver(list[Tensor]):
    """Tensors that are there for whoever takes them, once."""

    def __getitem__(self, position: Any) -> Any:
        value = super().__getitem__(position)
        self[position] = None  # pyright: ignore[reportArgumentType]
        return value
