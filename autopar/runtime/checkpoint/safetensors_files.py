"""The tensors of a checkpoint in safetensors files, none of them read yet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.errors import WeightsError
from autopar.runtime.checkpoint.lazy import Stored

_INDEX = ".safetensors.index.json"
_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


def open_checkpoint(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """Every tensor of a safetensors file, or of a directory of them, by its name.

    A directory has an index (`*.safetensors.index.json`), which says which file has which tensor,
    or else all its `*.safetensors` files are taken. WeightsError if there is nothing there, if a
    file is missing or damaged, or if two files have a tensor of one name.
    """
    if not isinstance(path, str | os.PathLike):
        raise WeightsError(
            f"weights is a {type(path).__name__}: give the path of a safetensors file, or of a "
            "directory of them; a state dict goes into the model before autopar.compile"
        )
    root = Path(path)
    if not root.exists():
        raise WeightsError(f"weights: there is no file or directory {root}")
    expected: Mapping[str, str] | None = None
    if root.is_dir():
        files, expected = _files(root)
    else:
        files = [root]
    found: dict[str, Stored] = {}
    for file in files:
        for name, tensor in _open(file).items():
            if expected is not None and expected.get(name) != file.name:
                continue
            if name in found:
                raise WeightsError(f"weights: {name} is in two files of {root}")
            found[name] = tensor
    missing = sorted(set(expected or ()) - set(found))
    if missing:
        raise WeightsError(
            f"weights: the index in {root} speaks of {missing[0]}, which its file does not have"
        )
    return found


def _files(root: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The files of a directory, and what its index says is where."""
    indices = sorted(root.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        raise WeightsError(
            f"weights: {root} has several indices ({', '.join(i.name for i in indices)}): keep one "
            "checkpoint per directory"
        )
    if indices:
        try:
            where = dict(json.loads(indices[0].read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"weights: cannot read the index {indices[0]}: {error}") from error
        return [root / name for name in sorted(set(where.values()))], where
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"weights: there is no safetensors file in {root}")
    return files, None


def _open(path: Path) -> dict[str, Stored]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise WeightsError(
            "weights= needs the package safetensors: pip install 'autopar[hf]'"
        ) from error
    if not path.is_file():
        raise WeightsError(f"weights: {path} is missing, or is no file")
    try:
        file: Any = safe_open(path, "pt")
        found: dict[str, Stored] = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            head = file.get_slice(name)
            dtype = _DTYPES.get(head.get_dtype())
            if dtype is None:
                raise WeightsError(f"weights: {name} in {path} has dtype {head.get_dtype()}")
            found[name] = Stored(file, name, tuple(head.get_shape()), dtype)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"weights: cannot read {path}: {error}") from error
    return found
