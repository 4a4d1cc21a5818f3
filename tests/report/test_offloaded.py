"""What pages and traces tell of a plan that offloads."""

from __future__ import annotations

from functools import cache

import msgspec

from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.pipeline import add_up
from autopar.ir.mesh import HOST_LINKS
from autopar.ir.offloading import offloadable
from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.estimates import NOTHING_ON_HOST, HostMemory, of_one_stage
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.report.costs import HostRow
from autopar.report.decided import decision_topics
from autopar.report.html.page import html
from autopar.report.summary import summarize
from autopar.report.timeline import timeline
from tests.graphs import linear_step
from tests.planned import LIMIT, on_h100, plan_for
from tests.redone import redecided, repriced
from tests.report.test_trace import check_format, traced

LAYERS = 8


@cache
def both() -> tuple[Plan, Plan]:
    """The same plan without and with it, wide enough for copies to take their time."""
    graph = linear_step(4096, 1024, 1024, layers=LAYERS)
    plain = plan_for(graph, "2", bucket_bytes=1)
    cluster, mesh = on_h100("2", 1)
    keys = (*offloadable(graph, mesh),)
    structure = redecided(plain.structure, offloaded=keys, reload_pace=1 << 20)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(mesh)
    estimates = cost_breakdown(request, structure.only).estimates
    found = msgspec.structs.replace(plain, structure=structure, estimates=of_one_stage(estimates))
    return plain, Plan.from_bytes(found.to_bytes())


def test_copies_are_two_more_axes_and_cost_what_they_expose() -> None:
    plain, found = both()
    step, estimates = timeline(found.stages[0]), found.estimates
    assert step.end_ns == estimates.step_ns
    assert {track.axis for track in step.tracks} >= {*HOST_LINKS}
    copied = {t.axis: t for t in estimates.stages[0].collectives if t.axis in HOST_LINKS}
    assert [(copied[link].kind, copied[link].count) for link in HOST_LINKS] == [
        ("offload", LAYERS - 3),
        ("reload", LAYERS - 3),
    ]
    assert copied["to host"].num_bytes == copied["from host"].num_bytes
    assert {*HOST_LINKS} <= estimates.stages[0].contention.keys() - plain.estimates.stages[
        0
    ].contention.keys()
    exposed = sum(share.exposed_ns for share in step.axes.values())
    assert exposed <= estimates.exposed_communication_ns
    assert estimates.exposed_communication_ns + estimates.hidden_communication_ns == sum(
        total.time_ns for total in estimates.stages[0].collectives
    )
    assert estimates.memory.total < plain.estimates.memory.total


def test_pages_say_what_is_offloaded() -> None:
    plain, found = both()
    shown = summarize(found)
    assert shown.stage is not None
    assert shown.stage.offloaded == found.structure.only.offloaded
    assert f"{LAYERS - 3} classes of activations" in str(shown)
    assert "offload" not in str(summarize(plain))
    assert b"memory until backward" in html(found)
    (topic,) = (
        t
        for t in decision_topics(plain.stages[0], found.stages[0])
        if t.title == "offloaded until backward"
    )
    assert len(topic.changes) == LAYERS - 3
    check_format(traced(found))


def test_pages_say_what_is_on_the_host() -> None:
    plain, found = both()
    each = 1 << (1024 * 1024 * 4 - 1).bit_length()
    use = summarize(found).host
    assert use is not None and summarize(plain).host is None
    assert use.rows == (HostRow("offloaded activations", use.num_bytes),)
    assert use.num_bytes % each == 0 and use.node_bytes == use.devices * use.num_bytes
    for page in (str(summarize(found)), html(found).decode()):
        assert f"on a node of {use.devices}" in page and "offloaded activations" in page
    assert "on a node" not in str(summarize(plain)) + html(plain).decode()


def test_plans_of_older_versions_tell_the_sum_alone() -> None:
    _, found = both()
    estimates = repriced(found.estimates, host_memory=NOTHING_ON_HOST)
    older = msgspec.structs.replace(found, estimates=estimates)
    data = older.to_bytes()
    assert b'"host_memory"' not in both()[0].to_bytes()
    assert b'"host_bytes"' in data and b'"host_memory"' not in data
    read = Plan.from_bytes(data)
    use = summarize(read).host
    assert use is not None and use.num_bytes == found.estimates.host_bytes
    assert "version does not tell" in str(summarize(read)) + html(read).decode()


def test_a_node_of_a_pipeline_has_what_its_devices_have() -> None:
    """The stages of a rank together, and of the devices of a node those of all ranks."""
    first, second = (
        msgspec.structs.replace(
            both()[0].estimates.stages[0],
            host_bytes=size,
            host_memory=HostMemory(offloaded=size, limit=100, devices=1),
        )
        for size in (30, 50)
    )
    cluster = parse_cluster("2xH100")
    table = PipelineSchedule.parse("0F0 0B0\n1F0 1B0")
    held = first.memory, second.memory
    whole = add_up(table, (first, second), (1, 1), (), (), held, cluster)
    assert whole.host_bytes == whole.host_memory.offloaded == 50
    assert whole.host_memory.devices == 2
    assert whole.host_memory.limit == cluster.host.memory_bytes
    both_stages = PipelineSchedule.parse("0F0 1F0 1B0 0B0")
    whole = add_up(both_stages, (first, second), (1, 1), (), (), held[:1], cluster)
    assert whole.host_bytes == 80
