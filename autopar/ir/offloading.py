"""Tensors in the memory of the host: saved activations, and parameters.

A tensor that is offloaded is copied to the host after its last use in forward, and back before its
first use in backward. A copy hides behind what other blocks compute: no more than `AHEAD` blocks'
tensors are on their way in either direction.

Some tensors stay on the device, though their class is offloaded: those last used in one of the last
blocks of forward, or needed in one of the first of backward. Outputs of the graph stay too: they
are held anyway. So do states of generators, which are small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from autopar.ir.blocks import Blocks, WindowPlace, blocks_of
from autopar.ir.casts import casts_of
from autopar.ir.graph import OUTPUT_ROLES, Graph, Phase, Ref, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Mesh
from autopar.ir.own_ops import STATE, is_optional
from autopar.ir.uses import Group, groups, is_saved, root_key, root_of

AHEAD = 2
"""An offload ends after so many blocks, the one in which it starts and the next. A reload starts at
most so many blocks ahead of the one that needs it."""


class OffloadedTensor(NamedTuple):
    """A tensor that is on the host between op `last` of forward, which makes it or is the last to
    read it, and op `first` of backward, the first to read it."""

    root: Ref
    last: int
    first: int


def offloadable(graph: Graph, mesh: Mesh) -> Mapping[str, tuple[OffloadedTensor, ...]]:
    """Per class of activations (`uses.root_key`) those of its tensors that are on the host when it
    is offloaded, in order. Classes without any are left out. An activation that may be recomputed
    (an optional copy, `passes.recompute`) counts as read where its copy is."""
    blocks, copies = blocks_of(graph, mesh).of, casts_of(graph).copies
    forward_ops = {n.name: n.index for n in graph.with_role(Role.OP) if n.phase is Phase.FORWARD}
    num_blocks = len(blocks_of(graph, mesh).windows[Phase.FORWARD])
    all_groups = groups(graph)
    forward = {group.root: group for group in all_groups if group.phase is Phase.FORWARD}
    tensors: dict[str, list[OffloadedTensor]] = defaultdict(list)
    for group in all_groups:
        root, maker = group.root, graph.nodes[group.root.node]
        if is_optional(maker):
            root = Ref(forward_ops[maker.name], root.output)
        elif not is_saved(graph, group) or root.node in copies or maker.op == STATE:
            continue
        used = forward[root].uses if root in forward else ()
        users = [use.node for use in (*used, *group.uses)]
        if any(graph.nodes[user].role in OUTPUT_ROLES for user in users):
            continue
        last = max((root.node, *(use.node for use in used)))
        first = min(use.node for use in group.uses)
        if blocks[last] + AHEAD < num_blocks and blocks[first] >= AHEAD:
            tensors[root_key(graph, root)].append(OffloadedTensor(root, last, first))
    return {key: tuple(tensors[key]) for key in sorted(tensors)}


def copied_in(
    graph: Graph, mesh: Mesh, tensor: OffloadedTensor
) -> tuple[WindowPlace | None, WindowPlace | None]:
    """The windows that hide the two copies: the block after the last use in forward hides the
    offload, the block before the first use in backward the reload."""
    known = blocks_of(graph, mesh)
    return (
        known.window(Phase.FORWARD, known.of[tensor.last] + 1),
        known.window(Phase.BACKWARD, known.of[tensor.first] - 1),
    )


def offloaded(graph: Graph, mesh: Mesh, keys: Collection[str]) -> tuple[OffloadedTensor, ...]:
    """The tensors on the host when the classes `keys` are offloaded. ValueError if one of these
    cannot be."""
    if not keys:
        return ()
    known = offloadable(graph, mesh)
    unknown = sorted(set(keys) - known.keys())
    if unknown:
        raise ValueError(f"{unknown[0]} cannot be offloaded")
    return tuple(tensor for key in sorted(keys) for tensor in known[key])


# Parameters in the memory of the host.
#
# Their gradients and optimizer states are there too, and the optimizer steps there. The device gets
# a copy ahead of the first use in forward, and another ahead of the first use in backward. A
# gradient goes to the host once it has the parameter's storage. A copy hides behind what the device
# computes meanwhile. Where backward needs a parameter soon after forward did, its copy stays.


class StreamedParam(NamedTuple):
    """A parameter on the host: the blocks of `forward` and `backward` for which it is copied to the
    device, None where it is not. `gradient` is the block of backward that makes its gradient, if
    there is one. The copy for forward `stays` until backward where backward reads it soon."""

    param: Ref
    forward: int | None
    backward: int | None
    gradient: int | None
    stays: bool

    def copied_in(self, known: Blocks) -> tuple[WindowPlace | None, ...]:
        """The windows that hide its copies, in this order: the block before each use, and the block
        after the one that makes the gradient."""
        uses = (Phase.FORWARD, self.forward), (Phase.BACKWARD, self.backward)
        windows = [known.window(phase, block - 1) for phase, block in uses if block is not None]
        if self.gradient is not None:
            windows.append(known.window(Phase.BACKWARD, self.gradient + 1))
        return tuple(windows)


@per_graph
def can_be_on_host(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """The parameters that may be on the host, per class in order: all that forward does not change,
    that are not outputs of the graph themselves, and that are not the script's."""
    changed = {node.target for node in graph.with_role(Role.UPDATE)}
    leaving = {root_of(graph, n.inputs[0])[0].node for n in graph.with_role(*OUTPUT_ROLES)}
    params = graph.with_role(Role.PARAM)
    ruled_out = {n.key for n in params if n.target in changed or n.index in leaving or n.external}
    members = grouped((node.key, node.target) for node in params)
    return {key: tuple(names) for key, names in members.items() if key not in ruled_out}


