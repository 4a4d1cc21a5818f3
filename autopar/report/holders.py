"""What holds memory at the peak, in words."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.plans.plan import Memory

TITLES: Mapping[str, str] = {
    "params": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "kept": "parameters kept for backward",
    "saved": "activations saved for backward",
    "transient": "all else that is live",
}
"""By field of `plan.Memory`."""


def held_by(memory: Memory) -> dict[str, int]:
    """Bytes by title."""
    return {title: getattr(memory, name) for name, title in TITLES.items()}
