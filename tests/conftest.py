"""What every test runs under: one thread each, no network, repeatable examples, no silent skips."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from importlib.util import find_spec
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if find_spec("torchvision") is not None:  # with the extra zoo alone
    import tests.torchvision_schemas  # noqa: F401

if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)

settings.register_profile(
    "autopar",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("autopar")

pytest_plugins = ["tests.slicing"]

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

NO_GPU = "needs a CUDA device"
NO_BROWSER = "needs chromium and chromedriver (tools/get_chromium.sh installs them as root)"
ALLOWED_SKIPS = (NO_GPU, NO_BROWSER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(NO_GPU)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip for a reason that is not listed above is a failure: a test that stops running is one
    that stops protecting."""
    report = yield
    return _fail_unlisted_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file."""
    report = yield
    return _fail_unlisted_skip(report)


def _fail_unlisted_skip(report: Report) -> Report:
    text = str(report.longrepr)
    listed = hasattr(report, "wasxfail") or any(reason in text for reason in ALLOWED_SKIPS)
    if report.skipped and not listed:
        report.outcome = "failed"
        report.longrepr = f"skipped, and tests/conftest.py does not list why: {text}"
    return report
