"""The states of optimizers and the memory traffic of their steps, by name and settings.

A name is a kind and its settings, `adamw-amsgrad-fused`. Where parameters have different
optimizers, the others follow: `adamw; sgd-momentum for head.weight layers.{0-3}.bias`.

Figures were counted by running each optimizer of torch under a dispatch mode, in tests. They are
those of the `foreach` implementation, torch's choice on GPUs, and where they differ those of the
for-loop, its choice on CPUs (`torch.optim`, "How to run optimizers"). A `fused` step is one kernel
that reads parameter, gradient and states and writes all but the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, cast
from urllib.parse import quote, unquote

from autopar.errors import AutoparError
from autopar.ir.graph import Node, TensorType, itemsize
from autopar.ir.patterns import compress, expand
from autopar.plans.requests.matching import matches

StepPasses = tuple[int, int]
"""The number of tensors of a parameter's size that a step reads or writes, and of kernels."""
Implementation = Literal["foreach", "forloop", "fused", ""]
"""The implementation of a step; "" for torch's choice on the device."""
COUNTER = "float32"
"""The dtype of counters of one element."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a setting adds to an optimizer: states, passes and kernels. It is set where torch's
    argument `argument` is true, or, if `inverted`, given and false. If it `needs` another setting,
    it counts only with that one."""

    name: str
    argument: str
    states: int = 0
    passes: int = 0
    kernels: int = 0
    needs: str = ""
    inverted: bool = False


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer has `states` tensors of a parameter's shape. `foreach` and, where it differs,
    `forloop` are a step's passes. If it is `factored`, it has one more state for parameters with
    fewer than two dims. For others it has the shapes of a mean over the last dim, and of one over
    the last but one.

    `flat` are tensors of a parameter's size that are replicated. `counters` of one element are in
    host memory unless `counts_on_device`; a CPU has only that memory. States are of a parameter's
    dtype, or of float32 if that is wider and `keeps_float32`.

    A `whole` optimizer steps on unsharded parameters, on every rank (`runtime.optimizers`). With
    `launches_each`, it steps on one parameter after the other. An `orthogonal` optimizer multiplies
    matrices; the kind `others` steps on other tensors. `history` is a number of pairs of flat
    tensors."""

    states: int
    foreach: StepPasses
    settings: tuple[Setting, ...] = ()
    forloop: StepPasses | None = None
    implementation: Implementation = ""
    counters: int = 1
    counts_on_device: bool = False
    can_fuse: bool = False
    factored: bool = False
    keeps_float32: bool = False
    flat: int = 0
    history: int = 0
    whole: bool = False
    launches_each: bool = False
    orthogonal: bool = False
    others: str = ""

    def passes(self, device: str) -> StepPasses:
        """The passes and kernels of a step on a kind of device ("cuda", "cpu")."""
        implementation = self.implementation or ("forloop" if device == "cpu" else "foreach")
        if implementation == "fused":
            return 3 + 2 * self.states, 1
        if implementation == "forloop" and self.forloop is not None:
            return self.forloop
        return self.foreach

    def of(self, tensor: TensorType) -> Optimizer:
        """The optimizer for a parameter of this type: itself or `others`."""
        return self if len(tensor.shape) == 2 or not self.others else find_kind(self.others)

    def states_of(self, tensor: TensorType, device: str) -> tuple[TensorType, ...]:
        """The states of a parameter in the memory of a kind of device ("cuda", "cpu"). States of
        another shape than the parameter's have no atoms: they are replicated."""
        is_narrow = self.keeps_float32 and itemsize(tensor.dtype) < itemsize("float32")
        alike = replace(tensor, dtype="float32") if is_narrow else tensor
        kept = [alike] * self.states
        if self.factored and len(tensor.shape) < 2:
            kept.append(alike)
        elif self.factored:
            *lead, rows, columns = tensor.shape
            kept += [_whole(alike.dtype, *lead, n) for n in (rows, columns)]
        kept += [_whole(alike.dtype, *tensor.shape)] * (self.flat + 2 * self.history)
        if self.counts_on_device or device == "cpu":
            kept += [_whole(COUNTER)] * self.counters
        return tuple(kept)


def _whole(dtype: str, *shape: int) -> TensorType:
    return TensorType(dtype, shape, ((),) * len(shape))


_MAXIMIZE = Setting("maximize", "maximize", passes=2, kernels=1)
_DECAY = Setting("decay", "weight_decay", passes=3, kernels=1)
_DECOUPLED = Setting("decoupled", "decoupled_weight_decay", passes=-1, needs="decay")
_AMSGRAD = Setting("amsgrad", "amsgrad", states=1, passes=3, kernels=1)
_MOMENTUM = Setting("momentum", "momentum", states=1, passes=5, kernels=2)
_NESTEROV = Setting("nesterov", "nesterov", passes=3, kernels=1, needs="momentum")
_CENTERED = Setting("centered", "centered", states=1, passes=6, kernels=2)
_COMMON = (_DECAY, _MAXIMIZE)
_HISTORY = 100
_PAIR: StepPasses = (10, 4)
"""The passes and kernels of LBFGS for each pair of its history."""

OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(
        0, (3, 1), (_MOMENTUM, _NESTEROV, *_COMMON), counters=0, can_fuse=True
    ),
    "adagrad": Optimizer(1, (13, 5), _COMMON, forloop=(11, 4), can_fuse=True),
    "rmsprop": Optimizer(1, (13, 5), (_MOMENTUM, _CENTERED, *_COMMON)),
    "lion": Optimizer(1, (13, 5), counters=0),
    "adam": Optimizer(2, (18, 7), (_AMSGRAD, _DECAY, _DECOUPLED, _MAXIMIZE), can_fuse=True),
    "adamw": Optimizer(
        2, (20, 8),
        (_AMSGRAD, Setting("nodecay", "weight_decay", 0, -2, -1, inverted=True), _MAXIMIZE),
        can_fuse=True,
    ),
    "adamax": Optimizer(2, (16, 6), _COMMON),
    "nadam": Optimizer(2, (22, 8), (_DECAY, _DECOUPLED, _MAXIMIZE), counters=2),
    "radam": Optimizer(2, (22, 9), (_DECAY, _DECOUPLED, _MAXIMIZE), forloop=(28, 12)),
    "adadelta": Optimizer(2, (27, 11), _COMMON),
    "rprop": Optimizer(
        2, (42, 16), (Setting("maximize", "maximize", 0, 4, 2),), forloop=(41, 16)
    ),
    "asgd": Optimizer(
        1, (12, 4), _COMMON, forloop=(8, 3), counters=3, counts_on_device=True
    ),
    "muon": Optimizer(
        1, (31, 17), (Setting("nonesterov", "nesterov", 0, -3, -1, inverted=True),),
        counters=0, whole=True, launches_each=True, orthogonal=True, others="adamw",
    ),
    "adafactor": Optimizer(
        0, (19, 11), (Setting("decay", "weight_decay", 0, 2, 1), _MAXIMIZE), forloop=(17, 10),
        factored=True, whole=True, launches_each=True,
    ),
    "transformers-adafactor": Optimizer(
        0, (21, 12),
        (Setting("momentum", "beta1", 1, 5, 2), Setting("decay", "weight_decay", 0, 2, 1)),
        factored=True, counts_on_device=True, keeps_float32=True, whole=True, launches_each=True,
    ),
    "lbfgs": Optimizer(
        0, (25, 12), counters=0, flat=2, history=_HISTORY, whole=True, implementation="foreach"
    ),
    "none": Optimizer(0, (0, 0), counters=0),
}  # fmt: skip
"""Optimizers by the name that users give. Lion is not in torch: a step of five operations, as in
its paper (arXiv 2302.06675, program 1). Muon steps on matrices, and AdamW on all else ("Muon is
designed for hidden layers", `torch.optim.Muon`). `whole` optimizers hold one more unsharded
parameter while they step, and LBFGS all of them. LBFGS has one evaluation per step and a full
history; its few scalars are not counted."""


@cache
def find_kind(name: str) -> Optimizer:
    """The optimizer by a kind's name with its settings in any order. AutoparError for an unknown
    name, with a list of the known ones."""
    kind, known, given = _parts(name)
    settings = {setting.name: setting for setting in known.settings}
    for word in dict.fromkeys(given):
        if word in settings:
            needs = settings[word].needs
            if needs and needs not in given:
                raise AutoparError(f"optimizer {name!r}: {word} needs {needs}")
            known = _with(known, settings[word])
        elif word in IMPLEMENTATIONS and not known.implementation and kind != "none":
            if word == "fused" and not known.can_fuse:
                raise AutoparError(f"optimizer {name!r}: {kind} has no fused implementation")
            is_fused, is_loop = word == "fused", word == "forloop"
            on_device = known.counts_on_device or (is_fused and known.counters > 0)
            each = known.launches_each or is_loop
            known = replace(
                known, implementation=word, counts_on_device=on_device, launches_each=each
            )
        elif known.history and word.isascii() and word.isdigit() and 0 < int(word) <= _MAX_HISTORY:
            known = replace(known, history=int(word))
        else:
            listed = ", ".join((*settings, *IMPLEMENTATIONS))
            raise AutoparError(f"optimizer {name!r}: {kind} has no setting {word!r}, but {listed}")
    passes, kernels = (
        each + known.history * of_pair for each, of_pair in zip(known.foreach, _PAIR, strict=True)
    )
    return replace(known, foreach=(passes, kernels))


IMPLEMENTATIONS: tuple[Implementation, ...] = ("fused", "foreach", "forloop")
_MAX_HISTORY = 10_000


