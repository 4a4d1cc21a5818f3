"""Scripts that train tensors which are no parameters of their model: `test_externals.py`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import autopar
from autopar.errors import AutoparError
from tests.grouped import grouped
from tests.runtime.workers import RANK, distance, whole

SIZE = int(os.environ.get("WORLD_SIZE", "1"))

WIDTH = 6
GLOBAL = [torch.ones(WIDTH, requires_grad=True)]
Find = Callable[[Any], Tensor]


class Scaled(nn.Module):
    """Two layers, with what `find` gives for it between them."""

    def __init__(self, find: Find) -> None:
        super().__init__()
        self.first, self.second, self.find = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), find
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) * self.find(self)).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.scale = nn.Linear(WIDTH, WIDTH), torch.rand(WIDTH).requires_grad_()

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + self.line(x).tanh() * self.scale + shift


class Stack(nn.Module):
    """Equal blocks, each with a tensor of its own, and one that all of them read."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.shifts = [torch.rand(WIDTH).requires_grad_()]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.shifts[0])
        return x.square().mean()


class Script(NamedTuple):
    """A model; what the script trains beside its parameters; and a loss of a batch, by the model
    that is called for it and the number of the step."""

    model: nn.Module
    trained: list[Tensor]
    loss: Callable[[Any, Tensor, int], Tensor]


def _plain_loss(model: Any, x: Tensor, _step: int) -> Tensor:
    return model(x)


def _leaf() -> Tensor:
    return torch.rand(WIDTH).add(0.5).requires_grad_()


def attribute() -> Script:
    model: Any = Scaled(lambda m: m.kept)
    model.kept = _leaf()
    return Script(model, [model.kept], _plain_loss)


def buffer() -> Script:
    model: Any = Scaled(lambda m: m.given)
    model.register_buffer("given", _leaf())
    return Script(model, [model.given], _plain_loss)


def listed() -> Script:
    model: Any = Scaled(lambda m: m.kept[0] * m.kept[1]["a"])
    model.kept = [_leaf(), {"a": _leaf()}]
    return Script(model, [model.kept[0], model.kept[1]["a"]], _plain_loss)


def closure() -> Script:
    tensor = _leaf()
    return Script(Scaled(lambda _: tensor), [tensor], _plain_loss)


def in_a_global() -> Script:
    GLOBAL[0] = _leaf()
    return Script(Scaled(lambda _: GLOBAL[0]), [GLOBAL[0]], _plain_loss)


def twice() -> Script:
    """As an attribute, in a list, and without gradient."""
    model: Any = Scaled(lambda m: m.kept * m.more[0] + _quiet(m.kept))
    model.kept = _leaf()
    model.more = [model.kept]
    return Script(model, [model.kept], _plain_loss)


@torch.no_grad()
def _quiet(x: Tensor) -> Tensor:
    return x.square()


def module_in_a_list() -> Script:
    model: Any = Scaled(lambda m: m.kept[0](torch.ones(WIDTH)))
    model.kept = [nn.Linear(WIDTH, WIDTH)]
    return Script(model, list(model.kept[0].parameters()), _plain_loss)


def parameter_in_a_list() -> Script:
    model: Any = Scaled(lambda m: m.kept[0])
    model.kept = [model.second.bias]
    return Script(model, [], _plain_loss)


def hypernetwork() -> Script:
    model: Any = Scaled(lambda m: m.kept)
    hyper = nn.Linear(3, WIDTH)

    def loss(compiled: Any, x: Tensor, step: int) -> Tensor:
        compiled.kept = hyper(torch.full((3,), 1.0 + step))
        return compiled(x)

    return Script(model, list(hyper.parameters()), loss)


def fast_in_a_list() -> Script:
    """An inner step on what is in a list, whose result takes its place."""
    model: Any = Scaled(lambda m: m.kept[0])
    slow = _leaf()

    def loss(compiled: Any, x: Tensor, _step: int) -> Tensor:
        compiled.kept = [slow]
        (grad,) = torch.autograd.grad(compiled(x), [slow])
        compiled.kept = [slow - 0.5 * grad]
        return compiled(x.flip(0))

    return Script(model, [slow], loss)


