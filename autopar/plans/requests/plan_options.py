"""Every option of a plan, once: its default, what people write, and its help in a line.

The flags of `autopar plan`, the keys of a recipe and the table in docs/options.md are generated
from it. A test compares the keywords of `compile`, `plan` and `frontier` with it. The file of a
plan has it, so that a plan can be recomputed from its file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import msgspec

from autopar.errors import ArgumentError

if TYPE_CHECKING:
    TorchDtype = Any
    """A dtype of torch, which is not imported here, or the name of one."""
    PathOrText = str | PathLike[str]
else:
    TorchDtype = PathOrText = str

BYTES, SECONDS = "bytes", "seconds"


def _option(
    help: str,
    metavar: str = "",
    unit: str = "",
    *,
    words: tuple[str, ...] = (),
    before: str = "",
) -> msgspec.Meta:
    """`unit` is that of a quantity, `words` are all allowed values, and `before` is the name from
    when options had no groups."""
    metavar = metavar or "|".join(map(shlex.quote, words))
    extra = {"metavar": metavar, "unit": unit, "words": words, "before": before}
    return msgspec.Meta(description=help, extra=extra)


Quantity = int | float | str | None
"""A number of units, or text with a unit; None for no limit."""
_Count = int | str | None
"""A number, or "auto"; None by default."""
_Texts = str | Sequence[str]
"""One, or several."""


class _Group(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Defaults are left out of files, so that a new option changes no file."""

    def __post_init__(self) -> None:
        # Files have lists, which would make a group that is equal to none.
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, list):
                msgspec.structs.force_setattr(self, name, tuple(cast("list[Any]", value)))


class MemoryOptions(_Group, frozen=True):
    """Memory limits, and what saves memory: offload, recompute, chunked loss, rounding."""

    limit: Annotated[
        Quantity,
        _option("Per device, such as 72GiB; default: all.", "SIZE", BYTES, before="memory_limit"),
    ] = None
    host: Annotated[
        Quantity,
        _option(
            "Per node, such as 1.5TiB, which its devices share; default: the cluster's figure.",
            "SIZE",
            BYTES,
            before="host_memory",
        ),
    ] = None
    residency: Annotated[
        str | None,
        _option(
            "Where parameters live, with gradients and optimizer states: on the device, on its "
            "host (offload), or, if memory binds, where it is best. Default: cuda, or auto if "
            "nothing fits otherwise.",
            words=("cuda", "cpu", "auto"),
            before="residency",
        ),
    ] = None
    checkpoint: Annotated[
        str,
        _option(
            "Recompute (activation checkpointing) of what the model wraps in "
            "torch.utils.checkpoint: planned as elsewhere, or done as written.",
            words=("planned", "as written"),
            before="checkpoint",
        ),
    ] = "planned"
    loss_chunks: Annotated[
        int | str,
        _option(
            "Compute the loss of a large vocabulary in N chunks of a device's tokens; auto: where "
            "memory binds and that is better.",
            "N|auto",
            before="loss_chunks",
        ),
    ] = "auto"
    saved_dtype: Annotated[
        TorchDtype | str | None,
        _option(
            "Save float32 activations for backward in this dtype, which rounds gradients. "
            "Default: as they are.",
            "bfloat16|float16",
            before="saved_dtype",
        ),
    ] = ""


class PipelineOptions(_Group, frozen=True):
    """How the model is cut into stages."""

    stages: Annotated[
        _Count,
        _option(
            "Cut the model into N pipeline stages; auto: as many as are best, or none. "
            "Default: 1, or auto if one stage does not fit, or wastes a third of its step on "
            "waiting or duplicate work. The default is 1 with a given mesh, microbatches or "
            "sharding.",
            "N|auto",
            before="stages",
        ),
    ] = None
    cuts: Annotated[
        _Texts,
        _option(
            "A stage begins at this module, as in model.layers.8; may be given several times.",
            "MODULE",
            before="cuts",
        ),
    ] = ()
    schedule: Annotated[
        PathOrText,
        _option(
            "The order of microbatches in stages: gpipe, 1f1b, eager-1f1b, interleaved:2, zb-h1, "
            "zb-v, zb:2, or a file with a schedule of your own.",
            "NAME|FILE",
            before="schedule",
        ),
    ] = "auto"


class ConstraintOptions(_Group, frozen=True):
    """Constraints on the plan; the rest is planned around them."""

    pins: Annotated[
        _Texts | Mapping[str, str],
        _option(
            "Fix a sharding, as in '*.down_proj.weight=S(1) on tp'; may be given several times.",
            "PATTERN=SHARDING",
            before="pins",
        ),
    ] = ()
    forbid: Annotated[
        _Texts | Mapping[str, str | Sequence[str]],
        _option(
            "Shard nothing there on the axis, as in tp:lm_head; may be given several times.",
            "AXIS:PATTERN",
            before="forbid",
        ),
    ] = ()
    strategy: Annotated[
        str | None,
        _option("ddp, fsdp, megatron, 2d, 2.5d or 3d; default: any.", "NAME", before="strategy"),
    ] = ""

    @property
    def is_empty(self) -> bool:
        """Whether there are no constraints."""
        return not (self.pins or self.forbid or self.strategy)


class OutputOptions(_Group, frozen=True):
    """Outputs of the model that are no losses."""

    differentiable: Annotated[
        _Texts,
        _option(
            "A backward goes through it, not only through the losses, as in logits; may be given "
            "several times.",
            "NAME",
            before="differentiable_outputs",
        ),
    ] = ()
    unread: Annotated[
        _Texts,
        _option(
            "The script does not read it in training, as in logits: it is None there; may be given "
            "several times.",
            "NAME",
            before="unread_outputs",
        ),
    ] = ()


