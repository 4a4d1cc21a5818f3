"""A backward in two parts: what other stages wait for, and the rest."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.ir.blocks import blocks_of
from autopar.ir.graph import Graph, Node, Phase, Role
from autopar.ir.mesh import Mesh
from autopar.ir.own_ops import RECEIVE, SEND
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.recompute import with_recompute
from autopar.ir.passes.stages import cut_at, in_stages, in_two_parts, waited_for
from tests.codegen.models import case


def stages(name: str, microbatches: int, *starts: str) -> tuple[Graph, ...]:
    whole = in_microbatches(case(name).traced.graph, microbatches)
    return in_stages(whole, [cut_at(whole, start) for start in starts])


def parts(graph: Graph) -> tuple[list[Node], list[Node]]:
    """The ops and outputs of backward, of either part."""
    assert graph.second_part is not None
    found = [n for n in graph.nodes if n.phase is Phase.BACKWARD and n.role is not Role.TANGENT]
    return (
        [n for n in found if n.index < graph.second_part],
        [n for n in found if n.index >= graph.second_part],
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_first_part_is_what_other_stages_wait_for(microbatches: int) -> None:
    for graph in stages("llama", microbatches, "model.layers.1"):
        split = in_two_parts(graph)
        first, second = parts(split)
        sent = [n for n in split.nodes if n.op == SEND and n.phase is Phase.BACKWARD]
        needed, missing = set[int](), [n.index for n in sent]
        while missing:
            index = missing.pop()
            needed.add(index)
            missing += [ref.node for ref in split.nodes[index].inputs if ref.node not in needed]
        come = {n.index for n in split.nodes if n.op == RECEIVE and n.phase is Phase.BACKWARD}
        in_backward = {n.index for n in (*first, *second)}
        assert {n.index for n in first} == (needed & in_backward) | come
        assert {n.target for n in graph.with_role(Role.GRAD)} == {
            n.target for n in second if n.role is Role.GRAD
        }


def test_products_with_weights_come_first_and_with_activations_behind() -> None:
    """Of the two products in the backward of a linear layer, one makes what goes on."""
    _, middle, _ = stages("llama", 2, "model.layers.0", "model.layers.1")
    first, second = (Counter(n.op for n in part)["aten.mm.default"] for part in
                     parts(in_two_parts(middle)))  # fmt: skip
    assert first == second == 7


def test_a_stage_that_sends_no_gradient_has_all_in_the_second_part() -> None:
    graph, _ = stages("llama", 2, "model.layers.1")
    assert {graph.nodes[index].op for index in waited_for(graph)} == {RECEIVE}


def test_order_is_kept_within_parts_and_nothing_else_changes() -> None:
    _, graph = stages("gpt2", 2, "transformer.h.1")
    split = in_two_parts(graph)
    first = {graph.nodes[index].name for index in waited_for(graph)}
    names = [n.name for n in graph.nodes if n.phase is Phase.BACKWARD]
    after = [n.name for n in split.nodes if n.phase is Phase.BACKWARD]
    assert sorted(names) == sorted(after) and names != after
    outside = {n.name for n in graph.nodes if n.role is Role.TANGENT} | first
    assert after == [n for n in names if n in outside] + [n for n in names if n not in outside]
    ahead = [n.name for n in graph.nodes if n.phase is Phase.FORWARD]
    assert [n.name for n in split.nodes if n.phase is Phase.FORWARD] == ahead
    assert [n.key for n in split.nodes if n.name in first] == [
        n.key for n in graph.nodes if n.name in first
    ]


def test_what_is_made_again_is_where_it_is_needed() -> None:
    """A gate's product is needed for a weight alone; what it is made of, for what goes on too."""
    _, graph, _ = stages("llama", 1, "model.layers.0", "model.layers.1")
    keys = {n.key for n in graph.nodes if ".mlp" in n.module and n.phase is Phase.FORWARD}
    again = {key for key in keys if ":silu." in key or ":mul." in key}
    first, second = parts(in_two_parts(with_recompute(graph, again)))
    assert any(":recompute:silu." in n.key for n in first)
    assert any(":recompute:mul." in n.key for n in second)
    assert not any(":recompute:mul." in n.key for n in first if ".mlp:" in n.key)


def test_each_part_has_blocks_of_its_own() -> None:
    _, graph = stages("llama", 2, "model.layers.1")
    split = in_two_parts(graph)
    known, whole = blocks_of(split, Mesh(())), blocks_of(graph, Mesh(()))
    first, second = parts(split)
    assert whole.second == 0 < known.second
    of = [max(known.of[n.index] for n in first if n.index in known.of),
          min(known.of[n.index] for n in second if n.index in known.of)]  # fmt: skip
    assert of == [known.second - 1, known.second]
    assert known.first_with(Phase.BACKWARD, known.second) == known.second
    assert known.first_with(Phase.BACKWARD, known.second - 1) == 0
    assert known.first_with(Phase.FORWARD, known.second) == 0
