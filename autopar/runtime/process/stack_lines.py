"""Where a process is, from its stack: the line of the user's script, the collective it waits in."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx

FOR = "for"
"""The key in the meta of a collective's node for the tensor it sends."""
AXIS = "axis"
"""The key in the meta of a collective's node for its mesh axis, once bound to a process group."""

_SENDS = re.compile(r"(\w+)\b[^=]*= .*_c10d_functional\.(\w+?)_?\.default\(")
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_PYTHON = sysconfig.get_paths()["stdlib"]
_STORAGES = frozenset(
    {
        f"{_TORCH}/_tensor.py", f"{_TORCH}/storage.py", f"{_OURS}/runtime/dtensor_private.py",
        f"{_OURS}/runtime/module/readings.py", f"{_OURS}/runtime/program/reads_whole.py",
    }
)  # fmt: skip
"""Files that convert one kind of storage into another."""
_WRAPPERS = frozenset({"wrapper", "__call__"})


def script_line(frames: list[tuple[CodeType, int]]) -> str:
    """`train.py:57 in main`, for the user's innermost frame of `frames`, which are outermost
    first."""
    of_script = ((code, line) for code, line in reversed(frames) if is_of_script(code))
    return next((f"{Path(c.co_filename).name}:{line} in {c.co_name}" for c, line in of_script), "")


def is_of_script(code: CodeType) -> bool:
    """Whether code is the user's."""
    name = code.co_filename
    return not (name.startswith(("<", _TORCH, _OURS)) or _is_python(name))


def is_read_by_script() -> bool:
    """Whether the caller was called by the user's code, not by a library or torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _STORAGES:
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    ends = name.startswith((_TORCH, _OURS, "<frozen")) or _is_python(name)
    return bool(name) and not ends and "site-packages" not in name


def _is_python(name: str) -> bool:
    return name.startswith(_PYTHON) and "site-packages" not in name


def of_stack(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """The frames of a running thread, outermost first, with the lines they are at."""
    frames = () if frame is None else walk_stack(frame)
    return [(each.f_code, line) for each, line in frames][::-1]


def of_error(error: BaseException) -> list[tuple[CodeType, int]]:
    """The frames an error came through, outermost first, with the lines they were at."""
    return [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]


def waiting_collective(frames: list[tuple[CodeType, int]], gm: fx.GraphModule | None = None) -> str:
    """The collective that the innermost frames are in: one of the local graph `gm`, with its mesh
    axis and tensor, or one of torch.distributed. Empty if they are in none."""
    collective = ""
    for code, line in frames:
        name = code.co_filename
        sends = _SENDS.search(linecache.getline(name, line)) if _is_written(name) else None
        if sends is not None:
            return _described(sends[1], sends[2], gm)
        if not name.startswith(_TORCH):
            collective = ""
        elif not collective and name.startswith(f"{_TORCH}/distributed") and _is_named(code):
            collective = code.co_name
    return collective


def in_optimizer(frames: list[tuple[CodeType, int]]) -> bool:
    """Whether one of torch's optimizers is among the frames."""
    return any(code.co_filename.startswith(f"{_TORCH}/optim/") for code, _ in frames)


def _is_written(name: str) -> bool:
    """Whether code was written by torch, from a graph."""
    return name.startswith("<") or "torchinductor" in name


def _is_named(code: CodeType) -> bool:
    return code.co_name not in _WRAPPERS and not code.co_name.startswith("_")


def _described(name: str, op: str, gm: fx.GraphModule | None) -> str:
    node: Any = None
    if gm is not None:
        node = next((node for node in gm.graph.nodes if node.name == name), None)
    if node is not None and op == "wait_tensor":
        (node,) = node.all_input_nodes
        op = getattr(node.target, "_opname", node.name).rstrip("_")
    text = op.removesuffix("_tensor").removesuffix("_into").removesuffix("_single")
    if node is None:
        return text
    over = f" over mesh axis {node.meta[AXIS]}" if AXIS in node.meta else ""
    tensor = f" of {node.meta[FOR]}" if FOR in node.meta else ""
    return f"{text}{over}{tensor}"
