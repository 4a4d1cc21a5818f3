"""torch's database of ops with samples of their arguments, which is for its own tests."""

from __future__ import annotations

from typing import Any

_NO_CPU = "jiterator"
"""Ops of the database that only exist on GPUs."""


def database() -> list[Any]:
    """The ops that a CPU has, in order of their names."""
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted((op for op in op_db if _NO_CPU not in op.name), key=full_name)


def full_name(op: Any) -> str:
    """The name of an op and of its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
