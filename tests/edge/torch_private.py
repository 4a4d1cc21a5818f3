"""torch's database of ops with samples of their arguments, which is for its own tests."""

from __future__ import annotations

from typing import Any

_NO_CPU = "jiterator"
"""Ops of the database that only exist on GPUs."""


def database(*, seeded: bool = True) -> list[Any]:
    """The ops that a CPU has, in order of their names. Around those that draw, the database sets a
    seed; if not `seeded`, which a model must not do in forward, no longer."""
    from torch.testing._internal import common_methods_invocations as invocations

    if not seeded:
        invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return sorted((op for op in invocations.op_db if _NO_CPU not in op.name), key=full_name)


def full_name(op: Any) -> str:
    """The name of an op and of its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
