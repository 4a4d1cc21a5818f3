"""What scripts do to parameters and gradients, and losses of them: the processes of
`test_changes.py`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import autopar
from autopar.errors import AutoparError
from tests.grouped import grouped
from tests.runtime.between_workers import in_between
from tests.runtime.workers import RANK

LIMIT = 1e-9


class Net(nn.Module):
    """Gives its loss, or what the loss is of."""

    def __init__(self, with_loss: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.with_loss = nn.Linear(8, 12), nn.Linear(12, 8), with_loss
        self.scale = nn.Parameter(torch.tensor(1.3))
        # No number of rows or columns that two ranks share evenly.
        self.odd = nn.Parameter(torch.linspace(-1, 2, 35).reshape(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        out = self.b(torch.tanh(self.a(x) * self.scale)) * self.odd.square().mean()
        return out.square().mean() if self.with_loss else out


MASK = torch.arange(12) % 3 == 0
ROWS = torch.tensor([1, 3])


def _reset(net: Any) -> None:
    net.a.reset_parameters()
    net.b.reset_parameters()


def _vector(net: Any) -> None:
    vector_to_parameters(parameters_to_vector(net.parameters()) * 0.5, net.parameters())


def _swap_rows(net: Any) -> None:
    w = net.a.weight
    w[0], w[1] = w[1].clone(), w[0].clone()


def _through_an_old_view(net: Any) -> None:
    w = net.a.weight
    part, row = w[2:6], w[3]
    w.mul_(2)
    part.mul_(part.norm())
    w[7].copy_(row)
    row.zero_()
    w[8:].copy_(part)


def _scaled_up_to_infinity(net: Any) -> None:
    """The first parameter is one of which every rank has all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD([net.scale, net.a.weight, net.b.weight], 0.1)
    scaler.scale(net.a.weight.grad.sum())  # starts the scaler
    net.a.weight.grad[11, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    net.a.weight.mul_(scaler.get_scale())
    net.a.weight.grad.zero_()


def _called_with_others(net: Any) -> None:
    values = {name: param.detach() * 1.1 for name, param in net.named_parameters()}
    found = torch.func.functional_call(net, values, (torch.ones(2, 8),))
    net.a.weight.mul_(found.detach())


def _swap_data(net: Any) -> None:
    w = net.a.weight
    kept = w.data
    w.data = torch.ones_like(w)
    w.add_(1)
    w.data = kept


def _each_row(net: Any) -> None:
    for index, row in enumerate(net.a.weight):
        row.mul_(index)


def _at(net: Any, *where: Any) -> None:
    net.a.weight[where if len(where) > 1 else where[0]] = 7.0


def _apply_gradient(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(net: Any) -> None:
        change(net.a.weight)
        net.a.weight.add_(net.a.weight.grad, alpha=-3)

    return changed


def _grad(value: Callable[[Tensor], Tensor], name: str) -> Callable[[Any], None]:
    def assign(w: Any) -> None:
        if name == "grad":
            w.grad = value(w.grad)
        else:
            w.grad.data = value(w.grad)

    return _apply_gradient(assign)


_ = slice(None)
CHANGES: dict[str, Callable[[Any], Any]] = {
    **{
        init.__name__: lambda net, init=init: init(net.a.weight)
        for init in (
            nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.eye_,
            nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_,
        )
    },
    "sparse_": lambda net: nn.init.sparse_(net.a.weight, 0.3),
    "reset_parameters": _reset,
    "with a generator": lambda n: n.a.weight.normal_(generator=torch.Generator().manual_seed(5)),
    "noise like": lambda net: net.a.weight.add_(torch.randn_like(net.a.weight)),
    "plain noise": lambda net: net.a.weight.add_(torch.randn(12, 8)),
    "dropout": lambda net: net.a.weight.copy_(F.dropout(net.a.weight)),
    "bernoulli": lambda net: net.a.weight.mul_(torch.bernoulli(torch.rand_like(net.a.weight))),
    "normal around": lambda net: net.a.weight.copy_(torch.normal(net.a.weight, 1.0)),
    "a number drawn": lambda net: net.a.weight.mul_(torch.rand(())),
    "a number without dims": lambda net: net.scale.add_(torch.randn(())),
    "a number in a mask": lambda net: net.a.weight.masked_fill_(MASK[:, None], torch.rand(())),
    "plain noise in rows": lambda net: net.a.weight[2:5].add_(torch.randn(3, 8)),
    "times plain noise": lambda net: net.a.weight.copy_(net.a.weight * (torch.rand(12, 8) > 0.3)),
    "rows in another order": lambda net: net.a.weight.copy_(net.a.weight[torch.randperm(12)]),
    "wide": lambda net: nn.init.orthogonal_(net.odd),
    "wider": lambda net: nn.init.orthogonal_(net.b.weight),
    "odd and flat": lambda net: net.odd.view(-1)[3:9].zero_(),
    "an odd column": lambda net: net.odd[:, 3].fill_(2.0),
    "by its values": lambda net: net.odd.mul_(net.odd[net.odd > 0].sum() / net.odd.nonzero().sum()),
    "an old view": _through_an_old_view,
    "a copied gradient": lambda net: net.a.weight.add_(copy.deepcopy(net.a.weight.grad)),
    "a copied model": lambda net: net.a.weight.add_(copy.deepcopy(net).a.weight),
    "infinite gradients": _scaled_up_to_infinity,
    "called with others": _called_with_others,
    "noise in rows": lambda net: net.a.weight[2:7].normal_(),
    "a row": lambda net: _at(net, 3),
    "rows": lambda net: net.a.weight[2:5].mul_(2),
    "a column": lambda net: _at(net, _, 2),
    "a rectangle": lambda net: net.a.weight[2:5, 1:3].add_(1),
    "a part of the bias": lambda net: net.a.bias[2:6].fill_(3.0),
    "a chunk": lambda net: net.a.bias.chunk(4)[1].fill_(1.0),
    "a split": lambda net: net.a.weight.split([5, 7])[0].neg_(),
    "each row": _each_row,
    "an unbound row": lambda net: net.a.weight.unbind(0)[3].zero_(),
    "flat": lambda net: net.a.weight.view(-1)[:5].zero_(),
    "flattened": lambda net: net.a.weight.flatten()[5].zero_(),
    "transposed": lambda net: net.a.weight.t()[2].zero_(),
    "a diagonal": lambda net: net.a.weight.diagonal().fill_(2.0),
    "fill_diagonal_": lambda net: net.a.weight.fill_diagonal_(2.0),
    "as_strided": lambda net: net.a.weight.as_strided((3,), (9,)).zero_(),
    "of data": lambda net: net.a.weight.data[3].zero_(),
    "rows copied": lambda net: net.a.weight[0].copy_(net.a.weight[1]),
    "rows swapped": _swap_rows,
    "by a mask": lambda net: _at(net, MASK),
    "by its own mask": lambda net: _at(net, net.a.weight > 0),
    "by indices": lambda net: _at(net, [0, 1]),
    "masked_fill_": lambda net: net.a.weight.masked_fill_(MASK[:, None], 1.0),
    "index_fill_": lambda net: net.a.weight.index_fill_(0, ROWS, 2.0),
    "index_copy_": lambda net: net.a.weight.index_copy_(0, ROWS, torch.ones(2, 8)),
    "scatter_": lambda net: net.a.weight.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 5.0),
    "tril_": lambda net: net.a.weight.tril_(),
    "cumsum_": lambda net: net.a.weight.cumsum_(0),
    "renorm_": lambda net: net.a.weight.renorm_(2, 0, 0.5),
    "addmm_": lambda net: net.a.weight.addmm_(net.b.weight.t(), torch.eye(8)),
    "norms": lambda net: net.a.weight.div_(net.a.weight.norm(dim=1, keepdim=True)),
    "clamp": lambda net: torch.clamp(net.a.weight, -0.1, 0.1, out=net.a.weight),
    "eye": lambda net: torch.eye(12, 8, out=net.a.weight, requires_grad=True),
    "sum": lambda net: torch.add(net.a.weight, torch.ones(12, 8), out=net.a.weight),
    "into a part": lambda net: torch.mul(net.a.weight[:3], 2, out=net.a.weight[:3]),
    "copy_": lambda net: net.a.weight.copy_(torch.ones(12, 8)),
    "mul_": lambda net: net.a.weight.mul_(MASK[:, None]),
    "fill_": lambda net: net.a.weight.fill_(net.a.weight.sum()),
    "where": lambda net: net.a.weight.copy_(
        torch.where(net.a.weight > 0, net.a.weight, torch.ones(12, 8))
    ),
    "cat": lambda net: net.a.weight.copy_(torch.cat([net.a.weight[:4], torch.zeros(8, 8)])),
    "lists": lambda net: torch.ops.aten._foreach_mul_.Scalar([net.a.weight, net.a.bias], 2.0),
    "lists of parts": lambda net: torch.ops.aten._foreach_mul_.Scalar(
        [net.a.weight[2:4], net.a.bias], 2.0
    ),
    "data": lambda net: setattr(net.a.weight, "data", net.a.weight.data.clamp(-0.01, 0.01)),
    "plain data": lambda net: setattr(net.a.weight, "data", torch.ones(12, 8)),
    "data and back": _swap_data,
    "vector": _vector,
    "grad": _grad(lambda g: g * 2, "grad"),
    "plain grad": _grad(lambda _: torch.ones(12, 8), "grad"),
    "data of grad": _grad(lambda g: g * 2, "data"),
    "rows of grad": _apply_gradient(lambda w: w.grad[:3].zero_()),
    "column of grad": _apply_gradient(lambda w: w.grad[:, 3].fill_(1.0)),
    "masked grad": _apply_gradient(lambda w: w.grad.mul_(MASK[:, None])),
    "noisy grad": _apply_gradient(lambda w: w.grad.add_(torch.randn_like(w.grad))),
    "data transposed": lambda n: setattr(n.a.weight, "data", n.a.weight.t().contiguous().t()),
}  # fmt: skip


def _in_hook(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def loss(net: Any, x: Tensor) -> Tensor:
        net.a.weight.register_hook(change)
        return net(x).sum()

    return loss


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "penalty": lambda net, x: net(x).mean() + 0.1 * sum(p.square().sum() for p in net.parameters()),
    "norms": lambda net, x: net(x).sum() + sum(p.norm() for p in net.parameters()),
    "orthogonal": lambda net, x: (
        net(x).sum() + (net.a.weight.t() @ net.a.weight - torch.eye(8)).square().sum()
    ),
    "times a weight": lambda net, x: (net(x) * net.b.bias).square().mean(),
    "a weight times": lambda net, x: (net.b.bias * net(x)).square().mean(),
    "a part": lambda net, x: net(x).sum() + net.a.weight[3].square().sum(),
    "rows": lambda net, x: net(x).sum() + (net.a.weight[2:5] * torch.ones(3, 8)).square().sum(),
    "masked": lambda net, x: net(x).sum() + net.a.weight[MASK].square().sum(),
    "beside": lambda net, x: net(x).sum() + torch.cat([net.a.weight, torch.ones(2, 8)]).norm(),
    "of a layer": lambda net, x: net(x).sum() + net.a(x).square().mean(),
    "mse": lambda net, x: net(x).sum() + F.mse_loss(net.a.weight, torch.ones(12, 8)),
    "mse of two": lambda net, x: net(x).sum() + F.mse_loss(net.a.weight, net.b.weight.t()),
    "entropy": lambda net, x: net(x).sum() + F.cross_entropy(net.a.weight, torch.arange(12) % 8),
    "lookup": lambda net, x: net(x).sum() + F.embedding(ROWS, net.a.weight).square().sum(),
    "spectral": lambda net, x: net(x).sum() + torch.linalg.matrix_norm(net.a.weight, 2),
    "flat": lambda net, x: net(x).sum() + torch.cat([p.view(-1) for p in net.parameters()]).norm(),
    "hook": _in_hook(lambda grad: grad.mul(MASK[:, None])),
}


def _difference(net: nn.Module, eager: nn.Module) -> float:
    """By how much values and gradients of parameters differ."""
    found = 0.0
    for ours, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        for a, b in ((ours, theirs), (ours.grad, theirs.grad)):
            whole = a.full_tensor() if hasattr(a, "full_tensor") else a
            found = max(found, float((whole.detach() - b.detach()).abs().max()))
    return found


def _pair(options: dict[str, Any], with_loss: bool) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    eager = Net(with_loss)
    return autopar.compile(copy.deepcopy(eager), **grouped(**options)), eager


def changed(options: dict[str, Any], every: int) -> dict[str, float]:
    """Those of `CHANGES`, after the first step, that leave other parameters than on one device, or
    another loss, with the difference: of one in `every`."""
    wrong: dict[str, float] = {}
    x = torch.randn(4, 8)
    pair = net, eager = _pair(options, True)
    first = copy.deepcopy(eager.state_dict())
    for name in [*CHANGES][::every]:
        change = CHANGES[name]
        for each in pair:
            each.load_state_dict(first)
            each.zero_grad()
            each(x).backward()
            # The generators of ranks are not in step, as where ranks load data.
            torch.manual_seed(0)
            torch.rand(RANK if each is net else 0)  # Rank 0 has drawn what one process has.
            with torch.no_grad():
                change(each)
        off = max(_difference(net, eager), abs(net(x[:2]).item() - eager(x[:2]).item()))
        if off > LIMIT:
            wrong[name] = off
    return wrong


def differentiated(options: dict[str, Any], every: int) -> dict[str, float]:
    """Those of `LOSSES` whose gradients, clipped, train other parameters than on one device: of one
    in `every`."""
    wrong: dict[str, float] = {}
    x = torch.randn(4, 8)
    pair = net, eager = _pair(options, "stages" in options)
    for name in [*LOSSES][::every]:
        loss = LOSSES[name]
        for each in pair:
            each.zero_grad()
            each(x)
            loss(each, x).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            torch.optim.SGD(each.parameters(), 0.1).step()
        off = _difference(net, eager)
        if off > LIMIT:
            wrong[name] = off
    return wrong


def run(options: dict[str, Any], every: int = 1) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    found = {"changes": changed(options, every), "losses": differentiated(options, every)}
    # In stages the rank that has the parameter alone has the error, which ends the others.
    return found if "stages" in options else found | {"between": in_between(*_pair(options, True))}


def few_in_shards() -> dict[str, Any]:
    found = run({"strategy": "fsdp"}, 3)
    return {**found, "told": told(), "of own rows": penalty_beside_own_rows()}


def in_shards() -> dict[str, Any]:
    return run({"strategy": "fsdp"})


def replicated() -> dict[str, Any]:
    return run({"strategy": "ddp"})


def few_in_stages() -> dict[str, Any]:
    return run({"stages": 2, "microbatches": 1}, 3)


def in_stages() -> dict[str, Any]:
    return run({"stages": 2, "microbatches": 1})


def told() -> dict[str, str]:
    """What is said of what cannot be."""
    net, _ = _pair({"strategy": "fsdp"}, False)
    x = torch.randn(4, 8)
    net(x).sum().backward()
    local, _ = _pair({"strategy": "fsdp", "inputs": "local"}, False)
    local(x)
    weight = net.a.weight
    return {
        "data": refusal(lambda: setattr(weight, "data", torch.ones(3, 8))),
        "grad": refusal(lambda: setattr(weight, "grad", torch.ones(12, 8, dtype=torch.float32))),
        "rows": refusal(lambda: local.a(x)),
    }


def refusal(act: Callable[[], Any]) -> str:
    """What autopar says of it, or nothing if it does it."""
    try:
        act()
    except AutoparError as error:
        return str(error)
    return ""


def penalty_beside_own_rows() -> float:
    """By how much a loss of ranks' own rows, with a penalty, is not that of one device."""
    local, eager = _pair({"strategy": "fsdp", "inputs": "local"}, True)
    x = torch.randn(4, 8)
    for each, rows in ((local, x[2 * RANK : 2 * RANK + 2]), (eager, x)):
        each(rows)
        LOSSES["penalty"](each, rows).backward()
    return _difference(local, eager)