class SearchOptions(_Group, frozen=True):
    """How plans are searched for."""

    work_limit: Annotated[
        int,
        _option(
            "How much the search may do, if it has a plan by then: about CPU seconds, but counted, "
            "however fast the machine is; 0 for no limit.",
            "WORK",
        ),
    ] = 120
    time_limit: Annotated[
        Quantity,
        _option(
            "For each solve, in seconds, or as 2min: the plan then depends on the machine.",
            "TIME",
            SECONDS,
            before="time_limit",
        ),
    ] = None
    margin: Annotated[
        bool | None,
        _option(
            "Find the best plan of another structure too, which takes about a third longer; "
            "default: for plans that `autopar plan` writes.",
            before="margin",
        ),
    ] = None
    strict: Annotated[
        bool, _option("An op without a sharding rule is an error.", before="strict")
    ] = False


class PlanOptions(_Group, frozen=True):
    """What a user asks of a plan, beside the model and the cluster."""

    mesh: Annotated[
        str,
        _option(
            "auto, auto:3 (all of three axes too), 8x8 or dp=8,tp=8; for stages, 4/2/2.", "MESH"
        ),
    ] = "auto"
    optimizer: Annotated[
        str,
        _option(
            "Its states and its step are priced; with settings: sgd-momentum, adamw-amsgrad-fused, "
            'or "muon; adamw for head.weight".',
            "NAME",
        ),
    ] = "adamw"
    microbatches: Annotated[
        int | str,
        _option(
            "Split the batch into N microbatches (gradient accumulation); auto: as many as are "
            "best in stages and where memory binds.",
            "N|auto",
        ),
    ] = "auto"
    backend: Annotated[
        str,
        _option("eager or inductor: what runs the plan; default: the device's own.", "NAME"),
    ] = ""
    memory: MemoryOptions = MemoryOptions()
    pipeline: PipelineOptions = PipelineOptions()
    constraints: ConstraintOptions = ConstraintOptions()
    outputs: OutputOptions = OutputOptions()
    search: SearchOptions = SearchOptions()


GROUPS: dict[str, type[_Group]] = {
    "memory": MemoryOptions,
    "pipeline": PipelineOptions,
    "constraints": ConstraintOptions,
    "outputs": OutputOptions,
    "search": SearchOptions,
}
"""The groups of `PlanOptions`, by their names."""


@dataclass(frozen=True, slots=True)
class OptionField:
    """An option of `PlanOptions`: its `group` ("" for none), name, type, default and help. `words`
    are all values that it may have, if these are few. `before` is its name from when options had no
    groups."""

    group: str
    name: str
    kind: Any
    default: Any
    help: str
    metavar: str
    unit: str
    words: tuple[str, ...]
    before: str

    @property
    def path(self) -> str:
        """Its name in errors and pages, such as `memory.limit`."""
        return f"{self.group}.{self.name}" if self.group else self.name

    @property
    def is_several(self) -> bool:
        """Whether its value may be several texts."""
        return self.default == ()

    @property
    def is_flag(self) -> bool:
        """Whether it is a flag without a value."""
        return bool in (self.kind, *get_args(self.kind))


@cache
def option_fields() -> tuple[OptionField, ...]:
    """All options, in order."""
    groups = (_fields_of(kind, name) for name, kind in GROUPS.items())
    return (*_fields_of(PlanOptions, ""), *(field for group in groups for field in group))


def _fields_of(kind: type[msgspec.Struct], group: str) -> Iterator[OptionField]:
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            of, meta = get_args(hint)
            extra: dict[str, Any] = meta.extra
            yield OptionField(group, field.name, of, field.default, meta.description, **extra)


def value_of(options: PlanOptions, field: OptionField) -> Any:
    """What `options` have for a field."""
    return getattr(getattr(options, field.group) if field.group else options, field.name)


def as_group(name: str, given: Any) -> Any:
    """The group `name` of `PlanOptions`, from a mapping or as it is. ArgumentError if it is
    neither, or has an unknown key; the text names close ones."""
    kind = GROUPS[name]
    if isinstance(given, kind):
        return given
    if given is None:
        return kind()
    example = f"{name}=autopar.{kind.__name__}({kind.__struct_fields__[0]}=...)"
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{name}={given!r}: write {example}, or a mapping of these options")
    values = cast("Mapping[str, Any]", given)
    check_known(name, values, kind.__struct_fields__)
    return kind(**values)


def check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """ArgumentError, with close names, on a keyword that `what` does not take."""
    names = list(known)
    for name in given:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f": did you mean {close[0]}?" if close else "."
            raise ArgumentError(f"{what} takes no {name}{hint} It takes {', '.join(names)}")


def options_among(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` that are fields of `PlanOptions`."""
    return {name: values[name] for name in PlanOptions.__struct_fields__ if name in values}


def in_groups(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, OptionField]]:
    """`given`, with ungrouped names of old options moved into their groups, and the fields that
    were moved, by their old names. ArgumentError if an option is given by both names."""
    old = {f.before: f for f in option_fields() if f.before and f.before in given}
    moved = {name: value for name, value in given.items() if name not in old}
    for name, field in old.items():
        group = as_group(field.group, moved.get(field.group))
        if getattr(group, field.name) != field.default:
            raise ArgumentError(f"{name} is {field.path}: say one of them")
        moved[field.group] = msgspec.structs.replace(group, **{field.name: given[name]})
    return moved, old
