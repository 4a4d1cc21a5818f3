"""What the stages of a pipeline send each other, and how long that is under way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.cost_model.collectives import collective_s
from autopar.cost_model.moves import to_ns
from autopar.ir.mesh import Axis
from autopar.ir.redistribute import local_bytes
from autopar.ir.stages import SEND, link_of
from autopar.plans.estimates import Delay
from autopar.plans.layout import Layout


def delays(layouts: Sequence[Layout], line: Axis | None) -> tuple[Delay, ...]:
    """Per pair of stages and phase: bytes of a device of the stage that sends, for a microbatch,
    and nanoseconds. `layouts` are those of the stages, `line` what joins them, None where all are
    on one rank; each tensor is a message of its own, as a permutation along it."""
    found: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
    for stage, layout in enumerate(layouts):
        graph = layout.graph
        for node in graph.nodes:
            if node.op == SEND:
                link, (state,) = link_of(node, stage), layout.pair(node)[0]
                tensor = graph.type_of(node.inputs[0])
                size = local_bytes(tensor, graph.atoms, state, layout.mesh.sizes)
                total = found[link.source, link.target, link.phase.value]
                total[0] += size
                if line is not None:
                    total[1] += to_ns(collective_s("permute", size, size, line))
    return tuple(Delay(*hop, *total) for hop, total in sorted(found.items()))
