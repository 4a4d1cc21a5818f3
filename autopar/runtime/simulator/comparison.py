"""Comparison of a compiled step with eager. Free of torch: reports read it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import VerificationError, listed

EXACT_TOLERANCE = 1e-9
"""The relative difference that rounding in float64 explains."""


@dataclass(frozen=True, slots=True)
class Unequal:
    """The largest difference of a tensor over all ranks.

    `relative` is the largest absolute difference of its elements over the largest magnitude in the
    eager tensor. So an element that happens to be near zero does not count more than the others. It
    is infinite where the compiled tensor has a NaN or infinity that eager has not, and where only
    one side has the tensor at all, which `why` says. `exact` is the same where both sides compute
    in float64, and None where that was not asked for.
    """

    name: str
    relative: float
    largest: float
    why: str = ""
    exact: float | None = None

    @property
    def is_blank(self) -> bool:
        """Whether both sides are zero, or have no finite number: nothing was compared."""
        return self.largest == 0 and self.relative == 0


@dataclass(frozen=True, slots=True)
class Report:
    """The losses, then the gradients, the worst first within each. `dtype` is the least precise
    floating dtype of the step, which `tolerance` follows where none is given. `notes` say what the
    comparison does not show."""

    model: str
    plan: str
    num_ranks: int
    dtype: str
    tolerance: float
    seed: int
    differences: tuple[Unequal, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Unequal, ...]:
        """What differs by more than the tolerance, in float64 too if that was computed."""
        return tuple(d for d in self.differences if not self._is_equal(d))

    def _is_equal(self, d: Unequal) -> bool:
        return d.relative <= self.tolerance or (d.exact is not None and d.exact <= EXACT_TOLERANCE)

    def check(self) -> None:
        """VerificationError, naming the tensors, if any differs by more than the tolerance, or if
        there was nothing to compare."""
        failed = self.failed
        if not failed:
            if all(d.is_blank for d in self.differences):
                raise VerificationError(
                    "nothing was compared: every tensor is zero or NaN on both sides, or there is "
                    "none; verify with weights and inputs that give a loss and gradients"
                )
            return
        named = listed(f"{d.name} ({_reason(d)})" for d in failed)
        raise VerificationError(
            f"{len(failed)} of {len(self.differences)} tensors differ from eager by more than "
            f"{self.tolerance:g}: {named}"
        )


def _reason(d: Unequal) -> str:
    exact = "" if d.exact is None else f", by {d.exact:.2g} in float64"
    return d.why or f"by {d.relative:.2g}{exact}"


def blank_note(differences: tuple[Unequal, ...]) -> tuple[str, ...]:
    """A sentence on tensors of which nothing was compared, if there are any."""
    blank = [d.name for d in differences if d.is_blank]
    if not blank:
        return ()
    are = "is" if len(blank) == 1 else "are"
    return (f"compared nothing: {listed(blank)} {are} zero or NaN throughout on both sides",)
