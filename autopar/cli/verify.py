"""`autopar verify`: a plan, run and compared with the model as it is."""

from __future__ import annotations

import click

from autopar.cli.terminal import (
    Output,
    page_options,
    print_content,
    spoken_progress,
    target_options,
)


@click.command()
@click.argument("file")
@target_options
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "own"]),
    default="own",
    show_default=True,
    help="Cast the model first; float64 leaves least room for rounding.",
)
@click.option(
    "--unread-output",
    "unread_outputs",
    multiple=True,
    metavar="NAME",
    help="As it was planned with; may be given several times.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and inputs.")
@page_options
def verify(
    file: str,
    target: str,
    global_batch: int | None,
    dtype: str,
    seed: int,
    unread_outputs: tuple[str, ...],
    how: Output,
) -> None:
    """Run all ranks of the plan in FILE in this process, and compare with the model of TARGET.

    The loss and every gradient must be those of the unchanged model, else the status is 4.
    """
    from autopar.driver.target import load_target
    from autopar.plans.plan import Plan

    loaded = Plan.load(file)
    with spoken_progress() as progress:
        progress("importing the target")
        function = load_target(target)
        from autopar.driver.verify import compare_with_eager
        from autopar.runtime.module.building import build

        built = build(function, global_batch, on_meta=False, seed=seed)
        report = compare_with_eager(
            loaded,
            built.model,
            built.inputs,
            dtype=None if dtype == "own" else dtype,
            seed=seed,
            unread_outputs=unread_outputs,
            progress=progress,
        )

    from autopar.report.verification import page

    print_content(report, page, how)
    report.check()
