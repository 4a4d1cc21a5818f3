"""A headless Chromium for tests and for the pictures of the docs: `tools/get_chromium.sh` installs
one. It reaches no network, and every start is with a new, empty profile."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
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
