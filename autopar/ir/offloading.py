"""What lies in the memory of the host: what forward hands to backward, and parameters.

A tensor that is offloaded is copied to the host after its last use in forward, and back before its
first in backward. A copy hides behind what other blocks compute. So what is last used in one of the
last blocks of forward, or needed in one of the first of backward, stays on the device, though its
class is offloaded: no more than `AHEAD` blocks' tensors are on their way in either direction. What
leaves the graph stays too: it is held anyway. So do states of generators, which are small.
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
"""An offload is over when so many blocks are, that in which it starts and the next; a reload starts
at most so many blocks ahead of the one that needs it."""


class OffloadedTensor(NamedTuple):
    """A tensor that is on the host between op `last` of forward, which makes it or is the last to
    read it, and op `first` of backward, the first to read it."""

    root: Ref
    last: int
    first: int


def offloadable(graph: Graph, mesh: Mesh) -> Mapping[str, tuple[OffloadedTensor, ...]]:
    """Per class of activations (`uses.root_key`) those of its tensors that are away when it is
    offloaded, in order; classes of which none would be are left out. Where it is open whether one
    is recomputed (`recompute.with_options`), it is read where its copy is."""
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
    """What hides the copies: that to the host the block after the last use, that back the block
    before the first."""
    known = blocks_of(graph, mesh)
    return (
        known.window(Phase.FORWARD, known.of[tensor.last] + 1),
        known.window(Phase.BACKWARD, known.of[tensor.first] - 1),
    )


def offloaded(graph: Graph, mesh: Mesh, keys: Collection[str]) -> tuple[OffloadedTensor, ...]:
    """What is away when the classes `keys` are offloaded. ValueError if one of them cannot be."""
    if not keys:
        return ()
    known = offloadable(graph, mesh)
    unknown = sorted(set(keys) - known.keys())
    if unknown:
        raise ValueError(f"{unknown[0]} cannot be offloaded")
    return tuple(tensor for key in sorted(keys) for tensor in known[key])


# Parameters that live in the memory of the host.
#
# So does what belongs to them: gradients and the states of the optimizer, which steps there. The
# device gets a copy ahead of the first use in forward, and another ahead of the first in backward;
# a gradient goes to the host once it is as the parameter is stored. A copy hides behind what the
# device computes meanwhile. Where backward needs a parameter soon after forward did, its copy
# stays.


class StreamedParam(NamedTuple):
    """A parameter on the host: the blocks of `forward` and `backward` for which it is copied to the
    device, None where it is not; that of backward in which its gradient is made, if it is. What is
    copied for forward `stays` until backward where that reads it soon."""

    param: Ref
    forward: int | None
    backward: int | None
    gradient: int | None
    stays: bool

    def copied_in(self, known: Blocks) -> tuple[WindowPlace | None, ...]:
        """What hides its copies, in this order: the block before each use, and the block after the
        one that makes the gradient."""
        uses = (Phase.FORWARD, self.forward), (Phase.BACKWARD, self.backward)
        windows = [known.window(phase, block - 1) for phase, block in uses if block is not None]
        if self.gradient is not None:
            windows.append(known.window(Phase.BACKWARD, self.gradient + 1))
        return tuple(windows)


@per_graph
def can_be_on_host(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """The parameters that may live on the host, per class in order: all that forward does not
    change, that do not leave the graph as they are, and that are not the script's."""
    changed = {node.target for node in graph.with_role(Role.UPDATE)}
    leaving = {root_of(graph, n.inputs[0])[0].node for n in graph.with_role(*OUTPUT_ROLES)}
    params = graph.with_role(Role.PARAM)
    ruled_out = {n.key for n in params if n.target in changed or n.index in leaving or n.external}
    members = grouped((node.key, node.target) for node in params)
    return {key: tuple(names) for key, names in members.items() if key not in ruled_out}


class Hosting(NamedTuple):
    """Which `members` of a class live on the host, where some of them `do` in any case, and all but
    those and the `open` ones do not."""

    do: tuple[str, ...]
    open: tuple[str, ...]

    @classmethod
    def of(cls, members: Sequence[str], known: Mapping[str, bool]) -> Hosting:
        """Of some it may be known whether they do."""
        return cls(
            tuple(m for m in members if known.get(m, False)),
            tuple(m for m in members if m not in known),
        )

    def counts(self, parts: int) -> tuple[int, ...]:
        """How many may: the open ones in so many equal parts."""
        num, least = len(self.open), len(self.do)
        return tuple(sorted({least + num * part // parts for part in range(parts + 1)}))

    def names(self, count: int) -> tuple[str, ...]:
        """Those that do, where so many do: of the open ones as evenly as can be, since their copies
        come one by one."""
        num, more = len(self.open), count - len(self.do)
        chosen = (m for k, m in enumerate(self.open) if (k + 1) * more // num > k * more // num)
        return (*self.do, *chosen)


def streamed(graph: Graph, mesh: Mesh, names: Collection[str]) -> tuple[StreamedParam, ...]:
    """The parameters `names` on the host, all of which can be there, in order."""
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
        # On the device to the end of forward, and from there, it need not come again.
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
    """The blocks whose ops read a tensor, or what is cast of it, in the group's phase."""
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