def _parts(name: str) -> tuple[str, Optimizer, list[str]]:
    """The kind in a name, its optimizer without settings, and the settings."""
    words = name.lower().split("-")
    for count in range(len(words), 0, -1):
        kind = "-".join(words[:count])
        if kind in OPTIMIZERS:
            return kind, OPTIMIZERS[kind], words[count:]
    listed = ", ".join(OPTIMIZERS)
    raise AutoparError(f"optimizer {name!r} is not known: name the one most like it of {listed}")


def _with(known: Optimizer, setting: Setting) -> Optimizer:
    def more(passes: StepPasses) -> StepPasses:
        return passes[0] + setting.passes, passes[1] + setting.kernels

    forloop = None if known.forloop is None else more(known.forloop)
    states = known.states + setting.states
    return replace(known, states=states, foreach=more(known.foreach), forloop=forloop)


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The optimizer of each parameter: by name (`named`), by a shell pattern (`patterns`), or
    `rest`."""

    rest: Optimizer
    named: Mapping[str, Optimizer]
    patterns: tuple[tuple[str, Optimizer], ...] = ()

    @property
    def all(self) -> tuple[Optimizer, ...]:
        """Each of them."""
        return (self.rest, *self.named.values(), *(each for _, each in self.patterns))

    def of(self, param: Node) -> Optimizer:
        """The optimizer of a parameter; that of an external one is unknown, and counts as none."""
        name, tensor = param.target, param.outputs[0]
        optimizer = find_kind("none") if param.external else self.named.get(name)
        if optimizer is None:
            hits = (each for pattern, each in self.patterns if matches(pattern, name))
            optimizer = next(hits, self.rest)
        return optimizer.of(tensor)

    def stranger(self, names: frozenset[str]) -> str:
        """A name or pattern that matches none of `names`; empty if all match."""
        unknown = (name for name in self.named if name not in names)
        unmet = (p for p, _ in self.patterns if not any(matches(p, name) for name in names))
        return next(unknown, "") or next(unmet, "")


@cache
def find_optimizers(text: str) -> Optimizers:
    """The optimizers in a text. AutoparError if its form is wrong, or a name in it is unknown."""
    first, *others = text.split(";")
    named, patterns = dict[str, Optimizer](), list[tuple[str, Optimizer]]()
    for other in others:
        name, separator, listed = other.strip().partition(" for ")
        if not separator or not listed.split():
            raise AutoparError(
                f"optimizer {text!r}: behind a semicolon there is a name and what it is for, as in "
                '"muon; adamw for head.weight embed.*"'
            )
        each = find_kind(name.strip())
        for pattern in map(unquote, listed.split()):
            if "*" in pattern:
                patterns.append((pattern, each))
            else:
                named |= dict.fromkeys(_expanded(text, pattern), each)
    return Optimizers(find_kind(first.strip()), named, tuple(patterns))


def _expanded(text: str, pattern: str) -> tuple[str, ...]:
    try:
        return expand(pattern)
    except ValueError as error:
        raise AutoparError(f"optimizer {text!r}: {error}") from None


# The text for the optimizers that a user gives: names, classes, optimizers and their groups.

_ELSEWHERE = {"transformers.optimization.Adafactor": "transformers-adafactor"}
"""Classes outside of torch that have the name of an optimizer of torch."""
_PLAIN = "{},\\[]:+=@/<>()"


def optimizer_name(given: Any, model: Any = None) -> str:
    """The text for `find_optimizers` from what a user gives: such a text, an optimizer of torch,
    several of them, a class or a `functools.partial` of one. With optimizers, each trained
    parameter of `model` has the settings of its group, or none if it is in no group. AutoparError
    for anything else, with a list of the known names."""
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
    """The parameters of a model, under each of their names."""
    return model.named_parameters(remove_duplicate=False)


def _of_groups(groups: Sequence[tuple[type, Mapping[str, Any]]], model: Any) -> str:
    """The text for parameter groups of `model`, or of a model like it."""
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
    """The kind of most parameters first, then every other kind with its parameters."""
    counts = Counter(text for _, text in named)
    first, *others = sorted(counts, key=lambda text: (-counts[text], text))
    parts = [first]
    for other in others:
        names = compress(name for name, text in named if text == other)
        parts.append(f"{other} for {' '.join(quote(name, safe=_PLAIN) for name in names)}")
    return "; ".join(parts)


def _named(kind: Any, settings: Mapping[str, Any]) -> str:
    """The name of a class with its arguments."""
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
    known, words = OPTIMIZERS[name], list[str]()
    for setting in known.settings:
        given = setting.argument in settings
        is_on = given and bool(settings[setting.argument]) != setting.inverted
        if is_on and (not setting.needs or setting.needs in words):
            words.append(setting.name)
    if known.history and "history_size" in settings:
        words.append(str(settings["history_size"]))
    if settings.get("fused") and known.can_fuse:
        words.append("fused")
    elif settings.get("foreach") is False and not known.launches_each:
        words.append("forloop")
    elif settings.get("foreach") and known.forloop is not None:
        words.append("foreach")
    return "-".join((name, *words))
