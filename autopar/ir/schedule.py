"""The schedule: what one rank does in a step, in order.

`plans.scheduling.events.schedule` makes it from a graph and the decisions. `timeline` simulates how
long it takes and what it holds. Code generation writes its events one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.ir.graph import Phase, Ref
from autopar.ir.redistribute import Collective, Copies
from autopar.ir.sharding import Sharding


class Value(NamedTuple):
    """Root `ref` (`uses.root_of`) in `state`, made in `phase`. A tensor that is saved for backward
    stays a value of the forward phase, on the device or `on_host`."""

    phase: Phase
    ref: Ref
    state: Sharding
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor is copied as it is from the device to its host (`offload`) or back (`reload`), on
    the link number `axis` of `mesh.Mesh.link_names`. Then the device may go on, or the host if
    `is_read_there`."""

    kind: Literal["offload", "reload"]
    axis: int
    is_read_there: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Step `step` of the route of the group `key` (`uses.Group`): `source` is brought into the
    state of `target` by `collective`, which for a slice sends nothing; `copies` says which of its
    buffers are laid out anew. Or a copy to or from the host, whose key is that of `offloading`."""

    key: str
    step: int
    source: Value
    target: Value
    collective: Collective | HostCopy
    copies: Copies


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Transfers that travel as one: several are of one kind, axis and dtype, laid end to end."""

    transfers: tuple[Transfer, ...]

    @property
    def axis(self) -> int:
        """The mesh axis, or other number of `mesh.Mesh.link_names`, whose links it takes."""
        return self.transfers[0].collective.axis

    @property
    def is_packed(self) -> bool:
        """Whether what is sent is a copy of the sources, which are not read any more then."""
        first, *others = self.transfers
        return bool(others) or first.copies.sent

    @property
    def kind(self) -> str:
        """The kind of its collective, or of copy."""
        return self.transfers[0].collective.kind


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """The device runs the op `node`, with the communication that is part of the op."""

    node: int
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The links of an axis, or to or from the host, begin with a message once they are done with
    those before it."""

    message: Message


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """The device goes on when the message has come."""

    message: Message


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """The target of a transfer is made: cut out of what has come, or, without a message, cut by the
    device out of the transfer's source."""

    transfer: Transfer
    message: Message | None


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The optimizer changes the parameters `params`, nodes of the graph."""

    params: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Nothing reads these any more: tensors, or what messages brought."""

    held: tuple[Value | Message, ...]


Event = Compute | Start | Wait | Take | Update | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """The events of a step: `forward` and `backward`, then the update of the parameters. Where
    backward comes in two parts (`passes.stages`), `backward` has the first, `weights` the second.

    With several `microbatches`, these are the events of the last one; all others are `before` it.

    Parameters, buffers, inputs and tangents are there without an event and are never freed; nor are
    `outputs`, the values that leave the graph. `saved` are the values saved for backward, on the
    device or on its host. `carried` are the values that the second part of backward needs, from
    `saved` or made by the first part.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    update: tuple[Event, ...]
    saved: tuple[Value, ...]
    outputs: frozenset[Value]
    before: Schedule | None = None
    microbatches: int = 1
    weights: tuple[Event, ...] = ()
    carried: tuple[Value, ...] = ()

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of all microbatches, and the update."""
        return (self.microbatches - 1) * self.microbatch_before + self.last_microbatch

    @property
    def microbatch_before(self) -> tuple[Event, ...]:
        """The events of a microbatch that is not the last."""
        return self.before.last_microbatch if self.before is not None else ()

    @property
    def last_microbatch(self) -> tuple[Event, ...]:
        """The events of the last microbatch, and the update."""
        return self.forward + self.backward + self.weights + self.update
