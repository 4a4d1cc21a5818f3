"""What a user can ask of the planner, beside the model and the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import AutoparError
from autopar.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Options:
    """`mesh` is "auto" or a shape ("8x8", "dp=8,tp=8"). `optimizer` names one of
    `cost_model.optimizer.OPTIMIZERS` ("adamw", "sgd", ...): its step counts, and what it keeps per
    parameter counts against the memory limit, which defaults to the device's memory. `strict` turns
    the warning about an op without a rule into an error. `max_axes` bounds the meshes that are
    searched. `pins` gives the storage of parameters, by name, as plans write it ("[S(0), R]"), or
    "R" for whole on any mesh: they are stored so, and the rest is planned around it.
    """

    mesh: str = "auto"
    optimizer: str = "adamw"
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    max_axes: int = 2
    strict: bool = False
    pins: Mapping[str, str] = field(default_factory=dict[str, str])


def make_options(
    mesh: str,
    optimizer: str,
    memory_limit: int | str | None,
    time_limit_s: float | None,
    strict: bool,
    pins: Mapping[str, str] | None = None,
) -> Options:
    """Options from what users write: `memory_limit` in bytes, or as text such as "72GiB".
    AutoparError if that has no unit."""
    try:
        limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    except ValueError as error:
        raise AutoparError(f"memory_limit: {error}") from error
    return Options(
        mesh=mesh,
        optimizer=optimizer,
        memory_limit_bytes=limit,
        time_limit_s=time_limit_s,
        strict=strict,
        pins=pins or {},
    )
