"""What the kernels of one device take."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autopar.cluster.profile import Attention, Matmul, Pointwise
from autopar.cost_model.measuring.stopwatch import Stopwatch, Timed, random
from autopar.errors import ClusterError
from autopar.ir.graph import itemsize

_LAUNCHES = 200


def launch_ns(watch: Stopwatch) -> int:
    """The host's time for one op on one element. ClusterError if not even that can be done."""

    def prepare() -> tuple[Timed]:
        value = torch.zeros(1, device=watch.device)

        def launch() -> None:
            for _ in range(_LAUNCHES):
                value.add_(1.0)

        return (launch,)

    found = watch.attempt("launch of ops", 0, prepare, on_host=True)
    if found is None:
        raise ClusterError(f"no op runs on {watch.device}: {watch.left_out[-1].reason}")
    return max(1, found[0] // _LAUNCHES)


def matmuls(watch: Stopwatch) -> tuple[Matmul, ...]:
    """Those of the cases."""
    found: list[Matmul] = []
    for m, k, n, dtype in watch.cases.matmuls:

        def prepare(m: int = m, k: int = k, n: int = n, dtype: str = dtype) -> tuple[Timed]:
            a = random(watch.device, m, k, dtype=dtype)
            b = random(watch.device, k, n, dtype=dtype)
            out = torch.empty(m, n, dtype=a.dtype, device=watch.device)
            return (lambda: torch.mm(a, b, out=out),)

        needed_bytes = (m * k + k * n + m * n) * itemsize(dtype)
        times_ns = watch.attempt(f"matmul {m}x{k}x{n} {dtype}", needed_bytes, prepare)
        found += [Matmul(m, k, n, dtype, each) for each in times_ns or ()]
    return tuple(found)


def attentions(watch: Stopwatch) -> tuple[Attention, ...]:
    """Those of the cases, forward and backward."""
    found: list[Attention] = []
    for *shape, dtype in watch.cases.attentions:
        batch, heads, sequence, head_dim = shape

        def prepare(shape: list[int] = shape, dtype: str = dtype) -> tuple[Timed, Timed]:
            query, key, value, gradient = (
                random(watch.device, *shape, dtype=dtype) for _ in range(4)
            )
            inputs = [t.requires_grad_() for t in (query, key, value)]

            def forward() -> torch.Tensor:
                with torch.no_grad():
                    return F.scaled_dot_product_attention(query, key, value, is_causal=True)

            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return forward, lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        # Query, key, value, output, their four gradients, and as much again for what kernels take.
        needed_bytes = 16 * batch * heads * sequence * head_dim * itemsize(dtype)
        name = f"attention {'x'.join(map(str, shape))} {dtype}"
        times_ns = watch.attempt(name, needed_bytes, prepare)
        if times_ns is not None:
            found.append(Attention(batch, heads, sequence, head_dim, dtype, *times_ns))
    return tuple(found)


def pointwise_ops(watch: Stopwatch) -> tuple[Pointwise, ...]:
    """Those of the cases."""
    found: list[Pointwise] = []
    for elements, dtype in watch.cases.pointwise:

        def prepare(elements: int = elements, dtype: str = dtype) -> tuple[Timed]:
            a, b = (random(watch.device, elements, dtype=dtype) for _ in range(2))
            out = torch.empty_like(a)
            return (lambda: torch.add(a, b, out=out),)

        num_bytes = 3 * elements * itemsize(dtype)
        times_ns = watch.attempt(f"pointwise {elements} {dtype}", num_bytes, prepare)
        found += [Pointwise(num_bytes, dtype, each) for each in times_ns or ()]
    return tuple(found)
