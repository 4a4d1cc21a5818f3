"""Ops written as others: what shards better in pieces, and what nobody has described as a whole.

An op of `PIECES_OF` becomes the ops of its function there. Any other op without a rule becomes what
torch's core decompositions make of it, again and again, until every op has a rule or no
decomposition is left.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.rules.table import rule_for
from autopar.tracer import torch_private
from autopar.tracer.decompose import META
from autopar.tracer.pieces_norm import NORM_PIECES
from autopar.tracer.snapshot import call_of

aten = torch.ops.aten

Pieces = Callable[..., Any]
"""An op as a function of its arguments that calls other ops; NotImplemented leaves it as it is."""

PIECES_OF: dict[Any, Pieces] = {
    **NORM_PIECES,
    # A view whose numbers are other ones than its memory's cannot be sent.
    aten._conj.default: aten._conj_physical.default,
}


def split_into_pieces(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace ops by their pieces, and ops without a rule by their decompositions."""
    pending = [node for node in reversed(gm.graph.nodes) if node.op == "call_function"]
    while pending:
        node = pending.pop()
        if node.target is operator.getitem or not node.users:
            continue
        function = PIECES_OF.get(node.target)
        if function is None and rule_for(call_of(node)) is None:
            function = torch_private.decomposition(node.target)
        if function is not None:
            pending += reversed(_replace(node, function))
    return gm


def _replace(node: fx.Node, function: Pieces) -> list[fx.Node]:
    """Put the ops that `function` calls in the place of `node`; those ops. None where it declines,
    or computes tensors of other shapes."""
    sources = list(dict.fromkeys(node.all_input_nodes))
    position = {source: i for i, source in enumerate(sources)}

    several = isinstance(node.meta["val"], tuple | list)
    wanted = node.meta["val"] if several else (node.meta["val"],)

    def call(*tensors: Tensor) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: tensors[position[n]])
        found = function(*map(_own, args), **{k: _own(value) for k, value in kwargs.items()})
        trusted = found is NotImplemented or node.target in PIECES_OF
        return found if trusted else _cast(found, wanted, several=several)

    traced = torch_private.ops_of(call, [source.meta["val"] for source in sources])
    if traced is None:
        return []
    results = traced.graph.output_node().args[0]
    found = results if isinstance(results, tuple | list) else (results,)
    if not _alike(found, wanted):
        return []
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
    made = _copy(node, traced, copies)
    if several:
        for user in list(node.users):
            _, which = user.args
            assert isinstance(which, int)
            user.replace_all_uses_with(copies[found[which]])
            node.graph.erase_node(user)
    else:
        node.replace_all_uses_with(copies[found[0]])
    node.graph.erase_node(node)
    return made


def _cast(found: Any, wanted: Sequence[Any], *, several: bool) -> Any:
    """Results in the dtypes of the op's."""
    results = found if several else (found,)
    if len(results) != len(wanted):
        return found
    cast = tuple(
        new.to(old.dtype) if isinstance(new, Tensor) and isinstance(old, Tensor) else new
        for new, old in zip(results, wanted, strict=True)
    )
    return cast if several else cast[0]


def _own(value: Any) -> Any:
    """FX's lists cannot be changed; a function may change those it is given."""
    return [_own(item) for item in value] if isinstance(value, list | tuple) else value


def _alike(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether the results are of the shapes that the op's are; what is None is left out. Dtypes are
    those of the pieces: of statistics under autocast, fake tensors and kernels disagree."""
    if len(found) != len(wanted):
        return False
    pairs = [
        (new.meta.get("val") if isinstance(new, fx.Node) else new, old)
        for new, old in zip(found, wanted, strict=True)
    ]
    return all(
        isinstance(new, Tensor) and new.shape == old.shape
        for new, old in pairs
        if isinstance(old, Tensor)
    )


def _copy(node: fx.Node, traced: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The ops of `traced` in front of `node`, in its place in the model."""
    made: list[fx.Node] = []
    with node.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copy = node.graph.node_copy(inner, copies.__getitem__)
            copy.meta = {key: node.meta[key] for key in META if key in node.meta}
            copy.meta["val"] = inner.meta["val"]
            copies[inner] = copy
            made.append(copy)
    return made