def inner_step() -> Script:
    """Of MAML, of first order, over the model's own parameters."""

    def loss(compiled: Any, x: Tensor, _step: int) -> Tensor:
        weights = dict(compiled.named_parameters())
        grads = torch.autograd.grad(compiled(x), list(weights.values()))
        fast = {n: p - 0.5 * g for (n, p), g in zip(weights.items(), grads, strict=True)}
        return functional_call(compiled, fast, (x.flip(0),)) + compiled(x)

    return Script(Scaled(lambda _: torch.ones(WIDTH)), [], loss)


def other_weights() -> Script:
    """Whole ones, of the script's own, in the place of some."""
    scale = torch.rand(8, WIDTH).requires_grad_()

    def loss(compiled: Any, x: Tensor, step: int) -> Tensor:
        own = {"first.weight": scale * (1 + step)}
        return functional_call(compiled, own, (x,)) + compiled(x)

    return Script(Scaled(lambda _: torch.ones(WIDTH)), [scale], loss)


class WithOutput(Scaled):
    def forward(self, x: Tensor) -> Any:
        made = self.second(self.first(x).tanh()) * self.find(self)
        return made.square().mean(), made


def later() -> Script:
    """A backward through an output that no program has a gradient of yet, when the model has other
    tensors again than in the call."""
    model: Any = WithOutput(lambda m: m.kept * m.table)
    model.kept, model.table = _leaf(), torch.ones(WIDTH)

    def loss(compiled: Any, x: Tensor, step: int) -> Tensor:
        before, _ = compiled(x)
        weights = {"first.weight": compiled.first.weight * 0.5}
        compiled.kept, compiled.table = kept * 2, torch.full((WIDTH,), 2.0 + step)
        _, made = functional_call(compiled, weights, (x,))
        compiled.kept, compiled.table = kept, torch.ones(WIDTH)
        return made.tanh().sum() + before

    kept = model.kept
    return Script(model, [kept], loss)


def averages() -> Script:
    """A teacher with averaged weights, called without gradients."""
    model = Scaled(lambda _: torch.ones(WIDTH))
    average = {n: 1.5 * p.detach() for n, p in model.named_parameters()}

    def loss(compiled: Any, x: Tensor, _step: int) -> Tensor:
        with torch.no_grad():
            for name, p in compiled.named_parameters():
                average[name] = 0.9 * average[name] + 0.1 * p
            target = functional_call(compiled, average, (x,))
        return (compiled(x) - target.detach()).square()

    return Script(model, [], loss)


def blocks() -> Script:
    model = Stack()
    scales: list[Tensor] = [block.scale for block in model.blocks]  # pyright: ignore[reportAssignmentType]
    return Script(model, [*scales, model.shifts[0]], _plain_loss)


def frozen_model() -> Script:
    """Only what is no parameter is trained: prompts, adversarial noise."""
    script = attribute()
    script.model.requires_grad_(False)
    return script


SCRIPTS = (
    attribute, buffer, listed, closure, in_a_global, twice, module_in_a_list, parameter_in_a_list,
    hypernetwork, fast_in_a_list, inner_step, other_weights, later, averages, blocks, frozen_model,
)  # fmt: skip


def _wholes(tensors: Iterator[Tensor]) -> list[Tensor]:
    return [whole(x.detach()).clone() for x in tensors]


def trained(
    make: Callable[[], Script], compiled: Callable[[nn.Module], Any] = lambda m: m
) -> list[Tensor]:
    """The losses of three steps of a script, its last gradients and what it has trained."""
    torch.manual_seed(5)
    script = make()
    batches = torch.randn(3, 12, WIDTH)
    model = compiled(script.model)
    found: list[Tensor] = []
    learned = [*(p for p in script.model.parameters() if p.requires_grad), *script.trained]
    optimizer = torch.optim.SGD(learned, lr=0.1)
    for step, x in enumerate(batches):
        optimizer.zero_grad()
        loss = script.loss(model, x, step)
        loss.backward()
        found.append(loss.detach().clone())
        optimizer.step()
    grads = [p.grad for p in learned]
    assert all(grad is not None for grad in grads)
    found += _wholes(grad for grad in grads if grad is not None)
    return found + _wholes(iter(learned))


def far(make: Callable[[], Script], **options: Any) -> float:
    """How far a script with a compiled model is from the plain one."""
    expected = trained(make)
    found = trained(make, lambda model: autopar.compile(model, **grouped(**options)))
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


