"""All private torch APIs that the code generator uses; `tests/codegen/test_torch_private.py` checks
them."""

from __future__ import annotations

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen, _BoxedCodeGen


def boxed_codegen() -> CodeGen:
    """Code of a graph that takes its inputs as one list, which it clears: the caller can hold no
    input longer than the graph needs it."""
    return _BoxedCodeGen()


def unwritten(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of `graph`, with the attributes of `root`, whose code is written once it is asked
    for: the graphs that all ranks share are bound or interpreted, not run."""
    return _LazyGraphModule(root, graph)
