"""What `gpu_check` found: values, and their table."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import msgspec

from benchmarks.tables import markdown

TOLERANCE = 1e-5
"""Of a gradient's largest difference over its largest element, in float32."""

HEADER = ("model", "run", "step ms", "eager", "torch.compile", "peak GiB", "first call s")


class Variant(msgspec.Struct, frozen=True):
    """A way to run the model. `error` says why there are no figures; times are of whole steps,
    `first_s` of the first one, which compiles; `peak_bytes` is None on the CPU."""

    name: str
    backend: str
    first_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    error: str = ""

    @property
    def step_s(self) -> float | None:
        """The median."""
        return statistics.median(self.steps_s) if self.steps_s else None


class Case(msgspec.Struct, frozen=True):
    """A model: how far autopar's gradients are from eager's, and the variants' figures.
    `gradient_error` is the worst parameter's (`TOLERANCE`), None where `error` says why."""

    model: str
    parameters: int
    batch: int
    sequence: int
    dtype: str
    loss_error: float | None
    gradient_error: float | None
    worst_gradient: str
    variants: tuple[Variant, ...]
    error: str = ""

    @property
    def fine(self) -> bool:
        """Whether autopar ran, and computed what eager computes."""
        ours = next(variant for variant in self.variants if variant.name == "autopar")
        return self.equal and not ours.error

    @property
    def equal(self) -> bool:
        """Whether loss and gradients were compared, and are within the tolerance."""
        if self.gradient_error is None or self.loss_error is None:
            return False
        return self.gradient_error <= TOLERANCE and self.loss_error <= TOLERANCE


class Results(msgspec.Struct, frozen=True):
    """All of a run."""

    device: str
    autopar: str
    torch: str
    cases: tuple[Case, ...]


def rows(results: Results) -> list[list[str]]:
    """The variants as cells, in the order of `HEADER`."""
    lines: list[list[str]] = []
    for case in results.cases:
        step_s = {variant.name: variant.step_s for variant in case.variants}
        for variant in case.variants:
            run = f"{variant.name} ({variant.backend})"
            if variant.step_s is None:
                lines.append([case.model, run, "failed", "", "", "", ""])
                continue
            peak = variant.peak_bytes
            lines.append(
                [
                    case.model,
                    run,
                    f"{variant.step_s * 1e3:.2f}",
                    *(_ratio(variant.step_s, step_s[name]) for name in ("eager", "torch.compile")),
                    "" if peak is None else f"{peak / 2**30:.2f}",
                    f"{variant.first_s:.1f}",
                ]
            )
    return lines


def _ratio(step_s: float | None, other_s: float | None) -> str:
    return "" if step_s is None or other_s is None else f"{step_s / other_s:.3f}"


def notes(results: Results) -> list[str]:
    """A line on each comparison, and one on each failure."""
    lines: list[str] = []
    for case in results.cases:
        what = f"{case.model}, {case.parameters:,} parameters, batch {case.batch} x {case.sequence}"
        if case.gradient_error is None or case.loss_error is None:
            lines.append(f"{what}: gradients not compared: {case.error}")
        else:
            verdict = "equal" if case.equal else "NOT EQUAL"
            worst = f" ({case.worst_gradient})" if case.worst_gradient else ""
            lines.append(
                f"{what}, steps in {case.dtype}; float32 gradients {verdict} to eager's: worst "
                f"{case.gradient_error:.1e}{worst}, loss {case.loss_error:.1e}, "
                f"tolerance {TOLERANCE:.0e}"
            )
        for variant in case.variants:
            if variant.error:
                lines.append(f"{case.model}, {variant.name}: {variant.error}")
            step_s, peak = variant.predicted_step_s, variant.predicted_peak_bytes
            if step_s is not None and peak is not None:
                lines.append(
                    f"{case.model}, {variant.name} predicted {step_s * 1e3:.2f} ms, "
                    f"and {peak / 2**30:.2f} GiB"
                )
    return lines


def write(results: Results, out: Path | None) -> None:
    """The files of the results so far."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"gpu_check_{slug(results.device)}"
    text = msgspec.json.format(msgspec.json.encode(results), indent=2)
    stem.with_suffix(".json").write_bytes(text + b"\n")
    title = f"One {results.device}, torch {results.torch}, autopar {results.autopar}"
    listed = "\n".join(f"- {line}" for line in notes(results))
    table = markdown(HEADER, rows(results))
    page = f"{title}. Columns 4 and 5: step time over eager's and torch.compile's.\n\n"
    stem.with_suffix(".md").write_text(f"{page}{table}\n\n{listed}\n", encoding="utf-8")


def slug(device: str) -> str:
    """A device's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
