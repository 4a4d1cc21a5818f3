"""All faults, as a page of the documentation."""

from __future__ import annotations

from types import ModuleType

from tests.faults import (
    attention_faults,
    codegen_faults,
    collective_faults,
    expert_faults,
    loss_chunk_faults,
    rule_faults,
    runtime_faults,
    stage_faults,
    tracer_faults,
)
from tests.faults.table import FAULTS

FILES: tuple[ModuleType, ...] = (
    rule_faults,
    tracer_faults,
    codegen_faults,
    collective_faults,
    attention_faults,
    expert_faults,
    loss_chunk_faults,
    runtime_faults,
    stage_faults,
)

HEAD = """# Faults that are noticed

`tests/faults` breaks the compiler on purpose, one fault at a time. It fails if the detector named
here does not notice the fault, or complains without it. `autopar verify` on a model (those of
`tests/faults/cases.py`) compares with eager under several plans. The other detectors are tests.
*Silent* faults leave every shape unchanged: only numbers would be wrong.

This page is written by `python -m tests.faults > docs/faults.md`.
"""


def page() -> str:
    lines = [HEAD]
    for file in FILES:
        assert file.__doc__ is not None
        title = file.__doc__.partition("\n")[0].rstrip(".")
        lines += [f"## {title}", "", "| Fault | Silent | Noticed by |", "| --- | --- | --- |"]
        for name, fault in FAULTS.items():
            if fault.inject.__module__ == file.__name__:
                text = name.replace("_", " ")
                lines.append(f"| {text} | {'yes' if fault.silent else ''} | {fault.detector} |")
        lines.append("")
    lines.append(f"{len(FAULTS)} faults, {sum(f.silent for f in FAULTS.values())} of them silent.")
    return "\n".join(lines) + "\n"
