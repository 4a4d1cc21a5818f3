"""Every dtype of safetensors files, which are written by hand: no library writes all of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import WeightsError
from autopar.runtime.checkpoint.lazy import open_checkpoint

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""All that the format knows, with the bits of an element."""

DTYPES = {
    "BOOL": torch.bool, "F4": torch.float4_e2m1fn_x2, "U8": torch.uint8, "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "C64": torch.complex64,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
"""What torch has of it."""

SHAPE = (6, 8)


def raw(kind: str, seed: int = 0) -> bytes:
    most = 2 if kind == "BOOL" else 60
    count = SHAPE[0] * SHAPE[1] * BITS[kind] // 8
    return bytes((k * 7 + seed) % most for k in range(count))


def write(path: Path, kinds: list[str]) -> None:
    """A file with a tensor `p_KIND` and another one `b_KIND` of each kind."""
    head: dict[str, object] = {}
    data = b""
    for kind in kinds:
        for seed, name in enumerate((f"p_{kind}", f"b_{kind}")):
            piece = raw(kind, seed)
            ends = [len(data), len(data) + len(piece)]
            head[name] = {"dtype": kind, "shape": SHAPE, "data_offsets": ends}
            data += piece
    written = json.dumps(head).encode()
    written += b" " * (-len(written) % 8)
    path.write_bytes(struct.pack("<Q", len(written)) + written + data)


class Holder(nn.Module):
    """Has a parameter and a buffer of each kind."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        for kind in kinds:
            dtype = DTYPES.get(kind, torch.uint8)
            shape = (SHAPE[0], SHAPE[1] // 2) if kind == "F4" else SHAPE
            for name in (f"p_{kind}", f"b_{kind}"):
                empty = torch.empty(shape, dtype=dtype)
                held = nn.Parameter(empty, requires_grad=False) if name[0] == "p" else empty
                setattr(self, name, held) if name[0] == "p" else self.register_buffer(name, held)


def test_a_model_gets_tensors_of_every_dtype(tmp_path: Path) -> None:
    write(tmp_path / "all.safetensors", sorted(DTYPES))
    with torch.device("meta"):
        model = Holder(sorted(DTYPES))
    loaded = autopar.compile(model, weights=tmp_path, cluster="1xcpu")
    for kind, dtype in DTYPES.items():
        for seed, name in enumerate((f"p_{kind}", f"b_{kind}")):
            value = loaded.state_dict()[name]
            assert value.dtype == dtype
            assert bytes(value.reshape(-1).view(torch.uint8).tolist()) == raw(kind, seed), name


@pytest.mark.parametrize("kind", sorted(DTYPES))
def test_a_piece_of_a_tensor_of_every_dtype(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "one.safetensors", [kind])
    stored = open_checkpoint(tmp_path)[f"p_{kind}"]
    num_bytes = BITS[kind] * SHAPE[1] // 8 // stored.shape[1]
    whole = torch.frombuffer(bytearray(raw(kind)), dtype=torch.uint8)
    wanted = whole.reshape(*stored.shape, num_bytes)[2:5, 1:3]
    piece = stored.read((slice(2, 5), slice(1, 3)))
    assert piece.dtype == stored.dtype == DTYPES[kind] and piece.shape == (3, 2)
    assert torch.equal(piece.unsqueeze(-1).view(torch.uint8), wanted)
    assert piece.untyped_storage().nbytes() == piece.nbytes


@pytest.mark.parametrize("kind", sorted(BITS.keys() - DTYPES.keys()))
def test_a_dtype_that_torch_lacks_is_named_where_the_model_needs_it(
    tmp_path: Path, kind: str
) -> None:
    write(tmp_path / "some.safetensors", ["F32", kind])
    with pytest.raises(WeightsError, match=rf"[pb]_{kind} in .*some.safetensors is {kind}\[6, 8\]"):
        autopar.compile(Holder(["F32", kind]), weights=tmp_path, cluster="1xcpu")
    needless = Holder(["F32"])
    where = {"weight_map": dict.fromkeys(needless.state_dict(), "some.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(where))
    assert autopar.compile(needless, weights=tmp_path, cluster="1xcpu").b_F32.sum() != 0


def test_numbers_of_4_bits_are_converted_to_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", ["F4"])
    model = Holder(["F4"])
    model.b_F4 = model.b_F4.view(torch.uint8).float()
    with pytest.raises(WeightsError, match=r"dtypes differ: b_F4 torch.float4_e2m1fn_x2 where"):
        autopar.compile(model, weights=tmp_path, cluster="1xcpu")
