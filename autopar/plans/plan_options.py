"""Every option of a plan, once: its default, what people write, and its help in a line.

The flags of `autopar plan`, the keys of a recipe and the table in docs/options.md are made of it.
The keywords of `compile`, `plan` and `frontier` are held equal to it by a test. The file of a plan
has it, so that a plan can be made again from its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

BYTES, SECONDS = "bytes", "seconds"


def _option(keyword: str, help: str, metavar: str = "", unit: str = "") -> msgspec.Meta:
    """`keyword` is its name where options have no groups, `unit` that of a quantity."""
    told = {"keyword": keyword, "metavar": metavar, "unit": unit}
    return msgspec.Meta(description=help, extra=told)


Quantity = int | float | str | None
"""In a unit, or as text with one; None for no limit."""
_Count = int | str | None
"""A number, or "auto"; None where nobody says."""
_Texts = tuple[str, ...]


class _Group(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """What is as by default is left out of files, so that those of before options were added stay
    as they are."""


class MemoryOptions(_Group, frozen=True):
    """What devices and hosts may hold, and what is done to hold less."""

    limit: Annotated[
        Quantity,
        _option("memory_limit", "Per device, such as 72GiB; default: all.", "SIZE", BYTES),
    ] = None
    host: Annotated[
        Quantity,
        _option(
            "host_memory",
            "Per node, such as 1.5TiB, which its devices share; default: what the cluster says.",
            "SIZE",
            BYTES,
        ),
    ] = None
    residency: Annotated[
        str,
        _option(
            "residency",
            "Where parameters live, with gradients and the optimizer's states: on the device, on "
            "its host, or where it is best if memory binds.",
            "cuda|cpu|auto",
        ),
    ] = "cuda"
    checkpoint: Annotated[
        str,
        _option(
            "checkpoint",
            "What becomes of what the model wraps in torch.utils.checkpoint: free to be planned, "
            "or made again as it asks.",
            "planned|'as written'",
        ),
    ] = "planned"
    loss_chunks: Annotated[
        int | str,
        _option(
            "loss_chunks",
            "Work on the loss of a large vocabulary in N chunks of a device's tokens; auto: where "
            "memory binds and that is better.",
            "N|auto",
        ),
    ] = "auto"
    saved_dtype: Annotated[
        str,
        _option(
            "saved_dtype",
            "Save activations of float32 for backward in this dtype, which rounds gradients. "
            "Default: as they are.",
            "bfloat16|float16",
        ),
    ] = ""


class PipelineOptions(_Group, frozen=True):
    """How the model is cut into stages."""

    stages: Annotated[
        _Count,
        _option(
            "stages",
            "Cut the model into N stages of a pipeline; auto: as many as are best, or none. "
            "Default: 1, or auto where that does not fit, or devices wait, or do the same work, "
            "for a third of its step, and nothing is asked of its mesh, microbatches or shardings.",
            "N|auto",
        ),
    ] = None
    cuts: Annotated[
        _Texts,
        _option(
            "cuts",
            "A stage begins there, as in model.layers.8; may be given several times.",
            "MODULE",
        ),
    ] = ()
    schedule: Annotated[
        str,
        _option(
            "schedule",
            "How stages work on microbatches: gpipe, 1f1b, eager-1f1b, interleaved:2, zb-h1, "
            "zb-v, zb:2, or a table of your own in a file.",
            "NAME|FILE",
        ),
    ] = "auto"


class ConstraintOptions(_Group, frozen=True):
    """What the plan must be like; the rest is planned around it."""

    pins: Annotated[
        _Texts,
        _option(
            "pins",
            "Keep to it, as in '*.down_proj.weight=S(1) on tp'; may be given several times.",
            "PATTERN=SHARDING",
        ),
    ] = ()
    forbid: Annotated[
        _Texts,
        _option(
            "forbid",
            "Shard nothing there on the axis, as in tp:lm_head; may be given several times.",
            "AXIS:PATTERN",
        ),
    ] = ()
    strategy: Annotated[
        str,
        _option("strategy", "ddp, fsdp, megatron, 2d, 2.5d or 3d; default: any.", "NAME"),
    ] = ""

    @property
    def is_empty(self) -> bool:
        """Whether they ask for nothing."""
        return not (self.pins or self.forbid or self.strategy)


class OutputOptions(_Group, frozen=True):
    """What becomes of outputs of the model that are no losses."""

    differentiable: Annotated[
        _Texts,
        _option(
            "differentiable_outputs",
            "A backward goes through it beside the losses, as in logits; may be given several "
            "times.",
            "NAME",
        ),
    ] = ()
    unread: Annotated[
        _Texts,
        _option(
            "unread_outputs",
            "Nobody looks at it in training, as in logits: it is None there; may be given several "
            "times.",
            "NAME",
        ),
    ] = ()


class SearchOptions(_Group, frozen=True):
    """How plans are looked for."""

    time_limit: Annotated[
        Quantity,
        _option(
            "time_limit",
            "Of each solve, in seconds, or as 2min: the plan then depends on the machine.",
            "TIME",
            SECONDS,
        ),
    ] = None
    strict: Annotated[bool, _option("strict", "An op without a sharding rule is an error.")] = False


class PlanOptions(_Group, frozen=True):
    """What a user asks of a plan, beside the model and the cluster."""

    mesh: Annotated[
        str,
        _option(
            "mesh",
            "auto, auto:3 (all of three axes too), 8x8 or dp=8,tp=8; of stages, 4/2/2.",
            "MESH",
        ),
    ] = "auto"
    optimizer: Annotated[
        str,
        _option(
            "optimizer",
            "Whose states and step count, with its settings: sgd-momentum, adamw-amsgrad-fused, "
            'or "muon; adamw for head.weight".',
            "NAME",
        ),
    ] = "adamw"
    microbatches: Annotated[
        _Count,
        _option(
            "microbatches",
            "Work on the batch in N parts, one after the other; auto: as many as are best where "
            "memory binds. Default: 1, or auto in stages and where nothing fits otherwise.",
            "N|auto",
        ),
    ] = None
    backend: Annotated[
        str,
        _option(
            "backend",
            "eager or inductor: what runs the plan; default: the device's own.",
            "NAME",
        ),
    ] = ""
    memory: MemoryOptions = MemoryOptions()
    pipeline: PipelineOptions = PipelineOptions()
    constraints: ConstraintOptions = ConstraintOptions()
    outputs: OutputOptions = OutputOptions()
    search: SearchOptions = SearchOptions()


@dataclass(frozen=True, slots=True)
class OptionField:
    """One of the options: where it stands in `PlanOptions` (`group` is "" for none), its `keyword`,
    default and type, and what is to be told of it."""

    group: str
    name: str
    keyword: str
    kind: Any
    default: Any
    help: str
    metavar: str
    unit: str

    @property
    def is_several(self) -> bool:
        """Whether it is a list of texts."""
        return self.kind == _Texts


@cache
def option_fields() -> tuple[OptionField, ...]:
    """All options, in order."""
    return tuple(_fields_of(PlanOptions, ""))


def _fields_of(kind: Any, group: str) -> Iterator[OptionField]:
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            yield from _fields_of(hint, field.name)
            continue
        of, meta = get_args(hint)
        yield OptionField(
            group, field.name, kind=of, default=field.default, help=meta.description, **meta.extra
        )


def from_keywords(given: Mapping[str, Any]) -> PlanOptions:
    """Options from their keywords, whose values are not looked at. TypeError on other keywords."""
    unknown = given.keys() - {field.keyword for field in option_fields()}
    if unknown:
        raise TypeError(f"no options: {', '.join(sorted(unknown))}")
    groups: dict[str, dict[str, Any]] = {}
    for field in option_fields():
        if field.keyword in given:
            groups.setdefault(field.group, {})[field.name] = given[field.keyword]
    top = groups.pop("", {})
    default = PlanOptions()
    filled = {
        group: msgspec.structs.replace(getattr(default, group), **values)
        for group, values in groups.items()
    }
    return PlanOptions(**top, **filled)


def to_keywords(options: PlanOptions) -> dict[str, Any]:
    """The inverse of `from_keywords`: all options by their keywords."""
    found: dict[str, Any] = {}
    for field in option_fields():
        group = getattr(options, field.group) if field.group else options
        found[field.keyword] = getattr(group, field.name)
    return found


def options_among(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are options, by keyword."""
    return {f.keyword: values[f.keyword] for f in option_fields() if f.keyword in values}
