"""Compiles inner loops by numba, once per machine if the result can be cached on disk."""

# numba has no types of its own.
# pyright: reportMissingTypeStubs=none, reportUnknownMemberType=none, reportPrivateUsage=none
# pyright: reportUnknownVariableType=none, reportUnknownArgumentType=none

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

from autopar.ir.files import warn_without_cache

Loop = TypeVar("Loop", bound=Callable[..., Any])

LOOPS: list[Any] = []
"""All compiled loops, as numba's dispatchers."""

_DAMAGED = (EOFError, pickle.PickleError, AttributeError, IndexError, KeyError, ValueError)
"""The errors that `pickle` raises for a truncated or damaged file."""


def compiled(function: Loop) -> Loop:
    """`function`, compiled for the types of its arguments at its first call with them."""
    return _compiled(function)


def compiled_within(function: Loop) -> Loop:
    """The same for one that only compiled functions call: what Python calls takes twice as long to
    compile."""
    return _compiled(function, no_cpython_wrapper=True)


def _compiled(function: Loop, **how: Any) -> Loop:
    # Minima may be taken in any order: no figure is a NaN, and the sign of a zero means nothing.
    how |= {"nogil": True, "no_cfunc_wrapper": True}
    loop: Any = numba.njit(fastmath={"nnan", "nsz"}, **how)(function)
    try:
        loop._cache = _Cache(function)
    except (OSError, RuntimeError):
        folder = Path(function.__code__.co_filename).parent
        _warn_without_cache(f"neither {folder} nor a cache folder of the user's can be written")
    LOOPS.append(loop)
    return loop


class _Cache(FunctionCache):
    """numba's cache. Entries that cannot be read or written count as missing."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """numba's hook: the loop for a signature, or None."""
        try:
            return super().load_overload(sig, target_context)
        except (OSError, *_DAMAGED) as error:
            _warn_without_cache(f"{self.cache_path}: {error}")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """numba's hook."""
        try:
            super().save_overload(sig, data)
        except (OSError, *_DAMAGED) as error:
            _warn_without_cache(f"{self.cache_path}: {error}")


def _warn_without_cache(reason: str) -> None:
    warn_without_cache(
        "the solver's compiled loops",
        reason,
        "Each process compiles them anew, which takes a minute or so. Name a folder that can be "
        "written in NUMBA_CACHE_DIR",
    )
