"""What forward draws from Python's and numpy's random numbers while it is traced, and where."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from autopar.runtime.replacing import replaced
from autopar.tracer.places import is_users


@contextmanager
def draws_noted() -> Generator[Callable[[], Iterator[str]], None, None]:
    """Yields a function that lists what was drawn so far inside, such as "draws from Python's
    random (model.py:12)". Afterwards, the generators are as before."""
    modules: dict[str, Any] = {"Python": random, "numpy": np.random}
    places: dict[str, dict[str, None]] = {name: {} for name in modules}
    drawn, drawn_by_numpy = random.getstate(), _numpy_state()

    def effects() -> Iterator[str]:
        changed = {
            "Python": random.getstate() != drawn,
            "numpy": not all(map(np.array_equal, _numpy_state(), drawn_by_numpy)),
        }
        for name in modules:
            if changed[name]:
                where = f" ({', '.join(places[name])})" if places[name] else ""
                yield f"draws from {name}'s random{where}"

    noting = (
        (module, key, _noting(value, places[name]))
        for name, module in modules.items()
        for key, value in vars(module).items()
        if isinstance(getattr(value, "__self__", None), random.Random | np.random.RandomState)
    )
    try:
        with replaced(*noting):
            yield effects
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)  # noqa: NPY002


def _noting(draw: Callable[..., Any], places: dict[str, None]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if is_users(frame.f_code.co_filename):
            places[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
        return draw(*args, **kwargs)

    return noted


def _numpy_state() -> Any:
    """That of the generator that `np.random.rand` and its like draw from."""
    return np.random.get_state()  # noqa: NPY002
