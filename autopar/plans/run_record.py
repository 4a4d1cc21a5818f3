"""What a run of a plan took, beside what the plan predicted: a file of a run."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec

from autopar.errors import PlanError
from autopar.ir.files import Format
from autopar.plans.cluster_rates import Count

RUN_VERSION = 1

_Some = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class PredictedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a plan: the whole step, its forward and backward alone, what the device waits for its host
    too, what communication costs the device in them, all communication, and the peak of memory."""

    step_ns: Count
    passes_ns: Count
    exposed_ns: Count
    communication_ns: Count
    peak_bytes: Count


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Medians on one rank: from the start of a step to that of the next, forward and backward, and
    the waits for communication in them; the peak of memory that torch had allocated. None is what
    was not measured."""

    step_ns: _Some | None
    passes_ns: _Some
    exposed_ns: Count | None
    peak_bytes: Count | None


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`steps` steps of `plan` (its digest), which was priced with figures of `source`, as rank
    `rank` saw them."""

    schema: int
    model: str
    plan: str
    cluster: str
    mesh: str
    source: str
    backend: str
    rank: Count
    steps: _Some
    predicted: PredictedStep
    measured: MeasuredStep

    @property
    def compute_ratio(self) -> float | None:
        """How many times what was predicted the device computes; None where that is not known. If
        waits were not measured, they are taken to be as predicted."""
        predicted, measured = self.predicted, self.measured
        exposed_ns = measured.exposed_ns
        waited_ns = predicted.exposed_ns if exposed_ns is None else exposed_ns
        computed_ns = measured.passes_ns - waited_ns
        predicted_ns = predicted.passes_ns - predicted.exposed_ns
        return computed_ns / predicted_ns if computed_ns > 0 and predicted_ns else None

    @property
    def communication_ratio(self) -> float | None:
        """How many times what was predicted communication takes, if all that it takes more or less
        is exposed; None where that is not known."""
        exposed_ns, whole_ns = self.measured.exposed_ns, self.predicted.communication_ns
        if exposed_ns is None or not whole_ns:
            return None
        return max(0.0, 1 + (exposed_ns - self.predicted.exposed_ns) / whole_ns)

    def check(self) -> None:
        """Any figures go together."""

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return _FORMAT.encode(self)

    @staticmethod
    def from_bytes(data: bytes, source: str = "record of a run") -> RunRecord:
        """The inverse of `to_bytes`; PlanError, naming the place, on anything else."""
        return _FORMAT.decode(data, source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically. PlanError if it cannot be written."""
        _FORMAT.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> RunRecord:
        """The record in a file; PlanError if it is missing, damaged or of another version."""
        return _FORMAT.load(path)


_FORMAT = Format(RunRecord, "record of a run", "run again", RUN_VERSION, PlanError)
