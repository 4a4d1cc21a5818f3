"""Whole tensors for one rank alone, from the shards of the others, without a collective.

Scripts for one device and for DDP print, log and save on one rank: their reads must not need a
collective. A thread of each rank answers requests for its shards, over sockets whose addresses are
in the c10d Store. All shards are read in one state: `moves` counts the changes of parameters,
gradients and states. If a rank has gone past the requested state, the reader raises.

A rank that ends waits until no other reads. No wait is longer than the process group's timeout.
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
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import AutoparError, RankError
from autopar.runtime.dtensor_private import local_slices, shard_of
from autopar.runtime.process.moves import moves
from autopar.runtime.process.rank_registry import guilty
from autopar.runtime.process.waits import BoundedStore, SilenceError, in_time
from autopar.runtime.process.world import World

_AT_THE_SAME = (
    ": read, print and save when all ranks are at the same step, gradients before the optimizer's"
)
_GRAD, _OUTPUT = "gradient of ", "output "
_KEY = f"autopar/reading/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_PATIENCE_S = 60.0
_LOOK_S = 1.0


class Reader:
    """Reads from all ranks of `world`, and lets them read here: parameters and gradients of
    `models`, states of `optimizers`, and `outputs` by their numbers. Each rank has them in the same
    order."""

    def __init__(self, world: World) -> None:
        assert world.store is not None
        self.world = world
        self.store: BoundedStore = world.store
        self.models: list[ReferenceType[nn.Module]] = []
        self.optimizers: list[ReferenceType[Optimizer]] = []
        self.outputs: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.num_outputs = 0
        self.saves = False
        """Whether single ranks save whole tensors by default."""
        self.retained: dict[int, Any] = {}
        """Compiled models and optimizers that ran. The script may have released them here while
        other ranks still read them."""
        self.copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        """The model inside of each copy of a compiled model that the script has."""
        self.held: list[nn.Module] = []
        """For the same reason, the models inside of copies that the script had when ranks last met,
        or has made since."""
        self.outputs_of: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        """For the same reason, outputs of the previous call of each model."""
        self._patience_s = min(_PATIENCE_S, self.store.timeout_s / 2)
        """How long an asked rank waits until it is at the same step: less than the asking one."""
        self._peers: dict[int, Connection] = {}
        self._last_s = 0.0
        if world.rank == 0:
            self.store.set(f"{_KEY}/secret", secrets.token_hex(32))
        self._secret = self.store.get(f"{_KEY}/secret")
        self._listener = Listener(("", 0), backlog=world.size)
        address = f"{socket.gethostname()} {self._listener.address[1]}"
        self.store.set(f"{_KEY}/{world.rank}", address)
        threading.Thread(target=self._listen, daemon=True, name="autopar reading").start()
        atexit.register(self._leave)

    def add_output(self, output: Any) -> None:
        """Register an output in shards: every rank does so at this place of the script."""
        output.number = self.num_outputs
        self.outputs[self.num_outputs] = output
        self.num_outputs += 1

    def hold_copies(self) -> None:
        """Hold the copies that the script has, and no others, as ranks have met."""
        self.held = [*self.copies.values()]

    def name_of(self, tensor: Any) -> str:
        """The name by which all ranks find a tensor. Empty if they may not have it, such as
        gradients after an optimizer's step, which ranks further on may drop."""
        if not isinstance(tensor, DTensor):
            number = getattr(tensor, "number", None)
            return f"{_OUTPUT}{number}" if number in self.outputs else ""
        return next((name for name, known in self._known() if known is tensor), "")

    def names(self) -> dict[int, str]:
        """The names of all parameters, gradients and states, by their `id`."""
        return {id(known): name for name, known in self._known()}

    def _known(self) -> Iterator[tuple[str, Any]]:
        for k, model in enumerate(self.models):
            module = model()
            for path, param in module.named_parameters() if module is not None else ():
                yield f"{k}.{path}", param
                if param.grad is not None and not moves.has_stepped:
                    yield f"{_GRAD}{k}.{path}", param.grad
        for k, optimizer in enumerate(self.optimizers):
            owner = optimizer()
            yield from (
                (f"state {k}/{index}/{key}", value)
                for index, state in enumerate(_states(owner) if owner is not None else ())
                for key, value in state.items()
                if isinstance(value, DTensor)
            )

    def _tensor_named(self, name: str, count: int) -> Any:
        """This rank's tensor of a name that `name_of` gave on another; None if it does not exist
        yet. AutoparError if it is gone."""
        if name.startswith(_OUTPUT):
            number = int(name.removeprefix(_OUTPUT))
            tensor, is_past = self.outputs.get(number), number < self.num_outputs
        else:
            tensor = next((x for known, x in self._known() if known == name), None)
            is_past = moves.count >= count
        if tensor is None and is_past:
            raise AutoparError(f"it has no {name} any more{_AT_THE_SAME}")
        return tensor

    def whole(self, name: str, tensor: Any) -> Tensor:
        """All of `tensor`, which has this name, on the CPU. AutoparError if another rank's shard
        has changed by now."""
        if isinstance(tensor, DTensor) and tensor.is_meta:
            raise AutoparError(
                f"{name} has no values before the model's first call, or model.prepare(...)"
            )
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        for rank in _holders(tensor):
            if rank == self.world.rank:
                out[_place(tensor)] = _shard(tensor).detach().cpu()
            else:
                place, shard = self._ask(rank, [name, _version(name, tensor)])
                out[place] = shard
        return out

    def _ask(self, rank: int, request: list[Any]) -> tuple[tuple[slice, ...], Tensor]:
        limit_s = self.store.timeout_s
        try:
            answer, data = in_time(limit_s, request[0], self._exchange, rank, request)
        except SilenceError as error:
            pre_step_check = self.world.pre_step_check
            where = f": {guilty(pre_step_check.registry.call())}" if pre_step_check else ""
            raise RankError(
                f"rank {self.world.rank} waited for {request[0]} from rank {rank}, which did not "
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
            _send_at_once(self._peers[rank])
        return self._peers[rank]

    def _listen(self) -> None:
        while True:
            peer = self._listener.accept()
            threading.Thread(target=self._welcome, args=(peer,), daemon=True).start()

    def _welcome(self, peer: Connection) -> None:
        """Serve a peer that knows the secret. A silent stranger does not block the others."""
        try:
            deliver_challenge(peer, self._secret)
            answer_challenge(peer, self._secret)
        except (AuthenticationError, EOFError, OSError):
            peer.close()
            return
        _send_at_once(peer)
        self._serve(peer)

    def _serve(self, peer: Connection) -> None:
        while True:
            try:
                name, positions = json.loads(peer.recv_bytes())
            except (EOFError, OSError):
                return
            self._last_s = time.monotonic()
            try:
                tensor, shard = self._answer(name, positions)
            except Exception as error:
                peer.send_bytes(json.dumps({"error": str(error)}).encode())
                continue
            place = [[part.start, part.stop] for part in _place(tensor)]
            dtype = str(shard.dtype).removeprefix("torch.")
            peer.send_bytes(json.dumps({"place": place, "dtype": dtype}).encode())
            peer.send_bytes(shard.flatten().view(torch.uint8).numpy().tobytes())
            self._last_s = time.monotonic()

    def _answer(self, name: str, positions: list[int]) -> tuple[Any, Tensor]:
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            tensor = self._tensor_named(name, positions[0])
            if tensor is not None and _version(name, tensor) >= positions:
                break
            time.sleep(0.001)
        else:
            raise AutoparError(f"it has not come to where {name} is there{_AT_THE_SAME}")
        if _version(name, tensor) == positions:
            shard = moves.copy(_shard(tensor).detach())
            if _version(name, tensor) == positions:
                return tensor, shard
        now, then = (".".join(map(str, each)) for each in (_version(name, tensor), positions))
        raise AutoparError(
            f"it is at change {now} of {name}, where {then} was wanted{_AT_THE_SAME}"
        )

    def _leave(self) -> None:
        """Wait for ranks that may still read, unless this process ends by an error."""
        check = self.world.pre_step_check
        if getattr(sys, "last_value", None) is not None or (check and check.has_parted):
            return
        waits_in = "the end of the script"
        with check.registry.during("", waits_in=waits_in) if check else nullcontext():
            self._stay()

    def _stay(self) -> None:
        check = self.world.pre_step_check
        look_s = self._last_s = max(self._last_s, time.monotonic())
        try:
            left = self.store.add(f"{_KEY}/left", 1)
            while left < self.world.size and time.monotonic() - self._last_s < self._patience_s:
                time.sleep(0.02)
                left = self.store.add(f"{_KEY}/left", 0)
                if check and time.monotonic() > look_s:
                    # Others may have ended without leaving.
                    left += sum(bool(place.ended) for place in check.registry.call())
                    look_s = time.monotonic() + _LOOK_S
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


def _send_at_once(peer: Connection) -> None:
    """Send short messages without delay: an answer is two messages."""
    with socket.socket(fileno=os.dup(peer.fileno())) as other:
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _states(optimizer: Optimizer) -> Iterator[Mapping[str, Any]]:
    """The states of an optimizer's parameters, in their order."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return (optimizer.state.get(param, {}) for param in params)


def _version(name: str, tensor: Any) -> list[int]:
    """How often a tensor of this name was changed. Only a gradient's own version counts what
    autograd adds to it outside of a program."""
    if not isinstance(tensor, DTensor):
        return [tensor.writes]
    return [moves.count, tensor._version] if name.startswith(_GRAD) else [moves.count]


def _shard(tensor: Any) -> Tensor:
    return shard_of(tensor) if isinstance(tensor, DTensor) else tensor.shard


def _place(tensor: Any) -> tuple[slice, ...]:
    return local_slices(tensor.shape, tensor.device_mesh, tensor.placements)


def _holders(tensor: Any) -> list[int]:
    """Ranks that together have the whole tensor, as near this one as possible."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate() or [0] * mesh.ndim
    index = tuple(
        slice(None) if placement.is_shard() else slice(at, at + 1)
        for at, placement in zip(here, tensor.placements, strict=True)
    )
    return mesh.mesh[index].flatten().tolist()
