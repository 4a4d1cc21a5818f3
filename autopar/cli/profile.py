"""`autopar profile`: measures the devices at hand and their links."""

from __future__ import annotations

from pathlib import Path

import click

from autopar.cli.terminal import debug_option, spoken_progress

_UNFINISHED = ".unfinished"


@click.command()
@click.option("-o", "--out", metavar="FILE", help="Write the profile there; default: print it.")
@click.option("--device", metavar="DEVICE", help="cuda:1 or cpu; default: a GPU if there is one.")
@click.option(
    "--cluster",
    metavar="CLUSTER",
    help="How torchrun's processes are joined: 2x8xH100, or a .toml file; default: nodes are "
    "torchrun's.",
)
@click.option("--quick", is_flag=True, help="Measure few sizes.")
@click.option(
    "--learn",
    "runs",
    multiple=True,
    metavar="RUN",
    help="Measure nothing: correct the profile of -o by a run that AUTOPAR_REPORT=RUN wrote; may "
    "be given several times.",
)
@debug_option
def profile(
    out: str | None, device: str | None, cluster: str | None, quick: bool, runs: tuple[str, ...]
) -> None:
    """Measure the figures of prices on the devices at hand.

    Measured are matmuls, attention, pointwise ops and copies of one device. Under torchrun they are
    measured on all devices at once, and so are links, by kind of axis and size of message:

    torchrun --nproc-per-node 8 -m autopar.cli.main profile -o lab.json

    `--cluster lab.json` then plans for the cluster at hand, `--cluster 64x8xH100 --profile
    lab.json` for a larger one like it. An interrupted run continues from FILE.unfinished.
    """
    if runs:
        _learn(out, runs)
        return
    from autopar.runtime.measuring.measure import profile as measure
    from autopar.runtime.process.world import place_of_process

    is_first = place_of_process()[0] == 0
    unfinished = f"{out}{_UNFINISHED}" if out and is_first else None
    with spoken_progress(quiet=not is_first) as progress:
        measured = measure(
            device, cluster=cluster, quick=quick, progress=progress, unfinished=unfinished
        )
    if not is_first:
        return
    for gap in measured.left_out:
        click.echo(f"autopar: left out: {gap.entry}: {gap.reason}", err=True)
    if out is None:
        click.echo(measured.to_bytes(), nl=False)
    else:
        measured.save(out)
        Path(f"{out}{_UNFINISHED}").unlink(missing_ok=True)


def _learn(out: str | None, runs: tuple[str, ...]) -> None:
    """Correct the profile `out` by `runs` of plans that were priced with it."""
    from autopar.cluster.profile import Profile, learn
    from autopar.plans.run_record import RunRecord

    if out is None:
        raise click.UsageError("--learn takes a profile: name it with -o FILE")
    records = [RunRecord.load(path) for path in runs]
    corrected, messages = learn(
        Profile.load(out),
        [(each.source, each.compute_ratio, each.communication_ratio) for each in records],
    )
    corrected.save(out)
    for message in messages:
        click.echo(message)
