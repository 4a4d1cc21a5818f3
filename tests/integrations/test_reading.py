"""One rank reads what others have, without their taking part."""

from __future__ import annotations

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
from autopar.runtime.process.reading import Moves, Reader
from autopar.runtime.process.waits import BoundedStore
from autopar.runtime.process.world import World


@dataclass
class Half:
    """A DTensor's part in it: two ranks have half of the rows each."""

    whole: Tensor
    rank: int
    is_meta: bool = False

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

    def to_local(self) -> Tensor:
        return self.whole[self.place]


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Reader]:
    monkeypatch.setattr(reading, "_place", lambda tensor: tensor.place)
    monkeypatch.setattr(reading, "_holders", lambda tensor: [0, 1])
    monkeypatch.setattr(reading, "moves", Moves())
    monkeypatch.setattr(reading.atexit, "register", lambda _: None)
    store = BoundedStore(dist.HashStore(), 60)
    return [Reader(World(rank, 2, torch.device("cpu"), store)) for rank in (0, 1)]


def offer(readers: list[Reader], tensor: Tensor) -> str:
    names = {reader.offer(lambda _, r=r: Half(tensor, r)) for r, reader in enumerate(readers)}
    return names.pop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_pieces_are_put_together(readers: list[Reader], dtype: torch.dtype) -> None:
    for shape in ((4, 3), (5,), (1, 2)):
        tensor = (torch.rand(shape) * 9).to(dtype)
        name = offer(readers, tensor)
        for rank, reader in enumerate(readers):
            found = reader.whole(name, "weight", Half(tensor, rank))  # pyright: ignore[reportArgumentType]
            assert torch.equal(found, tensor)


def test_a_rank_that_has_gone_on_says_so(
    readers: list[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.rand(4)

    def moving(_: str) -> Any:
        reading.moves.begin()
        reading.moves.end()
        return Half(tensor, 1)

    readers[0].offer(moving)
    name = readers[1].offer(moving)
    with pytest.raises(AutoparError, match="rank 0 reads what rank 1 has: it is at change 2"):
        readers[0].whole(name, "weight", Half(tensor, 0))  # pyright: ignore[reportArgumentType]


def test_a_rank_that_is_behind_is_waited_for(readers: list[Reader]) -> None:
    tensor = torch.rand(4)
    name = offer(readers, tensor)
    reading.moves.begin()
    later = threading.Timer(0.2, reading.moves.end)
    later.start()
    with pytest.MonkeyPatch.context() as patch:
        # What rank 0 asks for is the state after the change.
        ask = Reader._ask

        def after(self: Reader, rank: int, request: list[Any]) -> Any:
            return ask(self, rank, [*request[:2], 2])

        patch.setattr(Reader, "_ask", after)
        found = readers[0].whole(name, "weight", Half(tensor, 0))  # pyright: ignore[reportArgumentType]
    assert torch.equal(found, tensor)


def test_strangers_are_turned_away(readers: list[Reader]) -> None:
    host, port = "localhost", readers[1]._listener.address[1]
    with pytest.raises(Exception, match="digest"):
        Client((host, port), authkey=b"guess")
    tensor = torch.rand(4)
    name = offer(readers, tensor)
    assert torch.equal(readers[0].whole(name, "w", Half(tensor, 0)), tensor)  # pyright: ignore[reportArgumentType]


def test_loading_is_a_move() -> None:
    """A rank that loads later than the one that reads is waited for."""
    model: Any = autopar.compile(torch.nn.Linear(2, 2))
    before = reading.moves.count
    model.load_state_dict(model.state_dict())
    assert reading.moves.count > before and not reading.moves.are_going_on
