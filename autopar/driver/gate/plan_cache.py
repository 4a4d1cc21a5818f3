"""Plans computed before, under the user's cache directory, by a hash of what decides them.

A cache is never needed: an entry that cannot be read or written counts as missing.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import platformdirs

from autopar.driver.gate.recipe import PLAN_SUFFIX
from autopar.errors import PlanError
from autopar.ir.files import warn_without_cache
from autopar.plans.plan import Plan

_MAX_PLANS = 500


def default_folder() -> Path | None:
    """The folder of cached plans, `~/.cache/autopar/plans` on Linux. None, with a `CacheWarning`,
    if it does not exist and cannot be created."""
    folder = platformdirs.user_cache_path("autopar") / "plans"
    try:
        if not folder.is_absolute():
            raise FileNotFoundError(errno.ENOENT, "the user has no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        consequence = (
            "every plan is solved anew: name a folder that can be written in XDG_CACHE_HOME"
        )
        warn_without_cache("plans", f"{folder}: {error.strerror}", consequence)
        return folder if folder.is_absolute() and folder.is_dir() else None
    return folder


def find(folder: Path, digest: str, fingerprint: str) -> Plan | None:
    """The plan stored under `digest` (`GraphRequest.digest`), if it is whole and for that graph."""
    try:
        plan = Plan.load(folder / (digest + PLAN_SUFFIX))
    except PlanError:
        return None
    return plan if plan.structure.fingerprint == fingerprint else None


def keep(folder: Path, digest: str, plan: Plan) -> None:
    """Store `plan` for `find`; beyond `_MAX_PLANS` the oldest go."""
    with suppress(OSError, PlanError):
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(folder / (digest + PLAN_SUFFIX))
        entries = [(path.stat().st_mtime_ns, path) for path in folder.glob("*" + PLAN_SUFFIX)]
        for _, path in sorted(entries)[:-_MAX_PLANS]:
            path.unlink(missing_ok=True)
