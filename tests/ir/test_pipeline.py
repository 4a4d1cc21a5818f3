"""Tables of actions: read, checked, and played against longest paths in the graph of waits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, permutations, product
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import StageError
from autopar.ir.graph import Phase
from autopar.ir.pipeline import (
    Action,
    ActionSpan,
    Hop,
    Pass,
    PipelineSchedule,
    answers,
    hops_in_sequence,
    simulate_actions,
)
from autopar.plans.pipeline_orders import make_schedule

F, B, W = Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHTS
ROOT = "root"


def waits(
    chains: Iterable[Sequence[Action]],
    hops: Iterable[Hop],
    length: Callable[[Action], int] = lambda _: 0,
    delay: Callable[[Hop], int] = lambda _: 0,
) -> Any:
    """The graph of what waits for what, where actions of a chain follow one another. The path from
    `ROOT` of the least weight is as long, negated, as it takes for an action to start."""
    graph, chains = nx.MultiDiGraph(), [list(chain) for chain in chains]
    actions = {action for chain in chains for action in chain}
    edges = [(pair, 0) for chain in chains for pair in pairwise(chain)]
    for stage, kind, microbatch in actions:
        if kind is not F:
            before = Action(stage, F if kind is B else B, microbatch)
            edges.append(((before, Action(stage, kind, microbatch)), 0))
    for hop, microbatch in product(hops, {action.microbatch for action in actions}):
        source, target, phase = hop
        kind = F if phase is Phase.FORWARD else B
        sent = Action(source, kind, microbatch), Action(target, kind, microbatch)
        edges.append((sent, delay(hop)))
    graph.add_edges_from((ROOT, action, {"weight": 0}) for action in actions)
    for (first, second), late in edges:
        graph.add_edge(first, second, weight=-length(first) - late)
    return graph


@st.composite
def any_hops(draw: st.DrawFn, stages: int) -> frozenset[Hop]:
    """Forward to later stages and backward to earlier ones, with and without neighbours."""
    pairs = permutations(range(stages), 2)
    possible = [(s, t, Phase.FORWARD if s < t else Phase.BACKWARD) for s, t in pairs]
    return draw(st.frozensets(st.sampled_from(possible))) if possible else frozenset()


def line(stages: int) -> st.SearchStrategy[frozenset[Hop]]:
    return st.just(hops_in_sequence(stages))


@st.composite
def pipelines(
    draw: st.DrawFn,
    hops_of: Callable[[int], st.SearchStrategy[frozenset[Hop]]] = any_hops,
    can_hang: bool = False,
) -> tuple[PipelineSchedule, frozenset[Hop]]:
    """A table, and hops along which its ranks do not wait for each other, unless they can. Every
    rank has a stage, which takes microbatches in any order."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    hops, kinds = draw(hops_of(stages)), draw(st.sampled_from([(F, B), (F, B, W)]))
    assignment = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    lines = product(range(stages), kinds)
    chains = [[Action(s, kind, m)] for s, kind in lines for m in range(microbatches)]
    if can_hang:
        ways = draw(st.permutations([k for k, chain in enumerate(chains) for _ in chain]))
        left = [iter(chain) for chain in chains]
        order = [next(left[k]) for k in ways]
    else:
        graph = waits(chains, hops)
        graph.remove_node(ROOT)
        actions = sorted(graph.nodes)
        priority = dict(zip(actions, draw(st.permutations(range(len(actions)))), strict=True))
        order = list(nx.lexicographical_topological_sort(graph, key=priority.__getitem__))
    rows = [
        tuple(a for a in order if assignment[a.stage] == home) for home in sorted(set(assignment))
    ]
    return PipelineSchedule(tuple(rows)), hops


