"""The code generator's one door to private torch APIs; `tests/codegen/test_doors.py` holds what is
relied on."""

from __future__ import annotations

from torch.fx.graph import CodeGen, _BoxedCodeGen


def boxed_codegen() -> CodeGen:
    """Code of a graph that takes its inputs as one list, which it clears: the caller can hold no
    input longer than the graph needs it."""
    return _BoxedCodeGen()
