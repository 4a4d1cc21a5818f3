"""A local graph in the making."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from autopar.codegen.messages import Messages
from autopar.codegen.passes import apply_passes
from autopar.codegen.torch_private import unwritten
from autopar.ir.schedule import Transfer, Value
from autopar.ir.sharding import Sharding
from autopar.plans.layout import Layout
from autopar.runtime.program.lean import LeanGraph


class LocalGraph:
    """One of the graphs of a turn while it is written, with its inputs and outputs by name. `views`
    has the local value of each view in each sharding asked for."""

    def __init__(self, layout: Layout, spoken: Callable[[Transfer], str]) -> None:
        self.graph = LeanGraph()
        self.messages = Messages(layout, self.graph, spoken)
        self.inputs: dict[str, fx.Node] = {}
        self.outputs: dict[str, fx.Node] = {}
        self.values: dict[Value, fx.Node] = {}
        self.views: dict[tuple[int, Sharding, bool], fx.Node] = {}

    def placeholder(self, name: str) -> fx.Node:
        """A further input, behind the others."""
        identifier = f"{''.join(c if c.isalnum() else '_' for c in name)}__{len(self.inputs)}"
        self.inputs[name] = self.graph.placeholder(identifier)
        return self.inputs[name]

    def module(self, gm: fx.GraphModule, outputs: Sequence[str]) -> fx.GraphModule:
        """The graph, which returns these outputs; its constants are those of `gm`."""
        self.graph.output(tuple(self.outputs[name] for name in outputs))
        return unwritten(gm, apply_passes(self.graph))
