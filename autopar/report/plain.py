"""Pages as plain text."""

from __future__ import annotations

from rich.console import Console, RenderableType

WIDTH = 100


def plain(renderable: RenderableType, width: int = WIDTH) -> str:
    """A page in so many columns, without colours."""
    console = Console(
        width=width, color_system=None, highlight=False, markup=False, emoji=False, no_color=True
    )
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
