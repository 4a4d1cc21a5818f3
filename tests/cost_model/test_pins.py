"""Storage that is given is kept to, on every mesh and in every graph of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.cluster.parsing import parse_cluster
from autopar.driver.planning import answer
from autopar.errors import AutoparError
from autopar.plans.plan import Plan
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from tests.graphs import linear_step


def planned(pins: Mapping[str, str], mesh: str = "3", hidden: int = 64) -> Plan:
    """The plan of two layers on three devices, or as many as the mesh has."""
    count = 6 if "x" in mesh else 3
    return answer(
        make_graph_request(
            linear_step(4096, hidden, 60, layers=2),
            parse_cluster(f"{count}xH100"),
            make_options(mesh=mesh, constraints={"pins": pins}),
        ),
        lambda _: None,
    )


def storages(plan: Plan) -> dict[str, str]:
    return {name: param.storage for name, param in plan.structure.params.items()}


def test_what_is_not_given_is_chosen() -> None:
    assert storages(planned({})) == {"w0": "[R]", "w1": "[R]"}
    assert storages(planned({"w1": "[S(1)]"})) == {"w0": "[R]", "w1": "[S(1)]"}


def test_a_shard_is_even_where_it_can_be() -> None:
    assert storages(planned({"w0": "[S(0)]"}))["w0"] == "[C(0)]"
    assert storages(planned({"w0": "[C(0)]"}, hidden=66))["w0"] == "[S(0)]"
    assert storages(planned({"w0": "[S(1), S(0)]"}, "3x2"))["w0"] == "[C(1), S(0)]"


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"w7": "[R]"}, "has no parameter or module w7; close to it are w1, w0"),
        ({"w0": "[R, R]"}, r"\[R, R\] is for 2 mesh axes, and mesh dp=3 has 1"),
        ({"w0": "[S(2)]"}, r"w0 of shape \[64, 64\] cannot be stored as \[S\(2\)\] on mesh dp=3"),
        ({"w0": "[P]"}, r"it cannot be \[P\]"),
    ],
)
def test_what_cannot_be_is_told(pins: Mapping[str, str], words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        planned(pins)


class _Added(torch.autograd.Function):
    """A bias that a kernel before it added: forward does not read it, and it has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].sum(0)


class _Biased(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Added.apply(F.linear(x, self.weight), self.bias).square().mean()


def test_what_is_kept_is_asked_of_parameters_that_forward_reads() -> None:
    """Nothing of the bias is handed over to backward: the pin leaves it as it is stored."""
    with torch.device("meta"):
        model, x = _Biased(64, 64), torch.empty(64, 64)
    plan = autopar.plan(
        model,
        (x,),
        cluster="4xH100",
        mesh="4",
        constraints={"pins": {"param:*": "S(0) on dp", "for_backward:*": "R"}},
    )
    kept = {
        name: (param.storage, param.for_backward) for name, param in plan.structure.params.items()
    }
    assert kept == {"weight": ("[S(0)]", "[R]"), "bias": ("[S(0)]", "[S(0)]")}
