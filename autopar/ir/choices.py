"""What an op can do on a mesh: the choices of its node, and what each means.

On one mesh axis an op either replicates (`-`), shards one of its factors (the factor's name), or
computes on partial inputs (`+i`, the i-th entry of `Node.partial`). A choice is one of these
options per mesh axis. A parameter's choice is its storage, and its sharding for backward.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from autopar.ir.graph import Atom, Factor, FactorType, Graph, Node, Slot, per_graph
from autopar.ir.sharding import C, P, Placement, R, S, Sharding

REPLICATE = "-"


@dataclass(frozen=True, slots=True)
class Choice:
    """What an op does on each mesh axis, in mesh order."""

    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(self.options)

    @staticmethod
    def parse(text: str) -> Choice:
        """The inverse of `str`; ValueError on anything else."""
        options = tuple(text.split(",")) if text else ()
        if not all(option and option == option.strip() for option in options):
            raise ValueError(f"not a choice: {text!r} (for example b,n)")
        return Choice(options)

    def axes_of(self, names: Container[str]) -> tuple[int, ...]:
        """The mesh axes, ascending, on which it does one of `names`."""
        return tuple(axis for axis, option in enumerate(self.options) if option in names)

    def num_parts(self, names: Container[str], sizes: Sequence[int]) -> int:
        """Over how many ranks of a mesh of `sizes` it does one of `names`."""
        return prod(sizes[axis] for axis in self.axes_of(names))


@dataclass(frozen=True, slots=True)
class ParamChoice:
    """The `storage` of the parameters of a class, their sharding from forward to backward, and how
    many of them are in the memory of the device's host."""

    storage: Sharding
    for_backward: Sharding
    num_on_host: int = 0

    def __str__(self) -> str:
        where = f"|{self.num_on_host} on host" if self.num_on_host else ""
        return f"{self.storage}|{self.for_backward}{where}"

    @staticmethod
    def parse(text: str) -> ParamChoice:
        """The inverse of `str`; ValueError on anything else."""
        storage, _, rest = text.partition("|")
        for_backward, bar, on_host = rest.partition("|")
        number = on_host.removesuffix(" on host")
        if bar and not (on_host.endswith(" on host") and number.isdecimal()):
            raise ValueError(
                f"not a choice of a parameter: {text!r} (for example [R]|[R]|2 on host)"
            )
        states = Sharding.parse(storage), Sharding.parse(for_backward)
        return ParamChoice(*states, int(number) if bar else 0)


@dataclass(frozen=True, slots=True)
class Saved:
    """The outputs of an op are saved in `states`, one per output, and not recomputed. They are in
    the host's memory if `offloaded`. Without `states` they are not even saved, since nothing reads
    them."""

    states: tuple[Sharding, ...] = ()
    offloaded: bool = False

    def __str__(self) -> str:
        word = "offloaded" if self.offloaded else "saved"
        return f"{word} {' '.join(map(str, self.states))}" if self.states else "unused"


Decision = Choice | ParamChoice | Sharding | Saved
"""What a node of the graph chooses: for an input or an output its sharding, for an optional copy
(of an op that may be recomputed) what it computes, or that there is no copy."""


def axis_options(node: Node, atoms: Sequence[Atom], size: int) -> tuple[str, ...]:
    """What `node` can do on one axis of `size` ranks, in canonical order."""
    atom_of = {f.name: f.atom for f in node.factors}
    factors = (
        f.name
        for f in node.factors
        if not f.whole
        and all(atoms[atom_of[name]].size % size == 0 for name in f.members or (f.name,))
    )
    return (REPLICATE, *factors, *(f"+{i}" for i in range(len(node.partial))))


def choices(node: Node, atoms: Sequence[Atom], sizes: Sequence[int]) -> tuple[Choice, ...]:
    """Every choice of `node` on axes of `sizes` whose factors divide evenly, in canonical order.

    A joint factor is used on one axis. Another axis then shards only those of its members that are
    computed without exchange: the tokens of a layer of experts, not the experts."""
    candidates: list[Choice] = []
    factors = {f.name: f for f in node.factors}
    cut = {f.name: f.members or (f.name,) for f in node.factors}
    for options in product(*(axis_options(node, atoms, size) for size in sizes)):
        if not _joint_once(factors, options):
            continue
        num_parts: dict[str, int] = {}
        for option, size in zip(options, sizes, strict=True):
            for name in cut.get(option, ()):
                num_parts[name] = num_parts.get(name, 1) * size
        if all(atoms[factors[name].atom].size % n == 0 for name, n in num_parts.items()):
            candidates.append(Choice(options))
    return tuple(candidates)


