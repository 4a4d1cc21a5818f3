"""Figures of a bill as people read them."""

from __future__ import annotations

from autopar.ir.units import format_bytes, format_seconds
from autopar.report.bill import Figure, Unit


def value_text(value: int | None, unit: Unit) -> str:
    """`412 ms`; empty for what a plan lacks."""
    if value is None:
        return ""
    if unit == "ns":
        return format_seconds(value / 1e9)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "ppm":
        return f"{value / 1e4:.3g} %"
    return f"{value:.4g}"


def change_text(figure: Figure) -> str:
    """`+3.3 %`; empty where nothing changed, or no percentage says it."""
    percent = figure.change_percent
    if not percent:
        return "new" if figure.after and figure.before == 0 else ""
    text = f"{percent:+.3g} %"
    return text if percent < 1000 else f"x{1 + percent / 100:.3g}"


def share_text(part: int, whole: int) -> str:
    """`31 %`."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"
