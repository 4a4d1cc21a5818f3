"""Plans that are otherwise than they were made."""

from __future__ import annotations

from typing import Any

import msgspec

from autopar.plans.estimates import Estimates, Figures, StageEstimates
from autopar.plans.structure import Stage, Structure


def redecided(structure: Structure, **changed: Any) -> Structure:
    """The same with other fields, those of a stage in the only one."""
    own = {name: value for name, value in changed.items() if name in Stage.__struct_fields__}
    if own:
        changed["stages"] = (msgspec.structs.replace(structure.only, **own),)
    return msgspec.structs.replace(
        structure, **{name: value for name, value in changed.items() if name not in own}
    )


def repriced(estimates: Estimates, **changed: Any) -> Estimates:
    """The same with other figures: of the only stage too, if there is one."""
    own = {n: value for n, value in changed.items() if n in StageEstimates.__struct_fields__}
    whole = {
        n: value for n, value in changed.items() if n not in own or n in Figures.__struct_fields__
    }
    if len(estimates.stages) == 1 and "stages" not in changed:
        whole["stages"] = (msgspec.structs.replace(estimates.stages[0], **own),)
    return msgspec.structs.replace(estimates, **whole)
