"""A rank that tries ops on tensors in shards: `python -m tests.edge.process`, as `table` starts it.

Writes a line of JSON per case: the number of the op in the database, its name, the place, what came
of it, and why.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import mesh_of_others
from autopar.runtime.module.changes import know_changes
from autopar.runtime.process.own_group import know_bytes
from autopar.runtime.process.part_tensors import know, know_numbers
from tests.edge.calls import Meshes, difference, outcome
from tests.edge.samples import Case, cases, tried_ops

STATES = ("exact", "refused", "crash", "other", "hang")
"""What may come of a case, the best first: a crash is an error that autopar did not say."""
STOPPED = 3
"""How a rank ends where another did not come to a collective."""
TIMEOUT_S = 20
_OF_GLOO = ("timeout", "timed out", "closed by peer", "connection reset")


def meshes_of_world() -> Meshes:
    """With all that a compiled model makes known of them. A collective call."""
    size, rank = dist.get_world_size(), dist.get_rank()
    world = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    ranks = torch.tensor([size - 1])
    group = dist.new_group([size - 1], backend="gloo")
    if rank == size - 1:
        assert isinstance(group, dist.ProcessGroup)
        last = DeviceMesh.from_group(group, "cpu", ranks, mesh_dim_names=("dp",))
    else:
        last = mesh_of_others("cpu", ranks, ("dp",))
    know_bytes()
    know_numbers()
    know_changes([world, last])
    know([last], world)
    return Meshes(world, last)


def judge(case: Case, meshes: Meshes) -> tuple[str, str] | None:
    """The state of a case, and why; None where eager has no result. Where it has none of a whole
    place, the row is missing, and `test_edge.check` counts."""
    try:
        expected = outcome(case, None)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # what eager refuses is not a case
    if not expected:
        return None
    know_changes([meshes.world, meshes.last])  # ops that eager has just defined
    try:
        found = outcome(case, meshes)
    except AutoparError as error:
        return "refused", str(error)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    why = difference(case, expected, found)
    return ("other" if why else "exact"), why


def run(numbers: range, most: int | None, path: Path) -> None:
    """Try those ops, and write what comes of it."""
    meshes = meshes_of_world()
    after = dist.new_group(backend="gloo", timeout=timedelta(seconds=1.5 * TIMEOUT_S))
    ops = tried_ops()
    with path.open("a", encoding="utf-8") as log:
        for index in numbers:
            for case in cases(ops[index], most):
                judged = judge(case, meshes)
                if judged is None:
                    continue
                state, why = judged
                is_lost = any(word in why.lower() for word in _OF_GLOO)
                try:
                    worst = torch.tensor(STATES.index(state))
                    if not is_lost:
                        dist.all_reduce(worst, dist.ReduceOp.MAX, group=after)
                except RuntimeError:  # another rank waits in a collective of the case
                    is_lost = True
                state = "hang" if is_lost else STATES[int(worst)]
                line = (
                    index,
                    case.op,
                    case.place,
                    state,
                    f"{case}: {why}" if state != "exact" else "",
                )
                log.write(json.dumps(line) + "\n")
                if is_lost:
                    log.flush()
                    os._exit(STOPPED)
            log.write(json.dumps((index, "", "", "done", "")) + "\n")
            log.flush()


def main() -> None:
    """Reads what to do from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("step", type=int)
    parser.add_argument("--most", type=int)
    given: Any = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    run(range(given.first, given.last, given.step), given.most, given.path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
