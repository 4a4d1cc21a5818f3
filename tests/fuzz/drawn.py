"""What was drawn: the hard things that a model has, and what its plans did with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph, Role
from autopar.ir.input_sharding import input_state
from autopar.plans.plan import Plan
from autopar.runtime.program.program import Program as Step
from autopar.tracer import Traced
from tests.fuzz.programs import Program
from tests.planned import collectives

SENT = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}

WRITTEN = {
    "in-place ops": r"\.\w*[a-z]_\(|\] = |inplace=True|^\s+\w+ [+*]= ",
    "one layer called again": r"for _ in range\(1\)",
    "frozen parameters": r"frozen\(",
    "integer inputs": r"(?<!_)integers\(",
}
"""What is seen in a program's text."""

OF_MODELS = {
    "uneven sizes": 0.6,
    "layers alike": 0.1,
    "one layer called again": 0.02,
    "tied weights": 0.05,
    "in-place ops": 0.3,
    "several outputs": 0.3,
    "several losses": 0.05,
    "outputs used in backward": 0.05,
    "buffers that change": 0.1,
    "frozen parameters": 0.1,
    "integer inputs": 0.1,
    "dropout": 0.1,
    "inference": 0.01,
}
"""The share of models that each must be true of: a fuzzer that draws nothing hard finds nothing."""

OF_PLANS = {
    "sharded ops": 0.8,
    "sharded parameters": 0.5,
    "uneven shards": 0.1,
    "partial sums passed on": 0.05,
    "any collective": 0.8,
    "plans chosen": 0.03,
    "in stages": 0.1,
    "stages in microbatches": 0.02,
    "several stages of a rank": 0.02,
    "stages with two backwards": 0.02,
    "inputs in pieces": 0.05,
    **dict.fromkeys(sorted(SENT), 0.1),
}
"""The same of plans."""


@dataclass(frozen=True)
class On:
    """A mesh of `sizes`, and the seed of a random plan; without one, the plan chosen. With `local`,
    every rank is handed its own rows of those inputs that can be divided so."""

    sizes: tuple[int, ...]
    seed: int | None = None
    local: bool = False


@dataclass(frozen=True)
class Drawn:
    """What is true of a model, and of each of its plans."""

    model: set[str]
    plans: list[set[str]]


def facts_of_model(program: Program, traced: Traced, places: Sequence[On]) -> set[str]:
    graph = traced.graph
    keys = Counter(node.key for node in graph.with_role(Role.OP))
    losses = graph.with_role(Role.LOSS)
    ways = {size for place in places for size in place.sizes}
    found = {
        "uneven sizes": any(size % way for size in _sizes(graph) for way in ways if size > 1),
        "layers alike": max(keys.values(), default=0) > 1,
        "tied weights": bool(traced.tied),
        "several outputs": len(graph.with_role(Role.LOSS, Role.VALUE, Role.DETACHED)) > 1,
        "several losses": len(losses) > 1,
        "outputs used in backward": bool(losses and graph.with_role(Role.VALUE)),
        "buffers that change": bool(graph.with_role(Role.MUTATION)),
        "dropout": any("dropout" in node.op for node in graph.nodes),
        "inference": not graph.with_role(Role.GRAD),
    }
    written = {name for name, how in WRITTEN.items() if re.search(how, program.source, re.M)}
    return written | {name for name, true in found.items() if true}


def _sizes(graph: Graph) -> set[int]:
    return {size for node in graph.nodes for kind in node.outputs for size in kind.shape}


def facts_of_plan(graph: Graph, plan: Plan, step: Step, place: On) -> set[str]:
    structure = plan.structure
    sent = [collectives(gm) for gm in (step.forward, step.backward) if gm is not None]
    kinds = {kind for graph in sent for kind, _ in graph}
    stored = [param.storage for param in structure.params.values()]
    found = {
        "sharded ops": any(set(choice) - set("-,") for choice in structure.only.ops.values()),
        "sharded parameters": any("S" in text or "C" in text for text in stored),
        "uneven shards": any("C" in text for text in stored),
        "partial sums passed on": any("+" in choice for choice in structure.only.ops.values()),
        "any collective": bool(kinds),
        "plans chosen": place.seed is None,
        "inputs in pieces": any(
            not input_state(node, graph.atoms, place.sizes).is_replicated
            for node in graph.with_role(Role.INPUT)
        ),
    }
    return kinds | {name for name, true in found.items() if true}
