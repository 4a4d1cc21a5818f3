"""Passes over the joint FX graph, each a function `gm -> gm`, that bring it into the one form that
the rest of autopar expects."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.errors import TraceError
from autopar.runtime.program.random import is_random
from autopar.tracer import torch_private
from autopar.tracer.capture import PREFIX
from autopar.tracer.decomposed import (
    decompose_ops,
    draw_from_nothing,
    split_biased_matmuls,
    split_dropouts,
    split_squared_errors,
)
from autopar.tracer.fx_graphs import (
    META,
    MODULE_KEY,
    call_before,
    outputs_of,
    replace_node,
    set_outputs,
)
from autopar.tracer.updates import resolve_updates

aten = torch.ops.aten
_Pass = Callable[[fx.GraphModule], fx.GraphModule]

_MEAN, _SUM = 1, 2  # at::Reduction
_NLL_FORWARD = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def passes(tied: dict[str, str], external: frozenset[str]) -> tuple[_Pass, ...]:
    """All passes in order, for a model whose parameter names `tied` are further names of others,
    and a script some of whose tensors are `external`."""
    return (
        strip_prefix,
        partial(keep_known_outputs, external=external),
        partial(drop_unread, external=external),
        resolve_updates,
        partial(merge_tied_parameters, tied=tied),
        drop_output_copies,
        copy_expanded_gradients,
        split_mean_losses,
        split_biased_matmuls,
        split_dropouts,
        draw_from_nothing,
        split_squared_errors,
        decompose_ops,
        merge_constants,
        drop_assertions,
        drop_unused,
    )


def normalize(
    gm: fx.GraphModule, tied: dict[str, str], external: frozenset[str] = frozenset()
) -> fx.GraphModule:
    """`gm` after all passes, checked."""
    for step in passes(tied, external):
        gm = step(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def _target(desc: Any) -> str:
    """The name of the parameter or buffer of a descriptor."""
    return desc.target.removeprefix(PREFIX)


def strip_prefix(gm: fx.GraphModule) -> fx.GraphModule:
    """Names of parameters and buffers as the user's model has them: `meta["target"]`."""
    for node in gm.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if isinstance(desc, torch_private.ParamAOTInput | torch_private.BufferAOTInput):
            node.meta["target"] = _target(desc)
    return gm


def keep_known_outputs(gm: fx.GraphModule, external: frozenset[str]) -> fx.GraphModule:
    """Drop the outputs that are no tensors (where no gradient is requested), and gradients of
    inputs, which only forward requests; TraceError on an output that autopar cannot return."""
    kept: list[tuple[Any, Any]] = []
    for item, desc in zip(*outputs_of(gm), strict=True):
        match desc:
            case torch_private.GradAOTOutput(grad_of=torch_private.PlainAOTInput()):
                continue
            case torch_private.GradAOTOutput(grad_of=torch_private.BufferAOTInput() as buffer) if (
                _target(buffer) not in external
            ):
                raise TraceError(
                    f"forward makes {_target(buffer)} require a gradient, which is no parameter: "
                    "make it an nn.Parameter"
                )
            case torch_private.InputMutationAOTOutput(mutated_input=changed) if not isinstance(
                changed, torch_private.BufferAOTInput | torch_private.ParamAOTInput
            ):
                module = item.meta.get("custom", {}).get(MODULE_KEY, "")
                who = f"module {module!r}" if module else "the model"
                raise TraceError(
                    f"{who} changes one of the model's inputs in place ({changed.expr()}): "
                    "change a copy of it"
                )
            case (
                torch_private.PlainAOTOutput()
                | torch_private.InputMutationAOTOutput()
                | torch_private.GradAOTOutput(
                    grad_of=torch_private.ParamAOTInput() | torch_private.BufferAOTInput()
                )
            ):
                if item is not None:
                    kept.append((item, desc))
            case _ if item is not None:
                raise TraceError(
                    f"the captured graph has an output autopar does not know: {desc!r}"
                )
            case _:
                pass
    set_outputs(gm, kept)
    return gm


def drop_unread(gm: fx.GraphModule, external: frozenset[str]) -> fx.GraphModule:
    """Drop the script's tensors that forward does not read."""
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta.get("target") in external and not node.users:
            gm.graph.erase_node(node)
    return gm


def merge_tied_parameters(gm: fx.GraphModule, tied: dict[str, str]) -> fx.GraphModule:
    """One placeholder and one gradient, the sum, for a parameter of several names."""
    if not tied:
        return gm
    placeholders = {
        node.meta["target"]: node
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["desc"], torch_private.ParamAOTInput)
    }
    for name, first in tied.items():
        if name in placeholders:  # of a parameter that forward changes, torch has one placeholder
            replace_node(placeholders[name], placeholders[first])
    kept: list[tuple[Any, Any]] = []
    position: dict[str, int] = {}
    output = gm.graph.output_node()
    for item, desc in zip(*outputs_of(gm), strict=True):
        if isinstance(desc, torch_private.GradAOTOutput):
            name = _target(desc.grad_of)
            name = tied.get(name, name)
            if name in position:
                with gm.graph.inserting_before(output):
                    total = gm.graph.call_function(aten.add.Tensor, (kept[position[name]][0], item))
                _copy_meta(total, item, is_gradient_acc=True)
                kept[position[name]] = (total, kept[position[name]][1])
                continue
            position[name] = len(kept)
        kept.append((item, desc))
    set_outputs(gm, kept)
    return gm


