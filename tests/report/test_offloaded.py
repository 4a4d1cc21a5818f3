"""What pages and traces tell of a plan that offloads."""

from __future__ import annotations

from functools import cache

import msgspec

from autopar.cost_model.account import account
from autopar.ir.mesh import HOST_LINKS
from autopar.ir.offloading import offloadable
from autopar.plans.options import Options
from autopar.plans.plan import Plan
from autopar.plans.request import ask
from autopar.report.decided import decision_topics
from autopar.report.html.page import html
from autopar.report.summary import summarize
from autopar.report.timeline import timeline
from tests.graphs import linear_step
from tests.planned import LIMIT, on_h100, plan_for
from tests.report.test_trace import check_format, traced

LAYERS = 8


@cache
def both() -> tuple[Plan, Plan]:
    """The same plan without and with it, wide enough for copies to take their time."""
    graph = linear_step(4096, 1024, 1024, layers=LAYERS)
    plain = plan_for(graph, "2", bucket_bytes=1)
    cluster, mesh = on_h100("2", 1)
    keys = (*offloadable(graph, mesh),)
    structure = msgspec.structs.replace(plain.structure, offloaded=keys, reload_pace=1 << 20)
    request = ask(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(mesh)
    estimates = account(request, structure).estimates
    found = msgspec.structs.replace(plain, structure=structure, estimates=estimates)
    return plain, Plan.from_bytes(found.to_bytes())


def test_copies_are_two_more_axes_and_cost_what_they_expose() -> None:
    plain, found = both()
    step, estimates = timeline(found), found.estimates
    assert step.end_ns == estimates.step_ns
    assert {track.axis for track in step.tracks} >= {*HOST_LINKS}
    copied = {t.axis: t for t in estimates.collectives if t.axis in HOST_LINKS}
    assert [(copied[link].kind, copied[link].count) for link in HOST_LINKS] == [
        ("offload", LAYERS - 3),
        ("reload", LAYERS - 3),
    ]
    assert copied["to host"].num_bytes == copied["from host"].num_bytes
    assert {*HOST_LINKS} <= estimates.contention.keys() - plain.estimates.contention.keys()
    exposed = sum(share.exposed_ns for share in step.axes.values())
    assert exposed <= estimates.exposed_communication_ns
    assert estimates.exposed_communication_ns + estimates.hidden_communication_ns == sum(
        total.time_ns for total in estimates.collectives
    )
    assert estimates.memory.total < plain.estimates.memory.total


def test_pages_say_what_is_offloaded() -> None:
    plain, found = both()
    shown = summarize(found)
    assert shown.offloaded == found.structure.offloaded
    assert f"{LAYERS - 3} classes of activations" in str(shown)
    assert "offload" not in str(summarize(plain))
    assert b"memory until backward" in html(found)
    (topic,) = (t for t in decision_topics(plain, found) if t.title == "offloaded until backward")
    assert len(topic.changes) == LAYERS - 3
    check_format(traced(found))
