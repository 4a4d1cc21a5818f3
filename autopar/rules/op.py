"""The record of an op, in the file of its family: all that autopar knows of the op.

The rule says what can be sharded. A record says more only where the rule does not: what the op
computes, what its ranks send each other inside it, what it holds meanwhile, and which of its
arguments depend on shapes. The code that emits the sends is in `codegen/ops`, in a file of the same
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autopar.ir.choices import Choice
from autopar.ir.graph import Graph, Node
from autopar.rules.notation import RuleFunction, TensorShape

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of the tensor inputs and outputs of an op, in order: `whole`, and on one rank."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    local_inputs: tuple[Shape, ...]
    local_outputs: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """The arguments of an op, and the shapes of its tensors. Tensors among the arguments are
    ignored."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    shapes: Shapes

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def dim(self, position: int) -> int:
        """The dim in argument `position`, counted from the front of the whole side."""
        value = self.arg(position, "dim", 0)
        return value % max(map(len, (*self.shapes.inputs, *self.shapes.outputs)))


ElementsRead = Callable[[Shapes], Mapping[int, int]]
"""Elements that an op reads on one rank, by position, of the inputs that it does not read whole."""


Changes = dict[tuple[int, str], Any]
"""New values of arguments, by position and name."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective `kind` over mesh axis `axis`, of `in_bytes` on each rank that become
    `out_bytes`. An all-reduce is by `reduce`. `behind` is the part of the op's own compute that
    hides the exchange."""

    kind: str
    axis: int
    in_bytes: int
    out_bytes: int
    reduce: str = ""
    behind: float = 0.0


@dataclass(frozen=True, slots=True)
class JointCall:
    """An op under the joint factor `name`, sharded over mesh axis `axis` of `size` ranks, and its
    tensors on each."""

    node: Node
    name: str
    axis: int
    size: int
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]


@dataclass(frozen=True, slots=True)
class Joint:
    """What an op sends, and holds besides its inputs and outputs, under a joint factor."""

    sends: Callable[[JointCall], Iterable[Exchange]]
    scratch_bytes: Callable[[JointCall], int] = lambda _: 0


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of attention that one kernel computes, on the rank that has most: `rows` (of all
    heads and samples) by `keys`, half of them under a causal mask, with `per_score` FLOPs for each
    head dim; `passes` such kernels. With `added`, a mask that is a tensor is added to them."""

    rows: int
    keys: int
    head_dim: int
    per_score: float
    causal: bool
    backward: bool
    passes: int = 1
    added: bool = False


@dataclass(frozen=True, slots=True)
class MatmulWork:
    """`count` matmuls, each with `out` output elements, which are sums of `depth` terms. Each moves
    `num_bytes`."""

    count: int
    out: int
    depth: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What an op computes on its busiest rank: `flops`, in `passes` over its tensors, or in the
    `matmuls` that it consists of. Then `merges` merges of one more kernel's result, each of
    `merge_launches` launches and `merged_bytes`. `copied_bytes` are read and written to bring
    tensors in another order. `scores` are those of attention."""

    flops: float
    passes: int = 1
    merges: int = 0
    merge_launches: int = 0
    merged_bytes: int = 0
    copied_bytes: int = 0
    scores: Scores | None = None
    matmuls: tuple[MatmulWork, ...] | None = None


@dataclass(frozen=True, slots=True)
class DimName:
    """Dim `dim` of input `input`, by name; `parts` name those of a dim that has several."""

    input: int
    dim: int
    name: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Op:
    """The record of an op, or of each op of a family.

    `flops` counts the FLOPs of the whole op, if its arithmetic may take longer than its memory
    traffic; any other op is taken to do one per output element. An `embedding_lookup` reads rows
    of a table, wherever they lie. `work` is there where ranks have unequal shares. `inner_bytes`
    are the bytes of intermediate tensors on one rank. `reads` says of which inputs the op reads
    only a part, or only the shape; it reads all others whole.

    An op with exchanged factors reduces one value per row by each of `row_reductions`, in order.
    Its input `rows_of` has one row per element of the other dims. Meanwhile the op holds
    `row_copies` times its first input in the dtype of sums beside inputs and outputs: the first
    figure where that is the input's dtype, the second where the input's is half as wide. `joint`
    says what the op sends under each joint factor, by name.

    `local_args` are the arguments that follow the local shapes. An op that `reshapes` depends on
    nothing but the local shape of its output. One that needs `one_layout` takes tensors without
    gaps, all in one layout. Eager ensures that before it calls the kernel, but the layouts of local
    tensors may differ from those of whole ones. Where a dim is cut down to size 1, layouts that
    look alike are not. An op that `fills` reads no element of its first input, but makes a tensor
    like it.

    `dim_names` are the usual names of the dims of its inputs. In a `sequential` op, positions of a
    sequence depend on each other.
    """

    rule: str | RuleFunction
    flops: Callable[[Node, Graph], float] | None = None
    embedding_lookup: bool = False
    work: Callable[[Graph, Node, Choice, Sequence[int]], Work] | None = None
    inner_bytes: Callable[[Graph, Node, Choice, Sequence[int]], int] | None = None
    reads: ElementsRead | None = None
    row_reductions: tuple[str, ...] = ()
    rows_of: int = 0
    row_copies: tuple[float, float] = (0.0, 0.0)
    joint: Mapping[str, Joint] = field(default_factory=dict[str, Joint])
    local_args: Callable[[LocalCall], Changes] | None = None
    reshapes: bool = False
    one_layout: bool = False
    fills: bool = False
    dim_names: tuple[DimName, ...] = ()
    sequential: bool = False

    @property
    def scores_targets(self) -> bool:
        """Whether the op is a loss of scores for classes, with a row of scores for each target."""
        return any(each.name == "classes" for each in self.dim_names)


Family = tuple[tuple[Op, str], ...]
"""Records, each with the names of its ops: `mm` is short for `aten.mm.default`, `sum.dim` for
`aten.sum.dim`."""


def output_shape(position: int, name: str) -> Callable[[LocalCall], Changes]:
    """`local_args` of an op whose argument `name` is the shape of its output."""
    return lambda call: {(position, name): list(call.shapes.local_outputs[0])}


def row_itemsize(dtype: str) -> int:
    """Bytes per value that is reduced: sums are taken in float32, of float64 in float64."""
    return 8 if dtype == "float64" else 4


def reads_output_size(shapes: Shapes) -> Mapping[int, int]:
    """`reads` of an op that picks each output element from its first input."""
    return {0: sum(map(prod, shapes.local_outputs))}


def reads_shape_of(position: int) -> ElementsRead:
    """`reads` of an op that takes only the shape of one of its inputs."""
    return lambda _: {position: 0}
