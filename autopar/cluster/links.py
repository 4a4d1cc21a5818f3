"""Links that autopar knows by name: data, with the source of every figure.

Rates are those of datasheets, per device and direction. Collectives reach less, and start slowly:
their measured times are curves (`ir.mesh.Curve`, `cost_model.collectives`), which hold for the
other links of a family at their rates. The residual of a fit is the median and the 90th percentile
of |fitted / measured - 1| over sizes from 256 B to 1 GiB.

Fits of one node are of sweeps with NCCL 2.27 to 2.29 in loops that keep the device busy, published
in ai-dynamo/aiconfigurator (systems/data/*/comm/nccl). The host's time in PyTorch is not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.mesh import Curve, Link

_MIB = 2**20
_US = 1e-6

_Fits = Mapping[str, Sequence[tuple[int, float, float, float]]]
"""Per collective: (ranks, start in us, GB/s, us of the root at 1 MiB)."""


def _curves(gb_per_s: float, fits: _Fits) -> tuple[Curve, ...]:
    """The curves of fits to a link of `gb_per_s`, in figures that hold at other rates as well."""
    return tuple(
        Curve(
            kind,
            ranks,
            start_us * _US,
            fitted / gb_per_s,
            root_us * _US / (start_us * _US * _MIB / (fitted * 1e9)) ** 0.5,
        )
        for kind, rows in fits.items()
        for ranks, start_us, fitted, root_us in rows
    )


_NVLINK_3: _Fits = {
    "all_reduce": ((2, 9.7, 219, 12.0), (4, 13.5, 238, 13.8), (8, 20.9, 240, 12.9)),
    "all_gather": ((2, 8.8, 173, 9.0), (4, 10.5, 224, 12.2), (8, 14.6, 222, 9.1)),
    "reduce_scatter": ((2, 8.9, 200, 7.9), (4, 10.5, 235, 10.5), (8, 14.6, 235, 8.6)),
    "all_to_all": ((2, 10.5, 199, 8.6), (4, 12.1, 214, 7.6), (8, 12.5, 224, 9.2)),
    "permute": ((2, 14.7, 244, 0.0),),
}
_NVLINK_4: _Fits = {
    "all_reduce": ((2, 6.0, 341, 5.9), (4, 9.3, 372, 5.5), (8, 15.3, 517, 10.5)),
    "all_gather": ((2, 5.1, 295, 5.5), (4, 7.0, 355, 5.6), (8, 10.4, 368, 5.1)),
    "reduce_scatter": ((2, 5.2, 255, 3.8), (4, 7.0, 332, 4.1), (8, 10.2, 357, 3.3)),
    "all_to_all": ((2, 6.4, 358, 5.8), (4, 7.2, 349, 6.1), (8, 8.0, 343, 5.0)),
    "permute": ((2, 6.7, 399, 0.0),),
}
_NVLINK_5: _Fits = {
    "all_reduce": ((2, 10.1, 595, 3.7), (4, 15.0, 738, 6.2), (8, 25.1, 865, 9.9)),
    "all_gather": ((2, 8.7, 513, 3.1), (4, 11.1, 699, 4.3), (8, 16.7, 754, 5.4)),
    "reduce_scatter": ((2, 9.0, 458, 2.6), (4, 11.5, 650, 3.7), (8, 16.2, 740, 5.1)),
    "all_to_all": ((2, 9.3, 415, 4.8), (4, 10.2, 586, 4.3), (8, 11.9, 689, 5.3)),
    "permute": ((2, 6.7, 798, 0.0),),
}
_PCIE_5: _Fits = {
    "all_reduce": ((2, 5.9, 39, 8.2), (4, 12.4, 26, 13.4), (8, 23.0, 25, 36.5)),
    "all_gather": ((2, 5.7, 33, 7.2), (4, 8.9, 24, 7.8), (8, 13.8, 24, 19.4)),
    "reduce_scatter": ((2, 5.2, 33, 8.9), (4, 9.1, 24, 6.3), (8, 14.2, 25, 21.0)),
    "all_to_all": ((2, 6.5, 27, 4.0), (4, 7.8, 25, 12.6), (8, 8.9, 19, 27.1)),
}
_MI300X: _Fits = {
    "all_reduce": ((2, 9.7, 47.7, 0.0), (4, 13.5, 143.1, 0.0), (8, 20.9, 313, 0.0)),
    "all_gather": ((2, 8.8, 47.7, 0.0), (4, 10.5, 143.1, 0.0), (8, 14.6, 313, 0.0)),
    "reduce_scatter": ((2, 8.9, 47.7, 0.0), (4, 10.5, 143.1, 0.0), (8, 14.6, 313, 0.0)),
    "all_to_all": ((2, 10.5, 47.7, 0.0), (4, 12.1, 143.1, 0.0), (8, 12.5, 313, 0.0)),
    "permute": ((2, 14.7, 47.7, 0.0),),
}
# Per adapter of 400 Gb/s, between 2, 4 and 8 nodes of eight. An all_reduce was fitted to what each
# of 16, 32 and 64 ranks sends in a ring, 2 (n - 1)/n V: 565, 443 and 375 GB/s and roots of 27.5, 46
# and 47.1 us. Over m nodes the network carries 2 (m - 1)/m V of that through eight adapters.
_NDR: _Fits = {
    "all_reduce": ((2, 25.8, 37.7, 77.8), (4, 35.7, 42.9, 130.1), (8, 65.7, 41.7, 133.2)),
    "all_to_all": ((2, 30.0, 43.65, 0.0),),
    "permute": ((2, 17.5, 37.0, 0.0),),
}
# Four processes on two cores, in two pairs or all together, and eight.
_LOOPBACK: _Fits = {
    "all_reduce": ((2, 3300, 0.9, 900.0), (4, 4500, 1.2, 2000.0), (8, 18600, 0.8, 2700.0)),
    "all_gather": ((2, 3000, 0.45, 0.0), (4, 4000, 0.64, 0.0), (8, 13200, 0.32, 0.0)),
    "reduce_scatter": ((2, 4200, 0.27, 300.0), (4, 6000, 0.38, 1500.0), (8, 22600, 0.18, 0.0)),
    "all_to_all": ((2, 2300, 0.75, 0.0), (4, 3000, 1.1, 300.0), (8, 6300, 0.69, 0.0)),
}

_SWITCH = "all-reduce on 8 ranks of H100 and later adds up in the switch (NVLS)"
_GENERAL = "start and latency of other collectives: those of its all-gather"

_MEASURED: tuple[Link, ...] = (
    Link(
        "NVLink 3",
        300e9,
        1e-6,
        7.7e-6,
        "A100 datasheet: 600 GB/s both ways; collectives: fits to NCCL 2.27 on A100-80, 2 to 5 % "
        f"median, 8 to 16 % p90; permute: vidur, at most 244 GB/s measured; {_GENERAL}",
        0.74,
        _curves(300, _NVLINK_3),
    ),
    Link(
        "NVLink 4",
        450e9,
        0.9e-6,
        4.3e-6,
        "H100 datasheet: 900 GB/s both ways; collectives: fits to NCCL 2.29 on H100, 1 to 3 % "
        "median, 7 to 12 % p90 (all-to-all 7 to 8 and 23 to 46 %: noisy where small), within 6 % "
        f"of those on H200; permute: vidur; {_SWITCH}; {_GENERAL}",
        0.82,
        _curves(450, _NVLINK_4),
    ),
    Link(
        "NVLink 5",
        900e9,
        1.3e-6,
        7.4e-6,
        "DGX B200 datasheet: 1.8 TB/s both ways; collectives: fits to NCCL 2.29 on B200, 1 to 7 % "
        "median, 9 to 25 % p90, within 10 % of those on B300, GB200 and GB300 (72 ranks of GB200 "
        "measured 835 GB/s, CoreWeave); permute: twice the rate on NVLink 4; "
        f"{_SWITCH}; {_GENERAL}",
        0.84,
        _curves(900, _NVLINK_5),
    ),
    Link(
        "Infinity Fabric 4",
        448e9,
        1e-6,
        7.7e-6,
        "MI300X datasheet: a link of 64 GB/s to each of seven others; all-reduce of 4 GiB on 2 and "
        "8 ranks measured 47.7 and 313 GB/s (stas00, ml-engineering), other collectives estimated "
        f"alike; starts: those of A100; {_GENERAL}",
        0.7,
        _curves(448, _MI300X),
    ),
    Link(
        "PCIe 5 x16",
        63.0e9,
        1.35e-6,
        4.4e-6,
        "PCIe 5.0: 32 GT/s, 16 lanes, 128b/130b; collectives: fits to NCCL 2.29 on RTX PRO 6000, "
        f"1 to 8 % median, 7 to 29 % p90; {_GENERAL}",
        0.4,
        _curves(63, _PCIE_5),
    ),
    Link(
        "InfiniBand NDR 400",
        50e9,
        4.2e-6,
        22e-6,
        "NDR: 400 Gb/s, one adapter per GPU; rings: 0.97 of 48.5 GB/s, 4.2 us a rank and 22 us, "
        "fit to SimAI's efficiencies of 16 to 1,024 GPUs, 3 and 21 %; all-to-all: 0.90 of 48.5 "
        "GB/s, SimAI, 6 and 13 %; all-reduce: fits to NCCL on 2, 4 and 8 nodes of H100, 4 to 7 % "
        "and 12 to 13 % (nccl-tests issues 309); permute: vidur",
        0.941,
        _curves(50, _NDR),
    ),
    Link(
        "gloo loopback",
        0.8e9,
        0.5e-3,
        1.5e-3,
        "measured: gloo over TCP within one machine, torch 2.13, 16 B to 16 MiB among processes "
        "that share two cores, fitted within 6 to 20 % median and 14 to 46 % at most; its "
        "reduce-scatter is an all-reduce of which each rank keeps its part",
        curves=_curves(0.8, _LOOPBACK),
    ),
)


def _like(name: str, base: Link, gb_per_s: float, why: str, slower: float = 1.0) -> Link:
    """A link of the family of `base`: its efficiency, and its start and latency times `slower`."""
    return replace(
        base,
        name=name,
        bytes_per_s=gb_per_s * 1e9,
        latency_s=slower * base.latency_s,
        start_s=slower * base.start_s,
        source=f"{why}; collectives: not measured, the efficiencies of {base.name}"
        + (f" and {slower:g} times its latencies" if slower != 1 else ""),
        curves=tuple(replace(curve, start_s=slower * curve.start_s) for curve in base.curves),
    )


def _ethernet(gb: int, efficiency: float) -> Link:
    """TCP carries 1,448 bytes of the 1,538 of a frame, 0.94; hosts reach less at high rates."""
    standard = "1000BASE" if gb == 1 else f"{gb}GBASE"
    return Link(
        f"Ethernet {gb}G",
        gb / 8 * 1e9,
        25e-6,
        14e-6,
        f"{standard}: {gb} Gb/s per node; estimates: TCP reaches {efficiency:g} of it and takes "
        "25 us a step and 14 us to start",
        efficiency,
        contention=_NETWORK,
    )


_NODE, _NETWORK = 0.5, 0.05
"""Contention within a node and between nodes: of matmuls beside all-gathers on A100-40, 0.47 to
0.55 over NVLink and 0.02 to 0.09 over Ethernet, the middle half of 160 pairs (Dazz993/Mist,
tools/results-final). Other devices and links were not measured. Processes that share cores have a
contention of 1."""

_NVLINK3, _NVLINK4, _NVLINK5, _FABRIC, _PCIE5, _NDR400, _GLOO = (
    replace(link, contention=contention, is_gloo=link.name == "gloo loopback")
    for link, contention in zip(
        _MEASURED, (_NODE, _NODE, _NODE, _NODE, _NODE, _NETWORK, 1.0), strict=True
    )
)

LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        _like(
            "NVLink 2",
            _NVLINK3,
            150,
            "V100 datasheet: 300 GB/s both ways (all-reduce on 8 V100 measured 136 GB/s, vTrain, "
            "120 here)",
        ),
        _NVLINK3,
        _NVLINK4,
        _NVLINK5,
        _FABRIC,
        _like("PCIe 3 x16", _PCIE5, 15.75, "PCIe 3.0: 8 GT/s, 16 lanes, 128b/130b"),
        _like(
            "PCIe 4 x16",
            _PCIE5,
            31.5,
            "PCIe 4.0: 16 GT/s, 16 lanes, 128b/130b (two L40S measured 20 to 23 GB/s; four on a "
            "host without a path between peers 5)",
        ),
        _PCIE5,
        _like("InfiniBand HDR 200", _NDR400, 25, "HDR: 200 Gb/s, one adapter per GPU"),
        _NDR400,
        _like("InfiniBand XDR 800", _NDR400, 100, "XDR: 800 Gb/s, one adapter per GPU"),
        _like(
            "RoCE 200",
            _NDR400,
            25,
            "200 Gb/s, one adapter per GPU (16x100G between two nodes of A100: 238 GB/s, 1.19 of "
            "the wire, where NDR has 1.17)",
        ),
        _like("RoCE 400", _NDR400, 50, "400 Gb/s, one adapter per GPU, as RoCE 200"),
        _like("EFA v1", _NDR400, 6.25, "AWS p4d: 400 Gb/s for 8 GPUs; latencies: estimate", 2),
        _like(
            "EFA v2",
            _NDR400,
            50,
            "AWS p5: 3,200 Gb/s for 8 GPUs (all-reduce on 16 nodes of H100: 370 GB/s); "
            "latencies: estimate",
            2,
        ),
        _like("EFA v3", _NDR400, 50, "AWS p5en: 3,200 Gb/s for 8 GPUs; latencies: estimate", 1.5),
        _ethernet(1, 0.94),
        _ethernet(10, 0.9),
        _ethernet(25, 0.9),
        _ethernet(100, 0.7),
        _GLOO,
    )
}


_GLOO_STEP_S = 0.6e-3
_GLOO_CONTENTION = 0.7
"""A step of gloo's collectives between nodes, and what compute beside them loses. From profiles of
two and four processes on two cores, nodes as network namespaces (`benchmarks.emulated`), torch
2.13: an all-reduce starts in 1.0 to 1.4 ms among two ranks and in 3.3 to 4.0 among four, other
collectives in 0.3 to 2.6 times of what these steps give. Contention is 0.65 to 0.79."""


def by_gloo(link: Link) -> Link:
    """`link`, a preset, as gloo uses it: at least `_GLOO_STEP_S` a step, and none of the curves of
    another library."""
    if link.name == _GLOO.name:
        return link
    latency_s = max(link.latency_s, _GLOO_STEP_S)
    return replace(
        link,
        latency_s=latency_s,
        source=f"{link.source}; by gloo: {1e3 * latency_s:g} ms a step, measured",
        curves=(),
        contention=max(link.contention, _GLOO_CONTENTION),
    )


def at_most_gloo(link: Link) -> Link:
    """`link` at no more than a process sends by gloo within a machine."""
    if link.efficiency * link.bytes_per_s <= _GLOO.bytes_per_s:
        return link
    return replace(link, bytes_per_s=_GLOO.bytes_per_s, efficiency=1.0)


SHARED_LINKS = frozenset({"Ethernet 1G", "Ethernet 10G", "Ethernet 25G", "Ethernet 100G"})
"""Links that a node has only one of: its devices share the bandwidth."""

LINK_ALIASES: dict[str, str] = {
    "HDR": "InfiniBand HDR 200",
    "NDR": "InfiniBand NDR 400",
    "XDR": "InfiniBand XDR 800",
    "EFA": "EFA v2",
    "RoCE": "RoCE 400",
    "PCIe 3": "PCIe 3 x16",
    "PCIe 4": "PCIe 4 x16",
    "PCIe 5": "PCIe 5 x16",
    "1G": "Ethernet 1G",
    "10G": "Ethernet 10G",
    "25G": "Ethernet 25G",
    "100G": "Ethernet 100G",
}
"""Other names of links."""
