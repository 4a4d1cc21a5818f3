"""Running a graph of dynamo's so that what it computes belongs to the modules it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from autopar.tracer.capture import MODULE_KEY
from autopar.tracer.torch_private import annotate


def labelled(gm: fx.GraphModule, values: Sequence[Any]) -> Any:
    """`gm(*values)`, every node labelled with the path of its module, as `nn_module_stack` has
    it."""
    return _Labelling(gm).run(*values)


class _Labelling(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        stack = list((n.meta.get("nn_module_stack") or {}).values())
        # The first part of a path is the variable that holds the model.
        path = stack[-1][0].partition(".")[2] if stack else ""
        with annotate({MODULE_KEY: path}):
            return super().run_node(n)
