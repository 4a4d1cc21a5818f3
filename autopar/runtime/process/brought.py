"""The numbers that ranks compare in the pre-step check: a row each, and what differs among the
rows, in words."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from autopar.runtime.process.beside import differ
from autopar.runtime.process.digests import BATCH
from autopar.runtime.process.moves import moves

NEW = -1
"""The number of a program that is to be made."""
READ, STEP, ROWS = -2, -3, -4
"""The other occasions of a check: reading a tensor in shards, an optimizer step, exchanging numbers
of rows."""
OPTIMIZER_STEP = "step of an optimizer"
_CALL = "a call of a compiled model"
_DOES = {NEW: _CALL, STEP: f"a {OPTIMIZER_STEP}", ROWS: _CALL}

ALL_CALL = (
    "; every rank calls a compiled model at the same time with the same inputs, since each holds a "
    "part of it: make the call on all ranks, or enter `with model.unsharded(rank=0):` on all ranks "
    "and make it inside on that one alone"
)
OWN_ROWS = (
    '; each rank passes rows of its own (inputs="local"), which may be of another number, but not '
    "of another shape or dtype: pad them to one length on all ranks (accelerate's "
    'pad_across_processes, or padding="max_length" of a tokenizer or collator)'
)
APART = (
    "; every rank runs the same script, since each holds a part of the model: what is only to be "
    "printed or saved may be read on one rank alone, and all else is to be done on all ranks"
)
SEEDED = (
    "; every rank draws the same random numbers, as one process does: seed all ranks alike "
    "(torch.manual_seed(seed), not seed + rank). What one rank alone is to draw from a seed of its "
    "own, it draws inside torch.random.fork_rng(), or from a torch.Generator"
)
BESIDE = (
    "; what a script has beside a compiled model's outputs is the same on every rank, as the batch "
    "is: compute it from the whole batch, draw it with torch, on all ranks alike, or hand each "
    'rank rows of its own (inputs="local")'
)

_CALLS, _READS, _SEED = slice(0, 3), 4, 5
_FACTS = ("program", "gradients", "batch", "changes of parameters in place", "reads", "seed")
_PLACE, _FLOATS, _DIGESTS, _COUNT = range(len(_FACTS), len(_FACTS) + 4)
"""Columns that may differ: how far random numbers have come, and the number of calls. Sums of plain
tensors are compared with a tolerance."""
_WIDTH = _COUNT + 1


class Brought:
    """The rows of all ranks: `mine` is gathered into `rows`."""

    def __init__(self, size: int) -> None:
        rows = torch.zeros((size, _WIDTH), dtype=torch.int64, device="cpu")
        self.mine = torch.zeros(_WIDTH, dtype=torch.int64, device="cpu")
        self.rows = list(rows.unbind())
        self._own, self._all = self.mine.numpy(), rows.numpy()

    def bring(
        self, brought: Sequence[int], reads: int, drawn: tuple[int, int],
        beside: tuple[float, float], calls: int,
    ) -> None:  # fmt: skip
        """Fill this rank's row: its occasion (3 numbers, or fewer), a digest of its `reads`, (seed,
        digest of draws since), the sums of `beside`, and its `calls`."""
        seed, place = drawn
        self._own[:] = 0
        self._own[: len(brought)] = brought
        self._own[_CALLS.stop :] = (moves.in_place, reads, seed, place, 0, 0, calls)
        self._own.view(np.float64)[[_FLOATS, _DIGESTS]] = beside

    @property
    def is_read(self) -> bool:
        """Whether any rank is here to read."""
        return bool((self._all[:, 0] == READ).any())

    @property
    def calls(self) -> int:
        """The largest number of calls of a rank."""
        return int(self._all[:, _COUNT].max())

    @property
    def doing(self) -> str | None:
        """This rank's occasion, in words, if others have another one."""
        kinds = self._all[:, 0].clip(max=NEW)
        return _DOES[min(int(self._own[0]), NEW)] if (kinds != kinds[0]).any() else None

    @property
    def has_read_alike(self) -> bool:
        """Whether all ranks have the reads that this one has."""
        return bool((self._all[:, _READS] == self._own[_READS]).all())

    @property
    def is_beside_other(self) -> bool:
        """Whether plain tensors differ between ranks."""
        sums = self._all.view(np.float64)
        return differ(sums[:, _FLOATS].tolist(), sums[:, _DIGESTS].tolist())

    @property
    def has_drawn_other(self) -> bool:
        """Whether ranks have drawn more or less than others."""
        places = self._all[:, _PLACE]
        return bool((places != places[0]).any())

    @property
    def remedy(self) -> str:
        """What to do about what differs; an empty text if nothing does."""
        facts = self._all[:, : len(_FACTS)]
        others = (facts != facts[0]).any(0)
        if not others.any():
            return ""
        return ALL_CALL if others[_CALLS].any() else SEEDED if others[_SEED] else APART

    def named(self, facts: Mapping[str, str]) -> dict[str, str]:
        """`facts`, and this rank's row, in words."""
        brought = map(str, self._own[: len(_FACTS)])
        named: dict[str, str] = dict(zip(_FACTS, brought, strict=True))
        named[BATCH] = named.pop("batch")
        named["program"] = "a new one" if self._own[0] == NEW else named["program"]
        named["gradients"] = "on" if self._own[1] else "off"
        named["reads"] = f"digest {named['reads']}"
        named["seed (all ranks must draw the same random numbers)"] = named.pop("seed")
        return {**facts, **named}


_MOST = 16
"""With more tensors than this in a call, all ranks must have equally many rows."""


def row_shapes(tensors: Sequence[Tensor]) -> list[int]:
    """The numbers that ranks compare of local inputs, `_MOST + 1` of them: a digest of all that
    must be equal, and each tensor's number of rows."""
    rest = [(str(x.dtype), x.shape[1:]) for x in tensors]
    counts = [x.shape[0] for x in tensors]
    if len(counts) > _MOST:
        rest, counts = [*rest, *counts], []
    return [zlib.crc32(repr(rest).encode()), *counts, *[0] * (_MOST - len(counts))]
