"""The notation of sharding rules, one line per op in the manner of einsum, and calls of ops.

`"m k, k n -> m n"` names the dims of the tensor inputs and of the outputs. A letter that all
outputs have passes through; one that some output lacks is reduced: sharding it leaves that output
partial. `d!` needs replication. The ranks that share `d@` exchange data while they compute (a
permutation, see `work`); those that share `v#` must know which part of it they have; a letter may
be both, `v@#`. `(b s)` is one dim made of two, outermost first. `1` is a dim of size 1 without a
letter. `_` on its own is a tensor of no dims (a scalar). A rule is for one mesh axis; `choices`
combines axes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from autopar.ir.graph import Arg, FactorType, Ref, itemsize

Dim = tuple[str, ...]
"""The letters of a dim, outermost first; empty for a dim of size 1."""

Dims = tuple[Dim, ...]
"""The dims of a tensor."""

_TOKEN = re.compile(r"\(|\)|[A-Za-z][A-Za-z0-9_]*(?:[!@]?#?)|1|_")


@dataclass(frozen=True, slots=True)
class Rule:
    """What an op does with the dims of its tensors. `sizes` gives the size of each letter in a
    group; others take the size of their dim. See `graph.Node` for the flags. `joint` names letters
    that can be sharded on one axis at once: ("ring", ("s", "t"))."""

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
        """The letters whose ranks exchange data or know their position."""
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
        tensors = (*self.inputs, *self.outputs)
        return tuple(dict.fromkeys(a for dims in tensors for dim in dims for a in dim))


def parse_rule(text: str) -> Rule:
    """`Rule` from its notation; ValueError, naming the place, on anything malformed.

    >>> str(parse_rule("m k, k n -> m n"))
    'm k, k n -> m n'
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"rule {text!r} has no '->'")
    marked: dict[str, set[str]] = {"!": set(), "@": set(), "#": set()}
    inputs, outputs = (
        tuple(_parse_dims(tensor, marked, text) for tensor in tensors)
        for tensors in (left.split(",") if left.strip() else (), right.split(","))
    )
    return Rule(
        inputs, outputs, frozenset(marked["!"]), frozenset(marked["@"]), frozenset(marked["#"])
    )


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


# A call of an op as a rule sees it, and the helpers of rule functions.

_BROADCAST: Dim = ()


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape and dtype (as torch names it, "float32") of a tensor."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `op` on tensors of known shapes.

    `args` and `kwargs` are those of `graph.Node`, but that a tensor is `Ref(k)`: the k-th of
    `inputs`, which lists tensor arguments in order of appearance in `args`, then `kwargs`.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]

    def arg(self, position: int, name: str = "", default: Arg = None) -> Arg:
        """Argument `position`, or keyword `name`, or `default`."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def integer(self, position: int, name: str, default: int = 0) -> int:
        """An integer argument; None stands for `default`."""
        value = self.arg(position, name, default)
        return default if value is None else cast(int, value)

    def integers(self, position: int, name: str) -> tuple[int, ...] | None:
        """An argument that is a list of integers, or one; None where there is none."""
        value = self.arg(position, name)
        if value is None:
            return None
        return cast("tuple[int, ...]", value) if isinstance(value, tuple) else (cast(int, value),)

    def shape(self, arg: Arg) -> tuple[int, ...]:
        """The shape of a tensor argument; of a number, ()."""
        return self.inputs[arg.node].shape if isinstance(arg, Ref) else ()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all tensor inputs."""
        return tuple(i.shape for i in self.inputs)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return self.outputs[0].shape


RuleFunction = Callable[[Call], "Rule | None"]


def rule(
    inputs: Iterable[Sequence[Dim]],
    outputs: Iterable[Sequence[Dim]],
    *,
    whole: Iterable[str] = (),
    permuted: Iterable[str] = (),
    positional: Iterable[str] = (),
    joint: Iterable[tuple[str, tuple[str, ...]]] = (),
    partial: Iterable[tuple[int, ...]] = (),
    mean: bool = False,
    view: bool = False,
    sizes: dict[str, int] | None = None,
) -> Rule:
    """The `Rule` of these lists."""
    return Rule(
        tuple(map(tuple, inputs)),
        tuple(map(tuple, outputs)),
        frozenset(whole),
        frozenset(permuted),
        frozenset(positional),
        tuple(joint),
        tuple(partial),
        mean,
        view,
        tuple(sorted((sizes or {}).items())),
    )


