"""Watching a model's forward while it is traced: what it reads of its modules, and its effects in
Python, which its program will not have."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import SideEffectWarning, TraceError, listed
from autopar.runtime.module.facade import Facade
from autopar.runtime.process.world import place_of_process
from autopar.runtime.program.externals import is_external
from autopar.runtime.program.frozen import frozen
from autopar.runtime.program.guards import HOOKS, TABLES, Read, is_watchable
from autopar.runtime.program.leavings import MISSING, LeftBehind
from autopar.runtime.replacing import replaced
from autopar.tracer.draws import draws_noted
from autopar.tracer.held_values import (
    CONTAINERS,
    SIMPLE_TYPES,
    changed_numbers,
    copy_of,
    holds_tensors,
    is_recomputed,
    is_same,
    named_stand_in,
    refill,
    resolved_value,
    restore,
    value_before,
    value_read,
)
from autopar.tracer.reachable import is_own_update, reachable

# The last three are read where there are hooks, such as those that label nodes.
_INTERNAL = (frozenset(vars(nn.Module)) - {"training", "forward"}) | {
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
# Models of transformers put hooks where they need them at their first call; recurrent layers list
# their weights whenever one is put in place.
_SET_UP = {
    *TABLES, *HOOKS, *_INTERNAL, "_output_capturing_hooks_installed",
    "_flat_weights", "_flat_weight_refs",
}  # fmt: skip


_SETS_BUFFER = nn.Module.register_buffer.__code__
"""The code that checks whether an attribute exists, where a buffer is set."""

_OF_FACADE = frozenset({"_model", "_runner"})
"""The attributes of a compiled model that its model has not."""

_ONCE = "Python runs when the model is traced, and not again when its program runs. "
_OUTSIDE = _ONCE + "Pass what changes as an argument, keep it in a buffer, or do it outside"
_RETURN = "only forward has them. Return what is to be read after it, as in `return loss, aux`"
_RETAINED = (
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
        # Modules, and the objects that they hold, with their labels.
        self._owners = {id(m): (m, path or "the model") for m, path in self._paths.items()}
        self._reads: dict[tuple[int, str], bool] = {}
        """Whether an attribute was read for more than to add a number to it."""
        self._left: dict[tuple[int, Any], LeftBehind] = {}
        self._added: set[tuple[int, Any]] = set()
        """Where forward adds to numbers that it does not read otherwise."""
        self._first: dict[tuple[int, str], Any] = {}
        """The value of each attribute at its first read."""
        self._around = reachable(model, leaves or [])
        self._effects: dict[str, str] = {}
        self.externals: list[Tensor] = []
        """The tensors of the script that forward computes with, which become inputs."""
        self.overwritten: set[tuple[int, str]] = set()
        """Attributes and buffers with a gradient that forward sets before it reads them: their
        values before a call are not needed."""
        self._is_short, self._last = False, dict[tuple[int, Any, bool], Any]()
        self._unsettled: set[tuple[int, Any]] = set()
        self._replaced: dict[tuple[nn.Module, str], None] = {}
        self._spared: dict[tuple[nn.Module, str], None] = {}

    @property
    def reads(self) -> tuple[Read, ...]:
        """What was read, in the order of first reads."""
        inside: list[Read] = []
        for (identity, name), is_read in self._reads.items():
            owner, called = self._owners[identity]
            places = {(identity, name), (id(vars(owner)), name)}
            if is_read or not places & self._added:
                inside.append(Read(owner, name, _label(called, name)))
        return (*inside, *(x for x in self._around if (id(x.owner), x.name) not in self._added))

    @property
    def leavings(self) -> tuple[LeftBehind, ...]:
        """What forward leaves on modules: numbers to set after each call, stand-ins for tensors."""
        return tuple(
            replace(x, value=resolved_value(x.value))
            for key, x in self._left.items()
            if key not in self._unsettled
        )

    def note(self, effect: str, remedy: str) -> None:
        """The forward has an `effect` that its program will not have."""
        self._effects[effect] = remedy

    def meet(self, tensor: Tensor) -> None:
        """Forward computes with a tensor of the script that requires a gradient."""
        if not any(tensor is known for known in self.externals):
            self.externals.append(tensor)

    def meet_real(self, tensor: Tensor) -> None:
        """`meet` where all computed tensors are on the meta device."""
        if not tensor.is_meta:
            self.meet(tensor)

    @property
    def discoveries(self) -> int:
        """The number of discoveries that require another trace."""
        return len(self.externals) + len(self.overwritten)

    def spare_replaced(self) -> None:
        """From now on, have forward read copies of the buffers that it replaces: where backward
        needs the old values, these must not be changed in place."""
        self._spared |= self._replaced

    def of_short_model(self) -> AbstractContextManager[None]:
        """Inside, forward is that of the model without some blocks. What the whole model sets is
        known already."""
        return replaced((self, "_is_short", True))

    @contextmanager
    def forward(self) -> Generator[None, None, None]:
        """Watch a call of the model, which is as before afterwards. A buffer that is replaced
        inside is changed in place instead, as a program can do."""
        modules = list(self._paths)
        kept = [(read, value_read(read), copy_of(value_read(read))) for read in self._around]
        try:
            with untouched(modules) as before:
                for module, name in self._spared:
                    module._buffers[name] = module.get_buffer(name).clone()
                self._first.clear()
                with _recorded(self._reads, self._owners, self._first):
                    yield
                for module, was in zip(modules, before, strict=True):
                    self._leaves_in(module, *was)
                for each in kept:
                    self._leaves_around(*each)
        finally:
            for read, value, copy in kept:
                restore(read, value, copy)

    def _leaves_in(
        self, module: nn.Module, attributes: dict[str, Any], copies: dict[str, Any]
    ) -> None:
        """Note the effects on a module, which had these `attributes` before the call."""
        path = self._paths[module] or "the model"
        for name in _changed(module, attributes, copies):
            self._leaves(module, name, attributes.get(name, MISSING), copies, _label(path, name))
        for name in self._replacements(module, copies):
            self.note(f"replaces {_label(path, name)}", _OUTSIDE)

    def _leaves(
        self, module: nn.Module, name: str, was: Any, copies: dict[str, Any], called: str
    ) -> None:
        """Note that attribute `name` of a module, with the label `called`, is not what it `was`, or
        no longer has the items of its copy."""
        table, key = vars(module), (id(module), name)
        now, first = table.get(name, MISSING), value_before(module, name, was)
        is_updated = not self._reads.get(key, True)
        if type(now) in SIMPLE_TYPES and (was is MISSING or type(was) in SIMPLE_TYPES):
            self._sets(table, name, first, now, called, adds=is_updated)
        elif isinstance(now, Tensor) and self._is_retained(module, name, was):
            self.note(f"keeps a tensor in {called}", _RETAINED)
        elif now is was and self._sets_inside(key, now, copies.get(name), called, adds=is_updated):
            pass
        elif holds_tensors(now):
            stand_in, held = named_stand_in(now, called), now if now is was else None
            self._left[key] = LeftBehind(table, name, stand_in, passes=True, held=held)
            self.note(f"leaves tensors in {called}", _RETURN)
        else:
            self.note(f"sets {called}", _OUTSIDE)

    def _sets(self, table: Any, name: Any, was: Any, now: Any, called: str, *, adds: bool) -> None:
        """Note that a number, a flag or a text is not what it `was`. Forward only `adds` to it, or
        sets it."""
        key = id(table), name
        if adds and type(now) is type(was) is int:
            left = LeftBehind(table, name, now - was, adds=True, default=was)
            self._added.add(key)
        else:
            left = LeftBehind(table, name, now)
        if self._last.setdefault((*key, self._is_short), left.value) != left.value:
            self.note(f"sets {called} to something else each time", _OUTSIDE)
            self._unsettled.add(key)
        if key not in self._left or not self._is_short:
            self._left[key] = left

    def _sets_inside(
        self, key: tuple[int, Any], value: Any, copy: Any, called: str, *, adds: bool
    ) -> bool:
        """`_sets` for numbers, flags and texts in the list or dict at `key`. False if that has
        changed in another way."""
        keys = changed_numbers(value, copy)
        adds = adds and all(type(value[k]) is type(copy[k]) is int for k in keys or ())
        for k in keys or ():
            self._sets(value, k, copy[k], value[k], called, adds=adds)
        if adds:
            self._added.add(key)
        return keys is not None

    def _leaves_around(self, read: Read, was: Any, copy: Any) -> None:
        """Note the effects on what is read outside of the model. It `was` this before the call,
        with the items of `copy`."""
        now, key = value_read(read), (id(read.owner), read.name)
        if now is not was:
            if type(now) in SIMPLE_TYPES and type(was) in SIMPLE_TYPES:
                self._sets(read.owner, read.name, was, now, read.label, adds=read.is_updated)
            else:
                self.note(f"changes {read.label}", _OUTSIDE)
        elif copy is not None and not is_same(now, copy):
            if self._sets_inside(key, now, copy, read.label, adds=read.is_updated):
                return
            if holds_tensors(now):
                stand_in = named_stand_in(now, read.label)
                self._left[id(now), ""] = LeftBehind({}, "", stand_in, passes=True, held=now)
                self.note(f"leaves tensors in {read.label}", _RETURN)
            else:
                self.note(f"changes {read.label}", _OUTSIDE)

    def _is_retained(self, module: nn.Module, name: str, was: Any) -> bool:
        """Whether forward first reads what the previous call left, as a model does that stores a
        tensor from one call to the next."""
        before = value_before(module, name, was)
        return self._first.get((id(module), name), MISSING) is before is not MISSING

    def _replacements(self, module: nn.Module, copies: dict[str, Any]) -> Iterator[str]:
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
                    if self._first.get((id(module), name)) is old:
                        called = _label(self._paths[module] or "the model", name)
                        raise TraceError(_REPLACED.format(name=called))
                    self.overwritten.add((id(module), name))
                    continue
                if table == "_buffers" and alike:
                    with torch.no_grad():
                        old.copy_(new)
                    now[name] = old
                    self._replaced[module, name] = None
                else:
                    yield name

    @contextmanager
    def around(self, strict: bool) -> Generator[None, None, None]:
        """Watch a whole trace. The states of random number generators are as before afterwards.
        Effects on globals and modules that are not repeated after a call are warned of."""
        states = [frozen(value_read(read), read.label) for read in self._around]
        with draws_noted() as draws:
            yield
            for effect in draws():
                self.note(effect, _WITH_TORCH)
        for read, state in zip(self._around, states, strict=True):
            if frozen(value_read(read), read.label) != state:
                self.note(f"changes {read.label}", _OUTSIDE)
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
    reads: dict[tuple[int, str], bool],
    owners: dict[int, tuple[Any, str]],
    first: dict[tuple[int, str], Any],
) -> Generator[None, None, None]:
    """Inside, every attribute that is read from `owners` is recorded. An object that is read
    becomes one of the owners."""
    changed: dict[type, Any] = {}

    def watch(kind: type) -> None:
        if kind not in changed and "__dict__" in dir(kind):
            inherited: Any = kind.__getattribute__
            changed[kind] = vars(kind).get("__getattribute__")

            def noted(self: Any, name: str) -> Any:
                if issubclass(type(self), Facade) and name not in _OF_FACADE:
                    self = inherited(self, "_model")  # which has all other attributes
                known, frame = owners.get(id(self)), sys._getframe(1)
                if known is None or known[0] is not self or name in _INTERNAL or name[:2] == "__":
                    return inherited(self, name)
                if frame.f_code is _SETS_BUFFER:
                    return inherited(self, name)
                key = id(self), name
                if not reads.get(key, False):
                    reads[key] = not is_own_update(frame, name)
                try:
                    value = inherited(self, name)
                except AttributeError:
                    first.setdefault(key, vars(self).get("_buffers", {}).get(name, MISSING))
                    raise
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
                refill(attributes[name], copy)


def _copies(module: nn.Module) -> dict[str, Any]:
    return {k: x.copy() for k, x in vars(module).items() if type(x) in CONTAINERS}


def _changed(
    module: nn.Module, attributes: dict[str, Any], copies: dict[str, Any]
) -> Iterator[str]:
    """The attributes of a module that are not what they were."""
    for name in {**attributes, **vars(module)}:
        if name in _SET_UP or is_recomputed(module, name):
            continue
        now, was = vars(module).get(name), attributes.get(name)
        same = now is was or is_same(now, was)
        if not same or (name in copies and not is_same(now, copies[name])):
            yield name
