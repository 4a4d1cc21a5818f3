"""What a profile learns from runs of plans that were priced with it.

Points are measured one by one; in a step they heat the device, fill its caches and wait for one
another. What a step takes beyond its price is one factor for all that a device computes, and one
for all that links carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import msgspec

from autopar.cluster.profile import Learned, Profile
from autopar.errors import ClusterError

MOST = 3.0
"""One lesson changes a price by no more than this factor: what is further off is no matter of
degree, but of something that was not measured."""

Told = tuple[str, float | None, float | None]
"""The source of the figures that a run was priced with, and how many times what was predicted it
took to compute and to communicate; None is not known."""

_PPM = 1_000_000


def learn(profile: Profile, runs: Sequence[Told]) -> tuple[Profile, tuple[str, ...]]:
    """The profile with the geometric means of what the runs tell, on top of what it has learned
    before; and what that is, in words. ClusterError if a run was priced with anything else: what it
    tells is not of this profile, or was learned already."""
    for source, _, _ in runs:
        if f"profile {profile.digest} " not in source:
            raise ClusterError(
                f"a run was priced with other figures ({source}) than profile {profile.digest} "
                "has: plan with the profile, run that, and let it learn from there"
            )
    before = profile.learned or Learned(_PPM, _PPM, 1)
    said: list[str] = []
    compute = _mean("compute", [ratio for _, ratio, _ in runs], said)
    communication = _mean("communication", [ratio for _, _, ratio in runs], said)
    learned = Learned(
        compute_ppm=round(before.compute_ppm * compute),
        communication_ppm=round(before.communication_ppm * communication),
        runs=len(runs) + (profile.learned.runs if profile.learned else 0),
    )
    return msgspec.structs.replace(profile, learned=learned), tuple(said)


def _mean(what: str, ratios: Sequence[float | None], said: list[str]) -> float:
    known = [min(MOST, max(1 / MOST, ratio)) for ratio in ratios if ratio is not None]
    if not known:
        said.append(f"{what}: not known, left as it is")
        return 1.0
    found = exp(sum(map(log, known)) / len(known))
    beyond = [ratio for ratio in ratios if ratio is not None and not 1 / MOST <= ratio <= MOST]
    furthest = ", ".join(f"{ratio:.3g}" for ratio in beyond)
    told = (
        f" ({furthest} counts as the factor of {MOST:g} that one lesson changes)" if beyond else ""
    )
    said.append(f"{what}: takes {found:.3g} times what was predicted{told}")
    return found
