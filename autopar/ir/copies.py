"""The keys of ops of backward that make again what ops of forward made (`again`)."""

from __future__ import annotations

from autopar.ir.graph import Node, Phase

COPY, OPTION = "again", "maybe again"
"""Stand in the key of a copy where that of its original has the phase."""


def original_key(key: str) -> str:
    """The key of the ops of which those with `key` are copies, optional or not; `key` if of none.

    >>> original_key("layers.*.mlp:again:silu.0")
    'layers.*.mlp:forward:silu.0'
    """
    module, _, rest = key.partition(":")
    word, _, op = rest.partition(":")
    return f"{module}:{Phase.FORWARD.value}:{op}" if word in (COPY, OPTION) else key


def option_key(key: str) -> str:
    """The key of the optional copies of ops that have `key`."""
    return with_word(key, OPTION)


def is_copy(node: Node) -> bool:
    """Whether an op makes something again."""
    return f":{COPY}:" in node.key


def is_optional(node: Node) -> bool:
    """Whether an op is a copy that may be left out, where what it makes is saved."""
    return f":{OPTION}:" in node.key


def with_word(key: str, word: str) -> str:
    """The key of a forward op with `word` for the phase."""
    return key.replace(f":{Phase.FORWARD.value}:", f":{word}:", 1)
