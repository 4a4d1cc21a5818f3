"""A profile: measurements of devices and their links. Times are whole nanoseconds, sizes bytes.

As a file it is canonical JSON, like a plan (`ir.files`). `runtime.measuring` makes one,
`cluster.measured` turns one into the figures that prices start from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from math import exp, log, prod
from typing import Annotated

import msgspec

from autopar.cluster.foreign import look_into
from autopar.errors import ClusterError
from autopar.ir.files import Format
from autopar.ir.graph import itemsize
from autopar.ir.redistribute import KINDS

PROFILE_VERSION = 2

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
"""A size, a number of bytes or nanoseconds: never zero, which would be no measurement."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Matmul(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[m, k] @ [k, n]` in `dtype`, one kernel on the device."""

    m: Positive
    k: Positive
    n: Positive
    dtype: str
    time_ns: Positive

    @property
    def flops(self) -> int:
        """One multiplication and one addition per point."""
        return 2 * self.m * self.k * self.n

    @property
    def num_bytes(self) -> int:
        """Both operands read and the result written, once."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * itemsize(self.dtype)


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Causal scaled dot-product attention of `[batch, heads, sequence, head_dim]` with itself."""

    batch: Positive
    heads: Positive
    sequence: Positive
    head_dim: Positive
    dtype: str
    forward_ns: Positive
    backward_ns: Positive


class Pointwise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`a + b` into a third tensor; `num_bytes` counts what is read and written."""

    num_bytes: Positive
    dtype: str
    time_ns: Positive


class Sent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Collective `kind` over axes whose slowest link is that of `level` (0 the innermost), while
    all ranks run it. Each group has `ranks`, on `sides` sides of the link, `shared` on each.
    `num_bytes` are those of the local tensor that is not sharded, source or target."""

    level: _Count
    kind: str
    ranks: Positive
    sides: Positive
    shared: Positive
    num_bytes: Positive
    time_ns: Positive


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Matmuls and a collective over the link of `level`, each alone, and both at once."""

    level: _Count
    computing_ns: Positive
    sending_ns: Positive
    both_ns: Positive


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured times of runs in millionths of the predicted times, and the number of `runs`."""

    compute_ppm: Positive
    communication_ppm: Positive
    runs: Positive


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry that was not measured, and why."""

    entry: str
    reason: str


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of devices and links; see the module's text.

    `kind` is "cuda" or "cpu", `device` the driver's name for one, `memory_bytes` all of its memory.
    `cluster` is the text of the presets that stand for what was not measured, empty if there are
    none; `sizes` are those of its levels, outermost first. All its devices worked at the same time.
    `launch_ns` is the host's time to launch one op through torch. `learned` is what runs showed of
    prices from this profile.
    """

    schema: int
    device: str
    kind: str
    torch: str
    cluster: str
    sizes: tuple[Positive, ...]
    memory_bytes: Positive
    launch_ns: Positive
    matmuls: tuple[Matmul, ...]
    attentions: tuple[Attention, ...]
    pointwise: tuple[Pointwise, ...]
    collectives: tuple[Sent, ...]
    overlaps: tuple[Overlap, ...]
    left_out: tuple[LeftOut, ...]
    learned: Learned | None = None

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    @property
    def digest(self) -> str:
        """A short hash of the whole profile."""
        return sha256(self.to_bytes()).hexdigest()[:8]

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, two-space indent, a final newline."""
        return _FORMAT.encode(self)

    @staticmethod
    def from_bytes(data: bytes, source: str = "profile") -> Profile:
        """The inverse of `to_bytes`; ClusterError, naming the place, on anything else."""
        return _FORMAT.decode(data, source)

    def check(self) -> None:
        """ValueError if a dtype is unknown, or if what every price needs is missing: a float32
        matmul and a pointwise op."""
        for entry in (*self.matmuls, *self.attentions, *self.pointwise):
            try:
                itemsize(entry.dtype)
            except KeyError:
                raise ValueError(f"unknown dtype {entry.dtype!r}") from None
        if not any(entry.dtype == "float32" for entry in self.matmuls):
            raise ValueError("no float32 matmul: a profile has at least one" + self._why())
        for sent in self.collectives:
            if sent.kind not in KINDS:
                raise ValueError(f"unknown collective {sent.kind!r}")
        if not self.pointwise:
            raise ValueError("no pointwise op: a profile has at least one" + self._why())

    def _why(self) -> str:
        return "".join(f"; {gap.entry} was left out: {gap.reason}" for gap in self.left_out[:3])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: whoever reads finds the old profile or the new one.
        ClusterError if it cannot be written."""
        _FORMAT.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """The profile in a file; ClusterError if it is missing, damaged or of another version, or
        if the file is of another kind."""
        try:
            return _FORMAT.load(path)
        except ClusterError as error:
            try:
                foreign = look_into(path)
            except (OSError, TypeError, ValueError):
                raise error from None
            if foreign is None:
                raise
        message = f"profile {os.fspath(path)} is {foreign.what}; `autopar profile` measures one"
        raise ClusterError(f"{message}. {foreign.remedy}".rstrip())


_FORMAT = Format(Profile, "profile", "measure again", PROFILE_VERSION, ClusterError)

# What a profile learns from runs of plans that were priced with it.
#
# Points are measured one by one; in a step, kernels heat the device, fill its caches and wait for
# each other. The time of a step beyond its price becomes one factor for all compute of a device,
# and one for all communication.

MOST = 3.0
"""One lesson changes a price by no more than this factor: a larger error comes from something that
was not measured."""

RunRatios = tuple[str, float | None, float | None]
"""(source, compute, communication): the source of the figures that a run was priced with, and the
ratios of measured to predicted times; None is not known."""

_PPM = 1_000_000


def learn(profile: Profile, runs: Sequence[RunRatios]) -> tuple[Profile, tuple[str, ...]]:
    """The profile with the geometric means of the runs' ratios, on top of what it has learned
    before; and notes on these, as text. ClusterError if a run was priced with anything else: its
    ratios are of another profile, or were learned already."""
    for source, _, _ in runs:
        if f"profile {profile.digest} " not in source:
            raise ClusterError(
                f"a run was priced with other figures ({source}) than profile {profile.digest} "
                "has: plan with the profile, run that, and let it learn from there"
            )
    before = profile.learned or Learned(_PPM, _PPM, 1)
    notes: list[str] = []
    compute = _mean("compute", [ratio for _, ratio, _ in runs], notes)
    communication = _mean("communication", [ratio for _, _, ratio in runs], notes)
    learned = Learned(
        compute_ppm=round(before.compute_ppm * compute),
        communication_ppm=round(before.communication_ppm * communication),
        runs=len(runs) + (profile.learned.runs if profile.learned else 0),
    )
    return msgspec.structs.replace(profile, learned=learned), tuple(notes)


def _mean(what: str, ratios: Sequence[float | None], notes: list[str]) -> float:
    known = [min(MOST, max(1 / MOST, ratio)) for ratio in ratios if ratio is not None]
    if not known:
        notes.append(f"{what}: not known, left as it is")
        return 1.0
    mean = exp(sum(map(log, known)) / len(known))
    beyond = [ratio for ratio in ratios if ratio is not None and not 1 / MOST <= ratio <= MOST]
    furthest = ", ".join(f"{ratio:.3g}" for ratio in beyond)
    remark = (
        f" ({furthest} counts as the factor of {MOST:g} that one lesson changes)" if beyond else ""
    )
    notes.append(f"{what}: takes {mean:.3g} times what was predicted{remark}")
    return mean
