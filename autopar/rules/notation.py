"""The notation of sharding rules: one line per op, in the manner of einsum.

`"m k, k n -> m n"` names the dims of the tensor inputs and of the outputs. A letter that all
outputs have passes through; one that some output lacks is reduced: sharding it leaves that output
partial. `d!` needs replication. The ranks that share `d@` pass data among themselves while they
compute (a permutation, see `intra_op`); those that share `v#` must know which part of it they have;
a letter may be both, `v@#`. `(b s)` is one dim made of two, outermost first. `1` is a dim of size
one that stands for nothing. `_` on its own is a tensor of no dims (a scalar). A rule speaks of one
mesh axis; `choices` makes the product over axes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.ir.graph import FactorType

Dim = tuple[str, ...]
"""The letters of a dim, outermost first; empty for a dim of size 1."""

Dims = tuple[Dim, ...]
"""The dims of a tensor."""

_TOKEN = re.compile(r"\(|\)|[A-Za-z][A-Za-z0-9_]*(?:[!@]?#?)|1|_")


@dataclass(frozen=True, slots=True)
class Rule:
    """What an op does with the dims of its tensors. `sizes` gives the size of each letter that
    stands in a group; others take the size of their dim. See `graph.Node` for the flags;
    `joint` names ways to shard several letters on one axis at once: ("ring", ("s", "t"))."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    permuted: frozenset[str] = frozenset()
    positional: frozenset[str] = frozenset()
    joint: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[tuple[int, ...], ...] = ()
    mean: bool = False
    view: bool = False
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(self._dims, t)) for t in (self.inputs, self.outputs))
        return f"{inputs} -> {outputs}"

    def _dims(self, dims: Dims) -> str:
        def letters(dim: Dim) -> str:
            marked = [a + self._mark(a) for a in dim]
            return "1" if not marked else marked[0] if len(marked) == 1 else f"({' '.join(marked)})"

        return " ".join(map(letters, dims)) or "_"

    def _mark(self, letter: str) -> str:
        marked = {"!": self.whole, "@": self.permuted, "#": self.positional}
        return "".join(mark for mark, letters in marked.items() if letter in letters)

    @property
    def exchanged(self) -> frozenset[str]:
        """The letters whose ranks know one another."""
        return self.permuted | self.positional

    def type_of(self, letter: str) -> FactorType:
        if letter in self.whole:
            return FactorType.NEEDS_REPLICATION
        if letter in self.permuted:
            return FactorType.PERMUTATION
        everywhere = all(any(letter in dim for dim in dims) for dims in self.outputs)
        return FactorType.PASS_THROUGH if everywhere else FactorType.REDUCTION

    @property
    def letters(self) -> tuple[str, ...]:
        """Every letter, in order of appearance."""
        found = dict.fromkeys(a for dims in (*self.inputs, *self.outputs) for d in dims for a in d)
        return tuple(found)


def parse_rule(text: str) -> Rule:
    """`Rule` from its notation; ValueError, naming the place, on anything malformed.

    >>> str(parse_rule("m k, k n -> m n"))
    'm k, k n -> m n'
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"rule {text!r} has no '->'")
    marked: dict[str, set[str]] = {"!": set(), "@": set(), "#": set()}
    inputs = _parse_tensors(left, marked, text) if left.strip() else ()
    outputs = _parse_tensors(right, marked, text)
    return Rule(
        inputs, outputs, frozenset(marked["!"]), frozenset(marked["@"]), frozenset(marked["#"])
    )


def _parse_tensors(side: str, marked: dict[str, set[str]], text: str) -> tuple[Dims, ...]:
    return tuple(_parse_dims(tensor, marked, text) for tensor in side.split(","))


def _parse_dims(tensor: str, marked: dict[str, set[str]], text: str) -> Dims:
    if not tensor.strip():
        raise ValueError(f"rule {text!r} has an empty tensor (write _ for a scalar)")
    if _TOKEN.sub("", tensor).strip():
        raise ValueError(f"rule {text!r}: cannot read {_TOKEN.sub('', tensor).strip()!r}")
    dims: list[Dim] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(tensor):
        if token == "(":
            if group is not None:
                raise ValueError(f"rule {text!r}: groups do not nest")
            group = []
        elif token == ")":
            if group is None:
                raise ValueError(f"rule {text!r}: ')' without '('")
            dims.append(tuple(group))
            group = None
        elif token == "1":
            dims.append(())
        elif token != "_":
            letter = token.rstrip("!@#")
            for mark in token.removeprefix(letter):
                marked[mark].add(letter)
            if group is None:
                dims.append((letter,))
            else:
                group.append(letter)
    if group is not None:
        raise ValueError(f"rule {text!r}: '(' without ')'")
    return tuple(dims)
