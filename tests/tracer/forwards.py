"""Forwards that depend on data, or do more than compute, with what autopar says of each and what it
says to write instead."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.tracer.forwards_instead import (
    choose_layer,
    halve_where,
    loop_on_tensors,
    repeat_so_often,
)

Forward = Callable[..., Tensor]


class Part(nn.Module):
    """Runs `forward(self, x, ids, ...)`."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.run, self.line, self.table = forward, nn.Linear(6, 6), nn.Embedding(16, 6)
        self.register_buffer("noise", torch.rand(6, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor, ids: Tensor, *more: Any) -> Tensor:
        return self.run(self, x, ids, *more)


class Whole(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.part = Part(forward)

    def forward(self, x: Tensor, ids: Tensor, *more: Any) -> Tensor:
        return self.part(x, ids, *more)


@dataclass(frozen=True)
class Refused:
    """`forward` is refused: the error names `op` and says `remedy`. `instead` is what that leads
    to, which computes the same; `given` makes its further arguments of (x, ids)."""

    forward: Forward
    op: str
    remedy: str
    instead: Forward | None = None
    given: Callable[[Tensor, Tensor], tuple[Any, ...]] | None = None


def drop_layer(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    for _ in range(3):
        if torch.rand([]).item() < 0.5:
            continue
        y = m.line(y)
    return y.mean()


def drop_layer_later(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y, drawn = m.line(x), torch.rand([])
    if m.training and drawn < 0.5:
        y = y + m.line(y)
    return y.mean()


def loop_on_numbers(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    """Two names, each assigned from the other."""
    high = float(x.norm())
    for _ in range(2):
        low = high / 2
        high = low + 1
    return (m.line(x) * high).mean()


def grow_table(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    n = ids.max().item() + 1
    if n > 16:
        m.noise = torch.zeros(int(n))
    return m.table(ids).square().mean()


def repeat(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    for _ in range(int(ids.max()) % 3):
        y = m.line(y)
    return y.mean()


def halve(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    if y.mean() > 0:
        y = y / 2
    return y.mean()


def assign_picked(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x).clone()
    y[x > 0] = x[x > 0]
    return y.square().mean()


def keep_norm(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    LOG["norm"] = y.norm().item()
    return y.mean()


def scale_by_item(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    largest = y.detach().abs().max().item()
    return (y / largest).mean()


def hook_on_weight(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    m.line.weight.register_hook(lambda grad: grad * 2)
    return m.line(x).mean()


def other_precision(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda saved: saved.half(), lambda saved: saved.float()):
        return m.line(x).exp().mean()


def seeded(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    torch.manual_seed(3)
    return (m.line(x) * torch.rand(6)).mean()


def forked(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand(6)
    return (m.line(x) * noise).mean()


def inner_backward(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    z.square().sum().backward()
    assert z.grad is not None
    return (m.line(x) * z.grad).mean()


def inner_grad(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    return (m.line(x) * torch.autograd.grad(z.square().sum(), z)[0]).mean()


def swallow(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    try:
        count = ids.max().item()
    except Exception:
        count = 100
    return m.line(x).mean() * count


def in_a_thread(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = Thread(target=lambda: found.append(m.line(x)))
    thread.start()
    thread.join()
    return found[0].mean()


LOG: dict[str, Any] = {}
_ARGUMENT = "pass it as an argument"


def _matrix(m: Part, x: Tensor) -> Tensor:
    y = m.line(x)
    return y.mT @ y + torch.eye(6)


REFUSED: dict[str, Refused] = {
    "arange": Refused(
        lambda m, x, ids: m.table(torch.arange(ids.max().item() + 1)).mean(),
        "torch.Tensor.item", _ARGUMENT,
        lambda m, x, ids, n: m.table(torch.arange(n)).mean(),
        lambda x, ids: (int(ids.max()) + 1,),
    ),
    "table that grows": Refused(grow_table, "torch.Tensor.item", "decides which code runs"),
    "tolist": Refused(
        lambda m, x, ids: m.line(x)[ids[0].tolist()[0] % 4].square().mean(),
        "torch.Tensor.tolist", "index_select",
        lambda m, x, ids: m.line(x).index_select(0, (ids[0, 0] % 4).reshape(1)).square().mean(),
    ),
    "split": Refused(
        lambda m, x, ids: torch.split(m.line(x), (ids[0, :2] * 0 + 2).tolist())[0].mean(),
        "torch.Tensor.tolist", _ARGUMENT,
        lambda m, x, ids, sizes: torch.split(m.line(x), sizes)[0].mean(),
        lambda x, ids: ((ids[0, :2] * 0 + 2).tolist(),),
    ),
    "layers by chance": Refused(drop_layer, "torch.Tensor.item", "by chance", choose_layer),
    "layer by chance": Refused(drop_layer_later, "bool(tensor)", "by chance"),
    "item by chance": Refused(
        lambda m, x, ids: m.line(x)[torch.randint(4, (1,)).item()].square().mean(),
        "torch.Tensor.item", "index_select",
        lambda m, x, ids: m.line(x).index_select(0, torch.randint(4, (1,))).square().mean(),
    ),
    "nonzero": Refused(
        lambda m, x, ids: m.line(x)[(ids[:, 0] > 3).nonzero()[:, 0]].sum(),
        "torch.Tensor.nonzero", "torch.where(mask, a, b)",
        lambda m, x, ids: torch.where((ids[:, 0] > 3)[:, None], m.line(x), 0).sum(),
    ),
    "argwhere": Refused(
        lambda m, x, ids: m.line(x)[torch.argwhere(ids[:, 0] > -1)[:, 0]].sum(),
        "torch.argwhere", "nonzero_static(mask, size=number)",
        lambda m, x, ids: m.line(x)[torch.nonzero_static(ids[:, 0] > -1, size=4)[:, 0]].sum(),
    ),
    "where": Refused(
        lambda m, x, ids: m.line(x)[torch.where(ids[:, 0] > 3)[0]].sum(), "torch.where", "mask",
    ),
    "masked_select": Refused(
        lambda m, x, ids: m.line(x).masked_select(x > 0).mean(),
        "torch.Tensor.masked_select", "mask.sum() for a mean",
        lambda m, x, ids: torch.where(x > 0, m.line(x), 0).sum() / (x > 0).sum(),
    ),
    "mask": Refused(
        lambda m, x, ids: m.line(x)[x > 0].square().mean(), "x[index]", "torch.where(mask, x, 0)",
        lambda m, x, ids: torch.where(x > 0, m.line(x), 0).square().sum() / (x > 0).sum(),
    ),
    "mask assigned": Refused(
        assign_picked, "x[index]", "torch.where(mask, value, x)",
        lambda m, x, ids: torch.where(x > 0, x, m.line(x)).square().mean(),
    ),
    "unique": Refused(
        lambda m, x, ids: m.table(ids.unique()).mean(), "torch.Tensor.unique", "before the call",
        lambda m, x, ids, words: m.table(words).mean(), lambda x, ids: (ids.unique(),),
    ),
    "unique_consecutive": Refused(
        lambda m, x, ids: m.table(torch.unique_consecutive(ids)).mean(),
        "unique_consecutive", "before the call",
    ),
    "branch": Refused(halve, "bool(tensor)", "choose with torch.where", halve_where),
    "ternary": Refused(
        lambda m, x, ids: m.line(x).mean() if ids.max() > 7 else m.table(ids).mean(),
        "bool(tensor)", "choose with torch.where",
        lambda m, x, ids: torch.where(ids.max() > 7, m.line(x).mean(), m.table(ids).mean()),
    ),
    "method": Refused(
        lambda m, x, ids: m.line(x).mean() if ids.any() else m.line(x).sum(),
        "bool(tensor)", "choose with torch.where",
    ),
    "caught": Refused(swallow, "torch.Tensor.item", "leave the conversion out"),
    "thread": Refused(
        in_a_thread, "a thread is started", "in the same thread", lambda m, x, ids: m.line(x).mean()
    ),
    "cond": Refused(
        lambda m, x, ids: torch.cond(
            x.mean() > 0, lambda y: (y * 2).mean(), lambda y: y.mean(), (m.line(x),)
        ),
        "torch.cond", "choose with torch.where",
    ),
    "range": Refused(
        repeat, "int(tensor)", _ARGUMENT, repeat_so_often, lambda x, ids: (int(ids.max()) % 3,)
    ),
    "range of a tensor": Refused(
        lambda m, x, ids: torch.stack([m.line(x) for _ in range(ids.max() % 3 + 1)]).mean(),
        "a tensor as an index or a size", "a size or a bound",
    ),
    "slice": Refused(
        lambda m, x, ids: m.line(x)[: ids[0, 0] % 3 + 1].mean(), "x[index]", "a size or a bound",
        lambda m, x, ids, n: m.line(x)[:n].mean(), lambda x, ids: (int(ids[0, 0] % 3 + 1),),
    ),
    "row": Refused(
        lambda m, x, ids: m.line(x)[ids[0, 0] % 3].square().mean(), "x[index]", "index_select",
        lambda m, x, ids: m.line(x).index_select(0, (ids[0, 0] % 3).reshape(1)).square().mean(),
    ),
    "module of a list": Refused(
        lambda m, x, ids: [m.line, m.line][ids[0, 0] % 2](x).mean(),
        "a tensor as an index or a size", "picks an item",
        lambda m, x, ids, n: [m.line, m.line][n](x).mean(), lambda x, ids: (int(ids[0, 0] % 2),),
    ),
    "key": Refused(
        lambda m, x, ids: m.line(x).mean() * {0: 1.0}.get(ids[0, 0].item(), 2.0),
        "torch.Tensor.item", "picks an item",
    ),
    "number": Refused(
        scale_by_item, "torch.Tensor.item", "leave the conversion out",
        lambda m, x, ids: (m.line(x) / m.line(x).detach().abs().max()).mean(),
    ),
    "float": Refused(
        lambda m, x, ids: (m.line(x) / float(x.norm())).mean(),
        "float(tensor)", "leave the conversion out",
        lambda m, x, ids: (m.line(x) / x.norm()).mean(),
    ),
    "number that goes round": Refused(
        loop_on_numbers, "float(tensor)", "leave the conversion out", loop_on_tensors
    ),
    "list of numbers": Refused(
        lambda m, x, ids: (m.line(x) * torch.tensor([value.item() for value in x[0]])).mean(),
        "torch.Tensor.item", "leave the conversion out",
        lambda m, x, ids: (m.line(x) * torch.tensor(list(x[0]))).mean(),
    ),
    "kept": Refused(keep_norm, "torch.Tensor.item", "as an output of the model"),
    "maximum": Refused(
        lambda m, x, ids: max(m.line(x).mean(), m.line(x).sum()), "max(tensor)", "torch.maximum",
        lambda m, x, ids: torch.maximum(m.line(x).mean(), m.line(x).sum()),
    ),
    "sorted": Refused(
        lambda m, x, ids: sorted(m.line(x)[0])[0], "sorted(tensor)", "torch.sort",
        lambda m, x, ids: torch.sort(m.line(x)[0])[0][0],
    ),
    "contains": Refused(
        lambda m, x, ids: m.line(x).mean() * (2 if 3 in ids else 1), "in: ", "decides which code",
        lambda m, x, ids: m.line(x).mean() * torch.where((ids == 3).any(), 2, 1),
    ),
    "equal": Refused(
        lambda m, x, ids: m.line(x).mean() * (2 if torch.equal(x[0], x[1]) else 1),
        "torch.equal", "(a == b).all()",
        lambda m, x, ids: m.line(x).mean() * torch.where((x[0] == x[1]).all(), 2, 1),
    ),
    "allclose": Refused(
        lambda m, x, ids: m.line(x).mean() * (2 if torch.allclose(x[0], x[1]) else 1),
        "torch.allclose", "torch.where(condition, x, y)",
    ),
    "bincount": Refused(
        lambda m, x, ids: m.line(x).mean() * ids.flatten().bincount(minlength=16)[3],
        "torch.Tensor.bincount", "F.one_hot(x, num_classes=n).sum(0)",
        lambda m, x, ids: m.line(x).mean() * F.one_hot(ids.flatten(), num_classes=16).sum(0)[3],
    ),
    "one_hot": Refused(
        lambda m, x, ids: m.line(x).mean() * F.one_hot(ids).sum(),
        "torch.nn.functional.one_hot", "num_classes=n",
        lambda m, x, ids: m.line(x).mean() * F.one_hot(ids, num_classes=16).sum(),
    ),
    "repeat_interleave": Refused(
        lambda m, x, ids: m.line(x).repeat_interleave(ids[0, :4] * 0 + 2, dim=0).square().sum(),
        "torch.Tensor.repeat_interleave", "output_size=n",
    ),
    "numpy": Refused(
        lambda m, x, ids: (m.line(x) * torch.from_numpy(x.numpy() * 2)).mean(),
        "torch.Tensor.numpy", "write it with torch",
        lambda m, x, ids: (m.line(x) * (x * 2)).mean(),
    ),
    "numpy's functions": Refused(
        lambda m, x, ids: m.table(ids[0][np.asarray(ids[0]).argsort()]).mean(),
        "numpy's view of a tensor", "write it with torch",
        lambda m, x, ids: m.table(ids[0][torch.argsort(ids[0])]).mean(),
    ),
    "memory": Refused(
        lambda m, x, ids: m.line(x).mean() * (2 if x.data_ptr() == ids.data_ptr() else 1),
        "torch.Tensor.data_ptr", "leave out what asks for it", lambda m, x, ids: m.line(x).mean(),
    ),
    "copy": Refused(
        lambda m, x, ids: (m.line(x) * copy.deepcopy(x)).mean(),
        "copy.deepcopy(tensor)", "x.clone()", lambda m, x, ids: (m.line(x) * x.clone()).mean(),
    ),
    "pickle": Refused(
        lambda m, x, ids: m.line(x).mean() * len(pickle.dumps(x)), "", "as an output of the model",
    ),
    "saving": Refused(
        lambda m, x, ids: m.line(x).mean() + (torch.save(x, io.BytesIO()) or 0),
        "", "as an output of the model",
    ),
    "lstsq": Refused(
        lambda m, x, ids: torch.linalg.lstsq(_matrix(m, x), x.mT).solution.mean(),
        "torch.linalg.lstsq", "torch.linalg.solve(a.mT @ a, a.mT @ b)",
        lambda m, x, ids: torch.linalg.solve(
            _matrix(m, x).mT @ _matrix(m, x), _matrix(m, x).mT @ x.mT
        ).mean(),
    ),
    "lu_factor": Refused(
        lambda m, x, ids: torch.linalg.lu_factor(_matrix(m, x))[0].mean(),
        "torch.linalg.lu_factor checks", "torch.linalg.lu_factor_ex",
        lambda m, x, ids: torch.linalg.lu_factor_ex(_matrix(m, x))[0].mean(),
    ),
    "hook on a parameter": Refused(hook_on_weight, "a hook is put on a parameter", "once"),
    "hooks on what is saved": Refused(other_precision, "saved_tensors_hooks", "leave them out"),
    "seed": Refused(
        seeded, "torch.manual_seed", "keep them in a buffer",
        lambda m, x, ids: (m.line(x) * m.noise).mean(),
    ),
    "fork": Refused(
        forked, "torch.get_rng_state", "keep them in a buffer",
        lambda m, x, ids: (m.line(x) * m.noise).mean(),
    ),
    "backward": Refused(inner_backward, "backward", "torch.autograd.grad", inner_grad),
}  # fmt: skip
