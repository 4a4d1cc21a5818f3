"""What a plan says of a step as it passes, against its own sums and the order of the graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.memory import MAX_CURVE_POINTS
from autopar.cost_model.price import price
from autopar.ir.graph import Graph
from autopar.plans.decisions import make_stage
from autopar.plans.estimates import CollectiveTotal, StageEstimates
from autopar.plans.order import CUT, OPTIMIZER, START, WITH, Item, repeated
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from tests.cost_model.test_price import LIMIT, random_solution
from tests.graphs import linear_step


def bill(graph: Graph, mesh: str, seed: int) -> StageEstimates:
    cluster = parse_cluster(f"{mesh}xH100")
    layout = parse_mesh(mesh, cluster)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(layout)
    problem = price(request)
    solution = random_solution(problem, seed)
    return cost_breakdown(request, make_stage(request, problem, solution)).estimates


def items(estimates: StageEstimates) -> Iterator[str]:
    for run in estimates.order:
        for _ in range(run.times):
            yield from run.items


@settings(max_examples=40)
@given(seed=st.integers(0, 50), mesh=st.sampled_from(["2", "4", "2x4"]))
def test_any_plan_is_told_as_it_is_billed(seed: int, mesh: str) -> None:
    found = bill(linear_step(64, 32, 16, layers=3), mesh, seed)
    done = Counter(items(found))
    assert done.pop(OPTIMIZER) == 1
    computed = {key: op.count for key, op in found.ops.items() if op.count}
    assert {key: n for key, n in done.items() if key in found.ops} == computed
    begun, ended = Counter[tuple[str, int]](), 0
    for text, n in done.items():
        if text not in found.ops:
            item = Item.parse(text)
            begun[item.key, item.step] += n * (item.word in (START, WITH, CUT))
            ended += n * (item.word == "wait")
    sent = {
        (key, k): each.count
        for key, sends in found.sends.items()
        if key not in found.ops
        for k, each in enumerate(sends)
    }
    # Backward does not read the first weight: what a random plan keeps of it is never made.
    assert begun.items() <= sent.items()
    assert {key for key, _ in sent.keys() - begun.keys()} <= {"param:w0@forward"}
    assert ended == sum(n for text, n in done.items() if text.startswith("start "))
    exposed, hidden = found.exposed_communication_ns, found.hidden_communication_ns
    assert exposed + hidden == found.communication_ns and hidden >= 0
    waited = exposed + found.exposed_host_ns
    assert found.step_ns == found.compute_ns + waited + found.optimizer_ns
    totals: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for sends in found.sends.values():
        for each in sends:
            total = totals[each.phase, each.axis, each.kind]
            for k, value in enumerate((each.count, each.num_bytes, each.time_ns, each.host_ns)):
                total[k] += value
    assert found.collectives == tuple(
        CollectiveTotal(kind, axis, phase, *total)
        for (phase, axis, kind), total in sorted(totals.items(), key=_in_order(found))
    )
    memory, curve = found.memory, found.memory_curve
    held = list(zip(curve.unsharded, curve.saved, curve.transient, strict=True))
    assert max(map(sum, held)) == memory.unsharded + memory.saved + memory.transient
    assert curve.time_ns[-1] == found.step_ns
    assert list(curve.time_ns) == sorted(curve.time_ns)
    assert len(curve.time_ns) <= MAX_CURVE_POINTS + 1
    by_holder = Counter[str]()
    for each in found.peak_holders:
        by_holder[each.holder] += each.num_bytes
    for holder in ("unsharded", "saved", "transient"):
        assert by_holder[holder] == getattr(memory, holder)


def _in_order(found: StageEstimates):
    places = {(c.phase, c.axis, c.kind): k for k, c in enumerate(found.collectives)}
    return lambda entry: places[entry[0]]


@given(seed=st.integers(0, 20))
def test_what_an_op_reads_was_made_before(seed: int) -> None:
    found = bill(linear_step(64, 32, 16, layers=3), "2x4", seed)
    done = set[str]()
    for text in items(found):
        if text in found.ops:
            for key, state in found.ops[text].inputs:
                assert key in done or key.partition(":")[0] in ("param", "input", "tangent")
                made = found.ops[key].outputs[0][1] if key in found.ops else state
                assert state == made or any(k.startswith(f"{key}@") for k in done)
            done.add(text)
        elif text != OPTIMIZER and (item := Item.parse(text)).word != "wait":
            root = item.key.rpartition("@")[0]
            assert root in done or root.partition(":")[0] in ("param", "input", "tangent")
            done.add(item.key)


def test_use_of_the_devices() -> None:
    """Two products of 2 * 64 * 32 * 32 and one of the last layer forward, as many for each
    gradient: 5 of the first kind and 2 of the second, in float32."""
    found = bill(linear_step(64, 32, 16, layers=2), "4", 0)
    flops = 2 * 64 * 32 * (2 * 32 + 3 * 16)
    peak = found.cluster.flops_per_s["float32"] if found.cluster else 0
    assert found.mfu_ppm == pytest.approx(1e15 * flops / 4 / peak / found.step_ns, abs=1)
    assert found.tokens == 0


@given(
    before=st.text("xyz", max_size=3),
    body=st.text("abc", min_size=1, max_size=5),
    times=st.integers(1, 9),
    after=st.text("xyz", max_size=3),
)
def test_repetitions_are_found(before: str, body: str, times: int, after: str) -> None:
    sequence = [*before, *body * times, *after]
    runs = repeated(sequence)
    assert [item for run in runs for item in list(run.items) * run.times] == sequence
    assert all(run.times > 1 or runs[k - 1].times > 1 for k, run in enumerate(runs) if k)


def test_a_stack_is_one_run() -> None:
    layer = ["gather", "mm", "mm", "add", "gather", "mm"]
    runs = repeated(["embed", *layer * 80, "head"])
    assert [(run.times, list(run.items)) for run in runs] == [
        (1, ["embed"]),
        (80, layer),
        (1, ["head"]),
    ]


def test_a_short_repetition_is_found_where_its_first_item_returns_later() -> None:
    assert [run.times for run in repeated([*"abab", *"pqrs", "a"])] == [2, 1]
