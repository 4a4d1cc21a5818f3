"""Tracing: from a model and its inputs to a joint FX graph and its torch-free snapshot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.errors import TraceError
from autopar.ir.gc_pause import collection_paused
from autopar.ir.graph import Graph, Role
from autopar.ir.input_sharding import with_input_shardings
from autopar.ir.sharding import InputSharding
from autopar.runtime.process.layouts import check_arguments, check_states
from autopar.runtime.program.guards import Read
from autopar.runtime.program.leavings import LeftBehind
from autopar.tracer.annotate import report_unknown, with_rules
from autopar.tracer.calls import noting_dense_gradients
from autopar.tracer.capture import Capture, OutputFilter, only_losses
from autopar.tracer.capture import capture as _capture
from autopar.tracer.classes import with_keys
from autopar.tracer.expand import expand_blocks as _expand
from autopar.tracer.find import find_runs
from autopar.tracer.held_tensors import check_followed
from autopar.tracer.normalize import normalize as _normalize
from autopar.tracer.periods import Different
from autopar.tracer.runs import shortened
from autopar.tracer.snapshot import snapshot as _snapshot
from autopar.tracer.torch_private import TreeSpec, tree_flatten
from autopar.tracer.watch import Watch

_log = logging.getLogger(__name__)

__all__ = ["OutputFilter", "OutputLeaf", "Traced", "only_losses", "trace"]


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf of the model's output: item `item` of the graph's output, or the constant `value`.
    `name` is the path to it ("logits"). If it `is_cut`, it has a gradient in eager and none here;
    if it `is_left_out`, it is a tensor in eager and None here."""

    item: int | None = None
    value: Any = None
    name: str = ""
    is_cut: bool = False
    is_left_out: bool = False


@dataclass(frozen=True)
class Traced:
    """A captured model.

    `gm` is the joint graph, with flat inputs and outputs and fake tensors in `node.meta["val"]`;
    `graph` is its twin. `inputs` names the placeholders in order: "param:wte.weight",
    "buffer:NAME", "input:I" (flat leaf I of (args, kwargs)), "tangent:POS" (flat leaf POS of the
    output). `in_spec` is what a later call's (args, kwargs) must flatten to; `out_spec` and
    `outputs` rebuild the output. `tied` gives the first name of a parameter for each of its other
    names. `reads` is what else the program depends on. `leavings` is what forward leaves on the
    model. `externals` are the tensors of the script that are inputs with a gradient, though no
    module has them (`external_name`).
    """

    gm: fx.GraphModule
    graph: Graph
    inputs: tuple[str, ...]
    in_spec: TreeSpec
    out_spec: TreeSpec
    outputs: tuple[OutputLeaf, ...]
    tied: dict[str, str]
    reads: tuple[Read, ...]
    leavings: tuple[LeftBehind, ...] = ()
    externals: tuple[Tensor, ...] = ()


@collection_paused()
def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    strict: bool = False,
    name: str = "",
    selects: OutputFilter = only_losses,
    input_shardings: Mapping[str, InputSharding] = MappingProxyType({}),
) -> Traced:
    """The joint forward and backward graph of `model(*args, **kwargs)`, without computing anything.

    If there is a loss, `selects` says which other outputs have gradients, and which are left out.
    `input_shardings` says, by position, which inputs come to the ranks in shards.

    Forward only where gradients are off or no parameter requires one. TraceError where the model
    cannot be captured, and with `strict` for an op without a rule, which is otherwise an
    UnknownOpWarning; AutoparError for a tensor that no program takes. The model is left as it was.
    """
    leaves = tree_flatten((args, kwargs or {}))[0]
    check_arguments(model, leaves, args, kwargs or {}, with_values=False)
    check_states(model)
    watch = Watch(model, leaves)
    with watch.around(strict), noting_dense_gradients():
        capture, graph = _graph(
            model, args, kwargs or {}, name or type(model).__name__, selects, watch
        )
    check_followed(model, watch.reads, watch.externals)
    report_unknown(graph, strict=strict)
    forward = (Role.LOSS, Role.VALUE, Role.DETACHED)
    returned = (node for node in graph.nodes if node.op == "output")
    items = {node.target: k for k, node in enumerate(returned) if node.role in forward}
    return Traced(
        gm=capture.gm,
        graph=with_input_shardings(graph, input_shardings),
        inputs=tuple(
            f"{node.role.value}:{node.target}"
            for node, fx_node in zip(graph.nodes, capture.gm.graph.nodes, strict=False)
            if fx_node.op == "placeholder"
        ),
        in_spec=capture.in_spec,
        out_spec=capture.out_spec,
        outputs=tuple(
            OutputLeaf(None, leaf.value, leaf.name, is_left_out=leaf.is_left_out)
            if leaf.role is None
            else OutputLeaf(
                items[str(i)], None, leaf.name, leaf.has_grad and leaf.role is Role.DETACHED
            )
            for i, leaf in enumerate(capture.outputs)
        ),
        tied=capture.tied,
        reads=watch.reads,
        leavings=watch.leavings,
        externals=tuple(watch.externals),
    )


def _graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    selects: OutputFilter,
    watch: Watch,
) -> tuple[Capture, Graph]:
    """The joint graph and its twin, from a shorter model where blocks repeat."""
    runs = find_runs(model, args, kwargs, selects, watch)
    if runs:
        try:
            with watch.of_short_model(), shortened(model, runs):
                capture, graph = _whole_graph(model, args, kwargs, name, selects, watch)
            for run in runs:
                graph = _expand(capture.gm, graph, run)
        except (TraceError, Different) as error:
            _log.info("%s is traced whole, though blocks repeat: %s", name, error)
        else:
            return capture, graph
    return _whole_graph(model, args, kwargs, name, selects, watch)


def _whole_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    selects: OutputFilter,
    watch: Watch,
) -> tuple[Capture, Graph]:
    capture = _capture(model, args, kwargs, selects, watch)
    with torch.autocast("cpu", enabled=False):
        _normalize(capture.gm, capture.tied, capture.external)
    graph = with_keys(with_rules(_snapshot(capture, name)))
    graph.check()
    return capture, graph
