"""One rank reads what others have, without their taking part."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.errors import AutoparError
from autopar.runtime.process import reading
from autopar.runtime.process.moves import moves
from autopar.runtime.process.reading import Reader
from autopar.runtime.process.waits import BoundedStore
from autopar.runtime.process.world import World


@dataclass(eq=False)
class Half:
    """An output's part in it: two ranks have half of the rows each."""

    whole: Tensor
    rank: int
    writes: int = 0
    number: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def place(self) -> tuple[slice, ...]:
        rows = len(self.whole) // 2
        start = self.rank * rows
        stop = start + rows if self.rank == 0 else len(self.whole)
        return slice(start, stop), *(slice(0, size) for size in self.shape[1:])

    @property
    def shard(self) -> Tensor:
        return self.whole[self.place]


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Reader]:
    monkeypatch.setattr(reading, "_place", lambda tensor: tensor.place)
    monkeypatch.setattr(reading, "_holders", lambda tensor: [0, 1])
    monkeypatch.setattr(reading.atexit, "register", lambda _: None)
    store = BoundedStore(dist.HashStore(), 60)
    return [Reader(World(rank, 2, torch.device("cpu"), store)) for rank in (0, 1)]


def offer(readers: list[Reader], tensor: Tensor, writes: tuple[int, int] = (0, 0)) -> list[Half]:
    halves = [Half(tensor, rank, writes[rank]) for rank in range(2)]
    for reader, half in zip(readers, halves, strict=True):
        reader.add_output(half)
    return halves


def read(reader: Reader, half: Half) -> Tensor:
    return reader.whole(reader.name_of(half), half)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_pieces_are_put_together(readers: list[Reader], dtype: torch.dtype) -> None:
    for shape in ((4, 3), (5,), (1, 2)):
        tensor = (torch.rand(shape) * 9).to(dtype)
        halves = offer(readers, tensor)
        for reader, half in zip(readers, halves, strict=True):
            assert torch.equal(read(reader, half), tensor)


def test_a_rank_that_has_gone_on_says_so(readers: list[Reader]) -> None:
    halves = offer(readers, torch.rand(4), (3, 4))
    with pytest.raises(
        AutoparError, match="rank 0 reads what rank 1 has: it is at change 4 of output 0, where 3"
    ):
        read(readers[0], halves[0])


def test_a_rank_that_has_let_go_says_so(readers: list[Reader]) -> None:
    halves = offer(readers, torch.rand(4))
    del halves[1]
    with pytest.raises(AutoparError, match="rank 1 has: it has no output 0 any more"):
        read(readers[0], halves[0])


def test_a_rank_that_is_behind_is_waited_for(readers: list[Reader]) -> None:
    tensor = torch.rand(4)
    halves = offer(readers, tensor, (1, 0))
    later = threading.Timer(0.2, lambda: setattr(halves[1], "writes", 1))
    later.start()
    assert torch.equal(read(readers[0], halves[0]), tensor)


def test_an_output_that_is_not_there_yet_is_waited_for(readers: list[Reader]) -> None:
    tensor = torch.rand(4)
    halves = [Half(tensor, rank) for rank in range(2)]
    readers[0].add_output(halves[0])
    later = threading.Timer(0.2, readers[1].add_output, (halves[1],))
    later.start()
    assert torch.equal(read(readers[0], halves[0]), tensor)


def test_strangers_are_turned_away(readers: list[Reader]) -> None:
    address: Any = readers[1]._listener.address
    host, port = "localhost", int(address[1])
    silent = socket.create_connection((host, port))
    with pytest.raises(Exception, match="digest"):
        Client((host, port), authkey=b"guess")
    tensor = torch.rand(4)
    halves = offer(readers, tensor)
    assert torch.equal(read(readers[0], halves[0]), tensor)
    silent.close()


def test_loading_is_a_move() -> None:
    """A rank that loads later than the one that reads is waited for."""
    model: Any = autopar.compile(torch.nn.Linear(2, 2))
    before = moves.count
    model.load_state_dict(model.state_dict())
    assert moves.count > before and not moves.are_going_on
