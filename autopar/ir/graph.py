"""The typed, torch-free snapshot of a joint forward and backward graph.

`tracer` makes it, 1:1 with the FX nodes of the joint graph it came from (same names, same order);
the items of FX's single output node follow as one `Node` each. Everything between tracing and code
generation reads this graph alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from math import prod
from typing import Literal, TypeVar
from weakref import ReferenceType

from autopar.ir.sharding import InputSharding

Slot = tuple[int, int]
"""(dim, part): one atom of one dim of a tensor."""

_ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "complex32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes per element of a dtype named as torch names it ("bfloat16"); KeyError if unknown."""
    return _ITEMSIZE[dtype]


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of the model's dims that is never split further: batch, sequence, heads, ...

    `in_param` says that some parameter has it; it decides how two mesh axes on it nest
    (`redistribute.nesting`).
    """

    size: int
    name: str
    in_param: bool


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype name, global shape, and per dim the indices into `Graph.atoms` of its parts,
    outermost first. The sizes of a dim's parts multiply to its size; a dim of size 1 has none."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)

    def slots(self) -> Iterator[tuple[Slot, int]]:
        """((dim, part), atom) of every part, in order."""
        for dim, parts in enumerate(self.parts):
            for part, atom in enumerate(parts):
                yield (dim, part), atom


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Output `output` of node `node`."""

    node: int
    output: int = 0


Arg = Ref | int | float | bool | str | None | tuple["Arg", ...]
"""An argument: tensors as `Ref`, dtypes, devices and layouts as text, lists as tuples."""


class Role(StrEnum):
    """What a node is to the training step."""

    PARAM = "param"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"
    CONSTANT = "constant"
    OP = "op"
    LOSS = "loss"
    """Output: a scalar the user calls backward on; every rank gets its value."""
    VALUE = "value"
    """Output: any other differentiable result; every rank gets all of it, and has a tangent."""
    DETACHED = "detached"
    """Output: returned without gradient, in a sharding of the planner's choice."""
    MUTATION = "mutation"
    """Output: the new value of a buffer (`target`)."""
    UPDATE = "update"
    """Output: the new value of a parameter (`target`) that forward changes in place."""
    GRAD = "grad"
    """Output: the gradient of a parameter (`target`)."""


STORED_ROLES = frozenset({Role.UPDATE, Role.GRAD})
"""Outputs that leave in the sharding that the parameter `target` is stored in."""

OUTPUT_ROLES = STORED_ROLES | {Role.LOSS, Role.VALUE, Role.DETACHED, Role.MUTATION}


class Phase(StrEnum):
    """Which half of the step a node belongs to: what autograd adds is backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


class FactorType(StrEnum):
    """What sharding a factor does, in Shardy's words."""

    PASS_THROUGH = "pass-through"
    """Each rank computes its part of every output."""
    REDUCTION = "reduction"
    """Outputs that lack it become `P`: the op sums over it."""
    NEEDS_REPLICATION = "needs replication"
    """It must not be sharded."""
    PERMUTATION = "permutation"
    """Its ranks pass data among themselves as they compute; outputs that lack it come out `R`."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One atom of an op: where it sits in each tensor input and each output (None: absent).

    Sharding it gives every input and output that has it `S(slot)` and every other input `R`; its
    `type` says what the other outputs become. The local op of a `positional` one must know which
    part of it the rank has. A joint factor shards its `members`, factors of their own, on one axis
    at once; it stands where any of them stands.
    """

    name: str
    atom: int
    inputs: tuple[Slot | None, ...]
    outputs: tuple[Slot | None, ...]
    type: FactorType = FactorType.PASS_THROUGH
    positional: bool = False
    members: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return self.type is FactorType.NEEDS_REPLICATION

    @property
    def exchanged(self) -> bool:
        """Whether the op is another one on the ranks that shard it, which know one another."""
        return self.positional or self.type is FactorType.PERMUTATION


Checkpointed = Literal["", "whole", "selective"]
"""Whether an op is in a region that the model wraps in `torch.utils.checkpoint`, to be recomputed
as a whole, or as a `context_fn` says."""


