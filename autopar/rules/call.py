"""A call of an op as a rule sees it, and the few words in which rule functions are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from autopar.ir.graph import Arg, Ref, itemsize
from autopar.rules.notation import Dim, Dims, Rule

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
    """`Rule` from lists."""
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
    given = ((call.arg(position), found) for position, found in dims.items())
    found = {arg.node: dims for arg, dims in given if isinstance(arg, Ref)}
    return [found[k] for k in range(len(call.inputs))]


def linear(call: Call, *sets: Sequence[Arg]) -> tuple[tuple[int, ...], ...]:
    """`Rule.partial` from sets of arguments in which the op is jointly linear. A number takes part
    only as 0: any other makes the op affine. Booleans have no sum; a cast to integers rounds."""
    found: list[tuple[int, ...]] = []
    for members in sets:
        refs = tuple(sorted(m.node for m in members if isinstance(m, Ref)))
        zeros = all(isinstance(m, Ref) or (isinstance(m, int | float) and m == 0) for m in members)
        if refs and zeros and all(_sums(call, k) for k in refs):
            found.append(refs)
    return tuple(dict.fromkeys(found))


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
    """The op runs replicated: nothing of it can be sharded."""
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
    An output that the mask at `mask_at` does not want is whole, whatever shape stands for it, or is
    not listed at all."""
    mask = cast("tuple[bool, ...]", call.arg(mask_at, "output_mask"))
    found = [dims for dims, want in zip(outputs, mask, strict=True) if want]
    unwanted: list[str] = []
    if len(call.outputs) == len(outputs):
        found = list(outputs)
        for k, (output, want) in enumerate(zip(call.outputs, mask, strict=True)):
            if not want:
                names = letters(len(output.shape), f"x{k}_")
                found[k] = singles(names)
                unwanted += names
    return rule(
        place(call, inputs),
        found,
        whole=(*whole, *unwanted),
        permuted=permuted,
        partial=linear(call, (call.arg(0),)),
        sizes=sizes,
    )
