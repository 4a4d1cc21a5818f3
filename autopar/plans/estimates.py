"""What a plan is predicted to take and to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from autopar.ir.pipeline import Pass
from autopar.plans.cluster_rates import ClusterRates, Count
from autopar.plans.order import Run

LARGE_WAIT = 1 / 3
"""A plan in one stage that waits for communication in this share of its step is worth a look at
those in several, which send less and hold less."""


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes per device at the peak, by holder. `accumulated` is what microbatches add up;
    `transient` everything that is live at the peak and none of the others."""

    params: Count
    gradients: Count
    optimizer: Count
    unsharded: Count
    saved: Count
    transient: Count
    accumulated: Count = 0

    @property
    def at_rest(self) -> int:
        """What is there all the time."""
        return self.params + self.gradients + self.optimizer + self.accumulated

    @property
    def total(self) -> int:
        return self.at_rest + self.unsharded + self.saved + self.transient


class HostMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes that a device has in its host's memory, by holder, in which it may have `limit`: an
    equal share, as all `devices` of its node have. They are those of a whole step."""

    params: Count = 0
    gradients: Count = 0
    optimizer: Count = 0
    offloaded: Count = 0
    limit: Count = 0
    devices: Count = 1

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.optimizer + self.offloaded


NOTHING_ON_HOST = HostMemory()
"""Which plans' files leave out: by identity, as msgspec compares defaults."""


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


class MicrobatchTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a device takes for a microbatch, forward and backward; for the last one, in which
    gradients are reduced; and for the optimizer. Of a backward in two parts, the second is
    `weights_ns`. Where it is a stage's, a CPU takes `action_ns` more for each part, for what is no
    op."""

    forward_ns: Count = 0
    backward_ns: Count = 0
    last_forward_ns: Count = 0
    last_backward_ns: Count = 0
    update_ns: Count = 0
    weights_ns: Count = 0
    last_weights_ns: Count = 0
    action_ns: Count = 0

    def length_ns(self, kind: Pass, *, is_last: bool) -> int:
        """What it takes as a stage for a microbatch, the last one or another."""
        match kind:
            case Pass.FORWARD:
                ops_ns = self.last_forward_ns if is_last else self.forward_ns
            case Pass.BACKWARD:
                ops_ns = self.last_backward_ns if is_last else self.backward_ns
            case Pass.WEIGHTS:
                ops_ns = self.last_weights_ns if is_last else self.weights_ns
        return self.action_ns + ops_ns


class HeldBytes(NamedTuple):
    """Bytes of a device beside what is there all the time, by holder, as `Memory` has them."""

    unsharded: int = 0
    saved: int = 0
    transient: int = 0

    def plus(self, other: HeldBytes, times: int = 1) -> HeldBytes:
        """Both, the other so many times."""
        return HeldBytes(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class MicrobatchMemory:
    """What a device holds for a stage: at the fullest moment of each `part` of a microbatch, by
    whether it is the last one, `given` bytes of buffers and inputs included; and of each other
    microbatch, as it waits for a part of backward."""

    parts: Mapping[tuple[Pass, bool], HeldBytes]
    waiting: Mapping[Pass, HeldBytes]
    given: int


class Delay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stage `source` sends stage `target` for each microbatch, in one phase: bytes of a
    device, and how long they are under way."""

    source: Count
    target: Count
    phase: str
    num_bytes: Count
    time_ns: Count


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `ranks` of a pipeline share once all of their microbatches are done: so many messages of
    a kind (results, gradients of tied weights), bytes of a device and time of all of them."""

    kind: str
    ranks: tuple[Count, ...]
    count: Count
    num_bytes: Count
    time_ns: Count

    @property
    def places(self) -> str:
        """`0-3` of four ranks in a row, `0, 3` of two."""
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) > 2 and last - first == len(self.ranks) - 1:
            return f"{first}-{last}"
        return ", ".join(map(str, self.ranks))


class MemoryCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device holds over a step, beside parameters, gradients and optimizer states: entry k
    is the fullest point of the stretch of the step that ends at `time_ns[k]`."""

    time_ns: tuple[Count, ...] = ()
    unsharded: tuple[Count, ...] = ()
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


