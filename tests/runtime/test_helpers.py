"""Digests, shared random numbers and progress."""

from __future__ import annotations

import copy
import io
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.driver.training.progress import StepProgress
from autopar.report import progress as lines
from autopar.runtime.process import origins
from autopar.runtime.process.digests import digest_params, digest_values, param_types
from autopar.runtime.program.random import SharedRandom, draws
from autopar.runtime.replacing import once

CPU = torch.device("cpu")


def test_digests_of_parameters_follow_all_but_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = digest_params(model)
    assert before.startswith("48 numbers, ")
    nn.init.zeros_(model[0].weight)
    assert digest_params(model) == before
    seen = {before}
    model[0].weight.requires_grad_(False)
    seen.add(digest_params(model))
    model[1].weight = model[0].weight
    seen.add(digest_params(model))
    model.double()
    seen.add(digest_params(model))
    assert len(seen) == 4
    assert param_types(model)["0.weight"] == ((4, 4), "float64")


def test_digests_of_values_follow_every_bit() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    y = torch.tensor([True, False])
    same = digest_values([x, 1, y])
    assert digest_values([x.T.contiguous().T, None, y]) == same
    assert digest_values([torch.nextafter(x, x + 1), 1, y]) != same
    assert digest_values([x, 1, ~y]) != same
    assert digest_values([x.bfloat16()]) != digest_values([x.half()])
    assert digest_values([torch.empty(0)]) == digest_values([])


def test_random_numbers_have_a_state_of_their_own() -> None:
    torch.manual_seed(1)
    ours = SharedRandom(CPU)
    state = ours.default()
    expected = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(2)
    outside = torch.rand(3)
    torch.manual_seed(2)
    assert not ours.is_set
    ours.set(state)
    with ours.drawn_from():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), outside)
    with ours.drawn_from():
        second = torch.rand(3)
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def test_random_numbers_need_a_state() -> None:
    with (
        pytest.raises(RuntimeError, match="before the ranks share"),
        SharedRandom(CPU).drawn_from(),
    ):
        pass


@pytest.mark.parametrize(
    ("op", "expected"),
    [(torch.ops.aten.relu.default, False), (torch.ops.aten.rand_like.default, True)],
)
def test_which_graphs_draw(op: Callable[..., Any], expected: bool) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(op, (graph.placeholder("x"),)))
    assert draws(fx.GraphModule(nn.Module(), graph)) is expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("quiet", [True, False])
def test_progress(
    is_terminal: bool,
    quiet: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    screen = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with caplog.at_level(logging.INFO, "autopar"):
        progress = StepProgress(quiet=quiet)
        progress.phase("trace")
        progress.phase("plan")
        progress("solving")
        progress.close("Net on mesh dp=2")
    shown = screen.getvalue()
    if is_terminal and not quiet:
        assert "autopar: solving (0.0 s)" in shown
        assert shown.endswith("autopar: Net on mesh dp=2; trace 0.0 s, plan 0.0 s\n")
    else:
        assert shown == ""
    assert caplog.messages == ([] if quiet else ["Net on mesh dp=2; trace 0.0 s, plan 0.0 s"])


def test_without_a_terminal_long_phases_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    monkeypatch.setattr(lines, "LINE_EVERY_S", 1e-3)
    progress = StepProgress(quiet=False)
    progress.phase("plan")
    while "autopar: 0 s: plan\n" not in screen.getvalue():
        progress("plan")
    progress.close()
    threads = {thread.name for thread in threading.enumerate()}
    assert "autopar progress" not in threads


def test_progress_takes_one_row_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    progress = StepProgress(quiet=False)
    progress.phase("plan")
    progress("solving for mesh dp=8,tp=8, the loss in 128 chunks")
    progress.close()
    rows = screen.getvalue().split("\r\x1b[2K")
    assert "autopar: solving for mesh dp=8" in rows[-2]
    assert max(map(len, rows)) < 40


def test_tensors_that_are_noted_are_saved_as_ever(tmp_path: Path) -> None:
    """And torch can swap their contents."""
    origins.know_swaps()
    mask, other = torch.ones(3), torch.zeros(3)
    leaf = origins.source_of(mask)
    assert isinstance(leaf, origins.Leaf) and leaf.now() is mask
    torch.save(mask, tmp_path / "mask.pt")
    assert torch.load(tmp_path / "mask.pt").equal(mask)
    twin = copy.copy(mask)
    assert isinstance(own := origins.source_of(twin), origins.Leaf) and own.now() is twin
    torch.utils.swap_tensors(mask, other)
    assert leaf.now() is None and other.equal(torch.ones(3))
    again = origins.source_of(mask)
    assert isinstance(again, origins.Leaf) and again.now() is mask
    count = len(origins._handles)
    del mask, other, twin
    assert len(origins._handles) == count - 2


def test_progress_that_fails_wipes_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = StepProgress(quiet=False)
    progress.phase("trace")
    progress.close()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_a_replacement_that_failed_is_not_done_again() -> None:
    calls: list[None] = []

    @once
    def replace() -> None:
        calls.append(None)
        raise ValueError("half done")

    with pytest.raises(ValueError, match="half done"):
        replace()
    replace()
    assert len(calls) == 1
