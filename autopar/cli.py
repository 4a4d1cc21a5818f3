"""The command line. Standard output carries the result alone; progress goes to standard error."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from autopar.errors import AutoparError, AutoparWarning
from autopar.solve_command import solve
from autopar.terminal import spoken_progress
from autopar.units import parse_bytes
from autopar.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopar.plan import Plan

INTERRUPTED = 130
PIPED_WIDTH = 100

Command = TypeVar("Command", bound=Callable[..., Any])
Content = TypeVar("Content")


class Cli(click.Group):
    """A group whose errors are one line, and whose exit statuses are autopar's: 0 fine, 1 error,
    2 plans differ, 3 infeasible, 4 not equal to eager, 5 plan and model do not fit, 130 Ctrl-C."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            with _spoken_warnings():
                status = super().main(arguments, "autopar", complete_var, False, **extra)
        except (KeyboardInterrupt, click.Abort):
            status = INTERRUPTED
        except click.ClickException as error:
            hint = (
                error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
            )
            _say("error", error.format_message() + (f" (see {hint} --help)" if hint else ""))
            status = 1
        except Exception as error:
            if "--debug" in arguments:
                traceback.print_exc()
            _say("error", _sentence(error))
            status = error.exit_status if isinstance(error, AutoparError) else 1
        sys.exit(status if isinstance(status, int) else 0)


def _sentence(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return str(error)
    return (
        f"{type(error).__name__}: {error} (autopar did not expect this: --debug shows where it "
        "happened, please report it)"
    )


def _say(severity: str, message: str) -> None:
    from autopar.report.names import escape

    lines = "\n  ".join(map(escape, message.splitlines()))
    click.echo(f"autopar: {severity}: {lines}", err=True)


@contextmanager
def _spoken_warnings() -> Generator[None]:
    """Inside, autopar's own warnings are printed like its errors."""
    shown = warnings.showwarning

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, AutoparWarning):
            _say("warning", str(message))
        else:
            shown(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        yield


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autopar", message="%(prog)s %(version)s")
def main() -> None:
    """Plan, inspect and verify how a PyTorch model is spread over a cluster."""


def _common(command: Command) -> Command:
    for option in (
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option("--no-color", is_flag=True, help="Print without colours."),
        click.option("--width", type=click.IntRange(40, 1000), help="Columns of the page."),
        click.option("--json", "as_json", is_flag=True, help="Print the page's content as JSON."),
    ):
        command = option(command)
    return command


def _target(command: Command) -> Command:
    batch = click.option(
        "--global-batch",
        type=click.IntRange(1),
        metavar="N",
        help="Batch size over all devices, for targets whose inputs are a function of it.",
    )
    return batch(click.argument("target")(command))


def _size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@main.command()
@_target
@click.option(
    "--cluster", metavar="CLUSTER", help="64x8xH100, or a .toml file; default: the devices at hand."
)
@click.option("--mesh", default="auto", show_default=True, help="auto, auto:3, 8x8 or dp=8,tp=8.")
@click.option(
    "--profile",
    "profile_file",
    metavar="FILE",
    help="Price with what `autopar profile` measured, not with datasheets.",
)
@click.option(
    "--memory-limit",
    metavar="SIZE",
    callback=_size,
    help="Per device, such as 72GiB; default: all.",
)
@click.option("--optimizer", default="adamw", show_default=True, help="Whose states count.")
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
@click.option("-o", "--output", metavar="FILE", help="Write the plan there.")
@_common
def plan(
    target: str,
    cluster: str | None,
    mesh: str,
    global_batch: int | None,
    profile_file: str | None,
    memory_limit: int | None,
    optimizer: str,
    time_limit: float | None,
    strict: bool,
    pins: tuple[str, ...],
    forbid: tuple[str, ...],
    strategy: str,
    output: str | None,
    as_json: bool,
    width: int | None,
    no_color: bool,
    debug: bool,
) -> None:
    """Plan the model of TARGET, such as train.py:build, for a cluster.

    TARGET names a function that returns (model, inputs). It runs on torch's meta device: neither
    memory for the weights nor a GPU is needed.
    """
    from autopar.cluster import parse_cluster
    from autopar.options import make_options
    from autopar.profile_file import Profile
    from autopar.target import load_target

    make_options(mesh, optimizer, memory_limit, time_limit, strict, pins, forbid, strategy)
    described = None if cluster is None else parse_cluster(cluster)
    measured = None if profile_file is None else Profile.load(profile_file)
    with spoken_progress() as progress:
        progress("importing the target")
        function = load_target(target)
        from autopar.compile import plan as make_plan
        from autopar.runtime.building import build

        built = build(function, global_batch, on_meta=True)
        found = make_plan(
            built.model,
            built.inputs,
            cluster=described,
            profile=measured,
            mesh=mesh,
            optimizer=optimizer,
            memory_limit=memory_limit,
            time_limit=time_limit,
            strict=strict,
            pins=pins,
            forbid=forbid,
            strategy=strategy,
            progress=progress,
        )
    if output is not None:
        found.save(output)
    _emit_plan(found, as_json, width, no_color)


@main.command()
@click.argument("file")
@_common
def show(file: str, as_json: bool, width: int | None, no_color: bool, debug: bool) -> None:
    """Print what the plan in FILE decided, and what a step is predicted to cost."""
    from autopar.plan import Plan

    _emit_plan(Plan.load(file), as_json, width, no_color)


@main.command()
@click.argument("file")
@_target
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "own"]),
    default="own",
    show_default=True,
    help="Cast the model first; float64 leaves least room for rounding.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and inputs.")
