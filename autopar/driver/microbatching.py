"""How many microbatches a plan has, where that is open."""

from __future__ import annotations

import warnings
from dataclasses import replace

from autopar.errors import MicrobatchError, NotImposedWarning
from autopar.ir.contractions import batch_atoms
from autopar.ir.graph import Graph
from autopar.ir.microbatches import trains
from autopar.plans.options import Options
from autopar.plans.passes import StepForm, step_graph


def dividing(options: Options, graph: Graph) -> Options:
    """`options` for another call of a model that was planned with them: in as many microbatches as
    divide its batch, or as many as are best where it cannot be divided at all, which is told."""
    asked = options.microbatches
    if asked is None or not (trains(graph) or options.is_staged):
        return options
    sizes = [graph.atoms[atom].size for atom in sorted(batch_atoms(graph))]
    count = next(n for n in range(asked, 0, -1) if all(size % n == 0 for size in sizes))
    try:
        step_graph(graph, StepForm(count))
    except MicrobatchError as error:
        warnings.warn(NotImposedWarning(f"microbatches={asked}: {error}"), stacklevel=2)
        return replace(options, microbatches=None)
    return replace(options, microbatches=count)


def possible_counts(graph: Graph) -> tuple[int, ...]:
    """The powers of two that divide the batch, if the step can be taken in parts at all."""
    sizes = [graph.atoms[atom].size for atom in sorted(batch_atoms(graph))]
    found = [1]
    while trains(graph) and sizes and all(size % (2 * found[-1]) == 0 for size in sizes):
        found.append(2 * found[-1])
    try:
        step_graph(graph, StepForm(min(2, found[-1])))
    except MicrobatchError:
        return (1,)
    return tuple(found)