def drop_output_copies(gm: fx.GraphModule) -> fx.GraphModule:
    """Return what the wrapper copied (`capture._Step`) rather than the copy, where an op made it
    and nothing else returns it."""
    pairs = list(zip(*outputs_of(gm), strict=True))
    returned = {item for item, _ in pairs}
    for index, (item, desc) in enumerate(pairs):
        if isinstance(desc, torch_private.PlainAOTOutput) and item.target is aten.clone.default:
            source = item.args[0]
            if source.op == "call_function" and source not in returned and not item.kwargs:
                returned.add(source)
                pairs[index] = (source, desc)
    set_outputs(gm, pairs)
    return gm


def copy_expanded_gradients(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy gradients that are expanded (such as a sum's, from a number), so that ranks can have
    uneven chunks of them: a view would need a root that is cut alike, and a number is not."""
    pairs = list(zip(*outputs_of(gm), strict=True))
    for index, (item, desc) in enumerate(pairs):
        if isinstance(desc, torch_private.GradAOTOutput) and _is_expanded(item):
            with gm.graph.inserting_after(item):
                copy = gm.graph.call_function(aten.clone.default, (item,))
            copy.meta = {**item.meta, "val": item.meta["val"].clone()}
            pairs[index] = (copy, desc)
    set_outputs(gm, pairs)
    return gm


_VIEWS = (
    aten.permute.default, aten.squeeze.dim, aten.squeeze.dims, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.view.default,
)  # fmt: skip


def _is_expanded(item: Any) -> bool:
    """Whether a node is a view, through others, of what was expanded."""
    while isinstance(item, fx.Node) and item.target in _VIEWS:
        item = item.args[0]
    return isinstance(item, fx.Node) and item.target is aten.expand.default


def split_mean_losses(gm: fx.GraphModule) -> fx.GraphModule:
    """nll_loss with reduction "mean" as a sum divided by the sum of the weights it counted.

    Targets that are ignored may be spread unevenly over ranks, so that the mean of the ranks'
    means is not the mean; sums add up.
    """
    for node in list(gm.graph.nodes):
        if node.target in _NLL_FORWARD and node.args[3] == _MEAN:
            _split_forward(gm, node)
        elif node.target in _NLL_BACKWARD and node.args[4] == _MEAN:
            _split_backward(node)
    return gm


def _split_forward(gm: fx.GraphModule, node: fx.Node) -> None:
    node.update_arg(3, _SUM)
    parts = {user.args[1]: user for user in node.users}
    total = parts.get(0)
    if total is None:
        return
    if 1 in parts:
        weight = parts[1]
        total.append(weight)
    else:
        with gm.graph.inserting_after(total):
            weight = gm.graph.call_function(operator.getitem, (node, 1))
        _copy_meta(weight, total)
        weight.meta["val"] = node.meta["val"][1]
    with gm.graph.inserting_after(weight):
        mean = gm.graph.call_function(aten.div.Tensor, (total, weight))
    _copy_meta(mean, total)
    total.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


def _split_backward(node: fx.Node) -> None:
    grad, weight = node.args[0], node.args[6]
    assert isinstance(grad, fx.Node)
    node.update_arg(0, call_before(node, aten.div.Tensor, (grad, weight), grad.meta["val"]))
    node.update_arg(4, _SUM)


def _copy_meta(node: fx.Node, source: fx.Node, **more: Any) -> None:
    node.meta |= {key: source.meta[key] for key in ("val", *META) if key in source.meta} | more


def merge_constants(gm: fx.GraphModule) -> fx.GraphModule:
    """One node for each tensor that the graph holds."""
    first: dict[Any, fx.Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        kept = first.setdefault(node.target, node)
        if kept is not node:
            replace_node(node, kept)
    return gm


def drop_assertions(gm: fx.GraphModule) -> fx.GraphModule:
    """Drop assertions: shapes are fixed, and data was checked by the model's author."""
    for node in reversed(list(gm.graph.nodes)):
        checks = str(node.target).startswith(("aten._assert_", "aten.sym_constrain_"))
        if node.op == "call_function" and not node.users and checks:
            gm.graph.erase_node(node)
    return gm


def drop_unused(gm: fx.GraphModule) -> fx.GraphModule:
    """Drop every op whose result is not used. The joint graph is functional: no op has another
    effect than its result, but for those that draw random numbers, which decide what is drawn after
    them."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not (node.users or is_random(node)):
            gm.graph.erase_node(node)
    return gm