@dataclass(frozen=True, slots=True)
class Node:
    """One op, placeholder or output item.

    `inputs` lists the tensor arguments in the order in which they appear in `args`, then
    `kwargs`. `key` names the node's class: nodes of equal blocks (layers.0, layers.1, ...) share
    it, and take one decision. `factors`, `partial`, `mean` and `view` come from the op's rule:
    each entry of `partial` is a set of inputs that may be partial together, which leaves every
    output partial; `mean` says a reduced factor averages instead of sums; a `view` computes
    nothing and shares its input's storage. `has_rule` is False for an op nobody has described: it
    runs replicated. `target` is the name of a parameter, buffer or input, or the position of an
    output. For `Role.GRAD`, `target` is the parameter's name. `input_sharding` says which shard of
    an input a rank is passed, if it is not passed the whole. A `random` op draws random numbers.
    `checkpoint` says how the model wants an op checkpointed. A parameter that is `external` is the
    script's: whole on every rank, and its optimizer is unknown.
    """

    index: int
    name: str
    op: str
    role: Role
    phase: Phase
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    inputs: tuple[Ref, ...] = ()
    outputs: tuple[TensorType, ...] = ()
    module: str = ""
    key: str = ""
    target: str = ""
    factors: tuple[Factor, ...] = ()
    partial: tuple[tuple[int, ...], ...] = ()
    mean: bool = False
    view: bool = False
    has_rule: bool = True
    source_line: str = ""
    input_sharding: InputSharding | None = None
    random: bool = False
    checkpoint: Checkpointed = ""
    external: bool = False
    saved_dtype: str = ""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Graph:
    """Nodes in topological order, and the atoms of their tensors. All nodes but outputs run once
    per microbatch (`passes.microbatches`). Where backward comes in two parts (`passes.stages`), the
    second begins with the node `second_part`."""

    name: str
    nodes: tuple[Node, ...]
    atoms: tuple[Atom, ...]
    microbatches: int = 1
    second_part: int | None = None

    def type_of(self, ref: Ref) -> TensorType:
        return self.nodes[ref.node].outputs[ref.output]

    def input_types(self, node: Node) -> tuple[TensorType, ...]:
        return tuple(self.type_of(ref) for ref in node.inputs)

    def with_role(self, *roles: Role) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.role in roles)

    def check(self) -> None:
        """ValueError if the graph is not well formed: order, references, parts, factors, keys."""
        fit = set[int]()  # By identity: nodes of identical layers share their types.
        for position, node in enumerate(self.nodes):
            wrong = self._misplaced(position, node)
            for tensor in node.outputs:
                if id(tensor) not in fit:
                    wrong = wrong or self._misfit(tensor)
                    fit.add(id(tensor))
            wrong = wrong or self._misnamed(node)
            if wrong:
                raise ValueError(f"node {node.index} ({node.name}, {node.op}): {wrong}")

    def _misplaced(self, position: int, node: Node) -> str:
        if node.index != position:
            return f"stands at position {position}"
        for ref in node.inputs:
            if not 0 <= ref.node < position:
                return f"reads node {ref.node}, which does not precede it"
            if ref.output >= len(self.nodes[ref.node].outputs):
                return f"reads output {ref.output} of node {ref.node}"
        return ""

    def _misfit(self, tensor: TensorType) -> str:
        sizes = tuple(prod(self.atoms[a].size for a in parts) for parts in tensor.parts)
        return (
            ""
            if sizes == tensor.shape
            else f"parts multiply to {sizes}, the shape is {tensor.shape}"
        )

    def _misnamed(self, node: Node) -> str:
        factors = [factor for factor in node.factors if not factor.members]
        if not factors:
            return ""
        parts = [tensor.parts for tensor in (*self.input_types(node), *node.outputs)]
        for factor in factors:
            slots = (*factor.inputs, *factor.outputs)
            if len(parts) != len(slots):
                return f"factor {factor.name} covers {len(slots)} tensors"
            for part, slot in zip(parts, slots, strict=True):
                if slot is not None and part[slot[0]][slot[1]] != factor.atom:
                    return f"factor {factor.name} is not atom {factor.atom} there"
        return ""

    def __str__(self) -> str:
        """One line per node, for people and for golden tests."""
        return "\n".join(_line(self, node) for node in self.nodes)


def transplanted(node: Node, index: int, place: Callable[[Ref], Ref]) -> Node:
    """A node at `index` of another graph, where its inputs are at `place`; the node itself if
    nothing changes."""
    inputs = tuple(map(place, node.inputs))
    if index == node.index and inputs == node.inputs:
        return node
    args, kwargs = given_refs(node, place)
    return replace(node, index=index, args=args, kwargs=kwargs, inputs=inputs)


def given_refs(
    node: Node, place: Callable[[Ref], Ref]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The arguments of a node, by position and by name, where its inputs are at `place`."""

    def arg(old: Arg) -> Arg:
        if isinstance(old, Ref):
            return place(old)
        return tuple(map(arg, old)) if isinstance(old, tuple) else old

    return tuple(map(arg, node.args)), tuple((name, arg(old)) for name, old in node.kwargs)


def _line(graph: Graph, node: Node) -> str:
    def show(tensor: TensorType) -> str:
        dims = ("*".join(graph.atoms[a].name for a in parts) or "1" for parts in tensor.parts)
        return f"{tensor.dtype}[{' '.join(dims)}]"

    outputs = ", ".join(map(show, node.outputs))
    inputs = ", ".join(f"%{r.node}" + (f".{r.output}" if r.output else "") for r in node.inputs)
    what = node.op if node.role is Role.OP else f"{node.role.value} {node.target}"
    return f"%{node.index} = {what}({inputs}) -> {outputs}  # {node.key}"


T = TypeVar("T")


def per_graph(find: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """`find`, whose result is cached per graph, by identity, for as long as the graph lives."""
    known: dict[int, tuple[ReferenceType[Graph], T]] = {}

    @wraps(find)
    def cached(graph: Graph) -> T:
        number = id(graph)
        held = known.get(number)
        if held is None or held[0]() is not graph:
            held = ReferenceType(graph, lambda _: known.pop(number, None)), find(graph)
            known[number] = held
        return held[1]

    return cached
