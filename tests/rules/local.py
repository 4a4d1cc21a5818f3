"""Arguments that speak of shapes, for the tensors of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Shape = tuple[int, ...]

_OUTPUT_SHAPE_AT = {
    "view": 1, "_unsafe_view": 1, "reshape": 1, "expand": 1, "new_zeros": 1, "new_ones": 1,
    "new_full": 1, "new_empty": 1, "slice_backward": 1, "select_backward": 1,
}  # fmt: skip
_SLICE_DIM_AT = {"slice": 1, "slice_backward": 2, "slice_scatter": 2}


def local_args(
    op: str, args: Sequence[Any], local: Sequence[Shape], whole: Sequence[Shape]
) -> list[Any]:
    """`args`, whose tensors are local, with numbers that fit the `local` output shapes (`whole`
    are the global ones)."""
    name = op.split(".")[1] if "." in op else op
    found = list(args)
    if name in _OUTPUT_SHAPE_AT and op != "aten.view.dtype":
        found[_OUTPUT_SHAPE_AT[name]] = list(local[0])
    if name in _SLICE_DIM_AT:
        _localize_slice(found, args, _SLICE_DIM_AT[name], local[0], whole[0])
    elif name == "narrow":
        ratio = whole[0][args[1]] // local[0][args[1]]
        found[2:4] = args[2] // ratio, args[3] // ratio
    elif name in ("split", "unsafe_split"):
        found[1] = local[0][args[2]]
    elif name == "split_with_sizes":
        found[1] = [shape[args[2]] for shape in local]
    elif name == "repeat":
        source = args[0].shape
        lead = len(local[0]) - len(source)
        found[1] = [n if d < lead else n // source[d - lead] for d, n in enumerate(local[0])]
    elif name == "native_group_norm":
        found[3] = args[0].shape[0]
    elif name == "native_group_norm_backward":
        found[5] = args[0].shape[0]
    elif name == "convolution_backward" and args[3] is not None:
        found[3] = [args[0].shape[1]]
    return found


def _localize_slice(
    found: list[Any], args: Sequence[Any], at: int, local: Shape, whole: Shape
) -> None:
    """Bounds shrink as the dim does; negative ones count from the end, which shrinks too."""
    dim = args[at]
    ratio = whole[dim] // local[dim] if local[dim] else 1
    for position in (at + 1, at + 2):
        if position < len(args) and args[position] is not None and ratio > 1:
            found[position] = args[position] // ratio
