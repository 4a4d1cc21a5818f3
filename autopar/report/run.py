"""A run beside its plan: what was predicted, and what was measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.units import format_bytes, format_count, format_ns
from autopar.plans.run_record import RunRecord
from autopar.report.printed import Printed, name, table

_ALIKE = 0.05
"""Ratios this close to 1 are what a run of the same plan varies by."""


@dataclass(frozen=True, slots=True)
class RunReport(Printed):
    """The page of a run."""

    record: RunRecord

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file, for `autopar profile --learn`. PlanError if it cannot be
        written."""
        self.record.save(path)

    def page(self) -> RenderableType:
        record = self.record
        predicted, measured = record.predicted, record.measured
        head = (
            f"{record.model}, plan {record.plan[:12]}: {record.mesh} of {record.cluster}, "
            f"{record.backend}, {format_count(record.steps, 'step')} as rank {record.rank} saw them"
        )
        computed_ns = (
            measured.passes_ns - measured.exposed_ns if measured.exposed_ns is not None else None
        )
        rest_ns = None if measured.step_ns is None else measured.step_ns - measured.passes_ns
        rows: tuple[tuple[str, Callable[[int], str], int, int | None], ...] = (
            ("step", format_ns, predicted.step_ns, measured.step_ns),
            ("  forward and backward", format_ns, predicted.passes_ns, measured.passes_ns),
            ("    compute", format_ns, predicted.passes_ns - predicted.exposed_ns, computed_ns),
            ("    exposed communication", format_ns, predicted.exposed_ns, measured.exposed_ns),
            (
                "  optimizer; the script's own",
                format_ns,
                predicted.step_ns - predicted.passes_ns,
                rest_ns,
            ),
            ("peak memory", format_bytes, predicted.peak_bytes, measured.peak_bytes),
        )
        figures = table(
            ("what",),
            ("predicted", "measured", "ratio"),
            (
                (
                    what,
                    text(before),
                    "not measured" if after is None else text(max(0, after)),
                    f"{after / before:.2f}" if before and after and after > 0 else "",
                )
                for what, text, before, after in rows
            ),
        )
        return Group(name(head), figures, Text(""), Text(self._lesson()))

    def _lesson(self) -> str:
        ratios = {
            "compute": self.record.compute_ratio,
            "communication": self.record.communication_ratio,
        }
        known = {what: ratio for what, ratio in ratios.items() if ratio is not None}
        off = {what: ratio for what, ratio in known.items() if abs(ratio - 1) > _ALIKE}
        if off:
            text = ", ".join(f"{w} takes {r:.3g} times what was predicted" for w, r in off.items())
            return f"a profile should learn: {text}"
        return "a profile has nothing to learn: " + (
            f"{' and '.join(known)} as predicted" if known else "nothing of it is known"
        )
