"""Measure ops and copies on the device at hand, and put what was measured into a price.

Each figure is the median of several runs that start with cold caches. On a GPU a run is timed by
two events on the stream; a long write before them lets the host queue the run in time, so that the
figure is the device's time and not the host's.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from autopar.cluster.profile import (
    PROFILE_VERSION,
    Attention,
    HostCopy,
    LeftOut,
    Matmul,
    MemoryCopy,
    Pointwise,
    Profile,
)
from autopar.cost_model.cases import Cases, cases
from autopar.cost_model.roofline import product_s, stream_s
from autopar.errors import ClusterError
from autopar.ir.graph import itemsize
from autopar.ir.mesh import Device

_Entry = TypeVar("_Entry")

_WARM_UP_RUNS = 3
_LAUNCHES = 200
_FREE_PART = 2
"""An entry may take one part in this many of the memory that is free."""


def profile(
    device: str | torch.device | None = None,
    *,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Measure `device` (a CUDA device if there is one, else the CPU with the threads torch uses).

    The list of sizes is fixed (`cases`); `quick` measures the ceilings alone. What does not fit in
    half of the free memory, runs out of it all the same, or does not run on this device is named in
    `left_out`. `progress` is told of each entry. ClusterError if there is no such device, or if not
    even one matmul and one copy could be measured.
    """
    target = _device(device)
    wanted = cases(target.type, quick=quick)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        found = _measure(_Stopwatch(target, wanted, progress or _silent), wanted)
    finally:
        torch.set_float32_matmul_precision(precision)
    try:
        found.check()
    except ValueError as error:
        raise ClusterError(f"profile of {found.device}: {error}") from None
    return found


def device_from_profile(profile: Profile, base: Device) -> Device:
    """`base` with the rates that `profile` measured: what the largest matmul of each dtype and the
    largest copy reached, and the launch.

    The price of a kernel (`roofline`) takes parts of datasheet rates, those of `base`'s kernels, so
    these are the rates with which it gives the measured times back. Dtypes that were not measured
    keep `base`'s rates.
    ClusterError if the profile is of another kind of device.
    """
    if profile.kind != base.kind:
        raise ClusterError(
            f"the profile is of {profile.device}, kind {profile.kind}; the cluster's device "
            f"{base.name} is of kind {base.kind}: measure on a device of the cluster"
        )
    copy = max(profile.memory_copies, key=lambda entry: entry.num_bytes)
    device = replace(base, memory_bytes_per_s=copy.bytes_per_s / base.kernels.pointwise)
    measured: dict[str, Matmul] = {}
    for entry in profile.matmuls:
        if entry.dtype not in measured or entry.flops > measured[entry.dtype].flops:
            measured[entry.dtype] = entry
    rates = {dtype: _peak(entry, device) for dtype, entry in measured.items()}
    kept = [dtype for dtype, _ in base.flops_per_s if dtype not in rates]
    source = f"profile of {profile.device} with torch {profile.torch}"
    if kept:
        source += f"; {', '.join(kept)}: {base.source}"
    return replace(
        device,
        flops_per_s=tuple(sorted({**dict(base.flops_per_s), **rates}.items())),
        launch_s=profile.launch_ns * 1e-9,
        source=source,
    )


def _peak(entry: Matmul, device: Device) -> float:
    """The peak FLOP/s with which `roofline.product_s` gives `entry`'s time back, which is that of
    the device, without a launch."""
    seconds = entry.time_ns * 1e-9
    start_s = device.floor_s(device.kernels.product_start_s) if device.kind == "cuda" else 0.0
    computing_s = seconds - start_s if start_s < seconds / 2 else seconds
    # A matmul that is bound by memory says of the peak only that it is not lower than what it did.
    if stream_s(entry.num_bytes, device, device.kernels.product_memory) > 0.9 * computing_s:
        return entry.flops / (device.kernels.product * seconds)
    one = replace(device, flops_per_s=(("float32", 1.0),))
    return (product_s(entry.m * entry.n, entry.k, 0.0, "float32", one) - start_s) / computing_s


@dataclass
class _Stopwatch:
    """Times runs on one device, and leaves out what does not fit or does not run."""

    device: torch.device
    cases: Cases
    progress: Callable[[str], None]
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])
    flush: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = min(self.cases.flush_bytes, _free_bytes(self.device) // 8)
        self.flush = torch.empty(size, dtype=torch.uint8, device=self.device)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def random(self, *shape: int, dtype: str) -> torch.Tensor:
        """Random values: products of zeros draw less power, and so run faster than any model."""
        generator = torch.Generator(self.device).manual_seed(0)
        kind = getattr(torch, dtype)
        return torch.randn(*shape, dtype=kind, device=self.device, generator=generator)

    def attempt(self, name: str, needed_bytes: int, measure: Callable[[], _Entry]) -> list[_Entry]:
        """`[measure()]`, or nothing, and why in `left_out`."""
        self.progress(name)
        free_bytes = _free_bytes(self.device)
        if needed_bytes > free_bytes // _FREE_PART:
            reason = f"needs {needed_bytes} bytes, and {free_bytes} are free"
            self.left_out.append(LeftOut(name, reason))
            return []
        try:
            return [measure()]
        except (RuntimeError, MemoryError) as error:
            first_line = str(error).partition("\n")[0] or type(error).__name__
            self.left_out.append(LeftOut(name, first_line))
            return []
        finally:
            gc.collect()
            if self.on_cuda:
                torch.cuda.empty_cache()

    def time_ns(self, run: Callable[[], object]) -> int:
        """Median nanoseconds of `run`, at least 1."""
        for _ in range(_WARM_UP_RUNS):
            run()
        times = self._cuda_ns(run) if self.on_cuda else self._cpu_ns(run)
        return max(1, round(statistics.median(times)))

    def _cuda_ns(self, run: Callable[[], object]) -> list[float]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self.cases.repeats)
        ]
        with torch.cuda.device(self.device):
            for start, end in events:
                self.flush.zero_()
                start.record()
                run()
                end.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e6 for start, end in events]

    def _cpu_ns(self, run: Callable[[], object]) -> list[float]:
        times: list[float] = []
        for _ in range(self.cases.repeats):
            self.flush.zero_()
            start = time.perf_counter_ns()
            run()
            times.append(time.perf_counter_ns() - start)
        return times


