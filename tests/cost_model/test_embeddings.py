"""What reads a few rows of a large table is priced by those rows, not by the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Phase

TOKENS, ROWS, WIDTH = 512, 128_256, 4096
H100_BYTES_PER_S = 3.35e12


class Picks(nn.Module):
    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta"))
        self.pick = pick

    def forward(self, at: Tensor) -> Tensor:
        return self.pick(self.table, at).float().square().mean()


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda table, at: nn.functional.embedding(at, table),
    "embedding_bag": lambda table, at: nn.functional.embedding_bag(
        at, table, torch.arange(0, TOKENS, 2, device=at.device), mode="sum"
    ),
    "index": lambda table, at: table[at],
    "index_select": lambda table, at: table.index_select(0, at),
    "gather": lambda table, at: table.gather(0, at[:, None].expand(TOKENS, WIDTH)),
    "take_along_dim": lambda table, at: table.take_along_dim(at[:, None], 0),
    "narrow": lambda table, at: table.narrow(0, 3, TOKENS) * at[:, None],
    "slice": lambda table, at: table[5 : 5 + TOKENS] * at[:, None],
}


@pytest.mark.parametrize("name", PICKS)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_rows_are_priced_and_not_the_table(name: str, backend: str) -> None:
    at = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    plan = autopar.plan(Picks(PICKS[name]), (at,), cluster="1xH100", backend=backend)
    ops = plan.estimates.stages[0].ops.values()
    forward_ns = sum(op.compute_ns for op in ops if op.phase == Phase.FORWARD)
    backward_ns = sum(op.compute_ns for op in ops if op.phase == Phase.BACKWARD)
    table_ns = ROWS * WIDTH * 2 / H100_BYTES_PER_S * 1e9
    assert forward_ns < 60_000
    # The gradient of the table is as large as it, and written.
    assert backward_ns > table_ns


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_lookup_in_a_sharded_vocabulary_reads_no_more_than_it_finds(backend: str) -> None:
    at = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    plan = autopar.plan(
        Picks(PICKS["embedding"]),
        (at,),
        cluster="8xH100",
        mesh="8",
        backend=backend,
        constraints={"pins": {"param:table": "S(0) on dp", "for_backward:table": "S(0) on dp"}},
    )
    (lookup,) = (
        op for key, op in plan.estimates.stages[0].ops.items() if key == ":forward:embedding.0"
    )
    rows_ns = TOKENS * WIDTH * 2 / (0.8 * H100_BYTES_PER_S) * 1e9
    # Eager masks the rows of other ranks by another kernel.
    passes = 4 if backend == "eager" else 2
    assert lookup.compute_ns == pytest.approx(passes * rows_ns + 2400, abs=50)
