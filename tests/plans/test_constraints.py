"""Constraints as text: what can be written, what is told of what cannot, and what conflicts."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.driver.search.infeasible_subset import MAX_PROBES, smallest_infeasible_subset
from autopar.errors import ConstraintError, OldNameWarning
from autopar.ir.sharding import C, R, S
from autopar.plans.requests.constraints import (
    Constraint,
    Demand,
    PlacementSpec,
    check_strategy,
    parse_forbidden,
    parse_pins,
)
from autopar.plans.requests.matching import resolve_constraints
from tests.graphs import linear_step

AXES = st.sampled_from(["*", "dp", "tp"])
DEMANDS = st.builds(
    Demand, st.sampled_from([R, "S", S(0), S(1, 1), C(2), "batch"]), AXES, st.booleans()
)


@given(st.lists(DEMANDS, min_size=1, max_size=3), st.booleans())
def test_what_is_printed_can_be_read(demands: list[Demand[str]], complete: bool) -> None:
    wanted = PlacementSpec((tuple(demands),), complete)
    assert PlacementSpec.parse(str(wanted)) == wanted


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a.*.w=S(0) on tp", "a.*.w = S(0) on tp"),
        ("param:w = [S(1) on tp, S(0) on dp]", "param:w = [S(1) on tp, S(0) on dp]"),
        ("w=[R, S(0)]", "w = [R, S(0)]"),
        ("w=R", "w = replicated"),
        ("w=replicated", "w = replicated"),
        ("matmul:* = out on tp or in on tp", "matmul:* = out on tp or in on tp"),
    ],
)
def test_a_pin_is_read(text: str, printed: str) -> None:
    (found,) = parse_pins([text])
    assert str(found) == printed
    assert str(Constraint.parse(printed)) == printed
    assert found.origin.startswith("pin ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("w", "'w' is not PATTERN=SHARDING .for example"),
        ("w=", "is not PATTERN=SHARDING"),
        ("w=S(0)", r"'S\(0\)' is not a placement on an axis"),
        ("w=S(0) on", "is not a placement on an axis"),
        ("w=Q on tp", "not a placement: 'Q'"),
        ("w=S(-1) on tp", r"not a placement: 'S\(-1\)'"),
        ("w=P on tp", "it cannot be P on tp"),
        ("w=in on tp", "it cannot be in on tp"),
        ("param:w=batch on tp", "param cannot be batch on tp"),
        ("ops:w=S(0) on tp", r"ops cannot be S\(0\) on tp"),
        ("w=R on tp or S on tp", "it cannot be one of several"),
        ("weight:w=R", "'weight' is not a kind of thing to constrain: param, for_backward, input"),
    ],
)
def test_a_pin_that_means_nothing_is_an_error(text: str, words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        parse_pins([text])


def test_pins_and_forbidden_axes_are_lists_or_mappings() -> None:
    assert parse_pins({"w": "R"}) == parse_pins(["w=R"])
    assert parse_forbidden({"tp": ["a", "b"], "dp": "c"}) == parse_forbidden(
        ["tp:a", "tp:b", "dp:c"]
    )
    assert [str(c) for c in parse_forbidden(["tp:param:a"])] == ["param:a = not S on tp"]
    for wrong in ("tp", "tp:", ":a", "1:a", "tp:what:a"):
        with pytest.raises(ConstraintError, match=f"forbid {wrong}"):
            parse_forbidden([wrong])
    for parse, line in ((parse_pins, "w=R"), (parse_forbidden, "tp:a")):
        assert parse(line) == parse([line])
        assert parse(None) == ()
        for wrong in (3, [("w", "R")]):
            with pytest.raises(ConstraintError, match="is no text; give texts, or a mapping of"):
                parse(wrong)  # pyright: ignore[reportArgumentType]


def test_an_unknown_strategy_is_an_error() -> None:
    assert check_strategy("FSDP") == "fsdp"
    assert check_strategy(None) == check_strategy("auto") == ""
    with pytest.raises(ConstraintError, match="no strategy 'zero3': choose ddp, fsdp, megatron"):
        check_strategy("zero3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("w9=R", "hand-made has no parameter or module w9; close to it are w1, w0"),
        ("param:nothing=R", "has no parameter nothing; there are w0, w1"),
        ("input:y=S(0) on tp", "has no input y; there are x"),
        ("output:loss=R", "has no output loss; there are y"),
        ("module:mlp=R", "has no module mlp; there are"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(text: str, words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        resolve_constraints(linear_step(8, 8, 8, layers=2), parse_pins([text]))


def test_inputs_and_outputs_have_names() -> None:
    graph = linear_step(8, 8, 8)
    pins = parse_pins(["input:ids=S(0) on tp", "output:log*=R", "input:x=R"])
    settled = resolve_constraints(graph, pins, {"input:x": "ids", "output:y": "logits"})
    assert [(c.kind, c.pattern) for c in settled] == [
        ("input", "x"),
        ("output", "y"),
        ("input", "x"),
    ]
    assert resolve_constraints(graph, settled) == settled


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.just(n), st.sets(st.frozensets(st.integers(0, n - 1)), min_size=1, max_size=4)
        )
    )
)
def test_the_conflict_that_is_named_is_the_smallest(
    drawn: tuple[int, set[frozenset[int]]],
) -> None:
    """Whatever contains one of some sets is impossible."""
    count, clashes = drawn
    limits = [str(i) for i in range(count)]

    def possible(kept: Collection[str]) -> bool:
        return not any({str(i) for i in clash} <= set(kept) for clash in clashes)

    found = smallest_infeasible_subset(limits, possible)
    assert not possible(found)
    assert all(possible(set(found) - {limit}) for limit in found)
    sizes = (len(s) for n in range(count + 1) for s in combinations(limits, n) if not possible(s))
    assert len(found) == min(sizes)


def test_of_many_limits_a_set_is_named_that_cannot_be_made_smaller() -> None:
    """There are more sets than are tried."""
    limits = [f"{i:02}" for i in range(40)]
    clashes = [{"03", "11", "17", "29"}, {"03", "22", "30", "35"}]
    tried: list[Collection[str]] = []

    def possible(kept: Collection[str]) -> bool:
        tried.append(kept)
        return not any(clash <= set(kept) for clash in clashes)

    assert set(smallest_infeasible_subset(limits, possible)) in clashes
    assert len(tried) <= 40 + MAX_PROBES


@pytest.mark.parametrize(
    ("before", "now"),
    [("kept:*.w=R", "for_backward:*.w=R"), ("product:mlp=batch on tp", "matmul:mlp=batch on tp")],
)
def test_kinds_of_the_last_release_are_those_of_now_with_a_warning(before: str, now: str) -> None:
    with pytest.warns(OldNameWarning, match=f"write {now.partition('=')[0]}".replace("*", r"\*")):
        found = Constraint.parse(before, "a pin")
    assert found == Constraint.parse(now, "a pin")
