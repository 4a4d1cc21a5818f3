"""Time against memory: what a step takes within each of several memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.ir.units import parse_bytes
from autopar.plans.display import ShownFrontier
from autopar.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """The best plan known whose peak is within `limit_bytes` per device; None if no plan is."""

    limit_bytes: int
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Frontier(ShownFrontier):
    """Points by descending limit: no step is shorter than that of a larger limit. `device_bytes` is
    the memory of each device, or the requested limit. `unlimited` is the best plan without a limit,
    and `smallest_peak_bytes` the lowest peak of all plans."""

    device_bytes: int
    unlimited: Plan
    smallest_peak_bytes: int
    points: tuple[FrontierPoint, ...]


def read_limits(given: str | Sequence[float | str]) -> tuple[int, ...]:
    """The limits in bytes, each once, the largest first. `given` is a text such as `80,40,24GiB`,
    in which a number without a unit has that of the next one, or numbers and texts. AutoparError
    says what cannot be read."""
    if isinstance(given, str):
        given = _with_units(given.split(",")) if given.strip() else ()
    try:
        limits = {parse_bytes(each) if isinstance(each, str) else int(each) for each in given}
    except (TypeError, ValueError, OverflowError) as error:
        raise AutoparError(f"memory limits: {error}") from error
    if any(limit <= 0 for limit in limits):
        raise AutoparError("memory limits: each must be more than 0 bytes")
    return tuple(sorted(limits, reverse=True))


def _with_units(parts: Sequence[str]) -> list[str]:
    texts, unit = list[str](), ""
    for part in reversed(parts):
        own = part.strip().lstrip("0123456789.").strip()
        unit = own or unit
        texts.append(part if own else f"{part}{unit}")
    return texts
