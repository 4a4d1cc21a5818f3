"""The options of a plan as flags of a command: `--memory-limit` is `limit` of the group `memory`.

They are created when the command is called: importing the options takes as long as everything else.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.terminal import seconds, size

if TYPE_CHECKING:
    from autopar.plans.requests.plan_options import OptionField


class PlanFlags(click.Command):
    """A command that takes the options of a plan in `groups` ("" for those without a group, None
    for all). Its argument `options` has them by group and name. Help lists them by group."""

    def __init__(self, *args: Any, groups: Collection[str] | None = None, **others: Any) -> None:
        super().__init__(*args, **others)
        self.groups = groups

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        known = {param.name for param in self.params}
        self.params += [flag for flag in map(_flag, self._fields()) if flag.name not in known]
        return super().get_params(ctx)

    def _fields(self) -> list[OptionField]:
        from autopar.plans.requests.plan_options import option_fields

        return [f for f in option_fields() if self.groups is None or f.group in self.groups]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses `args`, in which old flags, without a group, are replaced by those of today."""
        now = {_as_flag(f.before, f): flag_of(f) for f in self._fields() if f.before}
        now |= {f"--no-{k[2:]}": f"--no-{v[2:]}" for k, v in now.items()}
        anew: list[str] = []
        for position, arg in enumerate(args):
            flag, equals, value = arg.partition("=")
            if flag not in now or now[flag] == flag or "--" in args[:position]:
                anew.append(arg)
                continue
            _tell(flag, now[flag])
            anew.append(now[flag] + equals + value)
        return super().parse_args(ctx, anew)

    def invoke(self, ctx: click.Context) -> Any:
        """Calls the command with its options in one argument."""
        options: dict[str, Any] = {}
        for field in self._fields():
            value = ctx.params.pop(_name(field))
            group: dict[str, Any] = options.setdefault(field.group, {}) if field.group else options
            group[field.name] = value
        ctx.params["options"] = options
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A section for each group."""
        titles = {_name(field): field.group.capitalize() or "Plan" for field in self._fields()}
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(titles.get(param.name or "", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def flag_of(field: OptionField) -> str:
    """`--memory-limit`; flags that may be given several times have singular names."""
    return _as_flag(f"{field.group}-{field.name}" if field.group else field.name, field)


def _as_flag(name: str, field: OptionField) -> str:
    name = name.removesuffix("s") if field.is_several else name
    return f"--{name.replace('_', '-')}"


def _name(field: OptionField) -> str:
    """The unique name of its parameter."""
    return f"option_{field.group}_{field.name}"


def _flag(field: OptionField) -> click.Option:
    from autopar.plans.requests.plan_options import BYTES, SECONDS

    flag, name = flag_of(field), _name(field)
    if field.is_flag:
        both = f"{flag}/--no-{flag[2:]}" if field.default is None else flag
        return click.Option((both, name), is_flag=True, default=field.default, help=field.help)
    return click.Option(
        (flag, name),
        default=field.default,
        show_default=isinstance(field.default, str) and bool(field.default),
        multiple=field.is_several,
        metavar=field.metavar,
        callback={BYTES: size, SECONDS: seconds}.get(field.unit),
        help=field.help,
    )


def _tell(before: str, now: str) -> None:
    from autopar.errors import OldNameWarning

    warnings.warn(OldNameWarning(f"{before} goes with the next release: write {now}"), stacklevel=2)
