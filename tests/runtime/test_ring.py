"""Three real processes over gloo, that share attention along the sequence."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.codegen.test_attention_forms import SEQ
from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


def test_processes_that_share_attention_compute_what_one_does() -> None:
    """Of one process's scores under a causal mask, 24 rows of them, each of three computes a third
    in zig-zag order. One after the other, the last of them computes 5/9."""
    ranks = cast("list[Any]", spawn("tests.runtime.ring_workers.three", 3))
    for rank in ranks:
        assert all(off < 1e-9 for off, _ in rank.values())
    whole, shard = SEQ * (SEQ + 1) // 2, SEQ // 3
    before = [k * shard * shard + shard * (shard + 1) // 2 for k in range(3)]
    assert sum(before) == whole
    for form, shares in {
        "ring, full": [SEQ * shard] * 3,
        "ring, causal": before,
        "gathered, causal": before,
        "ring, zig-zag, causal": [whole // 3] * 3,
        "gathered, zig-zag, causal": [whole // 3] * 3,
    }.items():
        assert [rank[form][1] for rank in ranks] == [[n, n] for n in shares]
