"""Shared parts of commands: options, pages on standard output, progress messages."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autopar.ir.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopar.runtime.module.building import Built

PIPED_WIDTH = 100
CTRL_C = 130
"""The exit status after Ctrl-C."""

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Output:
    """How a page is printed."""

    as_json: bool
    width: int | None
    no_color: bool


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
)
batch_option = click.option(
    "--global-batch",
    type=click.IntRange(1),
    metavar="N",
    help="Batch size over all devices, for targets whose inputs are a function of it.",
)


def page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that prints a page: its argument `how`, an `Output`."""

    @wraps(command)
    def run(*, as_json: bool, width: int | None, no_color: bool, **others: Any) -> Any:
        as_json = as_json or others.get("form") == "json"
        return command(how=Output(as_json, width, no_color), **others)

    for option in (
        debug_option,
        click.option("--no-color", is_flag=True, help="Print without colours."),
        click.option("--width", type=click.IntRange(40, 1000), help="Columns of the page."),
        click.option("--json", "as_json", is_flag=True, help="Print the page's content as JSON."),
    ):
        run = option(run)
    return run


def comparison_options(command: Command) -> Command:
    """The options of a command that compares plans: `form` and `fail_over`."""
    form = click.option(
        "--format",
        "form",
        type=click.Choice(("text", "md", "json")),
        default="text",
        show_default=True,
        help="A page, Markdown for a pull request, or JSON.",
    )
    bounds = click.option(
        "--fail-over",
        metavar="BOUNDS",
        help="What counts, as in time=2%,memory=1%,structure; default: everything.",
    )
    return bounds(form(command))


def target_options(command: Command) -> Command:
    """The argument `target` and the option `global_batch`."""
    return batch_option(click.argument("target")(command))


def size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """The callback of an option that is a number of bytes: `72GiB`."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def seconds(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """The callback of an option that is a time: `90`, in seconds, or `2min`."""
    if text is None:
        return None
    try:
        duration_s = float(text)
    except ValueError:
        try:
            duration_s = parse_seconds(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    if not 0 < duration_s < inf:
        raise click.BadParameter(f"{text!r}: it must be more than 0 seconds")
    return duration_s


stage_option = click.option(
    "--stage", type=click.IntRange(min=0), metavar="N", help="Of a pipeline, its stage N alone."
)


def build_target(
    target: str,
    global_batch: int | None,
    progress: Callable[[str], None],
    *,
    on_meta: bool = True,
    seed: int = 0,
) -> Built:
    """The model of a target with its inputs (`building.build`)."""
    progress("importing the target")
    from autopar.driver.target import load_target

    function = load_target(target)
    from autopar.runtime.module.building import build

    return build(function, global_batch, on_meta=on_meta, seed=seed)


def print_content(content: object, page: Callable[[], RenderableType], how: Output) -> None:
    """Print `content` on standard output: its page, or itself as JSON."""
    if how.as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
        return
    from rich.console import Console

    console = Console(no_color=how.no_color or None, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        from autopar.report.printed import plain

        click.echo(plain(page(), how.width or PIPED_WIDTH))
        return
    if how.width is not None:
        console.width = how.width
    console.print(page())


def write_page(path: str, data: bytes) -> None:
    """Write a file of a plan, and report it on standard error. ClickException if it cannot be
    written."""
    from autopar.ir.files import write_atomically
    from autopar.report.names import escape

    try:
        write_atomically(path, data)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from None
    click.echo(f"wrote {escape(path)} ({len(data):,} bytes)", err=True)


@contextmanager
def spoken_progress(*, quiet: bool = False) -> Generator[Callable[[str], None]]:
    """A function that shows progress on standard error, or nothing if `quiet`."""
    if quiet:
        yield lambda _: None
        return
    from autopar.report.progress import shown_progress

    with shown_progress() as progress:
        yield progress
