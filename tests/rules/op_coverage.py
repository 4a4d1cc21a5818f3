"""Which ops of torch's op database have sharding rules, all the way down.

`python -m tests.rules.op_coverage` traces the first sample of each op of OpInfo, forward and
backward, as autopar traces a model, and writes `op_coverage.txt` anew: a line per op that is not
covered, with what it lacks, under a line of totals. It takes about a minute.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import TraceError, UnknownOpWarning
from autopar.tracer import torch_private, trace
from tests.edge.torch_private import database, full_name

FILE = Path(__file__).with_name("op_coverage.txt")
_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


class OneOp(nn.Module):
    """An op of the database as a model: what it differentiates is a parameter. Arguments are
    copied, for some ops write into them."""

    def __init__(self, op: Any, leaves: list[Any], spec: torch_private.TreeSpec) -> None:
        super().__init__()
        self.op, self.leaves, self.spec = op, leaves, spec
        self.kept = nn.ParameterDict(
            {str(i): nn.Parameter(x.detach()) for i, x in enumerate(leaves) if _wants_grad(x)}
        )

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        leaves: list[Any] = []
        for i, leaf in enumerate(self.leaves):
            if str(i) in self.kept:
                leaves.append(self.kept[str(i)].clone())
            else:
                leaves.append(next(given).clone() if isinstance(leaf, Tensor) else leaf)
        first, args, kwargs = torch_private.tree_unflatten(leaves, self.spec)
        return self.op(first, *args, **kwargs)


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def missing(op: Any) -> list[str]:
    """The ATen ops without a rule in the graph of an op's first sample; or why it has none."""
    dtype = next((d for d in _DTYPES if op.supports_dtype(d, "cpu")), None)
    if dtype is None:
        return ["no sample"]
    graded = op.supports_autograd and dtype is torch.float32
    sample = next(iter(op.sample_inputs("cpu", dtype, requires_grad=graded)), None)
    if sample is None:
        return ["no sample"]
    leaves, spec = torch_private.tree_flatten((sample.input, sample.args, sample.kwargs))
    inputs = tuple(x for x in leaves if isinstance(x, Tensor) and not x.requires_grad)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("ignore", UnknownOpWarning)
            graph = trace(OneOp(op.op, leaves, spec), inputs).graph
    except TraceError as error:
        return [f"not captured: {_reason(error)}"]
    except RuntimeError as error:
        return [f"fails: {type(error).__name__}"]
    return sorted({node.op for node in graph.nodes if not node.has_rule})


def _reason(error: TraceError) -> str:
    text = str(error).splitlines()[0]
    named = [w for w in text.replace(":", " ").split() if w.endswith("Exception")]
    return named[0] if named else text[:60].rstrip()


def recorded() -> dict[str, str]:
    """Op name to what it lacks, from the file; covered ops are not in it."""
    lines = FILE.read_text(encoding="utf-8").splitlines()[1:]
    return dict(line.split(": ", 1) for line in lines)


def totals() -> tuple[int, int]:
    """(covered, all) from the file."""
    covered, _, count, *_ = FILE.read_text(encoding="utf-8").split(maxsplit=3)
    return int(covered), int(count)


def main() -> None:
    """Write the file."""
    ops = database(seeded=False)
    lacking = {full_name(op): found for op in ops if (found := missing(op))}
    covered = len(ops) - len(lacking)
    head = f"{covered} of {len(ops)} ops are covered ({covered / len(ops):.1%})"
    lines = [head, *(f"{name}: {', '.join(what)}" for name, what in sorted(lacking.items()))]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(head)


if __name__ == "__main__":
    main()
