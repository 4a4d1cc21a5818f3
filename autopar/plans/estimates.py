"""The predicted time and memory of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from autopar.ir.pipeline import Pass
from autopar.plans.cluster_rates import ClusterRates, Count
from autopar.plans.order import Run

LARGE_WAIT = 1 / 3
"""The share of its step from which on a plan in one stage waits too much for communication. Plans
in several stages are then worth a look, since they send and hold less."""


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes per device at the peak, by holder. `accumulated` are sums over microbatches;
    `transient` is all that is live at the peak and counts to no other holder."""

    params: Count
    gradients: Count
    optimizer: Count
    unsharded: Count
    saved: Count
    transient: Count
    accumulated: Count = 0

    @property
    def at_rest(self) -> int:
        """Bytes that are held all the time."""
        return self.params + self.gradients + self.optimizer + self.accumulated

    @property
    def total(self) -> int:
        return self.at_rest + self.unsharded + self.saved + self.transient


class HostMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes that a device has in its host's memory over a whole step, by holder. `limit` is the
    most that it may have there: all `devices` of its node have an equal share."""

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
"""The default, which plan files leave out. msgspec compares defaults by identity."""


class CollectiveTotal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All collectives of one kind on one axis in a step: how many, local input bytes, and time. The
    host launches them in `host_ns`, or with the op that sends them while it runs."""

    kind: str
    axis: str
    phase: str
    count: Count
    num_bytes: Count
    time_ns: Count
    host_ns: Count = 0


class OpTotal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All nodes of one key, added up: module pattern, op, number of nodes, and times. Those of a
    parameter have the optimizer's time.

    `inputs` are what most of the nodes read, as (key, sharding in which it is read); for a
    parameter, that is its gradient. `outputs` are what they make, as (type such as "bfloat16[64,
    4096]", sharding in which it is made). The host launches all of them in `host_ns`.
    """

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
    """Times of a device for a microbatch, forward and backward; for the last microbatch, which
    reduces gradients; and for the optimizer. If backward is in two parts, `weights_ns` is the
    second. In a pipeline, a CPU takes `action_ns` more for each action, for work that is no op."""

    forward_ns: Count = 0
    backward_ns: Count = 0
    last_forward_ns: Count = 0
    last_backward_ns: Count = 0
    update_ns: Count = 0
    weights_ns: Count = 0
    last_weights_ns: Count = 0
    action_ns: Count = 0

    def length_ns(self, kind: Pass, *, is_last: bool) -> int:
        """The time of an action of a stage for a microbatch, the last one or another."""
        match kind:
            case Pass.FORWARD:
                ops_ns = self.last_forward_ns if is_last else self.forward_ns
            case Pass.BACKWARD:
                ops_ns = self.last_backward_ns if is_last else self.backward_ns
            case Pass.WEIGHTS:
                ops_ns = self.last_weights_ns if is_last else self.weights_ns
        return self.action_ns + ops_ns


class HeldBytes(NamedTuple):
    """Bytes of a device beside what it holds all the time, by holder as in `Memory`."""

    unsharded: int = 0
    saved: int = 0
    transient: int = 0

    def plus(self, other: HeldBytes, times: int = 1) -> HeldBytes:
        """The sum of both, with `other` that many times."""
        return HeldBytes(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class MicrobatchMemory:
    """The memory of a device for a stage. `parts` has the peak of each pass of a microbatch, by
    whether it is the last one, `given` bytes of buffers and inputs included. `waiting` has what any
    other microbatch holds while it waits for a pass of backward."""

    parts: Mapping[tuple[Pass, bool], HeldBytes]
    waiting: Mapping[Pass, HeldBytes]
    given: int


class Delay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stage `source` sends to stage `target` for each microbatch in one phase: bytes per
    device, and how long they are in flight."""

    source: Count
    target: Count
    phase: str
    num_bytes: Count
    time_ns: Count


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages among `ranks` of a pipeline after all of their microbatches. `count` is the number
    of one kind (results, gradients of tied weights), with bytes per device and time of all of
    them."""

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
    """Bytes that a device holds over a step, without parameters, gradients and optimizer states.
    Entry k is the peak of the interval that ends at `time_ns[k]`."""

    time_ns: tuple[Count, ...] = ()
    unsharded: tuple[Count, ...] = ()
    saved: tuple[Count, ...] = ()
    transient: tuple[Count, ...] = ()


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of one key that are live at the peak. `holder` is the field of `Memory` that counts
    them, `state` the sharding in which they are held."""

    key: str
    state: str
    holder: str
    count: Count
    num_bytes: Count


class Figures(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """The predicted step of each device: forward and backward, communication, and the optimizer.
    `flops` is what all devices compute together.

    Communication is exposed while the device waits for it, and hidden while it computes. A step
    takes the sum of compute, exposed communication, optimizer, bubble, and `exposed_host_ns`, in
    which the device waits for its host. The host launches everything in `host_ns`. `tokens` are
    those of a step. It is 0 if inputs are no sequences of tokens; then `samples` are counted
    (`cost_model.rates`). `mfu_ppm` is the share of the devices' peak FLOP/s. `host_bytes` is what
    each device has in its host's memory, and `host_memory` says what holds it.
    """

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
        """0 if tokens are counted, or if the plan does not know its samples."""
        return self.samples * 10**9 // self.step_ns if self.step_ns else 0

    @property
    def waits_above_all(self) -> bool:
        """Whether devices wait for communication in a `LARGE_WAIT` of the step."""
        return self.exposed_communication_ns > LARGE_WAIT * self.step_ns

    @property
    def added_up_ns(self) -> int:
        """The step with nothing hidden of what the device and its links do."""
        return self.compute_ns + self.communication_ns + self.optimizer_ns


class StageEstimates(
    Figures, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """The estimates of one stage on its own.

    `hidden` is what could be hidden in each window (`cost_model.windows`). `contention` is how much
    device and links of each axis slow each other down, in thousandths. `sends` has the collectives
    by the key of the tensor they redistribute, or of the op that sends; `collectives` adds them up.
    `memory_curve` is the memory over time, and `peak_holders` are the largest tensors at the peak.
    `order` is the order of the step. With microbatches it is that of the last one, behind
    `microbatches_before` ones in `order_before`. `microbatch` has the times of one microbatch.
    """

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
        """The order of all microbatches."""
        return self.microbatches_before * self.order_before + self.order

    @property
    def modelled_ns(self) -> int:
        """The step in which each window takes as long as its busiest resource, which the solver
        minimizes."""
        return self.added_up_ns + self.host_ns - sum(self.hidden.values())


class Estimates(Figures, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The predicted step of a plan. Times are those of the busiest rank, of all its stages
    together; memory is that of the fullest device.

    `stages` has each stage on its own, `delays` what they send one another, and `shared` the
    messages at the end of the step. `devices` is the peak of a device of each rank, for all of its
    stages.
    """

    stages: tuple[StageEstimates, ...] = ()
    delays: tuple[Delay, ...] = ()
    shared: tuple[Shared, ...] = ()
    devices: tuple[Memory, ...] = ()


def of_one_stage(stage: StageEstimates) -> Estimates:
    """The estimates of a plan that has one stage, on one rank."""
    figures = {name: getattr(stage, name) for name in Figures.__struct_fields__}
    return Estimates(**figures, stages=(stage,))
