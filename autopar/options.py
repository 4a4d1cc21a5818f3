"""What a user can ask of the planner, beside the model and the cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """`mesh` is "auto" or a shape ("8x8", "dp=8,tp=8"). `optimizer` names one of
    `cost_model.memory.OPTIMIZERS` ("adamw", "sgd", ...): what it keeps per parameter counts against
    the memory limit, which defaults to the device's memory. `strict` turns the warning about an op
    without a rule into an error. `max_axes` bounds the meshes that are searched.
    """

    mesh: str = "auto"
    optimizer: str = "adamw"
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    max_axes: int = 2
    strict: bool = False
