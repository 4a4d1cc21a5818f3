"""Watching a model's forward while it is traced: what it reads of its modules, and what it does in
Python that its program will not do again."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CellType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from autopar.errors import SideEffectWarning, TraceError, listed
from autopar.runtime.module.facade import Facade
from autopar.runtime.process.world import place_of_process
from autopar.runtime.program.externals import is_external
from autopar.runtime.program.frozen import frozen
from autopar.runtime.program.guards import HOOKS, TABLES, Read, is_watchable
from autopar.runtime.program.leavings import MISSING, LeftBehind, LeftTensor
from autopar.tracer.draws import draws_noted
from autopar.tracer.own_updates import is_own_update
from autopar.tracer.reachable import reachable

_CONTAINERS = (dict, OrderedDict, list, set)

# The last three are asked for where there are hooks, as those are that label nodes.
_INTERNAL = (frozenset(vars(nn.Module)) - {"training", "forward"}) | {
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
# Models of transformers put hooks where they need them at their first call; recurrent layers list
# their weights whenever one is put in place.
_SET_UP = {
    *TABLES, *HOOKS, *_INTERNAL, "_output_capturing_hooks_installed",
    "_flat_weights", "_flat_weight_refs",
}  # fmt: skip


_OF_FACADE = frozenset({"_model", "_runner"})
"""What a compiled model has beside all that its model has."""

_ONCE = "Python runs when the model is traced, and not again when its program runs. "
_OUTSIDE = _ONCE + "Pass what changes as an argument, keep it in a buffer, or do it outside"
_RETURN = "only forward has them. Return what is to be read after it, as in `return loss, aux`"
_KEPT = (
    "a program computes it anew in each call, as the first one did. If it depends on the call, "
    "return it, and pass it as an argument, or keep it in a buffer"
)
_REPLACED = (
    "forward puts another tensor in the place of {name}, which requires a gradient: the next call "
    "would go back through this one. detach() it, or keep it as an argument and a result"
)
_WITH_TORCH = _ONCE + (
    "Set the probability to 0, pass what is drawn as an argument, or draw with torch, as in "
    "torch.where(torch.rand([]) < p, a, b)"
)


class Watch:
    """What `model` reads, and what it changes, in the forwards that run inside `forward()`."""

    def __init__(self, model: nn.Module, leaves: list[Any] | None = None) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        # Modules, and the objects that they hold, with what to call them.
        self._owners = {id(m): (m, path or "the model") for m, path in self._paths.items()}
        self._found: dict[tuple[int, str], bool] = {}
        """What was read, and whether it was for more than to add a number to it."""
        self._left: dict[tuple[int, str], LeftBehind] = {}
        self._first: dict[tuple[int, str], Any] = {}
        """What was found where a forward looked first."""
        self._around = reachable(model, leaves or [])
        self._effects: dict[str, str] = {}
        self.externals: list[Tensor] = []
        """The tensors of the script that were met, and are to be inputs."""
        self._replaced: dict[tuple[nn.Module, str], None] = {}
        self._spared: dict[tuple[nn.Module, str], None] = {}

    @property
    def reads(self) -> tuple[Read, ...]:
        """What was read, in the order in which it was first."""
        inside: list[Read] = []
        for (identity, name), is_read in self._found.items():
            owner, called = self._owners[identity]
            left = self._left.get((identity, name))
            if is_read or left is None or not left.adds:
                inside.append(Read(owner, name, _label(called, name)))
        return (*inside, *self._around)

    @property
    def leavings(self) -> tuple[LeftBehind, ...]:
        """What forward leaves on modules that is to be there, or is not, after each call."""
        return tuple(replace(x, value=_settled_value(x.value)) for x in self._left.values())

    def note(self, effect: str, remedy: str) -> None:
        """The forward has an `effect` that its program will not have."""
        self._effects[effect] = remedy

    def meet(self, tensor: Tensor) -> None:
        """Forward computes with a tensor of the script that requires a gradient."""
        if not any(tensor is known for known in self.externals):
            self.externals.append(tensor)

    def meet_real(self, tensor: Tensor) -> None:
        """The same where all that is computed is on the meta device."""
        if not tensor.is_meta:
            self.meet(tensor)

    def spare_replaced(self) -> None:
        """Of buffers that forward replaces it reads copies from now on: where backward needs the
        old values, they are not to be changed in place."""
        self._spared |= self._replaced

    @contextmanager
    def forward(self) -> Generator[None, None, None]:
        """Around a call of the model, which is as before afterwards. A buffer that is replaced
        inside is changed in place, which a program can do."""
        modules = list(self._paths)
        with untouched(modules) as before:
            for module, name in self._spared:
                module._buffers[name] = module.get_buffer(name).clone()
            self._first.clear()
            with _recorded(self._found, self._owners, self._first):
                yield
            for module, (attributes, copies) in zip(modules, before, strict=True):
                for name in _changed(module, attributes, copies):
                    called = _label(self._paths[module] or "the model", name)
                    self._leaves(module, name, attributes.get(name, MISSING), called)
                for name in self._settled(module, copies):
                    called = _label(self._paths[module] or "the model", name)
                    self.note(f"replaces {called}", _OUTSIDE)

    def _leaves(self, module: nn.Module, name: str, was: Any, called: str) -> None:
        """Attribute `name` of a module, which is `called` so, is not what it `was`."""
        table, key = vars(module), (id(module), name)
        now, first = table.get(name, MISSING), _before(module, name, was)
        if type(now) is type(first) is int and not self._found.get(key, True):
            self._left[key] = LeftBehind(table, name, now - first, adds=True, default=first)
        elif type(now) in _PLAIN and (was is MISSING or type(was) in _PLAIN):
            self._left[key] = LeftBehind(table, name, now)
        elif isinstance(now, Tensor) and self._is_kept(module, name, was):
            self.note(f"keeps a tensor in {called}", _KEPT)
        elif _holds_tensors(now):
            stand_in, held = _stand_in(now, called), now if now is was else None
            self._left[key] = LeftBehind(table, name, stand_in, passes=True, held=held)
            self.note(f"leaves tensors in {called}", _RETURN)
        else:
            self.note(f"sets {called}", _OUTSIDE)

    def _is_kept(self, module: nn.Module, name: str, was: Any) -> bool:
        """Whether what the call before had left is read first, as a model does with what it keeps
        from one call to the next."""
        before = _before(module, name, was)
        return self._first.get((id(module), name), MISSING) is before is not MISSING

    def _settled(self, module: nn.Module, copies: dict[str, Any]) -> Iterator[str]:
        """The parameters and submodules that were replaced; buffers are changed in place."""
        for table in TABLES:
            now, was = vars(module)[table], copies[table]
            for name in {**was, **now}:
                old, new = was.get(name), now.get(name)
                if new is old:
                    continue
                alike = isinstance(old, Tensor) and isinstance(new, Tensor)
                alike = alike and old.shape == new.shape and old.dtype == new.dtype
                if is_external(old):
                    called = _label(self._paths[module] or "the model", name)
                    raise TraceError(_REPLACED.format(name=called))
                if table == "_buffers" and alike:
                    with torch.no_grad():
                        old.copy_(new)
                    now[name] = old
                    self._replaced[module, name] = None
                else:
                    yield name

    @contextmanager
    def around(self, strict: bool) -> Generator[None, None, None]:
        """Around all of a trace: globals and random numbers are as before afterwards, and what the
        forward did to them and to its modules is told."""
        states = [frozen(_held(read), read.label) for read in self._around]
        kept = [(read, _held(read), _copy(_held(read))) for read in self._around]
        try:
            with draws_noted() as draws:
                yield
                for effect in draws():
                    self.note(effect, _WITH_TORCH)
            for (read, value, copy), state in zip(kept, states, strict=True):
                if copy is not None and _holds_tensors(value) and not _same(value, copy):
                    made = _stand_in(value, read.label)
                    self._left[id(value), ""] = LeftBehind({}, "", made, passes=True, held=value)
                    self.note(f"leaves tensors in {read.label}", _RETURN)
                elif frozen(_held(read), read.label) != state:
                    self.note(f"changes {read.label}", _OUTSIDE)
        finally:
            for read, value, copy in kept:
                _restore(read, value, copy)
        self._tell(strict)

    def _tell(self, strict: bool) -> None:
        for remedy in dict.fromkeys(self._effects.values()):
            effects = [effect for effect, what in self._effects.items() if what == remedy]
            text = f"forward {listed(effects)}: {remedy}"
            if strict:
                raise TraceError(text)
            if place_of_process()[0] == 0:
                warnings.warn(SideEffectWarning(text), stacklevel=2)


def _label(called: str, name: str) -> str:
    return f"{'the hooks' if name in HOOKS else name} of {called}"


@contextmanager
def _recorded(
    found: dict[tuple[int, str], bool],
    owners: dict[int, tuple[Any, str]],
    first: dict[tuple[int, str], Any],
) -> Generator[None, None, None]:
    """Inside, every attribute that is asked for of `owners` is noted; an object that is found there
    becomes one of them."""
    changed: dict[type, Any] = {}

    def watch(kind: type) -> None:
        if kind not in changed and "__dict__" in dir(kind):
            inherited: Any = kind.__getattribute__
            changed[kind] = vars(kind).get("__getattribute__")

            def noted(self: Any, name: str) -> Any:
                if issubclass(type(self), Facade) and name not in _OF_FACADE:
                    self = inherited(self, "_model")  # which has all that it is asked for
                known = owners.get(id(self))
                if known is None or known[0] is not self or name in _INTERNAL or name[:2] == "__":
                    return inherited(self, name)
                key = id(self), name
                if not found.get(key, False):
                    found[key] = not is_own_update(sys._getframe(1), name)
                value = inherited(self, name)
                first.setdefault(key, value)
                if is_watchable(value):
                    owners.setdefault(id(value), (value, _label(known[1], name)))
                    watch(type(value))
                return value

            type.__setattr__(kind, "__getattribute__", noted)

    watch(nn.Module)
    try:
        yield
    finally:
        for kind, before in changed.items():
            if before is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = before


_Before = tuple[dict[str, Any], dict[str, Any]]
"""The attributes of a module, and a copy of each table, list or set among them."""


@contextmanager
def untouched(modules: Iterable[nn.Module]) -> Generator[list[_Before], None, None]:
    """Whatever happens inside, every module has the attributes it had, and the tables, lists and
    sets among them (parameters, hooks, what a model remembers) hold what they held."""
    modules = list(modules)
    before = [(dict(vars(module)), _copies(module)) for module in modules]
    try:
        yield before
    finally:
        for module, (attributes, copies) in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
            for name, copy in copies.items():
                _refill(attributes[name], copy)


def _copies(module: nn.Module) -> dict[str, Any]:
    return {k: x.copy() for k, x in vars(module).items() if type(x) in _CONTAINERS}


def _changed(
    module: nn.Module, attributes: dict[str, Any], copies: dict[str, Any]
) -> Iterator[str]:
    """The attributes of a module that are not what they were."""
    for name in {**attributes, **vars(module)}:
        if name in _SET_UP or _is_recomputed(module, name):
            continue
        now, was = vars(module).get(name), attributes.get(name)
        same = now is was or (type(now) is type(was) and not _held_tensors(now) and _same(now, was))
        if not same or (name in copies and not _same(now, copies[name])):
            yield name


def _is_recomputed(module: nn.Module, name: str) -> bool:
    """Whether the hooks of weight_norm and spectral_norm make this anew before each forward."""
    return any(f"{name}{suffix}" in module._parameters for suffix in ("_g", "_orig"))


def _before(module: nn.Module, name: str, was: Any) -> Any:
    """What an attribute was, of the module or else of its class."""
    return getattr(type(module), name, MISSING) if was is MISSING else was


_PLAIN = frozenset({bool, int, float, str, type(None)})


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or has some in lists, tuples or dicts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)


class _Was(NamedTuple):
    """A tensor of the trace: nothing can be made there that stands for it."""

    called: str


def _stand_in(value: Any, called: str) -> Any:
    """A value with its name in the place of each tensor."""
    return _mapped(value, lambda x: _Was(called) if isinstance(x, Tensor) else x)


def _settled_value(value: Any) -> Any:
    return _mapped(value, lambda x: LeftTensor(x.called) if isinstance(x, _Was) else x)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A value, with what `function` makes of what is in its lists, tuples and dicts."""
    if isinstance(value, Mapping):
        return {key: _mapped(x, function) for key, x in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(_mapped(x, function) for x in value)
    return function(value)


def _held_tensors(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _same(now: Any, was: Any) -> bool:
    """Whether two values are the same, or containers of the same items, or equal and plain."""
    if type(now) is not type(was):
        return False
    if isinstance(now, dict):
        return now.keys() == was.keys() and all(now[k] is was[k] for k in now)
    if isinstance(now, list):
        return len(now) == len(was) and all(a is b for a, b in zip(now, was, strict=True))
    return bool(now == was) if isinstance(now, bool | int | float | str | set) else now is was


def _held(read: Read) -> Any:
    owner: Any = read.owner
    if isinstance(owner, CellType):
        return owner.cell_contents
    return vars(owner)[read.name] if isinstance(owner, type) else owner[read.name]


def _copy(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else None


def _restore(read: Read, value: Any, copy: Any) -> None:
    owner: Any = read.owner
    if _held(read) is not value:
        if isinstance(owner, CellType):
            owner.cell_contents = value
        elif isinstance(owner, type):
            setattr(owner, read.name, value)
        else:
            owner[read.name] = value
    if copy is not None:
        _refill(value, copy)


def _refill(held: Any, items: Any) -> None:
    """Make a dict, list or set hold `items` again."""
    held.clear()
    held.extend(items) if isinstance(held, list) else held.update(items)