class Figures(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """What a step is predicted to take on each device: forward and backward, what they send, and
    the optimizer; `flops` is what all devices compute together.

    Communication is exposed where the device waits for it, and hidden where it computes meanwhile;
    a step takes its compute, exposed communication, optimizer, bubble, and what the device waits
    for its host (`exposed_host_ns`), which launches all in `host_ns`. `tokens` are those of a step,
    0 where inputs are no sequences of tokens: then `samples` are told (`cost_model.rates`).
    `mfu_ppm` is the share of the devices' peak FLOP/s. `host_bytes` is what each device has in its
    host's memory, and `host_memory` says what holds it."""

    step_ns: Count
    compute_ns: Count
    communication_ns: Count
    optimizer_ns: Count
    flops: Count
    memory: Memory
    memory_limit: Count
    exposed_communication_ns: Count
    hidden_communication_ns: Count
    host_ns: Count
    exposed_host_ns: Count
    bubble_ns: Count
    tokens: Count
    tokens_per_s: Count
    mfu_ppm: Count
    cluster: ClusterRates
    host_bytes: Count = 0
    host_memory: HostMemory = NOTHING_ON_HOST
    samples: Count = 0

    @property
    def samples_per_s(self) -> int:
        """0 where tokens are told, and where a plan says nothing of samples."""
        return self.samples * 10**9 // self.step_ns if self.step_ns else 0

    @property
    def waits_above_all(self) -> bool:
        """Whether devices wait for communication in a `LARGE_WAIT` of the step."""
        return self.exposed_communication_ns > LARGE_WAIT * self.step_ns

    @property
    def added_up_ns(self) -> int:
        """A step in which nothing that the device and its links do is hidden."""
        return self.compute_ns + self.communication_ns + self.optimizer_ns


class StageEstimates(
    Figures, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """What a stage takes on its own.

    `hidden` says what could be hidden in each window (`cost_model.windows`), `contention` how much
    device and links of each axis slow each other down, in thousandths. `sends` has the collectives
    by the key of the tensor they redistribute, or of the op that sends; `collectives` adds them up.
    `memory_curve` says what is held over time, `peak_holders` the largest of what is held at the
    peak. `order` is that of the step; in microbatches that of the last one, behind
    `microbatches_before` in `order_before`. `microbatch` says what a microbatch takes."""

    collectives: tuple[CollectiveTotal, ...]
    ops: dict[str, OpTotal]
    hidden: dict[str, Count]
    contention: dict[str, Count]
    sends: dict[str, tuple[CollectiveTotal, ...]]
    order: tuple[Run, ...]
    memory_curve: MemoryCurve
    peak_holders: tuple[Held, ...]
    order_before: tuple[Run, ...] = ()
    microbatches_before: Count = 0
    microbatch: MicrobatchTimes = MicrobatchTimes()

    @property
    def runs(self) -> tuple[Run, ...]:
        """The order of all turns."""
        return self.microbatches_before * self.order_before + self.order

    @property
    def modelled_ns(self) -> int:
        """A step in which each window takes as long as its busiest resource: what the solver makes
        least of."""
        return self.added_up_ns + self.host_ns - sum(self.hidden.values())


class Estimates(Figures, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What a step is predicted to take: the times are those of the rank that is busiest, of all its
    stages together, the memory that of the fullest device.

    `stages` has each stage on its own, `delays` what they send one another, `shared` what ranks
    share at the end, and `devices` what a device of each rank holds for all of its stages at its
    fullest moment."""

    stages: tuple[StageEstimates, ...] = ()
    delays: tuple[Delay, ...] = ()
    shared: tuple[Shared, ...] = ()
    devices: tuple[Memory, ...] = ()


def of_one_stage(stage: StageEstimates) -> Estimates:
    """The estimates of a plan that has one stage, on one rank."""
    figures = {name: getattr(stage, name) for name in Figures.__struct_fields__}
    return Estimates(**figures, stages=(stage,))
