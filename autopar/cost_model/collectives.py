"""Seconds and bytes of one collective on one mesh axis: start + latency + bytes / bandwidth.

The formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), with n ranks, latency a per step, bandwidth b per device and direction,
and B the bytes of the unsharded side of the local tensor; every collective but a slice takes the
link's `start_s` on top:

    all_gather      ring                (n - 1) a + (n - 1)/n B / b
    reduce_scatter  ring                (n - 1) a + (n - 1)/n B / b
    all_to_all      pairwise exchange   (n - 1) a + (n - 1)/n B / b
    all_reduce      ring              2 (n - 1) a + 2 (n - 1)/n B / b
    all_reduce      tree         2 ceil(log2 n) a + 2 B / b
    permute         to the next             a + B / b
    slice           local                       0

Rings (and trees) over several nodes go through all adapters of a node at once, b is then
`Axis.ring_bytes_per_s`; what an exchange or a permutation sends to other nodes passes each device's
own adapter.
The all-reduce takes the faster of its two. The tree is the pipelined double binary tree of
Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
(2009), which NCCL uses. The adding up inside a reduction is not in these figures.
"""

from __future__ import annotations

import numpy as np

from autopar.ir.mesh import Axis
from autopar.ir.redistribute import KINDS


def collective_s(
    kind: str, in_bytes: int, out_bytes: int, axis: Axis, latency_share: float = 1.0
) -> float:
    """Seconds of collective `kind` over `axis`, all of whose groups run it at once.

    `in_bytes` and `out_bytes` are the bytes of one rank's input and output; `latency_share` is the
    part of start and latency that falls to them, where others are in the same message. The result
    is continuous and never falls as the bytes grow. ValueError if `kind` is unknown or the bytes
    contradict it. Bytes and share may be arrays, and then so is the result.
    """
    n = axis.size
    whole = _whole_bytes(kind, in_bytes, out_bytes)
    if n == 1 or kind == "slice":
        return 0.0
    link = axis.crossed
    latency_s, start_s = (latency_share * s for s in (link.latency_s, link.start_s))
    if kind == "permute":
        return start_s + latency_s + whole / link.bytes_per_s
    bytes_per_s = link.bytes_per_s if kind == "all_to_all" else axis.ring_bytes_per_s
    ring_s = (n - 1) * latency_s + (n - 1) / n * whole / bytes_per_s
    if kind != "all_reduce":
        return start_s + ring_s
    tree_s = 2 * _log2_ceil(n) * latency_s + 2 * whole / bytes_per_s
    return start_s + np.minimum(2 * ring_s, tree_s)


def _whole_bytes(kind: str, in_bytes: int, out_bytes: int) -> int:
    """Bytes of the side of the local tensor that is not sharded over the axis (all_to_all: of the
    larger shard, which differ where a dim does not divide)."""
    if np.any(np.minimum(in_bytes, out_bytes) < 0):
        raise ValueError(f"{kind}: negative bytes ({in_bytes} in, {out_bytes} out)")
    match kind:
        case "all_reduce" | "permute":
            plausible = in_bytes == out_bytes
        case "all_gather":
            plausible = in_bytes <= out_bytes
        case "reduce_scatter" | "slice":
            plausible = out_bytes <= in_bytes
        case "all_to_all":
            plausible = True
        case _:
            raise ValueError(f"unknown collective {kind!r} (known: {', '.join(KINDS)})")
    if not np.all(plausible):
        raise ValueError(f"{kind} cannot turn {in_bytes} local bytes into {out_bytes}")
    return np.maximum(in_bytes, out_bytes)


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()
