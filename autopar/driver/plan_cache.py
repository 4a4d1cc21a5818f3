"""Plans that were made before, under the user's cache directory, by what decides them.

A cache is never needed: an entry that cannot be read or written is as good as none.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import platformdirs

from autopar.errors import PlanError
from autopar.plans.plan import Plan
from autopar.plans.recipe import PLAN_SUFFIX

_MAX_PLANS = 500


def default_folder() -> Path:
    """Where plans are kept, `~/.cache/autopar/plans` on Linux."""
    return platformdirs.user_cache_path("autopar") / "plans"


def find(folder: Path, digest: str, fingerprint: str) -> Plan | None:
    """The plan kept under `digest` (`Asked.digest`), if it is whole and for that graph."""
    try:
        plan = Plan.load(folder / (digest + PLAN_SUFFIX))
    except PlanError:
        return None
    return plan if plan.structure.fingerprint == fingerprint else None


def keep(folder: Path, digest: str, plan: Plan) -> None:
    """Keep `plan` for `find`; beyond `_MAX_PLANS` the oldest go."""
    with suppress(OSError, PlanError):
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(folder / (digest + PLAN_SUFFIX))
        entries = [(path.stat().st_mtime_ns, path) for path in folder.glob("*" + PLAN_SUFFIX)]
        for _, path in sorted(entries)[:-_MAX_PLANS]:
            path.unlink(missing_ok=True)
