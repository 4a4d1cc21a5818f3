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
    "tests/benchmarks/test_emulated.py::"
    "test_every_workload_trains_and_its_batch_can_be_cut_or_is_too_small": 4,
    "tests/benchmarks/test_plan_time.py::test_irregular_models_are_planned": 3,
    "tests/codegen/test_again.py::test_equal_to_eager": 5,
    "tests/codegen/test_attention_forms.py::"
    "test_forms_together_and_with_other_keys_than_queries": 5,
    "tests/codegen/test_casts.py::test_equal_to_eager": 3,
    "tests/codegen/test_chunks.py::test_plans_for_little_memory_equal_eager": 2,
    "tests/codegen/test_chunks.py::test_random_plans_of_uneven_sizes_equal_eager": 3,
    "tests/codegen/test_draws.py::test_equal_to_eager": 2,
    "tests/codegen/test_events.py::test_events_are_in_order": 3,
    "tests/codegen/test_events.py::test_what_is_played_is_held": 3,
    "tests/codegen/test_experts.py::test_a_layer_of_ones_own": 3,
    "tests/codegen/test_experts.py::test_models_of_transformers": 3,
    "tests/codegen/test_loss_chunks.py::test_a_cut_vocabulary": 4,
    "tests/codegen/test_loss_chunks.py::test_equal_to_eager": 7,
    "tests/codegen/test_loss_chunks.py::test_in_microbatches_too": 4,
    "tests/codegen/test_microbatches.py::test_losses_stay_those_of_the_whole_batch": 3,
    "tests/codegen/test_microbatches.py::test_strategies_are_eager": 3,
    "tests/codegen/test_offload.py::test_equal_to_eager": 5,
    "tests/codegen/test_offload.py::test_equal_to_the_same_plan_without_it": 2,
    "tests/codegen/test_offload.py::test_what_is_played_is_held": 2,
    "tests/codegen/test_random_plans.py::test_equal_to_eager": 4,
    "tests/codegen/test_residency.py::test_equal_to_eager": 5,
    "tests/codegen/test_residency.py::test_equal_to_the_same_plan_on_the_device": 2,
    "tests/codegen/test_residency.py::test_every_op_finds_its_inputs_on_the_device": 3,
    "tests/codegen/test_rounding.py::test_gradients_are_within_the_rounding": 5,
    "tests/codegen/test_sequence_parallel.py::test_context_beside_tensor_parallelism": 2,
    "tests/codegen/test_two_parts.py::test_equal_to_eager": 5,
    "tests/codegen/test_two_parts.py::test_random_numbers_and_running_statistics": 2,
    "tests/cost_model/test_measured_links.py::test_price_gives_measured_collectives_back": 3,
    "tests/cost_model/test_moments.py::test_no_more_than_is_held": 7,
    "tests/cost_model/test_network.py::test_many_sizes_at_once": 3,
    "tests/cost_model/test_windows.py::test_a_step_is_played_as_it_is_modelled": 3,
    "tests/driver/test_again.py::test_a_plan_is_within_its_memory_and_no_longer_for_more": 2,
    "tests/driver/test_again.py::test_equal_to_the_best_of_all_that_can_be_made_again": 5,
    "tests/driver/test_loss_chunks.py::"
    "test_chunks_that_would_save_less_than_is_tolerated_are_not_planned": 2,
    "tests/driver/test_loss_chunks.py::test_strategies_are_eager": 3,
    "tests/driver/test_margin.py::test_limited_work_leaves_what_is_proven": 2,
    "tests/driver/test_margin.py::test_no_combination_of_roles_is_another_and_better": 3,
    "tests/driver/test_margin.py::test_no_plan_of_any_mesh_is_another_and_better": 2,
    "tests/driver/test_offload.py::test_equal_to_the_best_of_all_that_can_be_done": 3,
    "tests/driver/test_pinned.py::test_limits_that_conflict_do_not_without_any_one_of_them": 3,
    "tests/driver/test_pinned.py::test_nothing_is_sharded_on_an_axis_that_is_forbidden": 2,
    "tests/driver/test_pipelining.py::test_chosen_stages_are_eager": 5,
    "tests/driver/test_residency.py::test_equal_to_the_best_of_all_that_can_be_done": 3,
    "tests/driver/test_search.py::test_the_best_mesh_wins_and_its_bound_holds_on_all": 2,
    "tests/driver/test_segments.py::test_steps_are_thought_to_take_about_what_they_take": 3,
    "tests/driver/test_split_pipelines.py::test_an_action_takes_a_cpu_some_calls_of_ops": 2,
    "tests/driver/test_split_pipelines.py::"
    "test_given_stages_are_in_the_shortest_order_where_links_are_slow": 2,
    "tests/driver/test_stages_if_needed.py::test_who_arranges_a_plan_has_one_stage": 3,
    "tests/driver/test_unequal_ranks.py::test_any_number_of_stages_shares_the_devices": 3,
    "tests/driver/test_unequal_ranks.py::test_gradients_are_those_of_eager": 5,
    "tests/driver/test_what_if.py::test_alternatives_of_a_decision_cost_what_a_solve_says": 2,
    "tests/driver/test_whole_batch.py::test_backward_of_the_whole_batch": 3,
    "tests/faults/test_faults.py::test_a_fault_is_caught": 3,
    "tests/faults/test_faults.py::test_without_faults_the_detector_is_content": 7,
    "tests/fuzz/test_changes.py::test_a_changed_model_equals_eager": 8,
    "tests/fuzz/test_fuzz.py::test_a_drawn_model_equals_eager": 5,
    "tests/plans/test_pipeline_orders.py::"
    "test_tables_are_valid_and_have_each_stage_where_it_belongs": 3,
    "tests/plans/test_pipeline_orders.py::test_torch_interleaves_alike": 3,
    "tests/plans/test_strategies.py::test_a_strategy_computes_what_eager_computes": 7,
    "tests/plans/test_strategies.py::test_a_strategy_is_no_faster_than_the_best_of_all_plans": 3,
    "tests/report/test_browser.py::test_page_of_126_layers": 4,
    "tests/report/test_trace.py::test_events_add_up_to_the_bill": 2,
    "tests/runtime/test_checkpoint_regions.py::test_layers_are_made_again_as_written": 3,
    "tests/runtime/test_draws.py::test_ten_steps_of_a_script": 2,
    "tests/runtime/test_failures.py::test_a_rank_that_is_lost_within_a_step_is_named": 3,
    "tests/runtime/test_gradients.py::test_gradients_through_any_output_are_those_of_eager": 6,
    "tests/runtime/test_guards.py::test_a_change_of_what_the_trace_read_makes_a_new_program": 2,
    "tests/runtime/test_loss_chunks.py::test_a_stored_plan_decides": 2,
    "tests/runtime/test_loss_chunks.py::test_ten_steps_of_a_script": 2,
    "tests/runtime/test_pipelined.py::test_ranks_compute_together": 3,
    "tests/runtime/test_random.py::test_what_is_drawn_and_not_used_moves_no_mask": 2,
    "tests/runtime/test_residency.py::test_ten_steps_of_a_script": 2,
    "tests/runtime/test_rounding.py::test_a_sure_model_keeps_its_gradients": 4,
    "tests/runtime/test_simulator.py::test_dropout_draws_what_one_device_draws": 2,
    "tests/solver/test_cutting.py::test_a_chain_is_cut_as_dynamic_programming_cuts_it": 5,
    "tests/solver/test_cutting.py::test_a_deep_model_is_cut_within_a_part_in_a_hundred": 3,
    "tests/solver/test_cutting.py::test_no_cuts_are_better": 5,
    "tests/solver/test_promises.py::test_out_of_time_is_never_called_optimal_without_proof": 3,
    "tests/tracer/test_recurrent.py::test_any_plan_computes_what_eager_computes": 2,
    "tests/tracer/test_runs.py::test_a_short_trace_is_the_whole_one": 7,
    "tests/tracer/test_runs.py::test_a_short_trace_trains_as_eager_does": 3,
    "tests/tracer/test_trace.py::test_language_models": 3,
    "tests/zoo/test_autocast.py::test_autocast_to_bfloat16_is_eager_s": 3,
    "tests/zoo/test_calls.py::test_every_sort_of_call": 3,
    "tests/zoo/test_decoders.py::TestDecoders::test_any_plan": 7,
    "tests/zoo/test_decoders.py::TestDecoders::test_any_plan_of_inference": 3,
    "tests/zoo/test_decoders.py::TestDecoders::test_the_plan_chosen": 4,
    "tests/zoo/test_decoders.py::TestDecoders::test_the_plan_chosen_for_inference": 3,
    "tests/zoo/test_decoders.py::test_experts_by_hand": 2,
    "tests/zoo/test_encoders.py::TestEncoders::test_any_plan": 7,
    "tests/zoo/test_encoders.py::TestEncoders::test_any_plan_of_inference": 3,
    "tests/zoo/test_encoders.py::TestEncoders::test_the_plan_chosen": 4,
    "tests/zoo/test_encoders.py::TestEncoders::test_the_plan_chosen_for_inference": 3,
    "tests/zoo/test_images_and_sequences.py::TestImagesAndSequences::test_any_plan": 7,
    "tests/zoo/test_images_and_sequences.py::TestImagesAndSequences::test_any_plan_of_inference": 3,
    "tests/zoo/test_images_and_sequences.py::TestImagesAndSequences::test_the_plan_chosen": 4,
    "tests/zoo/test_images_and_sequences.py::TestImagesAndSequences::"
    "test_the_plan_chosen_for_inference": 3,
    "tests/zoo/test_masks.py::test_masks_that_a_model_wants_its_own_way": 2,
    "tests/zoo/test_masks.py::test_packed_positions": 2,
    "tests/zoo/test_masks.py::test_padding": 2,
    "tests/zoo/test_memory.py::test_an_allocator_rounds_up": 2,
    "tests/zoo/test_memory.py::test_masks_that_are_drawn_again_are_not_held": 2,
    "tests/zoo/test_memory.py::test_what_is_predicted_is_held": 5,
    "tests/zoo/test_memory.py::test_what_is_rounded_is_held_so": 2,
    "tests/zoo/test_microbatches.py::test_any_plan_is_eager": 3,
    "tests/zoo/test_stages.py::test_any_cuts_are_eager": 3,
    "tests/zoo/test_stages.py::test_between_modules_in_every_schedule": 5,
    "tests/zoo/test_two_parts.py::test_nothing_is_under_way_between_the_parts": 3,
    "tests/zoo/test_two_parts.py::test_zero_bubble_is_eager": 3,
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