def scripts() -> dict[str, float]:
    """Each script on all ranks."""
    found: dict[str, float] = {}
    for make in SCRIPTS:
        for strategy in ("fsdp", ""):
            found[f"{make.__name__} {strategy}"] = far(make, strategy=strategy)
    return found


MORE: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "microbatches": {"microbatches": 2},
    "stages": {"stages": 2},
    "both": {"stages": 2, "microbatches": 3},
    "checked": {"verify": True, "strategy": "fsdp"},
    "on the host": {"strategy": "fsdp", "residency": "cpu"},
}


def options() -> dict[str, float]:
    """Some scripts under other options."""
    return {
        f"{make.__name__} {name}": far(make, **how)
        for make in (blocks, listed, hypernetwork, inner_step)
        for name, how in MORE.items()
    }


def of_own_rows() -> dict[str, float]:
    """Of ranks that are handed rows of their own: gradients are of the mean of their losses."""
    torch.manual_seed(2)
    hyper, x = nn.Linear(3, WIDTH), torch.randn(4 * SIZE, WIDTH)
    plain: Any = Scaled(lambda m: m.kept)
    ours = copy.deepcopy(plain)
    model: Any = autopar.compile(ours, constraints={"strategy": "fsdp"}, inputs="local")
    found: dict[str, float] = {}
    for _ in range(2):
        ours.kept = hyper(torch.ones(3))
        model(x.chunk(SIZE)[RANK]).backward()
        plain.kept = hyper(torch.ones(3))
        (expected,) = torch.autograd.grad(plain(x), [hyper.weight])
        assert hyper.weight.grad is not None
        found[f"step {len(found)}"] = distance(hyper.weight.grad, expected)
        hyper.weight.grad = None
    return found


def apart() -> list[str]:
    """Errors where what a hypernetwork makes is not the same on all ranks: at a later step, and in
    the first one, of what it was made of."""
    told: list[str] = []
    for late in (True, False):
        model: Any = Scaled(lambda m: m.kept)
        compiled: Any = autopar.compile(model, constraints={"strategy": "fsdp"})
        hyper, x = nn.Linear(3, WIDTH), torch.ones(4, WIDTH)
        try:
            for step in range(3):
                code = torch.full((3,), float(RANK) if step or not late else 0.0)
                model.kept = hyper(code)
                compiled(x).backward()
            told.append("")
        except AutoparError as error:
            told.append(str(error))
    return told


def leaves_of_rank_0() -> list[float]:
    """What is a leaf has the values of rank 0 from the first call on."""
    model: Any = Scaled(lambda m: m.kept[0] * m.own)
    torch.manual_seed(RANK)
    model.kept, model.own = [torch.rand(WIDTH).requires_grad_()], torch.rand(WIDTH).requires_grad_()
    kept, own = model.kept[0], model.own
    compiled: Any = autopar.compile(model, constraints={"strategy": "ddp"})
    compiled(torch.ones(4, WIDTH)).backward()
    assert kept is model.kept[0] and own is model.own
    assert kept.grad is not None and own.grad is not None
    return [*kept.tolist(), *own.tolist(), *kept.grad.tolist(), *own.grad.tolist()]


def batches_of_gradients() -> dict[str, float]:
    """Several backwards at once, through a loss and through an output in shards."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh()), torch.randn(2 * SIZE, WIDTH)
    seen: dict[str, float] = {}
    for strategy in ("fsdp", "ddp"):
        model: Any = autopar.compile(copy.deepcopy(plain), constraints={"strategy": strategy})
        for name, ends in {
            "rows": lambda y: (y.sum(0), torch.eye(5)),
            "number": lambda y: (y.sum(), torch.arange(3.0)),
            "output": lambda y: (y, torch.linspace(0, 1, 3 * y.numel()).reshape(3, *y.shape)),
        }.items():
            found, expected = (
                torch.autograd.grad(
                    y, list(each.parameters()), direction, is_grads_batched=True, retain_graph=keep
                )
                for each, keep in ((model, True), (plain, False))
                for y, direction in [ends(each(x))]
            )
            far_off = (distance(a, b) for a, b in zip(found, expected, strict=True))
            seen[f"{strategy} {name}"] = max(far_off)
    return seen
