"""Devices, links, clusters, and the meshes laid over them. Units are in the field names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

TILE = 128 * 128
"""Elements of a matmul's output that one processor makes at once."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What parts of its datasheet's rates a device's kernels reach (`cost_model.roofline`).

    A kernel takes `start_s` however little it does, a matmul `matmul_start_s`. Large matmuls reach
    a part `matmul` of the peak, thin ones `matmul_memory` of the bandwidth. They reach half of that
    with `wave` waves of tiles over the `processors`, and with sums of `depth` terms.

    Attention reaches a part `attention` of the peak with heads of 128. Heads of 64 reach
    `attention_narrow` of that, and backward `attention_backward`. A row takes as long as if it had
    `attention_tokens` more scores. float32 has `attention_float32` in place of `attention`. With a
    mask that is a tensor, other dtypes reach `attention_masked` of their rate.

    `pointwise` kernels, and reductions of rows forward and backward, reach parts of the bandwidth.
    """

    start_s: float = 2.5e-6
    matmul_start_s: float = 3e-6
    matmul: float = 0.75
    matmul_memory: float = 0.8
    wave: float = 0.15
    depth: float = 125.0
    processors: int = 128
    attention: float = 0.4
    attention_narrow: float = 0.9
    attention_backward: float = 0.85
    attention_tokens: float = 300.0
    attention_float32: float = 0.4
    attention_masked: float = 1.0
    pointwise: float = 0.8
    reduction: float = 0.7
    reduction_backward: float = 0.37

    def matmul_flops(self, out_elements: float, depth: float) -> float:
        """FLOPs that the device could do at its full rate in the time of a matmul whose output has
        `out_elements`, each a sum of `depth` terms. These are more than the matmul's own FLOPs:
        part of a wave and the start of each sum are idle."""
        return 2 * (out_elements + self.wave * TILE * self.processors) * (depth + self.depth)


@dataclass(frozen=True, slots=True)
class MatmulGrid:
    """`seconds[i][j]` of matmuls in `dtype` with `outs[i]` output elements, each a sum of
    `depths[j]` terms."""

    dtype: str
    outs: tuple[int, ...]
    depths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class AttentionSeries:
    """(keys, seconds) of causal attention of `rows` queries with heads of `head_dim`."""

    backward: bool
    rows: int
    head_dim: int
    dtype: str
    seconds: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What kernels were measured to take, with all that each of them takes; nothing falls as sizes
    grow. `pointwise` are (bytes moved, seconds)."""

    matmuls: tuple[MatmulGrid, ...] = ()
    attention: tuple[AttentionSeries, ...] = ()
    pointwise: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or CPU core) as its datasheet, or a profile, describes it.

    `flops_per_s` maps a dtype's name ("bfloat16") to dense peak FLOP/s; a dtype that is absent
    runs at the rate of "float32". `launch_s` is the host's time to launch a kernel. `source` names
    where the figures come from. `measured` takes precedence over rates and `kernels`. Memory is
    allocated in multiples of `granule_bytes`.
    """

    name: str
    kind: str
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    source: str
    kernels: Kernels = Kernels()
    measured: Measured = Measured()
    granule_bytes: int = 1

    def floor_s(self, start_s: float) -> float:
        """The least time of a kernel: `start_s` on a device that a host launches for, the launch
        on a CPU, which launches its own."""
        return self.launch_s if self.kind == "cpu" else start_s

    @property
    def view_s(self) -> float:
        """The time of a view, which has no kernel: a CPU calls it as it calls ops. The time of a
        GPU's host is not counted."""
        return self.launch_s if self.kind == "cpu" else 0.0

    @property
    def host_launch_s(self) -> float:
        """The time of a host beside the device to launch a kernel: a CPU has none beside it."""
        return 0.0 if self.kind == "cpu" else self.launch_s

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`."""
        table = dict(self.flops_per_s)
        return table.get(dtype, table["float32"])


@dataclass(frozen=True, slots=True)
class Curve:
    """The measured time of collective `kind` among `ranks` sides of a link (devices, or nodes where
    it joins nodes). Its figures hold for a faster or slower link of the family too. On each side
    there are `shared` ranks, or any number of them if that is 0.

    It takes `start_s` however little it sends. Where it sends much it reaches `reach` of the link's
    rate: more than 1 where switches add up. `knee` says how slowly it gets there: V bytes take
    `knee * sqrt(start_s * V / rate)` longer than both together.
    """

    kind: str
    ranks: int
    start_s: float
    reach: float
    knee: float
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """What one device can send (and receive) at once through a level of the cluster: `bytes_per_s`
    of a datasheet, or its share of what a node has.

    `curves` are what collectives were measured to take. One that has none takes `start_s` however
    little it sends and to whom, `latency_s` for each of its steps, and comes to a part `efficiency`
    of the rate.

    `contention` is the part of a collective, or of the compute beside it if that is shorter, that
    is not hidden: 0 where the two do not slow each other down, 1 as if one ran after the other.

    `is_gloo` says that gloo sends through it: in rings, and a reduce-scatter is an all-reduce, of
    which each rank keeps its part.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    start_s: float
    source: str
    efficiency: float = 1.0
    curves: tuple[Curve, ...] = ()
    contention: float = 1.0
    is_gloo: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """`size` groups of the next level (or devices, on the last), joined by `link`."""

    size: int
    link: Link


@dataclass(frozen=True, slots=True)
class Host:
    """The host behind each device: the device's share of its memory and of what that reads and
    writes (`memory_bytes_per_s`, 0 where it is not known), and the device's copy bandwidth to
    it."""

    memory_bytes: int
    bytes_per_s: float
    latency_s: float
    source: str
    memory_bytes_per_s: float = 0.0


HOST_LINKS = TO_HOST, FROM_HOST = "to host", "from host"
"""What the two directions of a device's link to its host are called, beside the axes of a mesh."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Levels of links, outermost (slowest) first, over equal devices."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    host: Host

    @property
    def num_devices(self) -> int:
        return prod(level.size for level in self.levels)

    @property
    def devices_of_node(self) -> int:
        """How many devices share a host: those that the innermost level joins."""
        return self.levels[-1].size

    @property
    def has_host_memory(self) -> bool:
        """Whether hosts have memory beside the devices': that of a CPU is its own."""
        return self.device.kind != "cpu"


BUCKET_BYTES = 25 << 20
"""The least that a bucket may hold, as in DistributedDataParallel."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh, and the slowest link its collectives cross: None where a mesh is known by
    its axes alone, as from a plan's file.

    Buckets of what it gathers and reduces (`ir.buckets`) hold `bucket_bytes` each.

    `shared` is how many ranks of one group sit side by side below that link: a ring enters and
    leaves them through all their adapters at once, at most as fast as `inner`, the link that joins
    them, allows. An axis over 8 nodes of 8 devices has 8; one with a single rank per node has 1.
    """

    name: str
    size: int
    link: Link | None = None
    shared: int = 1
    inner: Link | None = None
    bucket_bytes: int = BUCKET_BYTES

    @property
    def crossed(self) -> Link:
        """`link`. ValueError if it is not known."""
        if self.link is None:
            raise ValueError(f"mesh axis {self.name} is laid over no cluster")
        return self.link

    @property
    def sides(self) -> int:
        """How many sides the link joins in one group: nodes, or ranks."""
        return -(-self.size // self.shared)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, slowest link first. Rank r sits at the row-major coordinate of r: the last axis
    varies fastest, so its ranks are neighbours."""

    axes: tuple[Axis, ...]

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def __getitem__(self, axis: int) -> Axis:
        return self.axes[axis]

    @property
    def text(self) -> str:
        """`dp=2,tp=4`, as `mesh_shapes.parse_mesh` reads it; 1 for a mesh without axes."""
        return str(self) or NO_AXES

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def link_names(self) -> tuple[str, ...]:
        """What messages travel on: the links of each axis, and those to and from the host."""
        return (*self.names, *HOST_LINKS)

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where `rank` sits, one index per axis."""
        coordinate: list[int] = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def group(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axis` alone, by their index on it."""
        stride = prod(self.sizes[axis + 1 :])
        first = rank - self.coordinate(rank)[axis] * stride
        return tuple(first + i * stride for i in range(self.sizes[axis]))


NO_AXES = "1"
"""The mesh of one device, as text."""

MESH_OF_RANK = "/"
"""What stands between the meshes of the ranks of a pipeline, where these differ."""


def meshes_text(meshes: Sequence[Mesh]) -> str:
    """The mesh that all ranks of a pipeline have; where they differ, those of all, one after the
    other: `dp=2,tp=2/dp=2/dp=2`."""
    texts = [mesh.text for mesh in meshes]
    return texts[0] if len({*texts}) == 1 else MESH_OF_RANK.join(texts)
