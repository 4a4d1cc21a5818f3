"""What an op sends while it runs, if an exchanged factor of it (`v@` in a rule) is sharded.

A softmax over a sharded dim needs the largest score and the sum of all ranks; a lookup in a sharded
table needs nothing but to know which rows it holds. What such an op reduces is one value per *row*,
a row being what its first input has along the exchanged dims; each value is reduced over every
axis that shards an exchanged factor, the last axis first. This list is what is priced, and code
generation emits exactly it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.graph import Node

EXCHANGES: dict[str, tuple[str, ...]] = {
    "aten._log_softmax.default": ("max", "sum"),
    "aten._softmax.default": ("max", "sum"),
    "aten.logsumexp.default": ("max", "sum"),
    "aten._log_softmax_backward_data.default": ("sum",),
    "aten._softmax_backward_data.default": ("sum",),
    "aten.native_layer_norm.default": ("sum", "sum"),
    "aten.native_layer_norm_backward.default": ("sum", "sum"),
    "aten._fused_rms_norm.default": ("sum",),
    "aten._fused_rms_norm_backward.default": ("sum",),
    "aten.embedding.default": (),
    "aten.embedding_dense_backward.default": (),
    "aten.nll_loss_forward.default": (),
    "aten.nll_loss2d_forward.default": (),
    "aten.nll_loss_backward.default": (),
    "aten.nll_loss2d_backward.default": (),
}
"""Per op with exchanged factors, how it reduces its rows, in order."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-reduce of `num_bytes` on each rank over mesh axis `axis`, by "sum" or "max"."""

    reduce: str
    axis: int
    num_bytes: int


def exchange_axes(node: Node, choice: str) -> tuple[int, ...]:
    """The mesh axes on which `choice` shards an exchanged factor of `node`, in mesh order."""
    names = {f.name for f in node.factors if f.exchanged}
    options = choice.split(",") if names and choice else ()
    return tuple(axis for axis, option in enumerate(options) if option in names)


def exchanges(node: Node, choice: str, dtype: str, local: Sequence[int]) -> tuple[Exchange, ...]:
    """What `node` sends under `choice`, in order; its first input is a `dtype` tensor of which a
    rank has shape `local`."""
    axes = exchange_axes(node, choice)
    if not axes:
        return ()
    num_bytes = row_itemsize(dtype) * prod(
        size for dim, size in enumerate(local) if dim not in exchanged_dims(node)
    )
    return tuple(
        Exchange(reduce, axis, num_bytes)
        for reduce in EXCHANGES[node.op]
        for axis in reversed(axes)
    )


def exchanged_dims(node: Node) -> frozenset[int]:
    """The dims of the first input that exchanged factors stand in."""
    slots = (f.inputs[0] for f in node.factors if f.exchanged)
    return frozenset(slot[0] for slot in slots if slot is not None)


def row_itemsize(dtype: str) -> int:
    """Bytes per value that is reduced: sums are taken in float32, of float64 in float64."""
    return 8 if dtype == "float64" else 4


def scratch_bytes(node: Node, choice: str, dtype: str, local: Sequence[int]) -> int:
    """Bytes that an op holds besides its inputs and outputs while it exchanges: the first input
    in the dtype of sums, once."""
    if not exchange_axes(node, choice) or not EXCHANGES[node.op]:
        return 0
    return row_itemsize(dtype) * prod(local)
