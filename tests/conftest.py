"""What every test runs under: one thread each, no network, repeatable examples, no silent skips."""

from __future__ import annotations

import os
import sys
from collections import Counter
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

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

NO_GPU = "needs a CUDA device"
NO_BROWSER = "needs chromium and chromedriver (tools/get_chromium.sh installs them as root)"
ALLOWED_SKIPS = (NO_GPU, NO_BROWSER)


BREADTH = {
    "tests/codegen/test_again.py::test_equal_to_eager": 2,
    "tests/codegen/test_loss_chunks.py::test_equal_to_eager": 3,
    "tests/codegen/test_offload.py::test_equal_to_eager": 2,
    "tests/codegen/test_random_plans.py::test_equal_to_eager": 2,
    "tests/codegen/test_residency.py::test_equal_to_eager": 2,
    "tests/codegen/test_rounding.py::test_gradients_are_within_the_rounding": 3,
    "tests/codegen/test_two_parts.py::test_equal_to_eager": 2,
    "tests/cost_model/test_moments.py::test_no_more_than_is_held": 4,
    "tests/driver/test_again.py::test_equal_to_the_best_of_all_that_can_be_made_again": 2,
    "tests/driver/test_pipelining.py::test_chosen_stages_are_eager": 3,
    "tests/driver/test_split_pipelines.py::test_chosen_stages_are_eager": 2,
    "tests/driver/test_unequal_ranks.py::test_gradients_are_those_of_eager": 3,
    "tests/faults/test_faults.py::test_a_fault_is_caught": 2,
    "tests/faults/test_faults.py::test_without_faults_the_detector_is_content": 3,
    "tests/fuzz/test_changes.py::test_a_changed_model_equals_eager": 2,
    "tests/fuzz/test_fuzz.py::test_a_drawn_model_equals_eager": 2,
    "tests/plans/test_strategies.py::test_a_strategy_computes_what_eager_computes": 3,
    "tests/runtime/test_draws.py::test_two_processes": 2,
    "tests/runtime/test_failures.py::test_a_rank_that_is_lost_within_a_step_is_named": 3,
    "tests/runtime/test_gradients.py::test_gradients_through_any_output_are_those_of_eager": 2,
    "tests/solver/test_cutting.py::test_a_chain_is_cut_as_dynamic_programming_cuts_it": 5,
    "tests/solver/test_cutting.py::test_no_cuts_are_better": 5,
    "tests/tracer/test_runs.py::test_a_short_trace_is_the_whole_one": 3,
    "tests/zoo/test_decoders.py::TestDecoders::test_any_plan": 3,
    "tests/zoo/test_decoders.py::TestDecoders::test_the_plan_chosen": 2,
    "tests/zoo/test_encoders.py::TestEncoders::test_any_plan": 3,
    "tests/zoo/test_encoders.py::TestEncoders::test_the_plan_chosen": 2,
    "tests/zoo/test_images_and_sequences.py::TestImagesAndSequences::test_any_plan": 3,
    "tests/zoo/test_images_and_sequences.py::TestImagesAndSequences::test_the_plan_chosen": 2,
    "tests/zoo/test_memory.py::test_what_is_predicted_is_held": 2,
    "tests/zoo/test_stages.py::test_between_modules_in_every_schedule": 2,
}
"""Tests of which one case in so many runs daily, and the others nightly: what a case more shows is
little beside what it takes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of `BREADTH` that are for the night."""
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in BREADTH:
            if seen[name] % BREADTH[name]:
                item.add_marker(pytest.mark.nightly)
            seen[name] += 1


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
