"""The rates of a cluster in a plan file: the figures that prices are computed from, as integers."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A whole number of bytes, nanoseconds or things."""


class CollectiveRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The measured time of a collective `kind` among `ranks` sides of a link. V bytes that cross
    the link take `start_ns`, V / `bytes_per_s`, and `root_ns` times the square root of V in MiB.
    `shared` is the number of ranks on each side; 0 stands for any number."""

    kind: str
    ranks: Count
    start_ns: Count
    bytes_per_s: Count
    root_ns: Count
    shared: Count = 0


class LinkRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A level of the cluster as it was priced: how many groups it joins, and how fast. A collective
    that is not among the `measured` reaches `efficiency_ppm` of `bytes_per_s`. It takes `start_ns`
    once, and `latency_ns` for each of its steps."""

    name: str
    size: Count
    bytes_per_s: Count
    latency_ns: Count
    start_ns: Count
    efficiency_ppm: Count
    measured: tuple[CollectiveRates, ...]


class ClusterRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster as it was priced: one of its equal devices, and its levels (`links`), the slowest
    first. `kernels` has the rates of the device's kernels under the names of `mesh.Kernels` with
    the unit appended: times in nanoseconds, all else in millionths. Its `launch_ns` is the time in
    which the host launches a kernel. `source` is the origin of the device's figures."""

    device: str
    source: str
    memory_bytes: Count
    memory_bytes_per_s: Count
    flops_per_s: dict[str, Count]
    kernels: dict[str, Count]
    links: tuple[LinkRates, ...]
