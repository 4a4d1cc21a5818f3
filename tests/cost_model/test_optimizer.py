"""The price of the optimizer's step: shards shorten it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.optimizer import update_s
from autopar.cost_model.optimizer_kinds import OPTIMIZERS, find_kind
from autopar.cost_model.price import price
from autopar.errors import AutoparError
from autopar.ir.graph import Atom, Graph, Role, TensorType
from autopar.ir.sharding import Sharding
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.request import make_graph_request
from tests.graphs import linear_step

ROWS, COLUMNS = 4096, 1024


def seconds(name: str, storage: str) -> float:
    atoms = Atom(ROWS, "rows", True), Atom(COLUMNS, "columns", True)
    tensor = TensorType("bfloat16", (ROWS, COLUMNS), ((0,), (1,)))
    cluster = parse_cluster("8xH100")
    mesh = parse_mesh("2x4", cluster)
    sharding = Sharding.parse(storage)
    return update_s(find_kind(name), tensor, atoms, sharding, mesh, cluster.device)


@pytest.mark.parametrize(
    "name", sorted(name for name, known in OPTIMIZERS.items() if name != "none" and not known.whole)
)
def test_shards_take_their_share_of_the_time(name: str) -> None:
    times = [seconds(name, s) for s in ("[R, R]", "[S(0), R]", "[R, S(1)]", "[S(0), S(1)]")]
    assert all(a > b for a, b in pairwise(times))
    # All but the launches is traffic.
    launches = OPTIMIZERS[name].passes("cuda")[1] * parse_cluster("1xH100").device.kernels.start_s
    assert times[0] - launches < 8 * times[3] < times[0] + 8 * launches


@pytest.mark.parametrize("name", [name for name, known in OPTIMIZERS.items() if known.whole])
def test_an_optimizer_that_steps_on_whole_tensors_gathers_shards(name: str) -> None:
    assert seconds(name, "[R, R]") < seconds(name, "[R, S(0)]") < seconds(name, "[S(0), S(0)]")


def test_no_optimizer_takes_no_time_and_an_unknown_one_is_an_error() -> None:
    assert seconds("none", "[R, R]") == 0
    with pytest.raises(AutoparError, match="name the one most like it of sgd, "):
        find_kind("sparse")


def test_only_what_is_trained_is_stepped() -> None:
    graph = linear_step(64, 32, 16, layers=2)
    last = graph.nodes[-1]
    assert last.role is Role.GRAD
    frozen = replace(graph, nodes=graph.nodes[:-1])
    cluster = parse_cluster("2xH100")
    mesh = parse_mesh("2", cluster)

    def stepped(graph: Graph) -> dict[str, int]:
        with_step, without = (
            price(
                make_graph_request(
                    graph, cluster, Options(PlanOptions(optimizer=name), memory_limit_bytes=1 << 40)
                ).on(mesh)
            )
            for name in ("adamw", "none")
        )
        pairs = zip(with_step.costs, without.costs, strict=True)
        more = (int((a - b).min()) for a, b in pairs)
        return {key: ns for key, ns in zip(with_step.keys, more, strict=True) if ns}

    owner = next(n.key for n in graph.with_role(Role.PARAM) if n.target == last.target)
    assert set(stepped(graph)) - set(stepped(frozen)) == {owner}
    assert set(stepped(graph)) == {n.key for n in graph.with_role(Role.PARAM)}
