"""From `train.py:build` or `package.module:build` to the function it names.

Only this module runs the user's code; commands that read plans never import it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.errors import TargetError

_EXAMPLE = "write it as train.py:build or package.module:build"


def load_target(text: str) -> Callable[..., Any]:
    """The function that `text` names. TargetError says which part of it is wrong.

    The folder of a file, or the working directory for a module, becomes the head of `sys.path`, as
    with `python train.py` and `python -m`.
    """
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise TargetError(f"target {text!r} names no function: {_EXAMPLE}")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise TargetError(f"{place} has no {name!r}{_suggestion(module)}")
        function = getattr(function, part)
    if not callable(function):
        kind = type(function).__name__
        raise TargetError(f"{text} is a {kind}, not a function that returns (model, inputs)")
    return function


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    _search_first(path.resolve().parent)
    name = path.stem if path.stem not in sys.modules else f"{path.stem} (target)"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TargetError(f"importing {path} failed: {_line(error)}") from error
    return module


def _from_name(name: str) -> ModuleType:
    _search_first(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise TargetError(f"importing {name} failed: {_line(error)}") from error


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _suggestion(module: ModuleType) -> str:
    """The functions that the module itself defines, as a hint."""
    functions = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]
    return f"; it defines {', '.join(functions[:8])}" if functions else ""
