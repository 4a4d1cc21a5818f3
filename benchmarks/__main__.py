"""Run every benchmark that needs no GPU; `benchmarks/README.md` says what each one shows."""

from __future__ import annotations

import sys

import click

from benchmarks import plan_time


@click.command(help=__doc__)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def main(as_markdown: bool) -> None:
    done = plan_time.run(plan_time.CASES, 32, as_markdown=as_markdown)
    click.echo("With a CUDA device there is also: python -m benchmarks.gpu_check")
    sys.exit(not done)


if __name__ == "__main__":
    main()
