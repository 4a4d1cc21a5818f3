"""Options of a plan by one flat name each, for tests that pass them through helpers."""

from __future__ import annotations

from typing import Any

from autopar.plans.requests.plan_options import in_groups


def grouped(**given: Any) -> dict[str, Any]:
    """`memory_limit=1` and the like, as `autopar.plan` takes them: in groups."""
    return in_groups(given)[0]
