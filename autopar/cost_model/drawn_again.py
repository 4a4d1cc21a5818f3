"""What drawing again costs beside the second draw where kernels are fused, in the problem that is
open about it.

A compiler draws within a kernel of its own making, which writes no more than others read. What is
to be drawn again is drawn both times by torch's kernel (`runtime.ops.draws`): it reads and writes
all of its tensors, and what it is given is written for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.cost_model.kernel_cost import Traffic, node_s
from autopar.cost_model.launches import host_ns
from autopar.cost_model.moves import to_ns
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.choices import Choice
from autopar.ir.copies import is_optional
from autopar.ir.draws import DRAW, MAYBE_DRAW, STATE
from autopar.ir.graph import Graph, Node, Role
from autopar.ir.mesh import Device, Mesh
from autopar.ir.problem import IntArray


def add_drawn_again(
    graph: Graph,
    mesh: Mesh,
    device: Device,
    table: Mapping[str, NodeClass],
    work: Mapping[int, Traffic],
    costs: Mapping[str, IntArray],
    windows: Windows,
) -> None:
    """Adds to the `costs` of drawing again, and to `windows`, by how much the first draw then takes
    longer."""
    number = {key: i for i, key in enumerate(table)}
    known = blocks_of(graph, mesh)
    originals = {node.name: node for node in graph.with_role(Role.OP) if node.op == MAYBE_DRAW}
    found: Counter[tuple[str, tuple[int, int], WindowPlace | None]] = Counter()
    for copy in graph.with_role(Role.OP):
        if is_optional(copy) and copy.op == DRAW:
            original = originals[copy.name]
            longer = _longer(graph, mesh, device, table, work, original)
            found[copy.key, longer, known.window_of(original)] += 1
    for (key, (computed_ns, launched_ns), place), count in found.items():
        drawn = np.array([isinstance(c, Choice) for c in table[key].choices], np.int64)
        costs[key][:] += graph.turns * count * (computed_ns + launched_ns) * drawn
        if place is not None:
            hiding = windows.hiding
            pair = hiding.computed(computed_ns * drawn), hiding.launched(launched_ns * drawn)
            for saved in pair:
                windows.add_node(place, number[key], [count * each for each in saved])


def _longer(
    graph: Graph,
    mesh: Mesh,
    device: Device,
    table: Mapping[str, NodeClass],
    work: Mapping[int, Traffic],
    original: Node,
) -> tuple[int, int]:
    """By how many nanoseconds an op, and what makes what it is given, take longer on the device,
    and for the host, where it is drawn by torch's kernel."""
    makers = [graph.nodes[ref.node] for ref in original.inputs]
    reads = tuple(maker.op != STATE for maker in makers)
    apart = Traffic(reads, (True,) * len(original.outputs))
    pairs = [(original, work[original.index]), (replace(original, op=DRAW), apart)]
    for maker in dict.fromkeys(makers):
        if maker.op != STATE and not maker.view and maker.index in work:
            done = work[maker.index]
            pairs += [(maker, done), (maker, replace(done, writes=(True,) * len(done.writes)))]
    computed = launched = 0
    for k, (node, done) in enumerate(pairs):
        entry, sign = table[original.key if node.op == DRAW else node.key], 1 if k % 2 else -1
        choice = entry.choices[0]
        assert isinstance(choice, Choice), f"{node.key} is no op"
        states = entry.inputs[0], entry.outputs[0]
        computed += sign * to_ns(node_s(graph, node, done, choice, states, mesh.sizes, device))
        launched += sign * host_ns(graph, node, done, choice, mesh.sizes, device, 0)
    return computed, launched
