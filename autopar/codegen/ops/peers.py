"""What an op whose ranks communicate is written with: local ops, and the collectives that it was
priced for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.ir.choices import Choice
from autopar.ir.graph import Atom, Node
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import nesting
from autopar.rules.op import Exchange, Shapes
from autopar.rules.work import exchange_axes
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.program.symbols import local_position, mirror, permute

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass
class Peers:
    """Appends the nodes of `node` under `choice` to `graph`. Tensors have `shapes`, the first input
    has `dtype`, and `sent` are the collectives that it was priced for, in order."""

    graph: LeanGraph
    node: Node
    choice: Choice
    mesh: Mesh
    atoms: Sequence[Atom]
    shapes: Shapes
    dtype: torch.dtype
    sent: Sequence[Exchange]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self._sent = list(self.sent)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call(op, *args, **kwargs)

    def items(self, call: fx.Node) -> list[fx.Node]:
        """The outputs of the node, of a call that returns them in a tuple."""
        return [self(operator.getitem, call, k) for k in range(len(self.node.outputs))]

    def own_op(self, variant: str = "") -> Any:
        """The node's op, or with `variant` the op whose name has that appended."""
        library, name, _ = self.node.op.split(".")
        return getattr(getattr(torch.ops, library), name + variant).default

    def check_all_sent(self) -> None:
        """AssertionError if the op was priced for more than it sent."""
        if self._sent:
            raise AssertionError(
                f"{self.node.op} was priced for {self._sent}, which it never sends"
            )

    def takes_part(self, kind: str, times: int) -> str:
        """The mesh axis along which an op that communicates by itself sends `times` collectives of
        `kind`: all that it was priced for."""
        exchanges, self._sent = self._sent, []
        axes = {each.axis for each in exchanges}
        if [each.kind for each in exchanges] != [kind] * times or len(axes) != 1:
            raise AssertionError(f"{self.node.op} sends {times} of {kind}, priced was {exchanges}")
        return self.mesh[axes.pop()].name

    def reduced(self, rows: fx.Node, how: str) -> fx.Node:
        """One value per row, reduced over the axes that share the rows."""
        for _ in exchange_axes(self.node, self.choice):
            sent = self._sent.pop(0)
            if sent.reduce != how:
                raise AssertionError(f"{self.node.op} reduces by {how}, priced was {sent}")
            rows = self(c10d.all_reduce.default, rows, how, self.mesh[sent.axis].name)
            rows = self(c10d.wait_tensor.default, rows)
        return rows

    def permuted(self, x: fx.Node, length: int) -> fx.Node:
        """`x`, a list of `length` elements, of the previous rank; to be waited for."""
        return self._passed(permute, x, length)

    def mirrored(self, x: fx.Node, length: int) -> fx.Node:
        """`x`, a list of `length` elements, of this rank's mirror (`symbols.CutShard`); to be
        waited for."""
        return self._passed(mirror, x, length)

    def _passed(self, symbol: Any, x: fx.Node, length: int) -> fx.Node:
        sent = self._sent.pop(0)
        if sent.kind != "permute":
            raise AssertionError(f"{self.node.op} passes {x} on, priced was {sent}")
        axis = self.mesh[sent.axis]
        return self(symbol, x, length, axis.size, axis.name)

    def local(self, indices: fx.Node, length: int) -> tuple[fx.Node, fx.Node]:
        """Indices into the positional dim, counted from the first of the `length` positions of this
        rank, and whether each is one of them."""
        (factor,) = (f for f in self.node.factors if f.positional)
        axes = nesting(self.atoms[factor.atom], exchange_axes(self.node, self.choice))
        path = tuple((self.mesh[axis].name, self.mesh[axis].size) for axis in axes)
        at = self(local_position, indices, length, path)
        inside = self(aten.logical_and.default, self(aten.ge.Scalar, at, 0),
                      self(aten.lt.Scalar, at, length))  # fmt: skip
        return at, inside

    @property
    def sums_in(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def cast(self, x: fx.Node, dtype: torch.dtype, *, given: torch.dtype | None = None) -> fx.Node:
        """`x`, which is in `given` (by default in the dtype of the first input), in `dtype`."""
        return x if (given or self.dtype) == dtype else self(aten._to_copy.default, x, dtype=dtype)


Emitters = dict[str, Callable[[Peers], list[fx.Node]]]
"""Per op, or per joint factor of an op ("op factor"), what writes its local outputs, in order."""
