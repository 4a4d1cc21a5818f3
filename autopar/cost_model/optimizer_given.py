"""The text that says which optimizers a user gives: names, classes, optimizers and their groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from urllib.parse import quote

from autopar.cost_model.optimizer_kinds import OPTIMIZERS, find_optimizers
from autopar.errors import AutoparError
from autopar.ir.patterns import compress

_ELSEWHERE = {"transformers.optimization.Adafactor": "transformers-adafactor"}
"""Classes that have the name of one of torch's."""
_PLAIN = "{},\\[]:+=@/<>()"


def optimizer_name(given: Any, model: Any = None) -> str:
    """What `find_optimizers` reads, of what a user gives: that, an optimizer of torch, several of
    them, a class or a `functools.partial` of one. Of optimizers each parameter of `model` that is
    trained has the settings of its group, and one that is in none has none. AutoparError, listing
    what is known, for anything else."""
    if given is None:
        raise AutoparError('optimizer is None: leave it out for AdamW, or write "none" for none')
    if isinstance(given, str):
        _check_names(given, model)
        return given if ";" in given else given.lower()
    kind = given if isinstance(given, type) else type(given)
    several = cast("Sequence[Any]", given if isinstance(given, list | tuple) else (given,))
    groups = [_groups(each) for each in several]
    if groups and all(groups):
        return _of_groups([pair for pairs in groups for pair in pairs], model)
    if isinstance(given, partial):
        return _named(given.func, given.keywords)
    return _named(kind, {})


def _groups(optimizer: Any) -> list[tuple[type, Mapping[str, Any]]]:
    """The groups of an optimizer, each with the optimizer's class."""
    if isinstance(optimizer, type):
        return []
    return [(type(optimizer), group) for group in getattr(optimizer, "param_groups", ())]


def _check_names(text: str, model: Any) -> None:
    known = find_optimizers(text)
    if model is None:
        return
    stranger = known.stranger(frozenset(name for name, _ in _parameters(model)))
    if stranger:
        raise AutoparError(f"optimizer {text!r}: the model has no parameter {stranger}")


def _parameters(model: Any) -> Iterable[tuple[str, Any]]:
    """Under all the names they have."""
    return model.named_parameters(remove_duplicate=False)


def _of_groups(groups: Sequence[tuple[type, Mapping[str, Any]]], model: Any) -> str:
    """That of groups that have the parameters of `model`, or others like them."""
    named: dict[int, str] = {}
    for kind, group in groups:
        text = _named(kind, group)
        named |= {id(param): text for param in group["params"]}
    params = () if model is None else _parameters(model)
    trained = [(name, param) for name, param in params if param.requires_grad]
    if not any(id(param) in named for _, param in trained):
        texts = list(dict.fromkeys(named.values()))
        if len(texts) != 1:
            raise AutoparError(
                "the optimizer's groups differ, and none of its parameters is the model's: give "
                f"the model's optimizer, or one of the names {', '.join(texts) or 'of groups'}"
            )
        return texts[0]
    return _text([(name, named.get(id(param), "none")) for name, param in trained])


def _text(named: Sequence[tuple[str, str]]) -> str:
    """The kind that most parameters have, then each other with its parameters."""
    counts = Counter(text for _, text in named)
    first, *others = sorted(counts, key=lambda text: (-counts[text], text))
    parts = [first]
    for other in others:
        names = compress(name for name, text in named if text == other)
        parts.append(f"{other} for {' '.join(quote(name, safe=_PLAIN) for name in names)}")
    return "; ".join(parts)


def _named(kind: Any, settings: Mapping[str, Any]) -> str:
    """A class with the arguments it was given."""
    bases: Sequence[type] = getattr(kind, "__mro__", (kind,))
    names = [_ELSEWHERE.get(f"{b.__module__}.{b.__name__}", b.__name__.lower()) for b in bases]
    name = next(
        (name for name in names if name in OPTIMIZERS), getattr(kind, "__name__", str(kind))
    )
    if "sparseadam" in names:
        raise AutoparError(
            "SparseAdam needs sparse gradients, and a compiled model has dense ones: take Adam or "
            "AdamW"
        )
    find_optimizers(name)
    words: list[str] = []
    for setting in OPTIMIZERS[name].settings:
        given = setting.argument in settings
        is_on = given and _is_true(settings[setting.argument]) != setting.inverted
        if is_on and (not setting.needs or setting.needs in words):
            words.append(setting.name)
    if OPTIMIZERS[name].history and "history_size" in settings:
        words.append(str(settings["history_size"]))
    if settings.get("fused") and OPTIMIZERS[name].can_fuse:
        words.append("fused")
    elif settings.get("foreach") is False and not OPTIMIZERS[name].launches_each:
        words.append("forloop")
    elif settings.get("foreach") and OPTIMIZERS[name].forloop is not None:
        words.append("foreach")
    return "-".join((name, *words))


def _is_true(value: Any) -> bool:
    """Momentum 0.0 is none; beta1 None too."""
    return value is not None and bool(value)
