"""Files that scripts write themselves hold whole tensors, and adapters of peft go through them."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as library

from autopar.runtime.module.readings import _TAKERS, in_one_piece
from tests.runtime import file_workers
from tests.runtime.spawn import spawn

TOLERANCE = 1e-5


def check(seen: dict[str, Any]) -> None:
    for kind, found in seen.items():
        for name, far in found.items():
            assert far < TOLERANCE, (kind, name, far)


def test_a_file_takes_the_place_of_another_when_it_is_complete(tmp_path: Path) -> None:
    save = in_one_piece(torch.save)
    path, plain = tmp_path / "here.pt", tmp_path / "plain"
    plain.mkdir()
    found: dict[str, Any] = {}

    class Reading:
        """Reads the file while it is written."""

        def __reduce__(self) -> tuple[Any, ...]:
            found["while"] = torch.load(path, weights_only=True) if path.exists() else None
            return OrderedDict, ()

    for step in range(2):
        save({"x": torch.full((3,), step), "y": Reading()}, str(path))
        found[f"step {step}"] = found.pop("while")
    assert found["step 0"] is None
    assert torch.equal(found["step 1"]["x"], torch.zeros(3))
    save({"x": torch.ones(3)}, path)
    torch.save({"x": torch.ones(3)}, plain / "here.pt")
    assert path.read_bytes() == (plain / "here.pt").read_bytes()
    with pytest.raises(TypeError):
        save({"x": (each for each in ())}, path)
    assert path.read_bytes() == (plain / "here.pt").read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here.pt", "plain"]


def test_what_is_no_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    save = in_one_piece(torch.save)
    buffer = io.BytesIO()
    save(torch.ones(2), buffer)
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue())), torch.ones(2))
    target, link = tmp_path / "target.pt", tmp_path / "link.pt"
    target.touch(mode=0o640)
    link.symlink_to(target)
    save(torch.ones(2), link)
    assert link.is_symlink() and torch.equal(torch.load(target), torch.ones(2))
    assert target.stat().st_mode & 0o777 == 0o640
    with pytest.raises(RuntimeError, match="does not exist"):
        save(torch.ones(2), tmp_path / "nowhere" / "x.pt")


@pytest.mark.filterwarnings("ignore:All adapters are already merged")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_files_in_one_process() -> None:
    check(file_workers.both())


@pytest.mark.processes
def test_files_of_two_ranks_hold_whole_tensors() -> None:
    for each in spawn("tests.runtime.file_workers.both", 2):
        assert isinstance(each, dict)
        check(each)


def test_safetensors_takes_tensors_where_it_is_relied_on() -> None:
    assert any(hasattr(library, name) for name in _TAKERS)
