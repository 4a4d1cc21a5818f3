"""What symbols of unbound graphs are on each rank."""

from __future__ import annotations

from autopar.runtime.program.symbols import on_rank, permute

WAYS, LENGTH = 3, 4


def test_each_rank_is_passed_what_the_one_before_it_had() -> None:
    """What one gets is what the other gives."""
    found = [on_rank(permute, (LENGTH, WAYS, "ring"), {"ring": k}) for k in range(WAYS)]
    for here, (_, (gets, gives, axis)) in enumerate(found):
        before, after = (here - 1) % WAYS, (here + 1) % WAYS
        assert gets == [LENGTH * (peer == before) for peer in range(WAYS)]
        assert gives == [LENGTH * (peer == after) for peer in range(WAYS)]
        assert axis == "ring"
