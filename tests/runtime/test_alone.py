"""What one rank does alone is exact, or an error with its line, and never a wait without end."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.runtime import alone_workers
from tests.runtime.spawn import spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("strategy", "size", "alone"), [("fsdp", 2, 0), ("fsdp", 3, 2), ("ddp", 2, 1)]
)
def test_what_one_rank_logs_is_that_of_one_process(strategy: str, size: int, alone: int) -> None:
    env = {"STRATEGY": strategy, "ALONE": str(alone)}
    ranks = spawn("tests.runtime.alone_workers.logs", size, env=env, timeout_s=100)
    seen = ranks[alone]
    assert isinstance(seen, dict) and len(seen) > 100
    assert max(seen.values()) < 1e-5, {name: x for name, x in seen.items() if x >= 1e-5}


def test_what_cannot_be_done_alone_is_told_with_its_line() -> None:
    ranks = spawn("tests.runtime.alone_workers.refused", 2, timeout_s=100)
    first, second = ranks
    assert isinstance(first, dict) and isinstance(second, dict)
    line = r"by rank 0 alone, at alone_workers\.py:\d+ in "
    others = r".* of which other ranks hold shards"
    for name, said in {
        "of before": rf"aten\.linalg_vector_norm\.default is called {line}tried, for a{others}",
        "gradient after the step": rf"aten\.linalg_vector_norm\.default is called {line}tried, for",
        "drawn": rf"aten\.normal_\.default is called {line}<lambda>, and would change or draw",
        "drawn like it": rf"aten\.randn_like\.default is called {line}<lambda>, and would change",
        "part": rf"aten\.fill_\.Tensor is called {line}part, and would change",
        "masked": rf"aten\.masked_fill_\.Scalar is called {line}<lambda>, and would change",
        "data": rf"an assignment to \.data or \.grad is called {line}assigned, and would change",
        "backward": rf"backward is called {line}<lambda>, and aten\.mul\.Tensor in it needs",
        "collective": rf"c10d\.allreduce_\.default is called {line}<lambda>, and would change",
    }.items():
        assert re.match(f"AutoparError: {said}", first[name]), first[name]
    plain = alone_workers.Model()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        plain(torch.ones(6, 8))[0].backward()
        optimizer.step()
    assert float(first["goes on"]) == pytest.approx(
        float(plain.first.weight.detach().sum()), rel=1e-5
    )
    assert first["step"] == second["step"] and first["in place"] == second["in place"]
    assert "a call of a compiled model, at alone_workers.py" in first["step"]
    assert "a step of an optimizer, at alone_workers.py" in first["step"]
    assert "differs from rank 0 in changes of parameters in place: 0 and 1" in first["in place"]


def test_what_the_others_have_finished_with_can_be_read() -> None:
    wanted = [float(x) for x in (lambda m: (m.first.weight.norm(), m.second.bias.sum()))(_plain())]
    assert spawn("tests.runtime.alone_workers.at_the_end", 2)[0] == pytest.approx(wanted)
    for rank in spawn("tests.runtime.alone_workers.without_groups", 2):
        assert rank == pytest.approx(wanted)


def test_copies_can_be_read_until_ranks_meet() -> None:
    plain = alone_workers.Model()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    wanted: list[float] = []
    begun = plain.first.weight.norm().item()
    for _ in range(3):
        plain(torch.ones(6, 8))[0].backward()
        wanted += [plain.first.weight.norm().item(), plain.second.bias.sum().item()]
        optimizer.step()
        optimizer.zero_grad()
    first, second = spawn("tests.runtime.alone_workers.copied", 2, timeout_s=100)
    assert first == pytest.approx([*wanted, begun, 0], rel=1e-5) and second == [0]


def test_ranks_that_waited_in_a_collective_read_together_after_it() -> None:
    first, second = spawn("tests.runtime.alone_workers.meets", 2, timeout_s=100)
    assert first == [2, 2] and second == [2, 0]


def _plain() -> alone_workers.Model:
    return alone_workers.Model().requires_grad_(False)


def test_ranks_read_shares_from_one_line() -> None:
    ranks: list[Any] = spawn("tests.runtime.alone_workers.shares", 3)
    assert sum(map(len, ranks)) == 4
    assert max(error for rank in ranks for error in rank.values()) < 1e-6


def test_gradients_are_read_as_autograd_has_added_to_them() -> None:
    seen: Any = spawn("tests.runtime.alone_workers.added", 2, timeout_s=100)[0]
    assert len(seen) == 3 and max(seen) < 1e-6
    told = spawn("tests.runtime.alone_workers.ahead", 2, timeout_s=100)[0]
    assert isinstance(told, str)
    assert re.match(r"rank 0 reads what rank 1 has: it is at change \d+\.\d+ of gradient of", told)


def test_a_thread_reads_beside_training() -> None:
    ranks: list[Any] = spawn("tests.runtime.alone_workers.threads", 2)
    assert max(ranks) < 1e-6


def test_a_place_that_is_trusted_and_is_not_for_all_is_told() -> None:
    (_, told) = spawn("tests.runtime.alone_workers.trusted", 2, timeout_s=60, lost=(0,))
    assert isinstance(told, str) and re.match(
        r"RankError: rank 1 waited in the start of call 2, .* and rank 0 waits in \w+ "
        r"\(at alone_workers\.py:\d+ in trusted\)",
        told,
    ), told
