"""Plain tensors that a script uses with a compiled model's: labels, noise, weights of losses.

With global inputs, plain tensors that enter a loss outside of the model must be the same on every
rank, and so must the gradients from that loss. Each rank sums them up in two numbers. Ranks compare
these at the next pre-step check: before the optimizer's step, or at the next call. Integers must be
equal. Floating point numbers may differ as much as kernels that add up in another order make them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.runtime.process.digests import Late, digest_of, signed_sum
from autopar.runtime.process.origins import numbers_in

_PLAIN = (Tensor, nn.Parameter)
SUM_TOLERANCE = 1e-3
"""The largest difference of sums of floating point numbers: the relative difference of the values,
if it is random. Differences in 16 bits count a tenth: their last digit alone is that much, and
kernels that add up in another order change it."""

rows_differ: list[bool] = []
"""Whether plain tensors are not the same on every rank."""


def know_rows_differ() -> None:
    """From now on plain tensors are not the same on every rank."""
    rows_differ[:] = [True]


_DIGITS = (1 << 40) - 1
"""The bits of a digest that are compared: sums of these are exact in float64."""


class _Met(NamedTuple):
    """A tensor: where it was used, its dtype and shape, and its sums, of floating point numbers and
    of a digest of integers. One of the two is zero."""

    where: str
    kind: tuple[torch.dtype, torch.Size] | None
    sums: tuple[float, float] | Tensor


class Beside:
    """The plain tensors of this rank since sums were last `taken`. The sums of a GPU are read one
    time later."""

    def __init__(self) -> None:
        self._met: list[_Met] = []
        self._compared: list[_Met] = []
        self._late: Late | None = None
        self._nothing = torch.zeros(2, dtype=torch.float64, device="cpu")
        self._waits: tuple[list[_Met], tuple[float, float]] = [], (0.0, 0.0)

    def add(self, where: str, given: Iterable[Any]) -> None:
        """Add the plain tensors among `given` that have values, and the numbers that the others
        were computed from."""
        if rows_differ:
            return
        for x in given:
            if type(x) in _PLAIN:
                if not x.is_meta and x.numel():
                    self._met.append(_Met(where, (x.dtype, x.shape), _sums(x)))
                continue
            numbers = numbers_in(x)
            if numbers:
                total = math.fsum(_sum_of_one(each) for each in numbers)
                self._met.append(_Met(where, None, (total, 0.0)))

    def taken(self, *, at_call: bool = True) -> tuple[float, float]:
        """The sums of all tensors. A GPU's are taken `at_call` alone: taking them in each optimizer
        step would wait for the device."""
        is_late = self._late is not None or any(isinstance(m.sums, Tensor) for m in self._met)
        if (not self._met and self._late is None) or (is_late and not at_call):
            self._compared = []
            return 0.0, 0.0
        met, self._met = self._met, []
        there = [each.sums for each in met if isinstance(each.sums, Tensor)]
        here = [each.sums for each in met if not isinstance(each.sums, Tensor)]
        sums = math.fsum(x for x, _ in here), math.fsum(x for _, x in here)
        if there and self._late is None:
            self._late, self._nothing = Late(), torch.zeros_like(there[0])
        if self._late is None:
            self._compared = met
            return sums
        before = self._late(torch.stack([self._nothing, *there]).sum(0))
        (self._compared, waited), self._waits = self._waits, (met, sums)
        floats, digests = (0.0, 0.0) if before is None else before.tolist()
        return waited[0] + floats, waited[1] + digests

    def describe(self) -> dict[str, str]:
        """The tensors whose sums were taken last, in words."""
        texts: dict[str, str] = {}
        times: Counter[str] = Counter()
        for where, kind, sums in self._compared:
            what = "a number" if kind is None else f"{str(kind[0])[6:]}{list(kind[1])}"
            name = f"{where} ({what})"
            times[name] += 1
            name = name if times[name] == 1 else f"{name} ({times[name]})"
            floats, digest = sums.tolist() if isinstance(sums, Tensor) else sums
            texts[name] = f"sum {floats:.9g}" if floats else f"digest {digest:.0f}"
        return texts


def differ(floats: Sequence[float], digests: Sequence[float]) -> bool:
    """Whether the sums of ranks differ."""
    is_near = max(floats) - min(floats) <= SUM_TOLERANCE
    return not is_near or any(each != digests[0] for each in digests)


def _sums(x: Tensor) -> tuple[float, float] | Tensor:
    if x.numel() == 1 and x.device.type == "cpu" and not x.is_complex():
        number: Any = x.item()
        if not x.is_floating_point():
            return 0.0, float(int(number) & _DIGITS)
        share = 0.1 if x.itemsize == 2 else 1.0
        return share * _sum_of_one(number), float(not math.isfinite(number))
    return _sums_of_many(x)


@torch.no_grad()
def _sums_of_many(x: Tensor) -> tuple[float, float] | Tensor:
    x = x.to_dense() if x.layout is not torch.strided else x
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    for dim, stride in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if stride == 0 else x
    is_floating = x.is_floating_point() and x.itemsize > 1  # of the others norms are not computed
    sums = _of_floats(x) if is_floating else _of_integers(x)
    return (float(sums[0]), float(sums[1])) if x.device.type == "cpu" else torch.stack(sums)


def _sum_of_one(number: float) -> float:
    if not (number and math.isfinite(number)):
        return 0.0
    return math.log(abs(number)) + math.copysign(1, number)


def _of_floats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Its length as a vector, and its direction, as one number: each changes by about 1 if values
    are others. For numbers that are not finite there is a digest alone."""
    length = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    value = (signed_sum(x) / length + length.log()).double() * (0.1 if x.itemsize == 2 else 1)
    is_finite = length.isfinite()
    return torch.where(is_finite & (length > 0), value, 0.0), (~is_finite).double()


def _of_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    digest = (digest_of(x) & _DIGITS).double()
    return torch.zeros_like(digest), digest
