"""Predicted against measured, as a picture for the documents: SVG that needs no style sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10

from markupsafe import Markup

from autopar.report.html.svg import element, picture, text
from benchmarks.published.report import Judged

SIZE, LEFT, TOP, BOTTOM = 520.0, 64.0, 34.0, 52.0
COLOURS = {"A100-40G": "#b26a00", "A100": "#00796b", "H100": "#3949ab", "H200": "#8e24aa"}
OTHER = "#757575"
GREY, DARK = "#9e9e9e", "#424242"
STYLE = "text{font:12px system-ui,sans-serif;fill:#424242}"


def scatter(judged: Sequence[Judged]) -> str:
    """Tokens per second and device on logarithmic axes; filled where the run was kept apart. The
    lines are what is right, and a quarter more and less."""
    values = [v for e in judged for v in (e.run.tokens_s_gpu, e.predicted.tokens_s_gpu)]
    low, high = floor(log10(min(values)) * 2) / 2, ceil(log10(max(values)) * 2) / 2
    plot = _Plot(low, high)
    title = "Predicted against measured tokens per second and device"
    children = [
        element("style", Markup(STYLE)),
        element("rect", width=SIZE, height=SIZE, fill="#ffffff"),
        *plot.axes(),
        *plot.lines(),
        *(plot.dot(each) for each in judged),
        *_legend(judged),
    ]
    drawn = picture(SIZE, SIZE, title, children)
    return str(drawn).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + "\n"


class _Plot:
    """A square of `low` to `high`, powers of ten, on both axes."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.side = min(SIZE - LEFT - 16, SIZE - TOP - BOTTOM)

    def x(self, value: float) -> float:
        return LEFT + self.side * (log10(value) - self.low) / (self.high - self.low)

    def y(self, value: float) -> float:
        return TOP + self.side * (self.high - log10(value)) / (self.high - self.low)

    def axes(self) -> Iterator[Markup]:
        yield element("rect", x=LEFT, y=TOP, width=self.side, height=self.side, fill="none",
                      stroke=GREY)  # fmt: skip
        for power in range(floor(self.low), ceil(self.high) + 1):
            for digit in (1, 2, 5):
                value = digit * 10.0**power
                if self.low <= log10(value) <= self.high:
                    yield from self.tick(value)
        middle = LEFT + self.side / 2
        yield text(middle, TOP + self.side + 38, "measured tokens/s per device", anchor="middle")
        yield text(LEFT - 50, TOP - 12, "predicted tokens/s per device")

    def tick(self, value: float) -> Iterator[Markup]:
        shown, end = f"{value:,.0f}", TOP + self.side
        x, y = self.x(value), self.y(value)
        yield _line(x, TOP, x, end, "#eeeeee")
        yield _line(LEFT, y, LEFT + self.side, y, "#eeeeee")
        yield text(x, end + 18, shown, anchor="middle")
        yield text(LEFT - 6, y + 4, shown, anchor="end")

    def lines(self) -> Iterator[Markup]:
        for factor, dashes in ((1.0, ""), (1.25, "4 4"), (0.8, "4 4")):
            least = max(10**self.low, 10**self.low / factor)
            most = min(10**self.high, 10**self.high / factor)
            ends = (self.x(least), self.y(factor * least), self.x(most), self.y(factor * most))
            yield _line(*ends, DARK, dashes)

    def dot(self, each: Judged) -> Markup:
        run, predicted = each.run, each.predicted.tokens_s_gpu
        colour = COLOURS.get(run.preset or "", OTHER)
        tip = f"{run.name}: measured {run.tokens_s_gpu:,.0f}, predicted {predicted:,.0f}"
        return element(
            "circle",
            element("title", tip),
            cx=self.x(run.tokens_s_gpu),
            cy=self.y(predicted),
            r=3.5,
            fill=colour if run.kept_apart else "none",
            stroke=colour,
        )


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, dashes: str = "") -> Markup:
    more = {"stroke_dasharray": dashes} if dashes else {}
    return element("line", x1=x, y1=y, x2=to_x, y2=to_y, stroke=colour, **more)


def _legend(judged: Sequence[Judged]) -> Iterator[Markup]:
    names = list(dict.fromkeys(each.run.preset or "" for each in judged))
    for k, name in enumerate(sorted(names)):
        y = TOP + 20 + 18 * k
        colour = COLOURS.get(name, OTHER)
        yield element("circle", cx=LEFT + 14, cy=y - 4, r=3.5, fill="none", stroke=colour)
        yield text(LEFT + 24, y, name)
    yield text(LEFT + 10, TOP + 20 + 18 * len(names), "filled: kept apart; dashed: a quarter off")
