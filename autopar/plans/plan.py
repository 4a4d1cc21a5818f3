"""The plan: every decision, what it is predicted to cost, and how good it is proven to be.

A plan is a value. As a file it is canonical JSON in three parts: `structure` (the decisions,
exact), `estimates` (integers, nanoseconds and bytes), `provenance` (versions and solver statistics,
never compared). A file is valid only if it is byte for byte the encoding of what it decodes to; in
it, identical parameters share an entry (`patterns`).
"""

from __future__ import annotations

import hashlib
import os
from math import prod
from typing import Annotated, Any, Literal

import msgspec

from autopar.errors import PlanError
from autopar.ir.canonical import Format, Wire
from autopar.ir.choices import ParamChoice
from autopar.ir.graph import itemsize
from autopar.ir.mesh import BUCKET_BYTES, Axis, Mesh
from autopar.ir.sharding import Sharding
from autopar.plans.cluster_rates import ClusterRates, Count
from autopar.plans.display import Shown
from autopar.plans.order import OPTIMIZER, Item, Run
from autopar.plans.wire import pack, unpack

SCHEMA_VERSION = 10
MAX_TENSOR_BYTES = 2**60
MAX_ITEMS = 2_000_000
"""Ops and redistributions of a step."""


class MeshAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One axis of the mesh, slowest first, and how much its buckets hold."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSOR_BYTES)] = BUCKET_BYTES


Residency = Literal["device", "host"]
"""Whose memory holds a tensor: the device's that computes with it, or its host's."""


