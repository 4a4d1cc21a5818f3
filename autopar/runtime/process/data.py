"""Loading data so that each rank reads its own rows of every global batch and no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from autopar.errors import AutoparError
from autopar.runtime.process.world import place_of_process


class LocalBatches(Sampler[list[int]]):
    """The local batches of `rank`: of each batch of indices in `batches`, the k-th of `world_size`
    equal parts for rank k. AutoparError, while iterating, for a batch that cannot be divided."""

    def __init__(self, batches: Iterable[list[int]], rank: int, world_size: int) -> None:
        self.batches = batches
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            num_rows, rest = divmod(len(batch), self.world_size)
            if rest:
                raise AutoparError(
                    f"a batch of {len(batch)} rows cannot be divided among {self.world_size} ranks"
                )
            yield batch[self.rank * num_rows : (self.rank + 1) * num_rows]

    def __len__(self) -> int:
        assert isinstance(self.batches, Sized)
        return len(self.batches)


class Shuffled(Sampler[int]):
    """The numbers below `length` in an order that depends on the seed and the epoch alone, so that
    all ranks draw the same. Each iteration is an epoch; `set_epoch` says which is next."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`, counted from 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        yield from torch.randperm(self.length, generator=generator).tolist()

    def __len__(self) -> int:
        return self.length


def dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    sampler: Sampler[int] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A `DataLoader` of this rank's rows of global batches of `batch_size`, for a model compiled
    with `inputs="local"`.

    The local batches of all ranks, one after the other, are the batch that one process would load;
    with `shuffle`, in an order that `seed` decides. A custom `sampler` must give the same indices
    on every rank. `options` are those of `DataLoader`.

    AutoparError if the ranks cannot divide the batches evenly, the last one included, or if the
    dataset is iterable: without indices, only the dataset itself can leave rows out.
    """
    rank, world_size = place_of_process()
    if isinstance(dataset, IterableDataset):
        raise AutoparError(
            "an iterable dataset has no indices to choose rows by: let it yield the rows of its "
            "own rank, and load them with a plain DataLoader"
        )
    assert isinstance(dataset, Sized)
    order = sampler or (Shuffled(len(dataset), seed) if shuffle else range(len(dataset)))
    num_rows = len(order) if isinstance(order, Sized) else 0
    rest = 0 if drop_last else num_rows % batch_size
    for size, what in ((batch_size, "a batch"), (rest, "the last batch")):
        if size % world_size:
            raise AutoparError(
                f"{what} has {size} rows, which {world_size} ranks cannot divide evenly: choose "
                "another batch_size, or drop_last=True"
            )
    batches = BatchSampler(order, batch_size, drop_last)
    return DataLoader(dataset, batch_sampler=LocalBatches(batches, rank, world_size), **options)
