"""Runs: blocks of a list of modules that execute alike, one after the other.

That blocks look alike proves nothing: the code that calls them may count them. So the true step is
recorded (`recording`), and so is the step of the model with most blocks of a run left out.

The blocks of a run must do the same, op by op, scalar by scalar, and read the same tensors as seen
from each block. All around the run must be the same with and without the blocks that are left out.
The graph of the whole model then follows from that of the short one (`expand`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

MAX_PERIOD = 8
"""The most blocks that may differ before they repeat, such as local and global attention."""

MIN_LEFT_OUT = 2
"""The least number of left-out blocks for which recording is worth it."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Of the `count` blocks of the list at `path`, all but the `head` first and the last one repeat
    with `period`: block m + period does what block m does."""

    path: str
    count: int
    head: int
    period: int

    @property
    def extra(self) -> int:
        """How many periods are left out of the short model, which has two."""
        return (self.count - 1 - self.head) // self.period - 2

    @property
    def kept(self) -> tuple[int, ...]:
        """The blocks of the short model, by their numbers in the whole one."""
        first = range(self.head + self.period)
        return (*first, *range(self.count - 1 - self.period, self.count))

    @property
    def first(self) -> range:
        """The numbers of the first period's blocks, in either model."""
        return range(self.head, self.head + self.period)

    @property
    def last(self) -> range:
        """The numbers of the last period's blocks in the whole model."""
        return range(self.count - 1 - self.period, self.count - 1)

    @property
    def prefix(self) -> str:
        """What stands before the number of a block in a path."""
        return f"{self.path}." if self.path else ""

    def split(self, name: str) -> tuple[int, str] | None:
        """The number of the block that the path `name` leads into, and the way from there."""
        if not name.startswith(self.prefix):
            return None
        number, _, rest = name[len(self.prefix) :].partition(".")
        return (int(number), rest) if number.isdigit() else None

    def join(self, number: int, rest: str) -> str:
        """The path `rest` within a block: what `split` takes apart."""
        return f"{self.prefix}{number}.{rest}" if rest else f"{self.prefix}{number}"


def block_name(path: str, number: int) -> str:
    """The path of a block of the list at `path`."""
    return f"{path}.{number}" if path else str(number)


def block_lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """(path, blocks) of every list of enough modules that share no parameter, buffer or module with
    anything else; lists that hold others first."""
    shared = _shared(model)
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        names, blocks = [*module._modules], list(module.children())
        enough = len(blocks) >= 1 + 1 + 2 + MIN_LEFT_OUT
        if enough and names == [str(i) for i in range(len(blocks))]:
            parts = (part for block in blocks for part in _parts(block))
            if not any(id(part) in shared for part in parts):
                yield path, blocks


def _parts(module: nn.Module) -> Iterator[object]:
    for each in module.modules():
        yield each
        yield from each._parameters.values()
        yield from each._buffers.values()


def _shared(model: nn.Module) -> set[int]:
    """The identities of modules, parameters and buffers that the model has under several names."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, module in model.named_modules(remove_duplicate=False):
        for part in (module, *module._parameters.values(), *module._buffers.values()):
            if part is not None:
                (shared if id(part) in seen else seen).add(id(part))
    return shared


@contextmanager
def shortened(model: nn.Module, runs: Sequence[BlockRun]) -> Generator[None, None, None]:
    """`model` with the kept blocks of each run alone, numbered from 0."""
    tables = [model.get_submodule(run.path)._modules for run in runs]
    whole = [dict(table) for table in tables]
    try:
        for run, table, blocks in zip(runs, tables, whole, strict=True):
            table.clear()
            table.update({str(i): blocks[str(m)] for i, m in enumerate(run.kept)})
        yield
    finally:
        for table, blocks in zip(tables, whole, strict=True):
            table.clear()
            table.update(blocks)
