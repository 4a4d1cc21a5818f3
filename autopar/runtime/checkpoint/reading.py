"""Whole tensors for one rank alone: the others' pieces, without their taking part.

`Trainer` and accelerate save on one rank, as scripts for one device and for DDP do: what they save
must not need a collective. Each rank answers requests for its pieces from a thread, over sockets
whose addresses are in the c10d Store. A piece is read in one state of the optimizer: `moved` counts
the times that parameters and states changed; a rank that has gone on, past what the reader wants,
says so, and the reader raises.

Ranks that end wait until nobody reads any more. No wait is longer than the process group's timeout.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, RankError
from autopar.runtime.dtensor_private import local_slices
from autopar.runtime.process.roll import guilty
from autopar.runtime.process.waits import BoundedStore, SilenceError, in_time
from autopar.runtime.process.world import World

Lookup = Callable[[str], Any]
"""A tensor of this rank by its name."""

_KEY = f"autopar/reading/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_PATIENCE_S = 60.0


class Moves:
    """How often the parameters changed on this rank: odd while they do."""

    def __init__(self) -> None:
        self.count = 0
        self._done: torch.cuda.Event | None = None

    @property
    def are_going_on(self) -> bool:
        return self.count % 2 == 1

    def begin(self) -> None:
        self.count |= 1

    def end(self) -> None:
        self.count = (self.count | 1) + 1
        if torch.cuda.is_initialized():
            self._done = torch.cuda.Event()
            self._done.record()

    def copy(self, piece: Tensor) -> Tensor:
        """`piece` as it is since the last move, on the CPU: on a stream of its own, since the
        default one may wait for the very rank that reads."""
        if not piece.is_cuda:
            return piece.contiguous().clone()
        stream = torch.cuda.Stream(piece.device)
        if self._done is not None:
            stream.wait_event(self._done)
        with torch.cuda.stream(stream):
            return piece.contiguous().cpu()


moves = Moves()


class Reader:
    """Reads from all ranks of `world`, and lets them read here what `offer` names."""

    def __init__(self, world: World) -> None:
        assert world.store is not None
        self.world = world
        self.store: BoundedStore = world.store
        self._patience_s = min(_PATIENCE_S, self.store.timeout_s / 2)
        """How long a rank that is asked waits until it is at the same step: less than who asks."""
        self._offers: dict[str, Lookup] = {}
        self._peers: dict[int, Connection] = {}
        self._last_s = 0.0
        if world.rank == 0:
            self.store.set(f"{_KEY}/secret", secrets.token_hex(32))
        self._secret = self.store.get(f"{_KEY}/secret")
        self._listener = Listener(("", 0), backlog=world.size, authkey=self._secret)
        address = f"{socket.gethostname()} {self._listener.address[1]}"
        self.store.set(f"{_KEY}/{world.rank}", address)
        threading.Thread(target=self._listen, daemon=True, name="autopar reading").start()
        atexit.register(self._leave)

    def offer(self, lookup: Lookup) -> str:
        """The name under which others find what `lookup` finds: the n-th offer of each rank must be
        that of the same thing."""
        name = str(len(self._offers))
        self._offers[name] = lookup
        return name

    def whole(self, offer: str, name: str, tensor: DTensor) -> Tensor:
        """All of `tensor`, which is `name` of `offer`, on the CPU. AutoparError if another rank's
        piece is of another state by now."""
        if tensor.is_meta:
            raise AutoparError(
                f"{name} has no values before the model's first call, or model.prepare(...)"
            )
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        for rank in _holders(tensor):
            if rank == self.world.rank:
                out[_place(tensor)] = tensor.to_local().detach().cpu()
            else:
                place, piece = self._ask(rank, [offer, name, moves.count])
                out[place] = piece
        return out

    def _ask(self, rank: int, request: list[Any]) -> tuple[tuple[slice, ...], Tensor]:
        limit_s = self.store.timeout_s
        try:
            answer, data = in_time(limit_s, f"{request[1]}", self._exchange, rank, request)
        except SilenceError as error:
            meeting = self.world.meeting
            where = f": {guilty(meeting.roll.call())}" if meeting else ""
            raise RankError(
                f"rank {self.world.rank} waited for {request[1]} from rank {rank}, which did not "
                f"answer within {limit_s:g} s{where}"
            ) from error
        except (EOFError, OSError) as error:
            raise AutoparError(
                f"rank {rank} has ended while rank {self.world.rank} reads what it has: let all "
                "ranks wait until it is saved (torch.distributed.barrier())"
            ) from error
        if "error" in answer:
            raise AutoparError(
                f"rank {self.world.rank} reads what rank {rank} has: {answer['error']}"
            )
        dtype: torch.dtype = getattr(torch, answer["dtype"])
        sizes = [stop - start for start, stop in answer["place"]]
        flat = (
            torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        )
        return tuple(slice(*ends) for ends in answer["place"]), flat.reshape(sizes)

    def _exchange(self, rank: int, request: list[Any]) -> tuple[dict[str, Any], bytes]:
        peer = self._peer(rank)
        peer.send_bytes(json.dumps(request).encode())
        answer: dict[str, Any] = json.loads(peer.recv_bytes())
        return answer, b"" if "error" in answer else peer.recv_bytes()

    def _peer(self, rank: int) -> Connection:
        if rank not in self._peers:
            host, port = self.store.get(f"{_KEY}/{rank}").decode().split()
            host = "localhost" if host == socket.gethostname() else host
            self._peers[rank] = Client((host, int(port)), authkey=self._secret)
        return self._peers[rank]

    def _listen(self) -> None:
        while True:
            try:
                peer = self._listener.accept()
            except (AuthenticationError, EOFError, OSError):
                continue  # A stranger at the port.
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: Connection) -> None:
        while True:
            try:
                offer, name, count = json.loads(peer.recv_bytes())
            except (EOFError, OSError):
                return
            self._last_s = time.monotonic()
            try:
                tensor, piece = self._piece(offer, name, count)
            except Exception as error:
                peer.send_bytes(json.dumps({"error": str(error)}).encode())
                continue
            place = [[part.start, part.stop] for part in _place(tensor)]
            dtype = str(piece.dtype).removeprefix("torch.")
            peer.send_bytes(json.dumps({"place": place, "dtype": dtype}).encode())
            peer.send_bytes(piece.flatten().view(torch.uint8).numpy().tobytes())
            self._last_s = time.monotonic()

    def _piece(self, offer: str, name: str, count: int) -> tuple[DTensor, Tensor]:
        deadline = time.monotonic() + self._patience_s
        while moves.count < count or offer not in self._offers:
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        if moves.count == count:
            tensor = self._offers[offer](name)
            piece = moves.copy(tensor.to_local().detach())
            if moves.count == count:
                return tensor, piece
        raise AutoparError(
            f"it is at change {moves.count} of the parameters, where {count} was wanted: save when "
            "all ranks are at the same step"
        )

    def _leave(self) -> None:
        """Wait for those who may still want to read, unless this process ends by an error."""
        if getattr(sys, "last_value", None) is not None:
            return
        self._last_s = max(self._last_s, time.monotonic())
        try:
            left = self.store.add(f"{_KEY}/left", 1)
            while left < self.world.size and time.monotonic() - self._last_s < self._patience_s:
                time.sleep(0.02)
                left = self.store.add(f"{_KEY}/left", 0)
        except RuntimeError:
            return  # The store went with the last rank.


_readers: list[Reader] = []


def start_reading(world: World) -> Reader:
    """The reader of this process, made if there is none yet."""
    if not _readers or _readers[-1].store is not world.store:
        _readers.append(Reader(world))
    return _readers[-1]


def running() -> Reader | None:
    """The reader of this process, if one was started."""
    return _readers[-1] if _readers else None


def _place(tensor: DTensor) -> tuple[slice, ...]:
    return local_slices(tensor.shape, tensor.device_mesh, tensor.placements)


def _holders(tensor: DTensor) -> list[int]:
    """The ranks that have the tensor between them, those nearest this one if it is one of them."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate() or [0] * mesh.ndim
    index = tuple(
        slice(None) if placement.is_shard() else slice(at, at + 1)
        for at, placement in zip(here, tensor.placements, strict=True)
    )
    return mesh.mesh[index].flatten().tolist()
