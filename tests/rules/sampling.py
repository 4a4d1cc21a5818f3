"""How samples are written down: a call of an op, by name.

A sample is what the op is called with; tensors are written `F(4, 6)` (normal), `U(4, 6)` (in
[0.1, 0.9]), `I(4, 6, high=5)` (integers below `high`), `B(4, 6)` (booleans), `C(4, 6)` (complex),
`H(4, 6)` (normal, in float32), and made from a fixed seed. Sizes are small, even and odd, so that
dims divide by 2, by 3, by both, and by neither.
"""

from __future__ import annotations

from typing import Any

Sample = tuple[tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[str, list[Sample]] = {}


def sample(ops: str, *args: Any, **kwargs: Any) -> None:
    """Adds one call for each of `ops`, named without `aten.` and `.default`."""
    for name in ops.split():
        SAMPLES.setdefault(full_name(name), []).append((args, kwargs))


def full_name(name: str) -> str:
    """The name as rules have it."""
    if name == "getitem" or name.startswith(("autopar.", "transformers.")):
        return name
    return f"aten.{name}" if "." in name else f"aten.{name}.default"
