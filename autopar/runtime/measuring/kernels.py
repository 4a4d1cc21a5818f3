"""Times of one device's kernels on operands that are not in its caches, as most of a step's are
not. A GPU's caches are cleared before each run; on a CPU runs cycle through many operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor

from autopar.cluster.profile import Attention, Matmul, Pointwise
from autopar.errors import ClusterError
from autopar.ir.graph import itemsize
from autopar.runtime.measuring import stopwatch
from autopar.runtime.measuring.stopwatch import Stopwatch, Timed, random
from autopar.runtime.ops.attention import sdpa, sdpa_backward

_LAUNCHES = 200
_ROUNDS, OPS_PER_ROUND = 8, 24

_CYCLE_BYTES = 64 * 2**20
"""On a CPU the operands of a run are read again after about so many bytes of others. That is more
than a core's caches hold, and about what the step of a small model reads."""
_MAX_COPIES = 1024
_FREE_PART = 4
"""If little memory is free, operands take one part in this many of it."""


def launch_ns(watch: Stopwatch) -> int:
    """The host's time for one op on few elements. For a GPU it is the time to launch a kernel. For
    a CPU it is the mean over ops of many kinds, since the code of a repeated op stays in a core's
    caches, unlike that of a step. ClusterError if no op runs."""

    def same() -> tuple[Timed]:
        value = torch.zeros(1, device=watch.device)

        def launch() -> None:
            for _ in range(_LAUNCHES):
                value.add_(1.0)

        return (launch,)

    def mixed() -> tuple[Timed]:
        x, weight = torch.zeros(4, 8, 16), torch.zeros(16, 16)

        def launch() -> None:
            with torch.no_grad():
                for _ in range(_ROUNDS):
                    ops_of_a_layer(x, weight)

        return (launch,)

    is_cpu = watch.device.type == "cpu"
    prepare, count = (mixed, _ROUNDS * OPS_PER_ROUND) if is_cpu else (same, _LAUNCHES)
    times_ns = watch.attempt("launch of ops", 0, prepare, on_host=True)
    if times_ns is None:
        raise ClusterError(f"no op runs on {watch.device}: {watch.left_out[-1].reason}")
    return max(1, times_ns[0] // count)


def ops_of_a_layer(x: Tensor, weight: Tensor) -> Tensor:
    """`OPS_PER_ROUND` ops, views among them, as in a layer of a model. `x` and the result are [a,
    b, c], `weight` is [c, c]."""
    a, b, c = x.shape
    rows = torch.reshape(x, (a * b, c))
    projected = torch.reshape(torch.matmul(rows, torch.t(weight)), (a, b, c))
    turned = torch.clone(torch.transpose(projected, 0, 1))
    scale = torch.rsqrt(torch.add(torch.mean(torch.pow(turned, 2), [-1], True), 1e-5))
    normed = torch.mul(torch.mul(torch.mul(turned, scale), 0.5), weight[0])
    gate = torch.div(normed, torch.add(torch.exp(torch.neg(normed)), 1.0))
    half = torch.narrow(torch.cat((gate, normed), -1), -1, 0, c)
    centred = torch.sub(half, torch.sum(half, [0], True))
    return torch.add(torch.transpose(centred, 0, 1), x)


def matmuls(watch: Stopwatch) -> Iterator[Matmul]:
    """Those of the cases."""
    for m, k, n, dtype in watch.cases.matmuls:
        num_bytes = (m * k + k * n + m * n) * itemsize(dtype)

        def multiply(m: int = m, k: int = k, n: int = n, dtype: str = dtype) -> tuple[Timed]:
            a = random(watch.device, m, k, dtype=dtype)
            b = random(watch.device, k, n, dtype=dtype)
            out = torch.empty(m, n, dtype=a.dtype, device=watch.device)
            return (lambda: torch.mm(a, b, out=out),)

        times_ns = _time(watch, f"matmul {m}x{k}x{n} {dtype}", num_bytes, multiply)
        yield from (Matmul(m, k, n, dtype, each) for each in times_ns or ())


def attentions(watch: Stopwatch) -> Iterator[Attention]:
    """Those of the cases, forward and backward, by the kernel that graphs call."""
    for *shape, dtype in watch.cases.attentions:
        batch, heads, sequence, head_dim = shape

        def both(shape: list[int] = shape, dtype: str = dtype) -> tuple[Timed, Timed]:
            batch, heads, sequence, head_dim = shape
            inputs = [
                random(watch.device, batch, sequence, heads, head_dim, dtype=dtype).transpose(1, 2)
                for _ in range(4)
            ]
            *given, gradient = inputs
            outputs = sdpa(*given, None, True, None)
            return (
                lambda: sdpa(*given, None, True, None),
                lambda: sdpa_backward(gradient, *given, *outputs, None, True, None),
            )

        # Query, key, value, output, their four gradients, and as much again for what kernels take.
        num_bytes = 16 * batch * heads * sequence * head_dim * itemsize(dtype)
        times_ns = _time(watch, f"attention {'x'.join(map(str, shape))} {dtype}", num_bytes, both)
        if times_ns is not None:
            yield Attention(batch, heads, sequence, head_dim, dtype, *times_ns)


def pointwise_ops(watch: Stopwatch) -> Iterator[Pointwise]:
    """Those of the cases."""
    for elements, dtype in watch.cases.pointwise:
        num_bytes = 3 * elements * itemsize(dtype)

        def add(elements: int = elements, dtype: str = dtype) -> tuple[Timed]:
            a, b = (random(watch.device, elements, dtype=dtype) for _ in range(2))
            out = torch.empty_like(a)
            return (lambda: torch.add(a, b, out=out),)

        times_ns = _time(watch, f"pointwise {elements} {dtype}", num_bytes, add)
        yield from (Pointwise(num_bytes, dtype, each) for each in times_ns or ())


def _time(
    watch: Stopwatch, name: str, num_bytes: int, make: Callable[[], tuple[Timed, ...]]
) -> tuple[int, ...] | None:
    """Nanoseconds of each of the runs that `make` returns, whose operands take `num_bytes`. On a
    CPU runs cycle through those of several calls of `make`. None where `Stopwatch.attempt` gives
    None."""
    copies = 1
    if not watch.on_cuda:
        room = stopwatch.free_bytes(watch.device) // (_FREE_PART * num_bytes)
        copies = max(1, min(_MAX_COPIES, -(-_CYCLE_BYTES // num_bytes), room))

    def prepare() -> tuple[Timed, ...]:
        run_sets = [make() for _ in range(copies)]
        return tuple(_in_turn(runs) for runs in zip(*run_sets, strict=True))

    return watch.attempt(name, copies * num_bytes, prepare)


def _in_turn(runs: tuple[Timed, ...]) -> Timed:
    """A run that cycles through `runs`, one per call."""
    if len(runs) == 1:
        return runs[0]
    following = cycle(runs)
    return lambda: next(following)()
