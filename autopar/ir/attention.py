"""What the torch-free parts must know of the attention ops, `autopar::sdpa` and its backward.

Queries may be cut into pieces of the sequence, over one mesh axis or several (letter `s`), with all
keys on every rank; or queries, keys and values together over one axis (`RING`), whose ranks then
pass keys and values on from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.choices import Choice
from autopar.ir.graph import Node

FORWARD = "autopar.sdpa.default"
BACKWARD = "autopar.sdpa_backward.default"

QUERIES = "s"
RING = "ring"

_CAUSAL_AT = {FORWARD: 4, BACKWARD: 7}


def is_causal(node: Node) -> bool:
    """Whether a row s of an attention op attends to columns 0..s alone."""
    return bool(node.args[_CAUSAL_AT[node.op]])


def query_ways(choice: Choice, sizes: Sequence[int]) -> int:
    """Into how many pieces `choice` cuts the queries."""
    cut = {option for option in choice.options if option.partition(".")[0] in (QUERIES, RING)}
    return choice.ways(cut, sizes)


def last_share(queries: int, keys: int, ways: int) -> float:
    """The part of all causal scores that the last of `ways` pieces of the rows has, which has most:
    (2 ways - 1) / ways^2 where there are as many keys as queries."""
    first = queries - queries // ways
    return (_seen(queries, keys) - _seen(first, keys)) / _seen(queries, keys)


def _seen(rows: int, keys: int) -> int:
    """How many scores the first `rows` rows have: row s has s + 1, and no more than there are."""
    short = min(rows, keys)
    return short * (short + 1) // 2 + (rows - short) * keys
