"""`autopar plan`: a model and a cluster in, a plan out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.terminal import (
    Output,
    page_options,
    print_content,
    seconds,
    size,
    spoken_progress,
    target_options,
    write_page,
)
from autopar.ir.gc_pause import collection_paused

if TYPE_CHECKING:
    from autopar.plans.plan_options import OptionField


class Planning(click.Command):
    """A command with the options of a plan, by their keywords, where it has `_HERE`. They are made
    when it is called: what they come from takes as long to import as all else."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        place = next((k for k, each in enumerate(self.params) if each.name == _HERE), None)
        if place is not None:
            from autopar.plans.plan_options import option_fields

            self.params[place : place + 1] = map(_option_of, option_fields())
        return super().get_params(ctx)


_HERE = "options_of_the_plan"


def flag_of(field: OptionField) -> str:
    """`--memory-limit`; those that may be given several times are named in the singular."""
    name = field.keyword.removesuffix("s") if field.is_several else field.keyword
    return f"--{name.replace('_', '-')}"


def _option_of(field: OptionField) -> click.Option:
    from autopar.plans.plan_options import BYTES, SECONDS

    flag = flag_of(field)
    if field.kind is bool:
        return click.Option((flag, field.keyword), is_flag=True, default=False, help=field.help)
    return click.Option(
        (flag, field.keyword),
        default=field.default,
        show_default=isinstance(field.default, str) and bool(field.default),
        multiple=field.is_several,
        metavar=field.metavar,
        callback={BYTES: size, SECONDS: seconds}.get(field.unit),
        help=field.help,
    )


@click.command(cls=Planning)
@target_options
@click.option(
    "--cluster",
    metavar="CLUSTER",
    help="64x8xH100, a .toml file or a profile; default: the devices at hand.",
)
@click.option(
    "--profile",
    "profile_file",
    metavar="FILE",
    help="Price with what `autopar profile` measured, not with datasheets.",
)
@click.option("--" + _HERE, _HERE, expose_value=False)
@click.option(
    "--margin/--no-margin",
    default=None,
    help="Find the best plan of another structure too, which takes about a third longer; default: "
    "for plans that are written.",
)
@click.option(
    "--frontier",
    "limits",
    is_flag=False,
    flag_value="",
    metavar="[LIMITS]",
    help="Time against memory instead: the best plan within each of LIMITS, as in 80,40,24GiB; "
    "default: some eight down to the leanest plan.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write the plan there, with --frontier a page for a browser; /dev/stdout: instead of the "
    "page.",
)
@page_options
@collection_paused()
def plan(
    target: str,
    cluster: str | None,
    global_batch: int | None,
    profile_file: str | None,
    margin: bool | None,
    limits: str | None,
    output: str | None,
    how: Output,
    **options: Any,
) -> None:
    """Plan the model of TARGET, such as train.py:build, for a cluster.

    TARGET names a function that returns (model, inputs). It runs on torch's meta device: neither
    memory for the weights nor a GPU is needed.
    """
    from autopar.cluster.parsing import parse_cluster
    from autopar.cluster.profile import Profile
    from autopar.plans.read_options import make_options

    make_options(**options)
    options["cluster"] = None if cluster is None else parse_cluster(cluster)
    options["profile"] = None if profile_file is None else Profile.load(profile_file)
    if limits is not None:
        if margin is not None:
            raise click.UsageError("--frontier has no margin: leave out --margin")
        staged = [options.pop(name) for name in ("stages", "cuts", "schedule")]
        if staged != [None, (), "auto"]:
            raise click.UsageError("--frontier is of one stage: leave out --stages and --cut")
        _frontier(target, global_batch, limits, output, how, options)
        return
    from autopar.ir.files import is_standard_output
    from autopar.report.shown import page_of, shown

    with spoken_progress() as progress:
        model, inputs = _built(target, global_batch, progress)
        from autopar.driver.api import plan as make_plan

        margin = output is not None if margin is None else margin
        found = make_plan(model, inputs, margin=margin, progress=progress, **options)
    if output is not None:
        found.save(output)
        if is_standard_output(output):
            return
    print_content(shown(found), page_of, how)


def _frontier(
    target: str,
    global_batch: int | None,
    limits: str,
    output: str | None,
    how: Output,
    options: dict[str, Any],
) -> None:
    """Print, and write as a page, what steps take within several memory limits."""
    from autopar.ir.files import is_standard_output
    from autopar.plans.frontier import read_limits
    from autopar.report.frontier import FrontierSummary

    read_limits(limits)
    with spoken_progress() as progress:
        model, inputs = _built(target, global_batch, progress)
        from autopar.driver.api import frontier

        found = frontier(model, inputs, limits=limits, progress=progress, **options).summary()
    if output is not None:
        from autopar.report.html.frontier import frontier_html

        write_page(output, frontier_html(found))
        if is_standard_output(output):
            return
    print_content(found, FrontierSummary.page, how)


def _built(
    target: str, global_batch: int | None, progress: Callable[[str], None]
) -> tuple[Any, Any]:
    """The model and the inputs of a target."""
    progress("importing the target")
    from autopar.driver.target import load_target

    function = load_target(target)
    from autopar.runtime.module.building import build

    built = build(function, global_batch, on_meta=True)
    return built.model, built.inputs