@_common
def verify(
    file: str,
    target: str,
    global_batch: int | None,
    dtype: str,
    seed: int,
    as_json: bool,
    width: int | None,
    no_color: bool,
    debug: bool,
) -> None:
    """Run all ranks of the plan in FILE in this process, and compare with the model of TARGET.

    The loss and every gradient must be those of the unchanged model, else the status is 4.
    """
    from autopar.plan import Plan
    from autopar.target import load_target

    loaded = Plan.load(file)
    with spoken_progress() as progress:
        progress("importing the target")
        function = load_target(target)
        from autopar.runtime.building import build
        from autopar.verify import compare

        built = build(function, global_batch, on_meta=False, seed=seed)
        report = compare(
            loaded,
            built.model,
            built.inputs,
            dtype=None if dtype == "own" else dtype,
            seed=seed,
            progress=progress,
        )

    from autopar.report.verification import page

    _emit(report, page, as_json, width, no_color)
    report.check()


@main.command()
@click.option("-o", "--out", metavar="FILE", help="Write the profile there; default: print it.")
@click.option("--device", metavar="DEVICE", help="cuda:1 or cpu; default: a GPU if there is one.")
@click.option("--quick", is_flag=True, help="Measure the ceilings alone.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def profile(out: str | None, device: str | None, quick: bool, debug: bool) -> None:
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


def _emit_plan(found: Plan, as_json: bool, width: int | None, no_color: bool) -> None:
    from autopar.report.summary import summarize
    from autopar.report.text import page

    _emit(summarize(found), page, as_json, width, no_color)


def _emit(
    content: Content,
    page: Callable[[Content], RenderableType],
    as_json: bool,
    width: int | None,
    no_color: bool,
) -> None:
    """Print `content` on standard output: its page, or itself as JSON."""
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
        return
    from rich.console import Console

    console = Console(no_color=no_color or None, highlight=False, markup=False, emoji=False)
    if width is not None or not console.is_terminal:
        console.width = width or PIPED_WIDTH
    if console.is_terminal:
        console.print(page(content))
        return
    with console.capture() as capture:
        console.print(page(content))
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


main.add_command(solve)


if __name__ == "__main__":
    main()
