"""A step cut into stages: who computes what, what travels, and what cannot be cut."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.driver.search.segments import segments
from autopar.errors import StageError
from autopar.ir.graph import Graph, Node, Phase, Role
from autopar.ir.own_ops import RECEIVE, SEND, is_end
from autopar.ir.passes.microbatches import in_microbatches, in_other_microbatches
from autopar.ir.passes.stage_assignment import assign
from autopar.ir.passes.stages import StageLink, cut_at, in_stages, link_of
from autopar.tracer import trace
from tests.codegen.models import case
from tests.zoo.cases import trained


def graph(name: str, microbatches: int = 2) -> Graph:
    return in_microbatches(case(name).traced.graph, microbatches)


def links(found: Graph, stage: int) -> tuple[StageLink, ...]:
    """What a stage sends and is sent, in the order of its nodes."""
    return tuple(link_of(node, stage) for node in filter(is_end, found.nodes))


def params(found: Graph) -> set[str]:
    return {node.target for node in found.with_role(Role.PARAM)}


def grads(found: Graph) -> set[str]:
    return {node.target for node in found.with_role(Role.GRAD)}


def test_between_layers_the_residual_and_its_gradient_travel_and_nothing_else() -> None:
    whole = graph("llama")
    first, second = in_stages(whole, [cut_at(whole, "model.layers.1")])
    (forth, back) = links(first, 0)
    assert {forth, back} == set(links(second, 1))
    assert (forth.source, forth.target, forth.phase) == (0, 1, Phase.FORWARD)
    assert (back.source, back.target, back.phase) == (1, 0, Phase.BACKWARD)
    assert params(first) == grads(first) and params(second) == grads(second)
    assert not params(first) & params(second)
    assert params(first) | params(second) == params(whole)


def test_masks_and_positions_are_computed_where_they_are_needed() -> None:
    whole = graph("llama")
    parts = in_stages(whole, [cut_at(whole, "model.layers.1")])
    tables = [
        {node.name for node in part.nodes if node.op.startswith(("aten.cos", "aten.sin"))}
        for part in parts
    ]
    assert tables[0] and tables[0] == tables[1]


def test_a_tied_weight_has_a_gradient_in_each_of_its_stages() -> None:
    whole = graph("gpt2")
    parts = in_stages(whole, [cut_at(whole, "transformer.h.1")])
    assert all("transformer.wte.weight" in grads(part) for part in parts)
    # Each adds up its own terms: neither hands the other a gradient of the weight.
    assert len(links(parts[0], 0)) == 2


def test_what_skips_a_stage_goes_straight_to_those_that_read_it() -> None:
    """The decoder's layers of T5 read what the encoder made."""
    whole = in_microbatches(trained("t5").traced.graph, 2)
    cuts = [cut_at(whole, m) for m in ("encoder.final_layer_norm", "decoder.block.0", "lm_head")]
    parts = in_stages(whole, cuts)
    found = {link for stage, part in enumerate(parts) for link in links(part, stage)}
    assert any(link.target - link.source == 1 for link in found)
    for stage, part in enumerate(parts):
        for node in part.nodes:
            if node.op in (SEND, RECEIVE):
                other = node.args[-1]
                assert isinstance(other, int)
                assert (other < stage) == ((node.op == RECEIVE) == (node.phase is Phase.FORWARD))


def test_each_gradient_is_made_where_its_parameter_is() -> None:
    for name in ("gpt2", "llama"):
        whole = graph(name)
        parts = in_stages(whole, [s.start for s in segments(whole)[1:]])
        assert all(grads(part) <= params(part) for part in parts)
        assert set().union(*map(grads, parts)) == grads(whole)


def test_every_op_is_in_some_stage_and_sums_are_not_counted_twice() -> None:
    whole = graph("gpt2")
    starts = [s.start for s in segments(whole)[1:]]
    assignment = assign(whole, starts)
    parts = in_stages(whole, starts)
    names = [{node.name for node in part.nodes} for part in parts]
    for node in whole.with_role(Role.OP):
        home = assignment.stage_of(node)
        if home is not None and not node.view:
            assert [k for k, some in enumerate(names) if node.name in some] == [home]


def test_forward_and_backward_follow_one_another() -> None:
    """What stages send each other leads on in forward and back in backward: none waits for ever."""
    for name in ("t5", "unet", "sequence"):
        whole = trained(name).traced.graph
        starts = [s.start for s in segments(whole)[1:]]
        for stage, part in enumerate(in_stages(whole, starts)):
            for link in links(part, stage):
                assert (link.source < link.target) == (link.phase is Phase.FORWARD)


def test_segments_are_the_list_of_layers_and_what_has_parameters_beside_it() -> None:
    found = [segment.module for segment in segments(graph("llama"))]
    assert found == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"
    ]  # fmt: skip
    assert all(a.start < b.start for a, b in pairwise(segments(graph("llama"))))


class Scaled(nn.Module):
    """Uses a parameter of its own after the first of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale)


def test_a_segment_begins_where_its_module_does() -> None:
    """A plan has names: from those, the run finds the same op."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.head = nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(torch.relu(self.stem(x))))).square().mean()

    whole = trace(Net(), (torch.ones(4, 8),), {}).graph
    found = segments(whole)
    assert [each.module for each in found] == ["stem", "body.a", "body.b", "head"]
    for each in found[1:]:
        between = whole.nodes[cut_at(whole, each.module) : each.start]
        assert all(node.view for node in between)


