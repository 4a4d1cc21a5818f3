"""Plans run on emulated clusters, beside every rival:

    python -m benchmarks.emulated                              # all scenarios: an hour
    python -m benchmarks.emulated --scenario wide-2 --rounds 30 --markdown
    python -m benchmarks.emulated --no-profile                 # planned from presets
    python -m benchmarks.emulated --orders --scenario slow-4   # the orders of its stages
    python -m benchmarks.emulated --show --markdown            # the tables of what was measured

Nodes are network namespaces on this machine, joined by links that are kept slow (`network`).
`autopar profile` measures the cluster, with all ranks active, as they share this machine's cores;
with `--no-profile` a file states the links between nodes, and presets the rest.
Then autopar's choice, every strategy it knows, DDP, FSDP2, HSDP and tensor parallelism by hand
train one model in turns, one step each per round, as in `step_time`. Those that take over twice as
long as the fastest are done after three rounds. Where namespaces are not
permitted it says so and ends with status 0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from benchmarks.emulated import network, report
from benchmarks.emulated.outcome import Outcome, load, save
from benchmarks.emulated.scenarios import SCENARIOS, Scenario
from benchmarks.processes import ROOT, run_ranks

DATA = ROOT / "benchmarks" / "data" / "emulated.json"
ORDERS_DATA = DATA.with_name("emulated_orders.json")
UNPROFILED_DATA = DATA.with_name("emulated_no_profile.json")
MODULE = [sys.executable, "-m", "benchmarks.emulated"]


def run(name: str, rounds: int, folder: Path, *, orders: bool, has_profile: bool) -> Outcome | None:
    """One scenario in namespaces of its own; None if it failed. Profiles are kept in `folder`, for
    other scenarios on the same cluster."""
    scenario = SCENARIOS[name]
    cluster = folder / f"{scenario.cluster}.{'json' if has_profile else 'toml'}"
    if not has_profile:
        cluster.write_text(stated(scenario), encoding="utf-8")
    options = ["--scenario", name, "--rounds", str(rounds), "--cluster", str(cluster)]
    options += ["--orders"] * orders
    inside = network.apart([*MODULE, "--inside", *options])
    done = subprocess.run(inside, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return None
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Outcome)


def stated(scenario: Scenario) -> str:
    """The cluster file of a person who has measured nothing but knows the links between nodes."""
    inside = f"[[levels]]\nsize = {scenario.per_node}\n" * (scenario.per_node > 1)
    rate = scenario.mbit_per_s * 125_000
    between = f"link = {{preset = 'Ethernet 1G', bytes_per_s = {rate}}}\n"
    head = f"name = '{scenario.cluster}'\ndevice = 'cpu'\n"
    return f"{head}[[levels]]\nsize = {scenario.nodes}\n{between}{inside}"


def run_inside(name: str, rounds: int, cluster: Path, *, orders: bool) -> bytes | None:
    """What rank 0 tells of a scenario, run in the namespaces of this process."""
    scenario = SCENARIOS[name]
    network.build(scenario.nodes, scenario.mbit_per_s)

    def on_ranks(command: list[str]) -> bytes | None:
        return run_ranks(
            command,
            scenario.ranks,
            local_ranks=scenario.per_node,
            address=network.address(0),
            before=lambda rank: network.on_node(rank // scenario.per_node),
            env={"GLOO_SOCKET_IFNAME": network.DEVICE, "TP_SOCKET_IFNAME": network.DEVICE},
        )

    if not cluster.exists():
        click.echo(f"{name}: profile", err=True)
        shape = f"{scenario.nodes}x{scenario.per_node}xcpu"
        profile = [sys.executable, "-m", "autopar.cli.main", "profile", "--cluster", shape]
        if on_ranks([*profile, "--device", "cpu", "-o", str(cluster)]) is None:
            return None
    options = ["--scenario", name, "--rounds", str(rounds), "--cluster", str(cluster)]
    options += ["--orders"] * orders
    return on_ranks([*MODULE, "--worker", *options])


@click.command(help=__doc__)
@click.option("--scenario", "names", multiple=True, type=click.Choice(list(SCENARIOS)))
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--show", is_flag=True, help="Measure nothing: print what is in the file.")
@click.option("--orders", is_flag=True, help="Stages alone, as many as are tried, in every order.")
@click.option("--profile/--no-profile", "has_profile", default=True, help="Measure the cluster.")
@click.option("--data", type=click.Path(path_type=Path), help="The file to keep.")
@click.option("--inside", is_flag=True, hidden=True)
@click.option("--worker", is_flag=True, hidden=True)
@click.option("--cluster", type=click.Path(path_type=Path), hidden=True)
def main(
    names: tuple[str, ...],
    rounds: int,
    as_markdown: bool,
    show: bool,
    orders: bool,
    has_profile: bool,
    data: Path | None,
    inside: bool,
    worker: bool,
    cluster: Path,
) -> None:
    if worker:
        from benchmarks.emulated.worker import work

        click.echo(msgspec.json.encode(work(names[0], str(cluster), rounds, orders=orders)))
        return
    if inside:
        told = run_inside(names[0], rounds, cluster, orders=orders)
        if told is None:
            sys.exit(1)
        click.echo(told.splitlines()[-1])
        return
    if orders and not has_profile:
        raise click.UsageError("--orders are measured with a profile")
    known = [name for name, scenario in SCENARIOS.items() if scenario.stages or not orders]
    wanted = [name for name in names or known if name in known]
    file = data or (ORDERS_DATA if orders else DATA if has_profile else UNPROFILED_DATA)
    failed = [] if show else measure(wanted, rounds, file, orders=orders, has_profile=has_profile)
    kept = load(file)
    found = [kept[name] for name in wanted if name in kept]
    report.report(found, as_markdown=as_markdown, has_choice=not orders)
    sys.exit(bool(failed))


def measure(
    names: Sequence[str], rounds: int, data: Path, *, orders: bool, has_profile: bool
) -> list[str]:
    """Run the scenarios and put what came of them into the file; those that failed."""
    if reason := network.refusal():
        click.echo(f"skipped: {reason}", err=True)
        return []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            outcome = run(name, rounds, Path(folder), orders=orders, has_profile=has_profile)
            if outcome is None:
                click.echo(f"{name}: failed", err=True)
                failed.append(name)
                continue
            kept = load(data) | {name: outcome}
            save((kept[each] for each in SCENARIOS if each in kept), data)
    return failed


if __name__ == "__main__":
    main()
