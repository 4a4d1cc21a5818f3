"""Choices as values: what is written is read again, and what says none is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.choices import Choice, ParamChoice
from autopar.ir.sharding import C, P, R, S, Sharding
from autopar.plans.layout import Move

_options = st.sampled_from(["-", "b", "n", "s.1", "+0", "ring", "exchange.1"])
_choices = st.builds(Choice, st.lists(_options, max_size=4).map(tuple))
_placements = st.sampled_from([R, P, S(0), S(2, 1), C(1)])
_shardings = st.builds(Sharding, st.lists(_placements, max_size=3).map(tuple))


@given(_choices, st.builds(ParamChoice, _shardings, _shardings, st.integers(0, 200)))
def test_what_is_written_is_read_again(choice: Choice, param: ParamChoice) -> None:
    assert Choice.parse(str(choice)) == choice
    assert ParamChoice.parse(str(param)) == param
    move = Move(param.storage, param.for_backward)
    assert Move.parse(str(move)) == move


@pytest.mark.parametrize("text", [",", "b,", ",b", "b,,n", "b, n", " b"])
def test_text_that_is_no_choice(text: str) -> None:
    with pytest.raises(ValueError, match="not a choice"):
        Choice.parse(text)


@pytest.mark.parametrize("text", ["", "[R]", "[R]|", "[R]|R", "[R]|[R]|[R]"])
def test_text_that_is_no_choice_of_a_parameter(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        ParamChoice.parse(text)


def test_axes_and_ways() -> None:
    choice = Choice.parse("b,n,b")
    assert choice.axes_of({"b"}) == (0, 2)
    assert choice.axes_of(()) == ()
    assert choice.num_parts({"b"}, (2, 3, 4)) == 8
    assert Choice().num_parts({"b"}, ()) == 1
