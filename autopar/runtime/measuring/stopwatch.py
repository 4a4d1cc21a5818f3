"""Time runs on one device, on all ranks at once, and store the figures.

On a GPU a run is timed by two events on the stream. A long write before them clears the caches and
lets the host queue the run in time, so that the figure is the device's time and not the host's. On
a CPU, whose cores processes may share, rounds of many runs are timed, so that they include the time
slices of other processes.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed

from autopar.cluster.profile import LeftOut
from autopar.errors import ClusterError
from autopar.ir.files import write_atomically
from autopar.runtime.measuring.cases import Cases
from autopar.runtime.process.hosts import text_of
from autopar.runtime.process.world import World
from autopar.runtime.torch_private import gloo_of_world

Timed = Callable[[], object]

_dist: Any = torch.distributed
"""Some of its functions have types in part."""

_WARM_UP_RUNS = 3
_FEW = 3
"""The number of rounds for a run that is longer than a round, and of those that estimate its
length."""
_ROUNDS = 10
"""A run that is longer than so many rounds was not just waiting for a core."""
_FREE_PART = 2
"""An entry may take one part in this many of the memory that is free."""
_FLUSH_BYTES = 2**30
_TICK_S = 1e-9


class Notebook(msgspec.Struct, forbid_unknown_fields=True):
    """Nanoseconds measured so far, by the names of entries. `what` describes the device and
    cases."""

    what: str
    times_ns: dict[str, tuple[int, ...]] = {}
    path: str = ""
    """The file it is written to after each entry; none if empty."""

    @staticmethod
    def open(path: str | os.PathLike[str] | None, what: str) -> Notebook:
        """The one that an interrupted run has left in the file; else an empty one."""
        place = os.fspath(path) if path else ""
        try:
            stored = msgspec.json.decode(Path(place).read_bytes(), type=Notebook) if place else None
        except (OSError, msgspec.MsgspecError):
            stored = None
        if stored is None or stored.what != what:
            return Notebook(what, path=place)
        return Notebook(what, stored.times_ns, place)

    def save(self) -> None:
        """ClusterError if it cannot be written."""
        if not self.path:
            return
        try:
            write_atomically(self.path, msgspec.json.encode(self))
        except OSError as error:
            raise ClusterError(f"cannot write {self.path}: {error.strerror}") from None


class AllRanks:
    """The ranks of `world`, which communicate on the host. All calls here are collective."""

    def __init__(self, world: World) -> None:
        self.world = world
        pre_step_check = world.pre_step_check
        self._host = pre_step_check and pre_step_check.within(
            "a process group to measure by", gloo_of_world
        )

    def align(self) -> None:
        """Return when all ranks are here."""
        if self._host:
            _dist.barrier(group=self._host)

    def mean(self, figure: float) -> float:
        """The mean of the ranks'."""
        value = torch.tensor(figure, dtype=torch.float64)
        if self._host:
            _dist.all_reduce(value, group=self._host)
        return float(value) / self.world.size

    def of_first(self, value: Any) -> Any:
        """That of rank 0."""
        values = [value]
        if self._host:
            _dist.broadcast_object_list(values, src=0, group=self._host)
        return values[0]

    def first_reason(self, reason: str) -> str:
        """That of the first rank that has one."""
        reasons = [reason] * self.world.size
        if self._host:
            _dist.all_gather_object(reasons, reason, group=self._host)
        return next(filter(None, reasons), "")