class Param(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a parameter lies (`storage`, in the memory of `residency`) and what is kept of it from
    forward to backward (`kept`, equal to `storage` when it is gathered again)."""

    shape: tuple[Count, ...]
    dtype: str
    storage: str
    kept: str
    residency: Residency = "device"

    @property
    def type_text(self) -> str:
        """`bfloat16[4096, 4096]`, as types are written elsewhere in a plan."""
        return f"{self.dtype}{list(self.shape)}"

    @property
    def choice(self) -> ParamChoice:
        """Both shardings. ValueError if one is none."""
        return ParamChoice(Sharding.parse(self.storage), Sharding.parse(self.kept))

    @property
    def num_bytes(self) -> int:
        """Of all of it, in the whole model. KeyError if the dtype is unknown."""
        return prod(self.shape) * itemsize(self.dtype)


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of the pipeline: modules by pattern, on the ranks from `first_rank` on."""

    modules: tuple[str, ...]
    first_rank: Count
    num_ranks: Count


class PipelineSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In which order the stages do the microbatches of a step; `none` if there is one of each."""

    kind: Literal["none"] = "none"
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1


class MemoryPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose memory holds gradients and the optimizer's states, and what becomes of activations
    between forward and backward, unless an entry of its own says otherwise."""

    gradients: Residency = "device"
    optimizer: Residency = "device"
    activations: Literal["keep"] = "keep"


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decisions. `ops` maps a node's key to its choice (`choices`), `outputs` the key of a
    detached output to its sharding, `routes` a group's key (`uses`) to the steps
    "[R, P] -> [R, S(0)]" that its tensor takes, `saved` the key of an activation
    (`uses.root_key`) to the sharding it is kept in for backward, where that is chosen. `again` are
    the keys of ops that backward makes again (`ir.again`), whose copies are among `ops`;
    `offloaded` those of activations (`uses.root_key`) that forward hands over in the host's memory
    (`ir.offloading`). `reload_pace` says how fast they come back (`host_copies.pace`)."""

    model: str
    fingerprint: str
    cluster: str
    axes: tuple[MeshAxis, ...] = msgspec.field(name="mesh")
    optimizer: str
    inputs: tuple[str, ...]
    params: dict[str, Param]
    ops: dict[str, str]
    outputs: dict[str, str]
    routes: dict[str, tuple[str, ...]]
    saved: dict[str, str] = {}
    again: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    reload_pace: Count = 0
    replicated_unknown_ops: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    schedule: PipelineSchedule = PipelineSchedule()
    memory_policy: MemoryPolicy = MemoryPolicy()

    @property
    def mesh(self) -> Mesh:
        """Where the plan lies."""
        return Mesh(tuple(Axis(a.name, a.size, bucket_bytes=a.bucket_bytes) for a in self.axes))


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes per device at the peak, by holder. `transient` is everything that is live at the peak
    and none of the others."""

    params: Count
    gradients: Count
    optimizer: Count
    kept: Count
    saved: Count
    transient: Count

    @property
    def total(self) -> int:
        at_rest = self.params + self.gradients + self.optimizer
        return at_rest + self.kept + self.saved + self.transient


class CollectiveTotal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All collectives of one kind on one axis in a step: how many, local input bytes, time, and
    that in which the host launches them (with the op, if that sends them while it runs)."""

    kind: str
    axis: str
    phase: str
    count: Count
    num_bytes: Count
    time_ns: Count
    host_ns: Count = 0


class OpTotal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All nodes of one key: how many there are, compute time of all, module pattern, op. A
    parameter's has the optimizer's time.

    `inputs` has what most of them read, (key, sharding in which it is read), which for a parameter
    is its gradient, and `outputs` what they make, (type such as "bfloat16[64, 4096]", sharding in
    which it is made). In `host_ns` the host launches all of them."""

    module: str
    op: str
    phase: str
    count: Count
    compute_ns: Count
    communication_ns: Count
    saved_bytes: Count
    optimizer_ns: Count
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    host_ns: Count = 0


class StageTotal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of the pipeline on each of its devices: busy time of a step, and peak memory."""

    busy_ns: Count
    peak_bytes: Count


class MemoryCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device holds over a step, beside parameters, gradients and optimizer states: entry k
    is the fullest point of the stretch of the step that ends at `time_ns[k]`."""

    time_ns: tuple[Count, ...] = ()
    kept: tuple[Count, ...] = ()
    saved: tuple[Count, ...] = ()
    transient: tuple[Count, ...] = ()


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of one key that are live at the peak: `holder` is the field of `Memory` they count
    to, `state` the sharding they are held in."""

    key: str
    state: str
    holder: str
    count: Count
    num_bytes: Count


class Estimates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step is predicted to take on each device: forward and backward, what they send, and
    the optimizer; `flops` is what all devices compute together.

    Communication is exposed where the device waits for it, and hidden where it computes meanwhile;
    a step takes its compute, exposed communication, optimizer, bubble, and what the device waits
    for its host (`exposed_host_ns`), which launches all in `host_ns`. `hidden` says what could be
    hidden in each window (`cost_model.windows`), `contention` how much device and links of each
    axis slow each other down, in thousandths. `tokens` are those of a step (0 where the first input
    is no batch of tokens), `mfu_ppm` is the share of the devices' peak FLOP/s. `sends` has the
    collectives by the key of the tensor they redistribute, or of the op that sends; `collectives`
    adds them up. `memory_curve` says what is held over time, `peak_holders` the largest of what is
    held at the peak."""

    step_ns: Count
    compute_ns: Count
    communication_ns: Count
    optimizer_ns: Count
    flops: Count
    memory: Memory
    memory_limit: Count
    collectives: tuple[CollectiveTotal, ...]
    ops: dict[str, OpTotal]
    exposed_communication_ns: Count
    hidden_communication_ns: Count
    host_ns: Count
    exposed_host_ns: Count
    hidden: dict[str, Count]
    contention: dict[str, Count]
    bubble_ns: Count
    tokens: Count
    tokens_per_s: Count
    mfu_ppm: Count
    stages: tuple[StageTotal, ...]
    cluster: ClusterRates
    sends: dict[str, tuple[CollectiveTotal, ...]]
    order: tuple[Run, ...]
    memory_curve: MemoryCurve
    peak_holders: tuple[Held, ...]

    @property
    def added_up_ns(self) -> int:
        """A step in which nothing that the device and its links do is hidden."""
        return self.compute_ns + self.communication_ns + self.optimizer_ns

    @property
    def modelled_ns(self) -> int:
        """A step in which each window takes as long as its busiest resource: what the solver makes
        least of."""
        return self.added_up_ns + self.host_ns - sum(self.hidden.values())


FRAGILE = 0.005
"""A plan that is better than those of another structure by less than this part of its step is
fragile: what they are is decided by trifles, or by errors of the cost model."""


PROVEN = 0.001
"""A plan whose gap is at most this part of its step is as good as optimal: to close the last of it
takes long where resources share a window, and prices are not that exact."""


class Margin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the best plan of another structure (`weight_layouts`) takes: `bound_ns` what none of
    them beats, `step_ns` the step of the best one known (None if none is), and `rival` what it does
    otherwise. They are steps as modelled (`Estimates.modelled_ns`), not differences."""

    bound_ns: Count
    step_ns: Count | None
    rival: str


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan came about. Never compared. `imposed` lists what the user asked for, and what a
    strategy comes to on the mesh of the plan (`constraints`); `margin` is None where it was not
    asked for."""

    autopar: str
    torch: str
    solver: str
    status: str
    objective_ns: Count
    bound_ns: Count
    gap_ppm: Count
    meshes_tried: tuple[str, ...] = ()
    imposed: tuple[str, ...] = ()
    margin: Margin | None = None
    statistics: dict[str, str] = {}

    @property
    def is_proven(self) -> bool:
        """Whether no plan is known to be possible that is better by more than `PROVEN`."""
        return self.gap_ppm <= PROVEN * 1e6

    @property
    def is_fragile(self) -> bool | None:
        """Whether a plan of another structure is within `FRAGILE` of this one; None if unknown."""
        margin = self.margin
        most = self.objective_ns * (1 + FRAGILE)
        if margin is None:
            return None
        if margin.step_ns is not None and margin.step_ns < most:
            return True
        return None if margin.bound_ns < most else False


class Plan(msgspec.Struct, Shown, frozen=True, forbid_unknown_fields=True):
    """A plan; see the module's text."""

    schema: int
    structure: Structure
    estimates: Estimates
    provenance: Provenance

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, one line per entry of a field, a final newline."""
        return _FORMAT.encode(self)

    @staticmethod
    def from_bytes(data: bytes, source: str = "plan") -> Plan:
        """The inverse of `to_bytes`; PlanError, naming the place, on anything else."""
        return _FORMAT.decode(data, source)

    def check(self) -> None:
        """ValueError, naming the place, if the parts do not make sense together: mesh axes,
        parameters' shapes and dtypes, shardings."""
        names = [axis.name for axis in self.structure.axes]
        if len(set(names)) != len(names) or len(names) > 8:
            raise ValueError(f"mesh axes {names}: names must differ, and there are at most 8")
        for name, param in self.structure.params.items():
            try:
                num_bytes = param.num_bytes
            except KeyError:
                raise ValueError(f"parameter {name}: unknown dtype {param.dtype!r}") from None
            if num_bytes > MAX_TENSOR_BYTES:
                raise ValueError(f"parameter {name}: shape {list(param.shape)} is not plausible")
            for sharding in (param.choice.storage, param.choice.kept):
                if len(sharding.placements) != len(names) or sharding.has_partial:
                    raise ValueError(f"parameter {name}: {sharding} on {len(names)} mesh axes")
                if any(p.dim >= len(param.shape) for p in sharding):
                    raise ValueError(f"parameter {name}: {sharding}, shape {list(param.shape)}")
        self._check_timeline()

    def _check_timeline(self) -> None:
        estimates, curve = self.estimates, self.estimates.memory_curve
        steps = {key: len(found) for key, found in estimates.sends.items()}
        for text in {text for run in estimates.order for text in run.items}:
            item = None if text in estimates.ops or text == OPTIMIZER else Item.parse(text)
            if item is not None and item.step >= steps.get(item.key, 0):
                raise ValueError(f"order: {text} is neither an op nor sent")
        if sum(run.times * len(run.items) for run in estimates.order) > MAX_ITEMS:
            raise ValueError(f"order: a step has at most {MAX_ITEMS} items")
        lengths = {len(curve.time_ns), len(curve.kept), len(curve.saved), len(curve.transient)}
        if len(lengths) > 1:
            raise ValueError("memory_curve: its lists must be equally long")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: whoever reads finds the old plan or the new one. PlanError if
        it cannot be written."""
        _FORMAT.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file; PlanError if it is missing, damaged or of another version."""
        return _FORMAT.load(path)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (2020-12) of plan files of this version; the package has it as
        `plan.schema.json`. It says what fields there are: files must be canonical beside that."""
        schema = msgspec.json.schema(Plan)
        for noun in schema["$defs"].values():
            noun["description"] = " ".join(noun["description"].split())
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"autopar plan, version {SCHEMA_VERSION}",
            **schema,
        }

    @property
    def digest(self) -> str:
        """A hash of the decisions alone: equal for plans that do the same."""
        raw = msgspec.json.encode(self.structure, order="sorted")
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    @property
    def world_size(self) -> int:
        return self.structure.mesh.num_devices


_FORMAT = Format(Plan, "plan", "plan again", SCHEMA_VERSION, PlanError, Wire(3, pack, unpack))
