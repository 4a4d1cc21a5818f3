"""The graphs of a rank, interpreted for all ranks of a mesh, one node after the other.

The interpreter knows what collectives mean and does them by hand, on the list of all ranks' values.
Nothing of torch.distributed runs, so that any mesh can be simulated anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.errors import AutoparError
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Mesh
from autopar.runtime.ops.ragged_all_to_all import RAGGED_OPS, together
from autopar.runtime.program.symbols import SYMBOLS, mirror, on_rank, permute

c10d = torch.ops._c10d_functional


def run(
    gm: fx.GraphModule, mesh: Mesh, inputs_per_rank: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """The outputs of unbound graph `gm` on every rank of `mesh`, in order of rank.

    Ranks whose arguments of an op are the same tensors share its result. So replicated values are
    computed (and, for random ops, drawn) once. Values are freed at their last use.
    """
    ranks = range(mesh.num_devices)
    if len(inputs_per_rank) != len(ranks):
        raise AutoparError(f"{len(inputs_per_rank)} lists of inputs for {len(ranks)} ranks")
    last_use = _last_uses(gm)
    values: dict[fx.Node, list[Any]] = {}
    place = 0
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = [inputs[place] for inputs in inputs_per_rank]
                place += 1
            elif node.op == "get_attr":
                values[node] = [attrgetter(node.target)(gm)] * len(ranks)
            elif node.op == "output":
                return [_at(node.args[0], values, rank) for rank in ranks]
            else:
                values[node] = _call(node, mesh, values)
            for dead in last_use.get(node, ()):
                del values[dead]
    raise AssertionError("a graph ends in its output")


def _last_uses(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Per node, the values that nothing uses after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    return grouped((at, node) for node, at in last.items())


def _at(arg: Any, values: Mapping[fx.Node, list[Any]], rank: int) -> Any:
    return map_arg(arg, lambda node: values[node][rank])


def _call(node: fx.Node, mesh: Mesh, values: Mapping[fx.Node, list[Any]]) -> list[Any]:
    collective = _COLLECTIVES.get(node.target)
    if collective is not None:
        (source,) = node.all_input_nodes
        if node.args[1] == "max":
            collective = _all_reduce_max
        return _by_group(collective, values[source], mesh, node.args[-1])
    if node.target is c10d.wait_tensor.default:
        return values[node.all_input_nodes[0]]
    if node.target in RAGGED_OPS:
        return _talked(node, mesh, values)
    done: dict[tuple[Any, ...], Any] = {}
    results: list[Any] = []
    for rank in range(mesh.num_devices):
        op, given, resolved = node.target, node.args, ""
        if op in SYMBOLS:
            index = dict(zip(mesh.names, mesh.coordinate(rank), strict=True))
            op, behind = on_rank(op, given[1:], index)
            given, resolved = (given[0], *behind), f"{op}{behind}"
        key = resolved, *(id(values[source][rank]) for source in node.all_input_nodes)
        if key not in done:
            args, kwargs = _at((given, node.kwargs), values, rank)
            done[key] = op(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        results.append(done[key])
    return results


def _talked(node: fx.Node, mesh: Mesh, values: Mapping[fx.Node, list[Any]]) -> list[Any]:
    """An op whose ranks along an axis communicate."""
    *args, axis = node.args

    def run(ranks: list[tuple[Any, ...]]) -> list[Any]:
        return together([RAGGED_OPS[node.target](*given) for given in ranks])

    given = [tuple(_at(args, values, rank)) for rank in range(mesh.num_devices)]
    return _by_group(run, given, mesh, axis, lambda given: tuple(map(id, given)))


def _by_group(
    collective: Callable[[list[Any]], list[Any]],
    shards: Sequence[Any],
    mesh: Mesh,
    axis: Any,
    identity: Callable[[Any], Any] = id,
) -> list[Any]:
    """`collective` on the ranks of each group along the axis; once, where groups hold the same."""
    at = mesh.names.index(axis)
    results: list[Any] = [None] * mesh.num_devices
    done: dict[tuple[Any, ...], list[Any]] = {}
    for rank in range(mesh.num_devices):
        if results[rank] is None:
            group = mesh.group(rank, at)
            given = [shards[peer] for peer in group]
            key = tuple(map(identity, given))
            if key not in done:
                done[key] = collective(given)
            for peer, result in zip(group, done[key], strict=True):
                results[peer] = result
    return results


def _all_gather(shards: list[Tensor]) -> list[Tensor]:
    return [torch.cat(shards)] * len(shards)


def _all_reduce(shards: list[Tensor]) -> list[Tensor]:
    return [torch.stack(shards).sum(0, dtype=shards[0].dtype)] * len(shards)


def _all_reduce_max(shards: list[Tensor]) -> list[Tensor]:
    return [torch.stack(shards).amax(0)] * len(shards)


def _reduce_scatter(shards: list[Tensor]) -> list[Tensor]:
    return [chunk.clone() for chunk in _all_reduce(shards)[0].chunk(len(shards))]


def _all_to_all(shards: list[Tensor]) -> list[Tensor]:
    sent = [shard.chunk(len(shards)) for shard in shards]
    return [torch.cat([chunks[k] for chunks in sent]) for k in range(len(shards))]


def _permute(shards: list[Tensor]) -> list[Tensor]:
    return [shard.clone() for shard in (shards[-1], *shards[:-1])]


def _mirror(shards: list[Tensor]) -> list[Tensor]:
    return [shard.clone() for shard in reversed(shards)]


_COLLECTIVES: Mapping[Any, Callable[[list[Tensor]], list[Tensor]]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_reduce.default: _all_reduce,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
    permute: _permute,
    mirror: _mirror,
}