def _joint_once(factors: Mapping[str, Factor], options: Sequence[str]) -> bool:
    """Whether no exchanged factor is cut twice where it is a member of a joint one, and no two
    joint factors are used."""
    joint = [factors[name] for name in options if name in factors and factors[name].members]
    if len(joint) > 1:
        return False
    bound = {name for f in joint for name in f.members if not _parallel(factors[name])}
    return not bound & set(options)


def _parallel(factor: Factor) -> bool:
    """Whether each rank computes its part of the factor by itself."""
    return not (factor.whole or factor.exchanged)


def shardings(node: Node, choice: Choice) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    """(inputs, outputs): the shardings of all tensor inputs and of all outputs under `choice`.
    ValueError on a choice the node does not have."""
    (sides,) = all_shardings(node, (choice,))
    return sides


def all_shardings(
    node: Node, candidates: Sequence[Choice]
) -> list[tuple[tuple[Sharding, ...], tuple[Sharding, ...]]]:
    """`shardings` of every choice. What an option means is worked out once, since there are many
    choices on three axes."""
    names = {option for choice in candidates for option in choice.options}
    placed = {option: _placements(node, option) for option in names}
    pairs: list[tuple[tuple[Sharding, ...], tuple[Sharding, ...]]] = []
    for choice in candidates:
        per_axis = [placed[option] for option in choice.options]
        if per_axis:
            inputs, outputs = (zip(*sides, strict=True) for sides in zip(*per_axis, strict=True))
            pairs.append((tuple(map(Sharding, inputs)), tuple(map(Sharding, outputs))))
        else:
            none = Sharding(())
            pairs.append(((none,) * len(node.inputs), (none,) * len(node.outputs)))
    return pairs


def _placements(node: Node, option: str) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """The placements of inputs and outputs on one axis under `option`."""
    if option == REPLICATE:
        return (R,) * len(node.inputs), (R,) * len(node.outputs)
    if option.startswith("+"):
        partial = node.partial[int(option[1:])]
        inputs = tuple(P if i in partial else R for i in range(len(node.inputs)))
        return inputs, (P,) * len(node.outputs)
    for factor in node.factors:
        if factor.name == option and not factor.whole:
            absent = R if factor.type is FactorType.PERMUTATION else P
            return tuple(_shard(slot, R) for slot in factor.inputs), tuple(
                _shard(slot, absent) for slot in factor.outputs
            )
    raise ValueError(f"{node.key}: {option!r} is not a choice of {node.op}")


def _shard(slot: Slot | None, absent: Placement) -> Placement:
    return absent if slot is None else S(*slot)


def num_shards(node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Among how many ranks `choice` divides the op's work."""
    return choice.num_parts({f.name for f in node.factors}, sizes)


def joint_axes(node: Node, choice: Choice) -> tuple[int, ...]:
    """The mesh axes on which `choice` uses a joint factor."""
    return choice.axes_of({f.name for f in node.factors if f.members})


def pull_back(graph: Graph, view: Node, sharding: Sharding) -> Sharding | None:
    """The sharding of a view's input that leaves its output in `sharding` without communication;
    None where there is none (a part that must stay whole is sharded, or a dim that the input does
    not have as such is cut into chunks)."""
    by_placement = _pulled(graph)[view.index]
    placements: list[Placement] = []
    for placement in sharding:
        if placement not in by_placement:
            assert placement.kind == "C"
            dim = _same_dim(graph, view, placement.dim)
            by_placement[placement] = None if dim is None else C(dim)
        pulled = by_placement[placement]
        if pulled is None:
            return None
        placements.append(pulled)
    return Sharding(tuple(placements))


@per_graph
def _pulled(graph: Graph) -> dict[int, dict[Placement, Placement | None]]:
    """Per view, its input's placement by its output's: all but chunks."""
    return {
        view.index: {R: R, P: P}
        | {
            S(*factor.outputs[0]): None if factor.whole else _shard(factor.inputs[0], R)
            for factor in reversed(view.factors)
            if factor.outputs[0] is not None
        }
        for view in graph.nodes
        if view.view
    }


def _same_dim(graph: Graph, view: Node, dim: int) -> int | None:
    """The dim of a view's input that is dim `dim` of its output, part by part."""
    slots = [f.inputs[0] for f in view.factors if f.outputs[0] and f.outputs[0][0] == dim]
    source = slots[0][0] if slots and slots[0] else -1
    tensor = graph.input_types(view)[0]
    if source < 0 or tensor.parts[source] != view.outputs[0].parts[dim]:
        return None
    whole = any(f.whole for f in view.factors if f.inputs[0] and f.inputs[0][0] == source)
    return None if whole else source