def _measure(watch: _Stopwatch, wanted: Cases) -> Profile:
    return Profile(
        schema=PROFILE_VERSION,
        device=_device_name(watch.device),
        kind=watch.device.type,
        torch=str(torch.__version__),
        memory_bytes=_memory_bytes(watch.device),
        launch_ns=_launch_ns(watch),
        matmuls=tuple(e for case in wanted.matmuls for e in _matmul(watch, *case)),
        attentions=tuple(e for case in wanted.attentions for e in _attention(watch, *case)),
        pointwise=tuple(e for case in wanted.pointwise for e in _pointwise(watch, *case)),
        memory_copies=tuple(e for size in wanted.memory_copies for e in _memory_copy(watch, size)),
        host_copies=tuple(e for size in wanted.host_copies for e in _host_copy(watch, size)),
        left_out=tuple(watch.left_out),
    )


def _launch_ns(watch: _Stopwatch) -> int:
    """The host's time for one op on one element. A GPU is waited for before each round and not in
    it, so that its queue, which holds more than a round, never makes the host wait."""
    watch.progress("launch of an op")
    value = torch.zeros(1, device=watch.device)
    rounds: list[float] = []
    for _ in range(watch.cases.repeats + 1):
        if watch.on_cuda:
            torch.cuda.synchronize(watch.device)
        start = time.perf_counter_ns()
        for _ in range(_LAUNCHES):
            value.add_(1.0)
        rounds.append((time.perf_counter_ns() - start) / _LAUNCHES)
    return max(1, round(statistics.median(rounds[1:])))


def _matmul(watch: _Stopwatch, m: int, k: int, n: int, dtype: str) -> list[Matmul]:
    def measure() -> Matmul:
        a, b = watch.random(m, k, dtype=dtype), watch.random(k, n, dtype=dtype)
        out = torch.empty(m, n, dtype=a.dtype, device=watch.device)
        return Matmul(m, k, n, dtype, watch.time_ns(lambda: torch.mm(a, b, out=out)))

    needed_bytes = (m * k + k * n + m * n) * itemsize(dtype)
    return watch.attempt(f"matmul {m}x{k}x{n} {dtype}", needed_bytes, measure)


def _attention(
    watch: _Stopwatch, batch: int, heads: int, sequence: int, head_dim: int, dtype: str
) -> list[Attention]:
    shape = (batch, heads, sequence, head_dim)

    def measure() -> Attention:
        query, key, value, gradient = (watch.random(*shape, dtype=dtype) for _ in range(4))
        inputs = [t.requires_grad_() for t in (query, key, value)]

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        with torch.no_grad():
            forward_ns = watch.time_ns(forward)
        out = forward()
        backward_ns = watch.time_ns(
            lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        )
        return Attention(*shape, dtype, forward_ns, backward_ns)

    tensor_bytes = batch * heads * sequence * head_dim * itemsize(dtype)
    name = f"attention {'x'.join(map(str, shape))} {dtype}"
    # Query, key, value, output, their four gradients, and as much again for what kernels take.
    return watch.attempt(name, 16 * tensor_bytes, measure)


def _pointwise(watch: _Stopwatch, elements: int, dtype: str) -> list[Pointwise]:
    num_bytes = 3 * elements * itemsize(dtype)

    def measure() -> Pointwise:
        a, b = watch.random(elements, dtype=dtype), watch.random(elements, dtype=dtype)
        out = torch.empty_like(a)
        return Pointwise(num_bytes, dtype, watch.time_ns(lambda: torch.add(a, b, out=out)))

    return watch.attempt(f"pointwise {elements} {dtype}", num_bytes, measure)


def _memory_copy(watch: _Stopwatch, size: int) -> list[MemoryCopy]:
    def measure() -> MemoryCopy:
        source = torch.zeros(size, dtype=torch.uint8, device=watch.device)
        target = torch.ones_like(source)
        return MemoryCopy(2 * size, watch.time_ns(lambda: target.copy_(source)))

    return watch.attempt(f"copy of {size} bytes", 2 * size, measure)


def _host_copy(watch: _Stopwatch, size: int) -> list[HostCopy]:
    name = f"host copy of {size} bytes"

    def measure() -> HostCopy:
        if size > _free_bytes(torch.device("cpu")) // _FREE_PART:
            raise MemoryError("too little host memory is free")
        host = torch.zeros(size, dtype=torch.uint8).pin_memory()
        inside = torch.empty(size, dtype=torch.uint8, device=watch.device)
        to_device_ns = watch.time_ns(lambda: inside.copy_(host, non_blocking=True))
        to_host_ns = watch.time_ns(lambda: host.copy_(inside, non_blocking=True))
        return HostCopy(size, to_device_ns, to_host_ns)

    return watch.attempt(name, size, measure)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ClusterError(f"{device!r} is not a device: {str(error).splitlines()[0]}") from None
    if target.type not in ("cuda", "cpu"):
        raise ClusterError(f"{target} cannot be profiled: only CUDA devices and the CPU can")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ClusterError(
            f"there is no device {target} here: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    if target == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _silent(_: str) -> None:
    """Tells nobody."""
