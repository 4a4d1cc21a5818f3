"""Measured steps of a run beside those that its plan predicted, as a file."""

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
    """Of a plan: the whole step; forward and backward, with waits for the host; exposed
    communication in them; all communication; and the peak of memory."""

    step_ns: Count
    passes_ns: Count
    exposed_ns: Count
    communication_ns: Count
    peak_bytes: Count


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Medians on one rank. `step_ns` is from the start of a step to that of the next, `passes_ns`
    is forward and backward, and `exposed_ns` waits for communication in them. `peak_bytes` is the
    peak of memory that torch allocated. None if not measured."""

    step_ns: _Some | None
    passes_ns: _Some
    exposed_ns: Count | None
    peak_bytes: Count | None


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`steps` steps of a plan on rank `rank`. `plan` is its digest, and `source` the origin of the
    figures that it was priced with."""

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
        """Measured over predicted time of compute; None if it is not known. Waits that were not
        measured are assumed to be as predicted."""
        predicted, measured = self.predicted, self.measured
        exposed_ns = measured.exposed_ns
        waited_ns = predicted.exposed_ns if exposed_ns is None else exposed_ns
        computed_ns = measured.passes_ns - waited_ns
        predicted_ns = predicted.passes_ns - predicted.exposed_ns
        return computed_ns / predicted_ns if computed_ns > 0 and predicted_ns else None

    @property
    def communication_ratio(self) -> float | None:
        """Measured over predicted time of communication, if the difference of exposed time is that
        of all communication; None if it is not known."""
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
