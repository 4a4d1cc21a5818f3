"""`autopar plan`: a model and a cluster in, a plan out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from autopar.cli.terminal import (
    Output,
    page_options,
    print_content,
    size,
    spoken_progress,
    target_options,
    write_page,
)
from autopar.ir.gc_pause import collection_paused


@click.command()
@target_options
@click.option(
    "--cluster",
    metavar="CLUSTER",
    help="64x8xH100, a .toml file or a profile; default: the devices at hand.",
)
@click.option(
    "--mesh",
    default="auto",
    show_default=True,
    help="auto, auto:3 (all of three axes too), 8x8 or dp=8,tp=8; of stages, 4/2/2.",
)
@click.option(
    "--profile",
    "profile_file",
    metavar="FILE",
    help="Price with what `autopar profile` measured, not with datasheets.",
)
@click.option(
    "--memory-limit",
    metavar="SIZE",
    callback=size,
    help="Per device, such as 72GiB; default: all.",
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    callback=size,
    help="Per node, such as 1.5TiB, which its devices share; default: what the cluster says.",
)
@click.option(
    "--microbatches",
    metavar="N|auto",
    help="Work on the batch in N parts, one after the other; auto: as many as are best where "
    "memory binds. Default: 1, or auto in stages and where nothing fits otherwise.",
)
@click.option(
    "--residency",
    default="cuda",
    show_default=True,
    metavar="cuda|cpu|auto",
    help="Where parameters live, with gradients and the optimizer's states: on the device, on its "
    "host, or where it is best if memory binds.",
)
@click.option(
    "--checkpoint",
    default="planned",
    show_default=True,
    metavar="planned|'as written'",
    help="What becomes of what the model wraps in torch.utils.checkpoint: free to be planned, or "
    "made again as it asks.",
)
@click.option(
    "--saved-dtype",
    metavar="bfloat16|float16",
    help="Save activations of float32 for backward in this dtype, which rounds gradients. Default: "
    "as they are.",
)
@click.option(
    "--stages",
    metavar="N|auto",
    help="Cut the model into N stages of a pipeline; auto: as many as are best, or none. Default: "
    "1, or auto where that does not fit, or devices wait, or do the same work, for a third of its "
    "step, and nothing is asked of its mesh, microbatches or shardings.",
)
@click.option(
    "--cut",
    "cuts",
    multiple=True,
    metavar="MODULE",
    help="A stage begins there, as in model.layers.8; may be given several times.",
)
@click.option(
    "--schedule",
    default="auto",
    show_default=True,
    metavar="NAME|FILE",
    help="How stages work on microbatches: gpipe, 1f1b, eager-1f1b, interleaved:2, zb-h1, zb-v, "
    "zb:2, or a table of your own in a file.",
)
@click.option(
    "--loss-chunks",
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Work on the loss of a large vocabulary in N chunks of a device's tokens; auto: where "
    "memory binds and that is better.",
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    help="Whose states and step count, with its settings: sgd-momentum, adamw-amsgrad-fused, or "
    '"muon; adamw for head.weight".',
)
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS")
@click.option("--strict", is_flag=True, help="An op without a sharding rule is an error.")
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="PATTERN=SHARDING",
    help="Keep to it, as in '*.down_proj.weight=S(1) on tp'; may be given several times.",
)
@click.option(
    "--forbid",
    multiple=True,
    metavar="AXIS:PATTERN",
    help="Shard nothing there on the axis, as in tp:lm_head; may be given several times.",
)
@click.option("--strategy", default="", help="ddp, fsdp, megatron, 2d, 2.5d or 3d; default: any.")
@click.option("--backend", help="eager or inductor: what runs the plan; default: the device's own.")
@click.option(
    "--differentiable-output",
    "differentiable_outputs",
    multiple=True,
    metavar="NAME",
    help="A backward goes through it beside the losses, as in logits; may be given several times.",
)
@click.option(
    "--unread-output",
    "unread_outputs",
    multiple=True,
    metavar="NAME",
    help="Nobody looks at it in training, as in logits: it is None there; may be given several "
    "times.",
)
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
    from autopar.plans.options import make_options

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