class Hosting(NamedTuple):
    """Which members of a class are on the host: those in `do` always, those in `open` possibly, and
    no others."""

    do: tuple[str, ...]
    open: tuple[str, ...]

    @classmethod
    def of(cls, members: Sequence[str], known: Mapping[str, bool]) -> Hosting:
        """`known` says of some members whether they are on the host; the others are open."""
        return cls(
            tuple(m for m in members if known.get(m, False)),
            tuple(m for m in members if m not in known),
        )

    def counts(self, parts: int) -> tuple[int, ...]:
        """The possible numbers of members on the host: the open ones in so many equal `parts`."""
        num, least = len(self.open), len(self.do)
        return tuple(sorted({least + num * part // parts for part in range(parts + 1)}))

    def names(self, count: int) -> tuple[str, ...]:
        """The members on the host, if there are `count`: the open ones are chosen as evenly as
        possible, since their copies come one by one."""
        num, more = len(self.open), count - len(self.do)
        chosen = (m for k, m in enumerate(self.open) if (k + 1) * more // num > k * more // num)
        return (*self.do, *chosen)


def streamed(graph: Graph, mesh: Mesh, names: Collection[str]) -> tuple[StreamedParam, ...]:
    """The parameters `names` as streamed parameters, in order. All of them can be on the host."""
    if not names:
        return ()
    known = blocks_of(graph, mesh)
    by_root = {(group.root.node, group.phase): group for group in groups(graph)}
    gradients = {node.target: node for node in graph.with_role(Role.GRAD)}
    num_blocks, all_streamed = len(known.windows[Phase.FORWARD]), list[StreamedParam]()
    for node in graph.with_role(Role.PARAM):
        if node.target not in names:
            continue
        param_groups = (by_root.get((node.index, phase)) for phase in Phase)
        read = [_blocks_that_read(graph, known, by_root, group) for group in param_groups]
        forward, backward = (min(blocks, default=None) for blocks in read)
        last = max(read[0], default=-1)
        # No reload for a copy still there at the end of forward, or needed right after it.
        stays = False
        if forward is not None and backward is not None:
            stays = last + AHEAD >= num_blocks or backward < AHEAD
        gradient = gradients.get(node.target)
        gradient_block = (
            None
            if gradient is None
            else known.of.get(root_of(graph, gradient.inputs[0])[0].node, -1)
        )
        reload = None if stays else backward
        all_streamed.append(StreamedParam(Ref(node.index), forward, reload, gradient_block, stays))
    return tuple(all_streamed)


def _blocks_that_read(
    graph: Graph, known: Blocks, by_root: dict[tuple[int, Phase], Group], group: Group | None
) -> list[int]:
    """The blocks whose ops read a tensor, or a cast of it, in the group's phase."""
    blocks: list[int] = []
    copies = casts_of(graph).copies
    for use in () if group is None else group.uses:
        if use.node in copies:
            assert group is not None
            of_cast = by_root.get((use.node, group.phase))
            blocks += _blocks_that_read(graph, known, by_root, of_cast) or [known.of[use.node]]
        elif use.node in known.of and not is_optional(graph.nodes[use.node]):
            blocks.append(known.of[use.node])
    return blocks