def letters(count: int, prefix: str = "d") -> tuple[str, ...]:
    """`count` letters: d0, d1, ..."""
    return tuple(f"{prefix}{i}" for i in range(count))


def singles(names: Iterable[str]) -> Dims:
    """Dims of one letter each."""
    return tuple((name,) for name in names)


def aligned(shape: Sequence[int], out: Sequence[int], names: Sequence[str]) -> Dims:
    """Dims of a tensor of `shape` that is broadcast to `out`, whose dims are `names`."""
    lead = len(out) - len(shape)
    return tuple(
        (names[lead + d],) if size == out[lead + d] else _BROADCAST for d, size in enumerate(shape)
    )


def dim_of(dim: int, rank: int) -> int:
    """A dim counted from the front; 0 for any dim of a scalar."""
    return dim % rank if rank else 0


def place(call: Call, dims: Mapping[int, Dims]) -> list[Dims]:
    """The inputs of a rule from the dims of each argument, by position; arguments that are not
    tensors are left out."""
    pairs = ((call.arg(position), of_arg) for position, of_arg in dims.items())
    by_input = {arg.node: of_arg for arg, of_arg in pairs if isinstance(arg, Ref)}
    return [by_input[k] for k in range(len(call.inputs))]


def linear(call: Call, *sets: Sequence[Arg]) -> tuple[tuple[int, ...], ...]:
    """`Rule.partial` from sets of arguments in which the op is jointly linear. A number takes part
    only as 0: any other makes the op affine. Booleans have no sum; a cast to integers rounds."""
    partial: list[tuple[int, ...]] = []
    for members in sets:
        refs = tuple(sorted(m.node for m in members if isinstance(m, Ref)))
        zeros = all(isinstance(m, Ref) or (isinstance(m, int | float) and m == 0) for m in members)
        if refs and zeros and all(_sums(call, k) for k in refs):
            partial.append(refs)
    return tuple(dict.fromkeys(partial))


def linear_in(call: Call, joint: str) -> tuple[tuple[int, ...], ...]:
    """`linear` from the positions of arguments: "01" is add, "0 1" is mul."""
    return linear(call, *([call.arg(int(p)) for p in members] for members in joint.split()))


def _sums(call: Call, position: int) -> bool:
    source = call.inputs[position].dtype
    return source != "bool" and all(
        o.dtype != "bool" and (is_floating(o.dtype) or not is_floating(source))
        for o in call.outputs
    )


def is_floating(dtype: str) -> bool:
    """Whether a dtype holds fractions (complex ones do)."""
    return dtype.startswith(("float", "bfloat", "complex"))


def all_whole(call: Call) -> Rule:
    """The rule of an op that runs replicated: none of its dims can be sharded."""
    inputs = [letters(len(i.shape), f"i{k}_") for k, i in enumerate(call.inputs)]
    outputs = [letters(len(o.shape), f"o{k}_") for k, o in enumerate(call.outputs)]
    return rule(
        map(singles, inputs),
        map(singles, outputs),
        whole=(a for names in (*inputs, *outputs) for a in names),
    )


def backward(
    call: Call,
    inputs: Mapping[int, Dims],
    outputs: Sequence[Dims],
    mask_at: int,
    *,
    whole: Iterable[str] = (),
    permuted: Iterable[str] = (),
    sizes: dict[str, int] | None = None,
) -> Rule:
    """The rule of a backward, which is linear in its first argument, from `inputs` as of `place`.
    An output that the mask at `mask_at` leaves out is whole, whatever its shape, or not listed at
    all."""
    mask = cast("tuple[bool, ...]", call.arg(mask_at, "output_mask"))
    out_dims = [dims for dims, want in zip(outputs, mask, strict=True) if want]
    unwanted: dict[int, tuple[str, ...]] = {}
    if len(call.outputs) == len(outputs):
        pairs = enumerate(zip(call.outputs, mask, strict=True))
        unwanted = {k: letters(len(x.shape), f"x{k}_") for k, (x, want) in pairs if not want}
        out_dims = [singles(unwanted[k]) if k in unwanted else x for k, x in enumerate(outputs)]
    return rule(
        place(call, inputs),
        out_dims,
        whole=(*whole, *(a for names in unwanted.values() for a in names)),
        permuted=permuted,
        partial=linear(call, (call.arg(0),)),
        sizes=sizes,
    )
