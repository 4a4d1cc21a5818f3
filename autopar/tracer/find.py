"""The runs of a model, found by recording its step as it is and as it is without most of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from autopar.tracer import torch_private
from autopar.tracer.alike import Stream, proposals, repeats, same_around
from autopar.tracer.capture import Wanted, staged
from autopar.tracer.recording import Kinds, Recording, record
from autopar.tracer.runs import BlockRun, block_lists, block_name, shortened
from autopar.tracer.stand_ins import MOST_TRACES, meta_tensor
from autopar.tracer.watch import Watch


def find_runs(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: Wanted,
    watch: Watch,
) -> tuple[BlockRun, ...]:
    """The runs of `model(*args, **kwargs)`: none where blocks differ, or where the step cannot be
    recorded. The model is left as it was."""
    lists = dict(block_lists(model))
    if not lists:
        return ()
    kinds: Kinds = {}
    record_once = partial(_recorded, model, args, kwargs, kinds, wanted, watch)
    whole = _unless_it_raises(partial(record_once, lists), watch)
    if whole is None:
        return ()
    found, states = whole
    runs = tuple(_chosen(found, states, lists, kinds))
    if not runs:
        return ()
    with watch.of_short_model(), shortened(model, runs):
        kept = {run.path: [lists[run.path][m] for m in run.kept] for run in runs}
        rest = _unless_it_raises(partial(record_once, kept), watch)
    if rest is None:
        return ()
    there = Stream(found, runs, states, kinds, short=False)
    return runs if same_around(there, Stream(rest[0], runs, rest[1], kinds, short=True)) else ()


def _chosen(
    found: Recording,
    states: Mapping[str, Hashable],
    lists: Mapping[str, Sequence[nn.Module]],
    kinds: Kinds,
) -> Iterator[BlockRun]:
    """The runs, none within another."""
    taken: list[str] = []
    for path, blocks in lists.items():
        if any(path.startswith(outer) for outer in taken):
            continue
        for run in proposals(found, path, len(blocks)):
            if repeats(Stream(found, (run,), states, kinds, short=False)):
                taken.append(run.prefix)
                yield run
                break


_Recorded = tuple[Recording, dict[str, Hashable]]


def _unless_it_raises(record_once: Callable[[], _Recorded], watch: Watch) -> _Recorded | None:
    """A recording; None if the model raises."""
    for _ in range(MOST_TRACES):
        known = watch.discoveries
        try:
            return record_once()
        except Exception:  # whatever the model raises here, it is traced whole
            # A tensor of the script's, which now has a stand-in, is not on the meta device.
            if watch.discoveries == known:
                return None
    return None


def _recorded(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kinds: Kinds,
    wanted: Wanted,
    watch: Watch,
    lists: Mapping[str, Sequence[nn.Module]],
) -> _Recorded:
    """A recording, and what each parameter and buffer is like."""
    leaves, spec = torch_private.tree_flatten((args, kwargs))
    blocks = {block: block_name(path, i) for path in lists for i, block in enumerate(lists[path])}
    with warnings.catch_warnings(), torch_private.compiling():
        warnings.simplefilter("ignore")
        with staged(model, leaves, spec, meta_tensor, {}, wanted, watch) as (step, tensors):
            states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            states |= dict(step.named_buffers(recurse=False))
            found = record(step, tensors, states, blocks, kinds)
    forms: dict[str, Hashable] = {
        name: (type(x), tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
        for name, x in states.items()
    }
    return found, forms
