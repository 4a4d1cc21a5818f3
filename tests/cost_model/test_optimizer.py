"""The price of the optimizer's step: its passes are torch's own, and shards shorten it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.overrides import TorchFunctionMode

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.optimizer import OPTIMIZERS, find_optimizer, update_s
from autopar.cost_model.price import price
from autopar.errors import AutoparError
from autopar.ir.graph import Atom, Graph, Role, TensorType
from autopar.ir.sharding import Sharding
from autopar.plans.options import Options
from autopar.plans.request import ask
from tests.graphs import linear_step

ROWS, COLUMNS = 4096, 1024
KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd-momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": optim.Adagrad, "rmsprop": optim.RMSprop, "adam": optim.Adam, "adamw": optim.AdamW,
    "adamax": optim.Adamax, "nadam": optim.NAdam, "radam": optim.RAdam,
    "adadelta": optim.Adadelta, "asgd": optim.ASGD,
}  # fmt: skip


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


class Passes(TorchFunctionMode):
    """Counts the kernels over tensors of `numel` elements, and what they read and write."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.passes, self.kernels = numel, 0, 0

    def _large(self, value: Any) -> set[int]:
        return {t.data_ptr() for t in tensors(value) if t.numel() == self.numel}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith("_foreach_"):
            in_place = func.__name__.endswith("_")
            written = self._large(args[0] if in_place else result)
            self.passes += len(self._large(args)) + len(written)
            self.kernels += bool(written)
        return result


@pytest.mark.parametrize("name", KINDS)
def test_passes_are_those_of_torch(name: str) -> None:
    param = nn.Parameter(torch.randn(48, 64))
    optimizer = KINDS[name]([param], foreach=True)
    with Passes(param.numel()) as counted:
        # RAdam and the accumulators of others settle within six steps.
        for _ in range(7):
            counted.passes = counted.kernels = 0
            param.grad = torch.randn(48, 64)
            optimizer.step()
    assert (counted.passes, counted.kernels) == (OPTIMIZERS[name].passes, OPTIMIZERS[name].kernels)
    states = [s for s in optimizer.state[param].values() if s.shape == param.shape]
    assert len(states) == OPTIMIZERS[name].states


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_fused_passes_are_those_of_torch(name: str) -> None:
    param = nn.Parameter(torch.randn(48, 64))
    optimizer = KINDS[name]([param], fused=True)
    calls: list[tuple[list[Tensor], list[Tensor]]] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.__name__ != f"_fused_{name}_":
                return func(*args, **(kwargs or {}))
            large = [t for t in tensors(args) if t.numel() == param.numel()]
            calls.append(([t.detach().clone() for t in large], large))
            return func(*args, **(kwargs or {}))

    param.grad = torch.randn(48, 64)
    with Calls():
        optimizer.step()
    ((before, after),) = calls
    written = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    entry = OPTIMIZERS[f"{name}-fused"]
    assert (len(before) + written, len(calls)) == (entry.passes, entry.kernels)


def seconds(name: str, storage: str) -> float:
    atoms = Atom(ROWS, "rows", True), Atom(COLUMNS, "columns", True)
    tensor = TensorType("bfloat16", (ROWS, COLUMNS), ((0,), (1,)))
    cluster = parse_cluster("8xH100")
    mesh = parse_mesh("2x4", cluster)
    sharding = Sharding.parse(storage)
    return update_s(find_optimizer(name), tensor, atoms, sharding, mesh, cluster.device)


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"none", "muon", "adafactor"}))
def test_shards_take_their_share_of_the_time(name: str) -> None:
    times = [seconds(name, s) for s in ("[R, R]", "[S(0), R]", "[R, S(1)]", "[S(0), S(1)]")]
    assert all(a > b for a, b in pairwise(times))
    # All but the launches is traffic.
    launches = OPTIMIZERS[name].kernels * parse_cluster("1xH100").device.kernels.start_s
    assert times[0] - launches < 8 * times[3] < times[0] + 8 * launches


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_an_optimizer_that_looks_at_whole_tensors_gathers_shards(name: str) -> None:
    assert seconds(name, "[R, R]") < seconds(name, "[R, S(0)]") < seconds(name, "[S(0), S(0)]")


def test_no_optimizer_takes_no_time_and_an_unknown_one_is_an_error() -> None:
    assert seconds("none", "[R, R]") == 0
    with pytest.raises(AutoparError, match="name the one most like it of sgd, "):
        find_optimizer("sparse")


def test_only_what_is_trained_is_stepped() -> None:
    graph = linear_step(64, 32, 16, layers=2)
    last = graph.nodes[-1]
    assert last.role is Role.GRAD
    frozen = replace(graph, nodes=graph.nodes[:-1])
    cluster = parse_cluster("2xH100")
    mesh = parse_mesh("2", cluster)

    def stepped(graph: Graph) -> dict[str, int]:
        with_step, without = (
            price(ask(graph, cluster, Options(optimizer=name, memory_limit_bytes=1 << 40)).on(mesh))
            for name in ("adamw", "none")
        )
        pairs = zip(with_step.costs, without.costs, strict=True)
        more = (int((a - b).min()) for a, b in pairs)
        return {key: ns for key, ns in zip(with_step.keys, more, strict=True) if ns}

    owner = next(n.key for n in graph.with_role(Role.PARAM) if n.target == last.target)
    assert set(stepped(graph)) - set(stepped(frozen)) == {owner}
    assert set(stepped(graph)) == {n.key for n in graph.with_role(Role.PARAM)}
