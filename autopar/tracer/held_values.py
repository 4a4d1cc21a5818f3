"""Values that a forward reads and changes in Python: whether they are the same, copies, and what
stands for tensors among them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from autopar.runtime.program.guards import Read
from autopar.runtime.program.leavings import MISSING, LeftTensor, put_at, value_at

CONTAINERS = (dict, OrderedDict, list, set)

SIMPLE_TYPES = frozenset({bool, int, float, str, type(None)})
"""Types of what is set after each call."""


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or has some in lists, tuples or dicts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(holds_tensors, value))
    return isinstance(value, Tensor)


class _Was(NamedTuple):
    """A tensor of the trace: nothing can be made there that stands for it."""

    called: str


def named_stand_in(value: Any, called: str) -> Any:
    """A value with its name in the place of each tensor."""
    return _mapped(value, lambda x: _Was(called) if isinstance(x, Tensor) else x)


def resolved_value(value: Any) -> Any:
    """A value with what is an error where it is used in the place of each name."""
    return _mapped(value, lambda x: LeftTensor(x.called) if isinstance(x, _Was) else x)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A value, with what `function` makes of what is in its lists, tuples and dicts."""
    if isinstance(value, Mapping):
        return {key: _mapped(x, function) for key, x in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(_mapped(x, function) for x in value)
    return function(value)


def is_same(now: Any, was: Any) -> bool:
    """Whether two values are the same, or containers of the same items, or equal and plain."""
    if type(now) is not type(was):
        return False
    if isinstance(now, dict):
        return now.keys() == was.keys() and all(now[k] is was[k] for k in now)
    if isinstance(now, list):
        return len(now) == len(was) and all(a is b for a, b in zip(now, was, strict=True))
    return bool(now == was) if isinstance(now, bool | int | float | str | set) else now is was


def value_read(read: Read) -> Any:
    """What is there now."""
    return value_at(read.owner, read.name)


def copy_of(value: Any) -> Any:
    """A copy of a table, a list or a set; None of all else."""
    return value.copy() if type(value) in CONTAINERS else None


def restore(read: Read, value: Any, copy: Any) -> None:
    """Have `value` there again, with what it held."""
    if value_read(read) is not value:
        put_at(read.owner, read.name, value)
    if copy is not None:
        refill(value, copy)


def refill(held: Any, items: Any) -> None:
    """Make a dict, list or set hold `items` again."""
    held.clear()
    held.extend(items) if isinstance(held, list) else held.update(items)


def changed_numbers(value: Any, copy: Any) -> list[Any] | None:
    """Under which keys a list or a table has other numbers, flags or texts than its copy; None if
    it differs in anything else."""
    if isinstance(value, dict):
        if value.keys() != copy.keys():
            return None
        keys = [key for key in value if value[key] is not copy[key]]
    elif isinstance(value, list) and len(value) == len(copy):
        keys = [k for k, x in enumerate(value) if x is not copy[k]]
    else:
        return None
    plain = (type(x[key]) in SIMPLE_TYPES for key in keys for x in (value, copy))
    return keys if all(plain) else None


def is_recomputed(module: nn.Module, name: str) -> bool:
    """Whether the hooks of weight_norm and spectral_norm make this anew before each forward."""
    return any(f"{name}{suffix}" in module._parameters for suffix in ("_g", "_orig"))


def value_before(module: nn.Module, name: str, was: Any) -> Any:
    """What an attribute was, of the module or else of its class."""
    return getattr(type(module), name, MISSING) if was is MISSING else was
