"""What the demo does to the model, its cluster and its recipe: ten changes that the gate is to
name, and ten that it is not to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODEL, RECIPE, CLUSTER = "model.py", "plans/toy.toml", "lab.toml"


@dataclass(frozen=True)
class Edit:
    """`old`, which is in `file` once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Seed:
    """Edits by `name`, and the words that the difference must have. `moves` has new names of files;
    `environment` is for a process of its own; `elsewhere`: it is run in another folder."""

    name: str
    edits: tuple[Edit, ...] = ()
    words: tuple[str, ...] = ()
    moves: Mapping[str, str] = field(default_factory=dict[str, str])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    elsewhere: bool = False


CHANGES = (
    Seed(
        "a wider layer",
        (
            Edit(
                MODEL,
                "HIDDEN, LAYERS, WORDS, SEQUENCE = 512, 2048",
                "HIDDEN, LAYERS, WORDS, SEQUENCE = 512, 4096",
            ),
        ),
        ("layers.{0-1}.up.weight", "float32[2048, 512]", "float32[4096, 512]"),
    ),
    Seed(
        "an untied head",
        (Edit(MODEL, "        self.head.weight = self.embed.weight\n", ""),),
        ("parameters that are new or gone", "head.weight", "float32[8192, 512]"),
    ),
    Seed(
        "a slower link",
        (Edit(CLUSTER, '"50GB/s"', '"12.5GB/s"'),),
        ("bandwidth of the link of level 0", "46.6 GiB/s", "11.6 GiB/s"),
    ),
    Seed(
        "a rule removed",
        (
            Edit(
                MODEL,
                "\n\nclass Block",
                "\nfrom autopar.rules.table import OPS\n\n"
                'del OPS["aten.gelu.default"]\n\n\nclass Block',
            ),
        ),
        ("ops without a sharding rule", "aten.gelu.default"),
    ),
    Seed(
        "a new op",
        (Edit(MODEL, "wide = self.up(self.norm(x))", "wide = self.up(self.norm(x)).sin()"),),
        ("ops that are new or gone", "layers.*", "sin.0"),
    ),
    Seed(
        "fewer devices",
        (Edit(CLUSTER, "size = 4", "size = 2"), Edit(RECIPE, '"2x4"', '"2x2"')),
        ("dp=2,tp=4", "dp=2,tp=2"),
    ),
    Seed(
        "another optimizer",
        (Edit(RECIPE, '"adamw"', '"sgd"'),),
        ("What it is planned for: optimizer", "adamw", "sgd"),
    ),
    Seed(
        "a larger batch",
        (Edit(RECIPE, "global_batch = 24", "global_batch = 48"),),
        ("What it is planned for: inputs", "int64[24, 256]", "int64[48, 256]"),
    ),
    Seed(
        "less memory",
        (Edit(RECIPE, '"8GiB"', '"256MiB"'),),
        ("memory limit", "8 GiB", "256 MiB"),
    ),
    Seed(
        "an added layer",
        (Edit(MODEL, "2048, 2, 8192", "2048, 3, 8192"),),
        ("layers.2.up.weight", "2 of each", "3 of each"),
    ),
)

HARMLESS = (
    Seed(
        "a renamed variable",
        (
            Edit(MODEL, "wide = self.up(self.norm(x))", "features = self.up(self.norm(x))"),
            Edit(MODEL, "F.gelu(wide,", "F.gelu(features,"),
        ),
    ),
    Seed(
        "a comment and a docstring",
        (
            Edit(
                MODEL,
                "    def forward(self, x: Tensor) -> Tensor:\n",
                "    def forward(self, x: Tensor) -> Tensor:\n"
                '        """Up and down."""\n        # The residual stays as it is.\n',
            ),
        ),
    ),
    Seed(
        "keyword arguments in another order",
        (
            Edit(
                MODEL,
                '{"words": words, "labels": words}',
                '{"labels": words, "words": words}',
            ),
        ),
    ),
    Seed(
        "code in other lines",
        (
            Edit(
                MODEL,
                "        wide = self.up(self.norm(x))\n"
                '        return x + self.down(F.gelu(wide, approximate="tanh"))\n',
                "        return x + self.down(\n"
                '            F.gelu(self.up(self.norm(x)), approximate="tanh")\n'
                "        )\n",
            ),
        ),
    ),
    Seed(
        "other weights",
        (
            Edit(
                MODEL,
                "        self.head.weight = self.embed.weight\n",
                "        torch.manual_seed(7)\n"
                "        nn.init.normal_(self.head.weight, std=0.02)\n"
                "        self.head.weight = self.embed.weight\n",
            ),
        ),
    ),
    Seed(
        "a function that nothing calls",
        (
            Edit(
                MODEL,
                "def build():\n",
                "def count(model: nn.Module) -> int:\n"
                "    return sum(param.numel() for param in model.parameters())\n\n\n"
                "def build():\n",
            ),
        ),
    ),
    Seed(
        "a file that is moved",
        (Edit(RECIPE, "../model.py:build", "../src/network.py:build"),),
        moves={MODEL: "src/network.py"},
    ),
    Seed("another working directory", elsewhere=True),
    Seed("another hash seed", environment={"PYTHONHASHSEED": "4242"}),
    Seed("other numbers of threads", environment={"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}),
)
