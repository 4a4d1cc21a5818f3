"""The cluster as a plan's file has it: the figures that prices were made of, in whole numbers."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A whole number of bytes, nanoseconds or things."""


class CollectiveRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a collective `kind` among `ranks` sides of a link was measured to take: V bytes that
    cross it take `start_ns`, V at `bytes_per_s`, and `root_ns` times the root of V in MiB; where
    `shared` ranks lie on each side, or any number of them."""

    kind: str
    ranks: Count
    start_ns: Count
    bytes_per_s: Count
    root_ns: Count
    shared: Count = 0


class LinkRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A level of the cluster as it was priced: how many groups it joins, and how fast. Collectives
    that are not among the `measured` come to `efficiency_ppm` of `bytes_per_s`, with a latency a
    step after the start."""

    name: str
    size: Count
    bytes_per_s: Count
    latency_ns: Count
    start_ns: Count
    efficiency_ppm: Count
    measured: tuple[CollectiveRates, ...]


class ClusterRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster as it was priced: one of its equal devices, and its levels, the slowest first.
    `kernels` has what its kernels reach, times in nanoseconds and all else in millionths, under the
    names of `mesh.Kernels` with the unit behind, and `launch_ns`, in which a host beside the device
    launches one. `source` says where the figures of the device come
    from."""

    device: str
    source: str
    memory_bytes: Count
    memory_bytes_per_s: Count
    flops_per_s: dict[str, Count]
    kernels: dict[str, Count]
    links: tuple[LinkRates, ...]
