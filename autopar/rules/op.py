"""What is known of an op: one record, in the file of its family, which every part of autopar asks.

The rule says what can be sharded. A record says more only where the rule does not tell: what the op
computes, what its ranks send one another inside it, what it holds meanwhile, and which of its
arguments speak of shapes. What writes the sends is in `codegen/ops`, in a file of the same name.
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
    """The arguments of an op, and the shapes of its tensors. Tensors among the arguments are not
    looked at."""

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
    runs while it is under way."""

    kind: str
    axis: int
    in_bytes: int
    out_bytes: int
    reduce: str = ""
    behind: float = 0.0


@dataclass(frozen=True, slots=True)
class JointCall:
    """An op under a joint factor that is sharded over mesh axis `axis` of `size` ranks, and its
    tensors on each."""

    node: Node
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
    """`count` products of matrices, each of which makes `out` elements, sums of `depth` products,
    and moves `num_bytes`."""

    count: int
    out: int
    depth: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What an op computes on the rank that has most of it: `flops`, in `passes` over its tensors,
    or in the `matmuls` that it is made of; then `merges` of what one more kernel gives, each of
    `merge_launches` and of `merged_bytes`. `scores` are those of attention."""

    flops: float
    passes: int = 1
    merges: int = 0
    merge_launches: int = 0
    merged_bytes: int = 0
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

    `flops` counts those of the whole op, of one whose arithmetic may take longer than its memory
    traffic; any other is taken to do one per element that it makes. A `embedding_lookup` reads rows
    of a table, wherever they lie. `work` is there where ranks have unequal shares. `inner_bytes`
    are those that it makes on the way, on one rank, and reads again. `reads` says of which inputs
    it reads a part, wherever that lies, or only the shape; it reads all others whole.

    An op with exchanged factors reduces one value per row by each of `row_reductions`, in order;
    a row is what its input `rows_of` has along other dims.
    While it does, it holds `row_copies` times its first input in the dtype of sums beside inputs
    and outputs: the first figure where that is the input's dtype, the second where the input has
    half of it. `joint` says what it sends under each joint factor, by name.

    `local_args` are the arguments that follow the local shapes. Of an op that `reshapes` all that
    counts is the local shape of its output. One that needs `one_layout` takes tensors without gaps,
    all in one layout: eager sees to that before it calls the kernel, but local tensors may be laid
    out otherwise than the whole ones, and where a dim is cut down to size 1, layouts that look
    alike are not. One that `fills` reads no element of its first input, but makes a tensor like it.

    `dim_names` are what people call the dims of its inputs. In one that is `sequential`, positions
    of a sequence see one another.
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
        """Whether it is a loss of scores for classes, one row of them for each target."""
        return any(each.name == "classes" for each in self.dim_names)


Family = tuple[tuple[Op, str], ...]
"""Records, and the names of the ops that each is of: `mm` is short for `aten.mm.default`, `sum.dim`
for `aten.sum.dim`."""


def output_shape(position: int, name: str) -> Callable[[LocalCall], Changes]:
    """`local_args` of an op whose argument `name` is the shape of its output."""
    return lambda call: {(position, name): list(call.shapes.local_outputs[0])}


def row_itemsize(dtype: str) -> int:
    """Bytes per value that is reduced: sums are taken in float32, of float64 in float64."""
    return 8 if dtype == "float64" else 4


def reads_output_size(shapes: Shapes) -> Mapping[int, int]:
    """`reads` of an op that picks each element it makes from its first input."""
    return {0: sum(map(prod, shapes.local_outputs))}


def reads_shape_of(position: int) -> ElementsRead:
    """`reads` of an op that takes only the shape of one of its inputs."""
    return lambda _: {position: 0}