class Stopwatch:
    """Times runs in lockstep with the other ranks of `world`, in rounds by `cases.Cases`. What does
    not fit or run on one of them is left out on all. The `notebook` of rank 0 is that of all."""

    def __init__(
        self, world: World, cases: Cases, notebook: Notebook, progress: Callable[[str], None]
    ) -> None:
        self.device, self.cases = world.device, cases
        self.peers = AllRanks(world)
        self.left_out: list[LeftOut] = []
        self._notebook = self.peers.of_first(notebook)
        self._writes, self._progress = world.rank == 0, progress
        size = min(_FLUSH_BYTES, free_bytes(self.device) // 8) if self.on_cuda else 0
        self._flush = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._signal = torch.zeros(1, device=self.device)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def attempt(
        self,
        name: str,
        needed_bytes: int,
        prepare: Callable[[], tuple[Timed, ...]],
        *,
        on_host: bool = False,
    ) -> tuple[int, ...] | None:
        """Nanoseconds of each run that `prepare` returns, at least 1: the mean over ranks of their
        medians; with `on_host`, the host's time. None where there is too little memory or an error;
        the reason is in `left_out` then."""
        if name in self._notebook.times_ns:
            return self._notebook.times_ns[name]
        self._progress(name)
        runs, reason = self._prepared(needed_bytes, prepare)
        try:
            refused = self.peers.first_reason(reason)
            if refused:
                self.left_out.append(LeftOut(name, refused))
                return None
            times_ns = tuple(self._time_ns(run, on_host=on_host) for run in runs)
        finally:
            del runs
            gc.collect()
            if self.on_cuda:
                torch.cuda.empty_cache()
        self._notebook.times_ns[name] = times_ns
        if self._writes:
            self._notebook.save()
        return times_ns

    def _prepared(
        self, needed_bytes: int, prepare: Callable[[], tuple[Timed, ...]]
    ) -> tuple[tuple[Timed, ...], str]:
        """The runs, each done once; or why there are none."""
        free = free_bytes(self.device)
        if needed_bytes > free // _FREE_PART:
            return (), f"needs {needed_bytes} bytes, and {free} are free"
        try:
            runs = prepare()
            for run in runs:
                run()
        except (RuntimeError, MemoryError) as error:
            return (), str(error).partition("\n")[0] or type(error).__name__
        return runs, ""

    def _time_ns(self, run: Timed, *, on_host: bool) -> int:
        times_s = self._device_s(run) if self.on_cuda and not on_host else self._host_s(run)
        return max(1, round(self.peers.mean(statistics.median(times_s)) * 1e9))

    def _device_s(self, run: Timed) -> list[float]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self.cases.repeats)
        ]
        for _ in range(_WARM_UP_RUNS):
            run()
        with torch.cuda.device(self.device):
            for start, end in events:
                self._flush.zero_()
                if self.peers.world.size > 1:
                    _dist.all_reduce(self._signal)  # All ranks begin together.
                start.record()
                run()
                end.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in events]

    def _host_s(self, run: Timed) -> list[float]:
        runs = 1
        while runs * self._shortest_s(run, runs) < self.cases.round_s:
            runs *= 2
        rounds = self.cases.repeats if runs > 1 else min(_FEW, self.cases.repeats)
        return [self._round_s(run, runs) for _ in range(rounds)]

    def _shortest_s(self, run: Timed, runs: int) -> float:
        """Seconds of a run, the mean over `runs` in the shortest of a few rounds: in a single round
        a short run may have waited for the core. Equal on all ranks."""
        shortest_s = self.peers.mean(self._round_s(run, runs))
        if runs * shortest_s < _ROUNDS * self.cases.round_s:
            for _ in range(1, _FEW):
                shortest_s = min(shortest_s, self.peers.mean(self._round_s(run, runs)))
        return shortest_s

    def _round_s(self, run: Timed, runs: int) -> float:
        """The mean over `runs` of them."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
        self.peers.align()
        start = time.perf_counter()
        for _ in range(runs):
            run()
        return max(_TICK_S, (time.perf_counter() - start) / runs)


def free_bytes(device: torch.device) -> int:
    """Bytes of the device's memory that nothing uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in text_of("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def random(device: torch.device, *shape: int, dtype: str = "float32") -> torch.Tensor:
    """Random values: matmuls of zeros draw less power, and so run faster than in any model."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, dtype=getattr(torch, dtype), device=device, generator=generator)
