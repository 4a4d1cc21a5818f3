"""What constraints take away from the problem, where the best plan would not show it."""

from __future__ import annotations

from functools import cache

import torch

from autopar.cost_model.price import limited_classes, price
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.problem import FORBIDDEN, Problem
from autopar.ir.sharding import P, Sharding
from autopar.ir.uses import SAVED, groups, requirement
from autopar.plans.requests.options import Options
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.tracer import trace
from tests.planned import LIMIT, on_h100


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16, bias=False)
        self.act = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 * self.down(self.act(self.up(x)))).square().sum()


@cache
def graph(*, autocast: bool = False) -> Graph:
    """A model whose rows end in partial sums that the next op could work on."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return trace(Model(), (torch.randn(8, 16),), {}).graph


def asked(*pins: str, forbid: tuple[str, ...] = (), strategy: str = "") -> Options:
    return make_options(
        mesh="2x2", constraints={"pins": pins, "forbid": forbid, "strategy": strategy}
    )


def problem(options: Options) -> Problem:
    return price(request(options).within(LIMIT))


def request(options: Options, of: Graph | None = None) -> PlanRequest:
    cluster, mesh = on_h100("2x2")
    return make_graph_request(of or graph(), cluster, options).on(mesh)


def allowed_steps(options: Options, prefix: str) -> set[tuple[str, str]]:
    """The placements on the inner axis that a flow may lead from and to."""
    return {
        (str(Sharding.parse(f.states[t])[1]), str(Sharding.parse(f.states[h])[1]))
        for f in problem(options).flows
        if f.key.startswith(prefix)
        for t, h, cost in zip(f.tails, f.heads, f.costs, strict=True)
        if cost < FORBIDDEN and Sharding.parse(f.states[t])[1] != Sharding.parse(f.states[h])[1]
    }


def test_what_a_module_returns_is_used_by_nobody_in_partial_sums() -> None:
    def uses(options: Options) -> set[str]:
        """What the ops ask of what `down` returns to be on the inner axis."""
        found = groups(graph())
        table, _ = limited_classes(request(options), found)
        (group,) = (g for g in found if g.key.startswith("down:forward:mm") and not g.crosses)
        return {
            str(state[1])
            for use in group.uses
            for inputs in table[graph().nodes[use.node].key].inputs
            if (state := requirement(graph(), use, inputs[use.arg])) is not None
        }

    assert str(P) in uses(asked())
    assert str(P) not in uses(asked("module:down=S(1) on tp"))


def test_partial_sums_of_a_module_become_what_is_pinned() -> None:
    free = allowed_steps(asked(), "down:forward:mm")
    assert {("P", "R"), ("P", "S(0)"), ("P", "S(1)")} <= free
    pinned = allowed_steps(asked("module:down=S(1) on tp"), "down:forward:mm")
    assert {step for step in pinned if step[0] == "P"} == {("P", "S(1)")}


def test_a_parameter_that_is_unmoved_has_no_step_on_the_axis() -> None:
    assert allowed_steps(asked(), "param:up.weight")
    assert not allowed_steps(asked("param:* = unmoved on tp"), "param:up.weight")


def test_what_is_saved_of_a_forbidden_module_is_not_cut_either() -> None:
    def saved(options: Options) -> set[str]:
        found = problem(options)
        return {
            str(label[1])
            for key, labels in zip(found.keys, found.labels, strict=True)
            if key.startswith(SAVED + "act:")
            for label in labels
            if isinstance(label, Sharding)
        }

    assert saved(asked()) - {"R"}
    assert saved(asked(forbid=("tp:act",))) == {"R"}


def test_under_fsdp_parameters_and_gradients_are_cast_in_shards() -> None:
    cast = graph(autocast=True)
    table, _ = limited_classes(request(asked(strategy="fsdp"), cast), groups(cast))
    params = {node.index for node in cast.with_role(Role.PARAM)}
    casts = [n for n in cast.with_role(Role.OP) if n.op == "aten._to_copy.default" and not n.view]
    of_params = [n for n in casts if n.inputs[0].node in params]
    of_gradients = [
        n for n in casts if n.phase is Phase.BACKWARD and "weight" in str(_grads(cast, n.index))
    ]
    assert of_params and of_gradients
    for node in (*of_params, *of_gradients):
        assert any(set(str(c).split(",")) == {"d0"} for c in table[node.key].choices)
    table, _ = limited_classes(request(asked(strategy="ddp"), cast), groups(cast))
    assert all("d0" not in str(c) for node in of_params for c in table[node.key].choices)


def _grads(found: Graph, index: int) -> list[str]:
    return [n.target for n in found.with_role(Role.GRAD) if n.inputs[0].node == index]