@given(st.builds(Action, st.integers(0, 99), st.sampled_from(Pass), st.integers(0, 999)))
def test_parsing_an_action_is_the_inverse_of_str(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(pipelines(line), st.sampled_from([" ", ",", ", ", "  "]), st.sampled_from("BI"))
def test_parsing_a_table_is_the_inverse_of_str(
    drawn: tuple[PipelineSchedule, frozenset[Hop]], blank: str, backward: str
) -> None:
    table, _ = drawn
    text = str(table).replace(" ", blank).replace("B", backward)
    assert PipelineSchedule.parse(f"\n{text}\n") == table


def test_a_table_is_read_as_it_is_written() -> None:
    table = PipelineSchedule.parse("0F0 0I0,0W0\n1F0, 1I0  1W0")
    first, second = (tuple(Action(s, kind, 0) for kind in (F, B, W)) for s in (0, 1))
    assert table == PipelineSchedule((first, second))
    assert str(table) == "0F0 0B0 0W0\n1F0 1B0 1W0"
    assert (table.ranks, table.num_stages, table.microbatches) == ({0: 0, 1: 1}, 2, 1)
    assert table.is_split and not PipelineSchedule.parse("0F0 0I0").is_split


@pytest.mark.parametrize(
    "text", ["", "0", "F0", "0F", "0X0", "0f0", "-1F0", "0F-1", "0FB0", "0F0 ", "0F0\n", "0F0.5"]
)
def test_what_is_no_action_is_quoted(text: str) -> None:
    with pytest.raises(StageError, match=re.escape(f"{text!r} is no action")):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0B0; 1F0", "'0B0;' is no action"),
        ("1F0 1B0\n3F0 3B0", r"has stages \[1, 3\]: number them from 0"),
        ("0F0 0B0\n2F0 2B0", r"has stages \[0, 2\]: number them from 0"),
        ("0F0 0B0\n1F0 1B0\n0F1 0B1", r"stage 0 is on ranks \[0, 2\]"),
        ("0F0 0F2 0B0 0B1 0B2", r"stage 0 does F of microbatches \[0, 2\].* each of 0 to 2 once"),
        ("0F0 0F1 0B0", r"stage 0 does B of microbatches \[0\].* 0 to 1"),
        ("0F1 0B1", r"stage 0 does F of microbatches \[1\].* 0 to 1"),
        ("0F0 0F1 1F0 1B0 0B0 0B1", r"stage 1 does F of microbatches \[0\].* 0 to 1"),
        ("0F0 0F0 0B0", r"stage 0 does F of microbatches \[0, 0\].* 0 to 0"),
        ("0F0 0B0 0W0 0W1", r"stage 0 does F of microbatches \[0\].* 0 to 1"),
        ("0B0 0F0", ": 0B0 never start"),
        ("0F0 0W0 0B0", ": 0W0 never start"),
        ("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1", "wait for each other: 0B0, 1F1 never start"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "wait for each other: 0B0, 1F1 never start"),
        ("0F0 0B0\n2F0 2B0 1F0 1B0", "wait for each other: 0B0, 2F0 never start"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(text: str, reason: str) -> None:
    with pytest.raises(StageError, match=reason):
        PipelineSchedule.parse(text)


def test_neighbours_send_each_other_unless_hops_are_given() -> None:
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert hops_in_sequence(3) == {
        (0, 1, forward), (1, 2, forward), (1, 0, backward), (2, 1, backward),
    }  # fmt: skip
    rows = ("0F0 0B0", "2F0 2B0 1F0 1B0")
    table = PipelineSchedule(tuple(tuple(map(Action.parse, row.split())) for row in rows))
    table.check({(0, 1, forward), (0, 2, forward), (1, 0, backward)})
    for hops in (None, {(1, 2, forward)}, {(1, 2, backward)}):
        with pytest.raises(StageError, match="wait for each other"):
            table.check(hops)


def test_an_action_starts_when_its_rank_is_free_and_the_last_of_what_it_needs_has_come() -> None:
    """Neighbours send in 1, stages 0 and 2 in 10."""
    table = PipelineSchedule.parse("0F0 0B0\n1F0 1B0\n2F0 2B0")
    hops = hops_in_sequence(3) | {(0, 2, Phase.FORWARD), (2, 0, Phase.BACKWARD)}
    lengths, delays = {F: 2, B: 3}, {1: 1, 2: 10}
    found = simulate_actions(
        table, lambda a: lengths[a.kind], hops, lambda hop: delays[abs(hop[0] - hop[1])]
    )
    assert {str(action): tuple(span) for action, span in found.items()} == {
        "0F0": (0, 2), "1F0": (3, 5), "2F0": (12, 14),
        "2B0": (14, 17), "1B0": (18, 21), "0B0": (27, 30),
    }  # fmt: skip


@given(pipelines(), st.data())
def test_actions_start_after_the_longest_path_to_them(
    drawn: tuple[PipelineSchedule, frozenset[Hop]], data: st.DataObject
) -> None:
    table, hops = drawn
    actions = [action for row in table.rows for action in row]
    some = st.integers(0, 9)
    lengths = data.draw(st.fixed_dictionaries(dict.fromkeys(actions, some)))
    delays = data.draw(st.fixed_dictionaries(dict.fromkeys(sorted(hops), some)))
    length, delay = lengths.__getitem__, delays.__getitem__
    graph = waits(table.rows, hops, length, delay)
    paths = nx.single_source_bellman_ford_path_length(graph, ROOT)
    starts = {a: -int(paths[a]) for a in actions}
    expected = {a: ActionSpan(starts[a], starts[a] + lengths[a]) for a in actions}
    table.check(hops)
    assert simulate_actions(table, length, hops, delay) == expected


@given(pipelines(can_hang=True))
def test_ranks_wait_for_ever_where_actions_wait_in_a_circle(
    drawn: tuple[PipelineSchedule, frozenset[Hop]],
) -> None:
    """The error names where each rank stops: its first action on a circle, or behind one."""
    table, hops = drawn
    graph = waits(table.rows, hops)
    circles = [part for part in nx.strongly_connected_components(graph) if len(part) > 1]
    stuck = {late for circle in circles for a in circle for late in (a, *nx.descendants(graph, a))}
    if not stuck:
        assert simulate_actions(table, lambda _: 1, hops).keys() == graph.nodes - {ROOT}
        return
    heads = [next((str(a) for a in row if a in stuck), None) for row in table.rows]
    named = ", ".join(head for head in heads if head)
    with pytest.raises(StageError, match=f": {named} never start"):
        table.check(hops)


@pytest.mark.parametrize(
    ("text", "forward", "backward"),
    [
        ("0F0 0F1 0F2 0B2 0B1 0B0", 2, 0),
        ("0F2 0F0 0F1 0B0 0B1 0B2", 1, 2),
        # Of a backward in two parts it is the second that is done last.
        ("0F0 0F1 0B1 0B0 0W0 0W1", 1, 1),
        ("0F0 0F1 0B0 0B1 0W0", 1, 0),
    ],
)
def test_what_a_stage_does_last(text: str, forward: int, backward: int) -> None:
    table = PipelineSchedule.parse(text)
    assert table.last_microbatches(0) == (forward, backward)
    lasts = {str(action) for action in table.rows[0] if table.is_last(action)}
    expected = {f"0F{forward}", f"0B{backward}", *([f"0W{backward}"] if table.is_split else [])}
    assert lasts == expected


def test_a_whole_backward_among_some_in_two_parts_has_both_at_once() -> None:
    table = PipelineSchedule.parse("0F0 0F1 0B0 0I1 0W1\n1F0 1F1 1I0 1B1 1W0")
    assert str(table) == "0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1F1 1B0 1B1 1W1 1W0"


@given(pipelines(can_hang=True))
def test_a_stage_holds_what_has_gone_forward_and_is_not_done(
    drawn: tuple[PipelineSchedule, frozenset[Hop]],
) -> None:
    """Counted anew after every action of its rank."""
    table, _ = drawn
    last = "W" if "W" in str(table) else "B"
    for stage in table.ranks:
        (row,) = [row for row in str(table).split("\n") if f"{stage}F0" in row.split()]
        words = row.split()
        held = [
            sum(word.startswith(f"{stage}F") for word in words[:end])
            - sum(word.startswith(f"{stage}{last}") for word in words[:end])
            for end in range(len(words) + 1)
        ]
        assert table.in_flight(stage) == max(held)


@given(pipelines())
def test_others_wait_while_a_stage_works(drawn: tuple[PipelineSchedule, frozenset[Hop]]) -> None:
    """Counted anew, microbatch by microbatch, before every action of the stage."""
    table, _ = drawn
    for stage, rank in table.ranks.items():
        row = [a for a in table.rows[rank] if a.stage == stage]
        found: set[tuple[int, int]] = set()
        for place, action in enumerate(row):
            done: dict[int, set[Pass]] = {}
            for each in row[:place]:
                if each.microbatch != action.microbatch:
                    done.setdefault(each.microbatch, set()).add(each.kind)
            back = sum(kinds == {F} for kinds in done.values())
            rest = sum(kinds == {F, B} for kinds in done.values()) if table.is_split else 0
            found.add((back, rest))
        most = {
            a for a in found if not any(a != b and a[0] <= b[0] and a[1] <= b[1] for b in found)
        }
        assert {tuple(each) for each in table.others(stage)} == most
        assert 1 + max(each.backward for each in table.others(stage)) <= table.in_flight(stage)


@pytest.mark.parametrize(
    ("name", "stage", "others"),
    [
        ("1f1b", 0, {(3, 0)}),
        ("1f1b", 3, {(0, 0)}),
        ("gpipe", 2, {(7, 0)}),
        # Of the last rank as many wait for the rest as there are ranks before it.
        ("zb-h1", 0, {(3, 0)}),
        ("zb-h1", 3, {(0, 3)}),
    ],
)
def test_others_of_schedules_that_are_known(
    name: str, stage: int, others: set[tuple[int, int]]
) -> None:
    assert {tuple(each) for each in make_schedule(name, 4, 8).others(stage)} == others


@given(pipelines(), st.integers(1, 6))
def test_fewer_microbatches_of_a_table_are_a_table(
    drawn: tuple[PipelineSchedule, frozenset[Hop]], count: int
) -> None:
    table, hops = drawn
    fewer = table.first(min(count, table.microbatches))
    fewer.check(hops)
    assert fewer.microbatches == min(count, table.microbatches)
    assert fewer.ranks == table.ranks


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 2), (3, 3), (4, 8)])
def test_answers_are_made_of_what_the_action_before_sends(
    name: str, ranks: int, microbatches: int
) -> None:
    table = make_schedule(name, ranks, microbatches, 2 if name == "interleaved" else 1)
    chains = [list(row) for row in table.rows]
    for rank, row in enumerate(table.rows):
        # Without the waits of the rank for itself: those for its own row and its own stages.
        others = [chain for number, chain in enumerate(chains) if number != rank]
        graph = waits([*others, *([action] for action in row)], hops_in_sequence(table.num_stages))
        own = set(row)
        expected: set[Action] = set()
        for before, action in pairwise(row):
            sent = [a for a in graph.predecessors(action) if a != ROOT and a not in own]
            made_of = {a for each in sent for a in nx.ancestors(graph, each)}
            if before in made_of:
                expected.add(action)
        assert answers(table.rows, rank) == expected


def test_what_is_no_answer_may_be_asked_for_ahead() -> None:
    found = answers(make_schedule("1f1b", 2, 4, 1).rows, 0)
    assert not found
    alone = PipelineSchedule.parse("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0")
    assert {str(action) for action in answers(alone.rows, 0)} == {"2F0", "2B0", "0B0"}
    assert {str(action) for action in answers(alone.rows, 1)} == {"3F0", "1B0"}
    backward = tuple(tuple(a for a in row if a.kind is B) for row in alone.rows)
    assert {str(action) for action in answers(backward, 0)} == {"0B0"}
