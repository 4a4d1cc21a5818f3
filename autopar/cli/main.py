"""The command line. Standard output has only the result; progress goes to standard error."""

from __future__ import annotations

import errno
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

import click

from autopar.cli.check import check
from autopar.cli.diff import diff
from autopar.cli.explain import explain
from autopar.cli.plan import plan
from autopar.cli.profile import profile
from autopar.cli.report import report
from autopar.cli.show import show
from autopar.cli.solve import solve
from autopar.cli.terminal import CTRL_C
from autopar.cli.verify import verify
from autopar.errors import AutoparError, AutoparWarning, sentence
from autopar.ir.gc_pause import collection_paused, end_collection
from autopar.ir.version import __version__


class Cli(click.Group):
    """A group of commands whose errors are one line. Exit statuses are autopar's: 0 fine, 1 error,
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
        is_own = args is None
        # The process of a plan ends without a last garbage collection, which would take long.
        with collection_paused() if is_own and arguments[0] == plan.name else nullcontext():
            status = self._status(arguments, complete_var, **extra)
            if is_own:
                end_collection()
        sys.exit(status)

    def _status(self, arguments: list[str], complete_var: str | None, **extra: Any) -> int:
        """Runs a command, and returns its exit status."""
        try:
            with _spoken_warnings():
                status = super().main(arguments, "autopar", complete_var, False, **extra)
        except (KeyboardInterrupt, click.Abort):
            status = CTRL_C
        except click.ClickException as error:
            hint = (
                error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
            )
            _say("error", error.format_message() + (f" (see {hint} --help)" if hint else ""))
            status = 1
        except SystemExit as error:
            _say("error", f"the target ended the process (sys.exit({error.code!r})) half way")
            status = 1
        except Exception as error:
            if "--debug" in arguments:
                traceback.print_exc()
            _say("error", _error_text(error))
            status = error.exit_status if isinstance(error, AutoparError) else 1
        return status if isinstance(status, int) else 0


def _error_text(error: Exception) -> str:
    """The message of an error. Commands report errors of the files that they write themselves."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write to standard output: {error.strerror}"
    return sentence(error)


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
    """Plan, inspect and verify how a PyTorch model is parallelized over a cluster."""


for command in (plan, show, explain, report, diff, check, verify, profile, solve):
    main.add_command(command)


if __name__ == "__main__":
    main()
