"""Small models drawn at random, of ops whose backward may make large errors of small ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, ROWS = 24, 48


class Function(nn.Module):
    """A function of activations, and its text."""

    def __init__(self, text: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.text, self.function = text, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.text


class Distances(nn.Module):
    """To as many points as there are features, near to which the activations are."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.points, self.p = nn.Parameter(torch.randn(WIDTH, WIDTH)), p

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.points, p=self.p)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.inner(x))


class Attention(nn.Module):
    """One head, in which rows attend to rows."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(WIDTH, 3 * WIDTH), scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (self.scale * q @ k.t()).softmax(-1) @ v


class Normed(nn.Module):
    """A root mean square norm, spelled out as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "x + 100": lambda x: x + 100,
    "30 x": lambda x: 30 * x,
    "x / 50": lambda x: x / 50,
    "cos(60 x)": lambda x: (60 * x).cos(),
    "sin(x)": torch.sin,
    "tan(x / 2)": lambda x: (x.tanh() / 2).tan(),
    "tanh(4 x)": lambda x: (4 * x).tanh(),
    "sigmoid(6 x)": lambda x: (6 * x).sigmoid(),
    "atanh": lambda x: (0.9999 * x.tanh()).atanh(),
    "acos": lambda x: (0.999 * x.tanh()).acos(),
    "log(1 - x^2)": lambda x: (1.001 - x.tanh().square()).log(),
    "1 / (x - 1)": lambda x: 1 / (1.01 - x.tanh()),
    "over var": lambda x: x / x.var(-1, keepdim=True).add(1e-3),
    "less mean over std": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "over norm": lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "exp": lambda x: (2 * x.tanh()).exp(),
    "expm1": lambda x: x.clamp(max=2).expm1(),
    "log1p": lambda x: x.square().log1p(),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: 10 * x.softmax(-1),
    "square": torch.square,
    "x^3": lambda x: x**3 / 10,
    "sqrt": lambda x: (x.square() + 1e-3).sqrt(),
    "rsqrt": lambda x: (x.square() + 0.1).rsqrt(),
    "abs": torch.abs,
    "gelu": F.gelu,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "erf": torch.erf,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "cumsum": lambda x: x.cumsum(-1) / 5,
    "cumprod": lambda x: (1 + x.tanh() / 8).cumprod(-1),
    "prod": lambda x: x + (1 + x.tanh() / 8).prod(-1, keepdim=True),
    "sort": lambda x: x.sort(-1)[0],
    "glu": lambda x: F.glu(torch.cat([x, x.flip(-1)], -1), -1),
    "near a neighbour": lambda x: (x - (x + 0.01 * x.tanh())) * 100,
}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "group norm": lambda: nn.GroupNorm(4, WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "rms norm spelled out": Normed,
    "cdist": lambda: Distances(2.0),
    "cdist of p": lambda: Distances(1.0),
    "attention": lambda: Attention(0.2),
    "sharp attention": lambda: Attention(2.0),
}


class Drawn(nn.Module):
    """Linear layers, and two or three of the above behind each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = random.Random(number)
        torch.manual_seed(number)
        layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
        for _ in range(draw.randint(1, 3)):
            for _ in range(draw.randint(1, 3)):
                name = draw.choice([*FUNCTIONS, *LAYERS, *LAYERS])
                made = LAYERS[name]() if name in LAYERS else Function(name, FUNCTIONS[name])
                layers.append(Residual(made) if draw.random() < 0.2 else made)
            layers.append(nn.Linear(WIDTH, WIDTH))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(ROWS, WIDTH, generator=draw) for name in ("x", "y")}
