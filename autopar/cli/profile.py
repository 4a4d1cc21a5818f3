"""`autopar profile`: what the device at hand can do."""

from __future__ import annotations

import click

from autopar.cli.terminal import debug_option, spoken_progress


@click.command()
@click.option("-o", "--out", metavar="FILE", help="Write the profile there; default: print it.")
@click.option("--device", metavar="DEVICE", help="cuda:1 or cpu; default: a GPU if there is one.")
@click.option("--quick", is_flag=True, help="Measure the ceilings alone.")
@debug_option
def profile(out: str | None, device: str | None, quick: bool) -> None:
    """Measure matmuls, attention, pointwise ops and copies on the device at hand."""
    from autopar.cost_model.measured import profile as measure

    with spoken_progress() as progress:
        found = measure(device, quick=quick, progress=progress)
    for gap in found.left_out:
        click.echo(f"autopar: left out: {gap.entry}: {gap.reason}", err=True)
    if out is None:
        click.echo(found.to_bytes(), nl=False)
    else:
        found.save(out)
