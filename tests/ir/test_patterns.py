"""Texts that stand for sets of names."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.patterns import MAX_NAMES, compress, expand

parts = st.sampled_from(["0", "1", "2", "3", "10", "03", "w", "{0-1}", "{", "\\", "\\{", ""])
names = st.lists(parts, min_size=1, max_size=4).map(".".join)


@given(st.lists(names, unique=True, max_size=12), st.randoms())
def test_expanding_gives_the_names_back(found: list[str], random: Random) -> None:
    texts = compress(found)
    assert sorted(name for text in texts for name in expand(text)) == sorted(found)
    random.shuffle(found)
    assert compress(found) == texts


@pytest.mark.parametrize(
    ("found", "texts"),
    [
        ([f"layers.{i}.w" for i in range(80)], ("layers.{0-79}.w",)),
        (["h.0.w", "h.1.w", "h.3.w"], ("h.{0-1,3}.w",)),
        ([f"h.{i}.e.{j}.w" for i in range(4) for j in range(8)], ("h.{0-3}.e.{0-7}.w",)),
        (["h.0.e.1", "h.1.e.1", "h.1.e.2"], ("h.0.e.1", "h.1.e.{1-2}")),
        (["w", "a.03"], ("a.03", "w")),
        (["a.{0-1}.w"], ("a.\\{0-1}.w",)),
    ],
)
def test_texts(found: list[str], texts: tuple[str, ...]) -> None:
    assert compress(found) == texts


@pytest.mark.parametrize(
    "text", ["{0-1", "{}", "{1-0}", "{a-b}", "{0-}", "{00}", "{0-99999}.{0-99999}", "{0-999999999}"]
)
def test_malformed_texts(text: str) -> None:
    with pytest.raises(ValueError):
        expand(text)


def test_many_names_are_refused_before_they_are_made() -> None:
    assert len(expand(f"{{0-{MAX_NAMES - 1}}}")) == MAX_NAMES
    with pytest.raises(ValueError, match="more than"):
        expand(f"{{0-{MAX_NAMES}}}")