def test_what_cannot_be_cut_is_an_error_that_says_why() -> None:
    whole = graph("llama")
    with pytest.raises(StageError, match=r"no stage begins at 'model\.layers\.7'"):
        cut_at(whole, "model.layers.7")
    with pytest.raises(StageError, match="in the order in which the model computes them"):
        in_stages(whole, [cut_at(whole, "lm_head"), cut_at(whole, "model.layers.1")])
    after = max(n.index for n in whole.with_role(Role.OP) if n.phase is Phase.FORWARD) + 1
    with pytest.raises(StageError, match="stage 1 would have nothing to compute"):
        in_stages(whole, [after])


def test_running_statistics_have_one_owner() -> None:
    whole = trained("resnet").traced.graph
    ops = [n for n in whole.with_role(Role.OP) if n.module == "stem.1"]
    read = [n.index for n in ops if n.phase is Phase.FORWARD and not n.view]
    failures = list[str]()
    for place in read[1:]:
        try:
            in_stages(whole, [place])
        except StageError as error:
            failures.append(str(error))
    # Within the norm, some cuts leave the old mean to one stage and the new one to another, or the
    # gradient of its bias to one that does not have it.
    told = (
        r"stem\.1\.running_\w+ is changed by stage",
        r"gradient of stem\.1\.bias is made by stage",
    )
    assert any(re.search(told[0], each) for each in failures)
    assert all(re.search("|".join(told), each) for each in failures)


def test_a_link_is_the_same_from_both_ends() -> None:
    whole = graph("llama")
    parts = in_stages(whole, [s.start for s in segments(whole)[1:]])
    ends: dict[StageLink, list[Node]] = {}
    for stage, part in enumerate(parts):
        for link, node in zip(
            links(part, stage), (n for n in part.nodes if n.op in (SEND, RECEIVE)), strict=True
        ):
            ends.setdefault(link, []).append(replace(node, index=0))
    for a, b in ends.values():
        assert {a.op, b.op} == {SEND, RECEIVE}
        assert [f.name for f in a.factors] == [f.name for f in b.factors]


class Unread(nn.Module):
    """Draws numbers that nobody reads, before some that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        nn.functional.dropout(h, 0.5)
        return nn.functional.dropout(self.second(h), 0.5).sum()


def test_numbers_that_nobody_reads_are_drawn() -> None:
    graph = trace(Unread(), (torch.ones(2, 4),)).graph
    for part in in_stages(graph, [cut_at(graph, "second")]):
        assert sum(node.random for node in part.nodes) == 1


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2"])
def test_in_another_number_of_microbatches_only_extents_differ(name: str) -> None:
    """Of a whole step, and of its stages."""
    whole = trained(name).traced.graph
    two, four = in_microbatches(whole, 2), in_microbatches(replace(whole), 4)
    assert in_other_microbatches(two, whole, 4) == four
    start = segments(two)[1].start
    stages = [in_stages(found, [start]) for found in (two, four)]
    for a, b in zip(*stages, strict=True):
        assert a != b and in_other_microbatches(a, whole, 4) == b


class Tuned(nn.Module):
    """Of which the embedding alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_a_gradient_goes_back_through_layers_that_are_not_trained() -> None:
    """Though all that is computed there is for one parameter of the first stage."""
    traced = trace(Tuned(), (torch.zeros(4, 3, dtype=torch.int64),), {})
    whole = in_microbatches(traced.graph, 2)
    stages = in_stages(whole, [cut_at(whole, f"layers.{k}") for k in (1, 2)])
    assert [grads(stage) for stage in stages] == [{"embed.weight"}, set(), set()]
    back = [sum("tanh_backward" in n.op for n in stage.with_role(Role.OP)) for stage in stages]
    assert back == [1, 1, 2]


class Adapted(nn.Module):
    """A layer with two adapters, of which the model that it is in reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor, which: str) -> Tensor:
        return (self.base(x) + getattr(self, which)(x)).tanh()


class Adapters(nn.Module):
    def __init__(self, which: str) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3))
        self.layers, self.which = nn.ModuleList(Adapted() for _ in range(4)), which

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.which)
        return x.square().mean()


def test_what_nobody_reads_is_where_another_call_reads_it() -> None:
    """As once another adapter is set; what is near nothing is in the first stage."""
    found: list[list[set[str]]] = []
    for which in "ab":
        whole = in_microbatches(trace(Adapters(which), (torch.randn(4, 8),), {}).graph, 2)
        parts = in_stages(whole, [cut_at(whole, f"layers.{k}") for k in (1, 3)])
        found.append([params(part) for part in parts])
    assert found[0] == found[1]
    assert "spare" in found[0][0] and "layers.3.b.weight" in found[0][2]


class Split(nn.Module):
    """A weight whose rows are split in two and in three, and in the order of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 5, 5))

    def forward(self, ids: Tensor) -> Tensor:
        scaled = self.weight * 1
        masked = scaled * torch.ones(5, 5).tril()
        thirds = masked.chunk(3, 0)
        moved = torch.cat([thirds[2], thirds[0]])
        loss = F.cross_entropy(scaled, ids, reduction="sum")
        half = masked.diagonal(dim1=-2, dim2=-1) + 0.5
        half[:3] = half[:3] * 2
        return half.tanh().mean() + loss + moved.sum()


def test_a_term_of_other_parts_is_not_taken_for_a_sum_of_gradients() -> None:
    """A stage has one term of the sum; the next op knows its dims by other parts."""
    graph = trace(Split(), (torch.zeros(6, 5, dtype=torch.int64),), {}).graph
    ops = {n.op: n.index for n in graph.with_role(Role.OP) if n.phase is Phase.FORWARD}
    for first in ("aten.diagonal.default", "aten.slice_scatter.default"):
        assert len(in_stages(graph, [ops[first], ops["aten.sum.default"]])) == 3
