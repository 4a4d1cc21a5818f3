"""What passes put into a graph: ops of autopar's own, and the keys of ops that are copies.

`passes` says what each op does, in the file of the pass that writes it.
"""

from __future__ import annotations

from string import ascii_lowercase

from autopar.ir.graph import Factor, Node, Phase, TensorType

MICROBATCH, SHARE = "autopar.microbatch.default", "autopar.share.default"

ACCUMULATE, COLLECT = "autopar.accumulate.default", "autopar.collect.default"


def is_result(node: Node) -> bool:
    """Whether an op puts a result together from microbatches."""
    return node.op in (ACCUMULATE, COLLECT)


def whole_factors(tensor: TensorType) -> tuple[Factor, ...]:
    """The factors of an op whose output is like its input: one for each part."""
    return tuple(
        Factor(ascii_lowercase[k], atom, (slot,), (slot,))
        for k, (slot, atom) in enumerate(tensor.slots())
    )


SEND, RECEIVE = "autopar.send.default", "autopar.receive.default"


def is_end(node: Node) -> bool:
    """Whether an op sends a tensor to another stage, or receives one."""
    return node.op in (SEND, RECEIVE)


ROUND, RESTORE = "autopar.round.default", "autopar.restore.default"

STATE, DRAW = "autopar.random_state.default", "autopar.draw.default"

COUNT = "autopar.count_targets.default"
"""How many targets a loss counts, or the sum of their weights: the last output of the loss itself,
of the targets alone. Its arguments are the targets, the weights of classes and what is ignored."""

LINEAR, LINEAR_BACKWARD = "autopar.linear_nll.default", "autopar.linear_nll_backward.default"

SCORES, SCORES_BACKWARD = "autopar.scores_nll.default", "autopar.scores_nll_backward.default"

CHUNKED = frozenset({LINEAR, LINEAR_BACKWARD, SCORES, SCORES_BACKWARD})

# The keys of ops of backward that recompute what ops of forward made (`passes.recompute`).

COPY, OPTION = "recompute", "maybe recompute"
"""In the key of a copy, these stand where the original's key has the phase."""


def original_key(key: str) -> str:
    """The key of the originals, if ops with `key` are copies, optional or not; else `key`.

    >>> original_key("layers.*.mlp:recompute:silu.0")
    'layers.*.mlp:forward:silu.0'
    """
    module, _, rest = key.partition(":")
    word, _, op = rest.partition(":")
    return f"{module}:{Phase.FORWARD.value}:{op}" if word in (COPY, OPTION) else key


def option_key(key: str) -> str:
    """The key of the optional copies of ops that have `key`."""
    return with_word(key, OPTION)


def is_copy(node: Node) -> bool:
    """Whether an op recomputes an activation."""
    return f":{COPY}:" in node.key


def is_optional(node: Node) -> bool:
    """Whether an op is a copy that may be left out, where what it makes is saved."""
    return f":{OPTION}:" in node.key


def with_word(key: str, word: str) -> str:
    """The key of a forward op with `word` for the phase."""
    return key.replace(f":{Phase.FORWARD.value}:", f":{word}:", 1)
