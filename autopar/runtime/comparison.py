"""What a compiled step computed beside what eager did. Free of torch: reports read it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import VerificationError

MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of a tensor over all ranks.

    `relative` is the largest absolute difference of its elements over the largest magnitude in the
    eager tensor: an element that happens to be near zero does not count for more than the others.
    It is infinite where the compiled tensor has a NaN or infinity that eager has not.
    """

    name: str
    relative: float
    largest: float


@dataclass(frozen=True, slots=True)
class Report:
    """The losses, then the gradients, the worst first within each. `dtype` is the least precise
    floating dtype of the step, which `tolerance` follows where none is given."""

    model: str
    plan: str
    num_ranks: int
    dtype: str
    tolerance: float
    seed: int
    differences: tuple[Difference, ...]

    @property
    def failed(self) -> tuple[Difference, ...]:
        """What differs by more than the tolerance."""
        return tuple(d for d in self.differences if not d.relative <= self.tolerance)

    def check(self) -> None:
        """VerificationError, naming the tensors, if any differs by more than the tolerance."""
        failed = self.failed
        if not failed:
            return
        named = ", ".join(f"{d.name} (by {d.relative:.2g})" for d in failed[:MAX_NAMED])
        rest = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        raise VerificationError(
            f"{len(failed)} of {len(self.differences)} tensors differ from eager by more than "
            f"{self.tolerance:g}: {named}{rest}"
        )
