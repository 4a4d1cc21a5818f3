"""What a plan decided for one class of parameters or ops, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.matching import general
from autopar.plan import MeshAxis, OpTotal, Param, Plan
from autopar.report.costs import PARAM, short_op, tensor_name
from autopar.report.summary import ParamGroup, on_axes
from autopar.sharding import Placement, Sharding
from autopar.units import format_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """`what` is a type of parameter or an op, `count` how many are alike. `choice` says what was
    chosen, a line per thing. Of an op, `reads` and `makes` are tensors with their shardings; of
    parameters, `reads` says by which ops they are read."""

    name: str
    what: str
    phase: str
    count: int
    choice: tuple[str, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]


def param_decision(plan: Plan, group: ParamGroup) -> Decision:
    """How parameters are stored, what is kept of them, what each mesh axis does to them."""
    mesh, readers = plan.structure.mesh, _readers(plan, group)
    whole = format_bytes(group.total_bytes // group.count)
    stored = format_bytes(group.local_bytes // group.count)
    if group.kept != group.storage:
        kept = f"kept for backward: {group.kept}"
    else:
        kept = "kept for backward: as it is stored, no copy"
    storage = Sharding.parse(raw_param(plan, group).storage)
    forward = [state for op, state in readers if op.phase == "forward"]
    taken = _parsed(forward[0], mesh) if forward else None
    roles = [
        f"{axis.name}: {_role(placement, taken[k] if taken else None)}"
        for k, (axis, placement) in enumerate(zip(mesh, storage, strict=True))
    ]
    return Decision(
        name=group.name,
        what=f"{group.dtype}{list(group.shape)}",
        phase="",
        count=group.count,
        choice=(f"stored {group.storage}: {stored} of {whole} on each device", kept, *roles),
        reads=tuple(
            f"read by {short_op(op.op)} in {op.phase} as {state_text(state, mesh)}"
            for op, state in readers
        ),
        makes=(),
    )


def raw_param(plan: Plan, group: ParamGroup) -> Param:
    """One of the parameters of a group, as the plan has it."""
    return next(
        param
        for name, param in plan.structure.params.items()
        if general(name) == general_text(group.name)
        and on_axes(Sharding.parse(param.storage), plan.structure.mesh) == group.storage
        and (param.shape, param.dtype) == (group.shape, group.dtype)
    )


def general_text(text: str) -> str:
    """`matching.general` of a text that may stand for several names: `layers.{0-3}.w`."""
    return ".".join("*" if part.startswith("{") else general(part) for part in text.split("."))


def op_decision(plan: Plan, key: str, op: OpTotal) -> Decision:
    """What each mesh axis does to an op, and how its tensors lie."""
    mesh, options = plan.structure.mesh, plan.structure.ops.get(key, "")
    per_axis = options.split(",") if options else []
    made = [found for _, state in op.outputs if (found := _parsed(state, mesh)) is not None]
    return Decision(
        name=key,
        what=short_op(op.op),
        phase=op.phase,
        count=op.count,
        choice=tuple(
            f"{axis.name}: {_option(option, any(state[k].kind == 'P' for state in made))}"
            for k, (axis, option) in enumerate(zip(mesh, per_axis, strict=False))
        ),
        reads=tuple(
            f"reads {tensor_name(plan.estimates, name)} {state_text(state, mesh)}"
            for name, state in op.inputs
        ),
        makes=tuple(f"makes {kind} {state_text(state, mesh)}" for kind, state in op.outputs),
    )


def state_text(state: str, mesh: Sequence[MeshAxis]) -> str:
    """A sharding with the names of its axes; what is none, as it is."""
    sharding = _parsed(state, mesh)
    return state if sharding is None else on_axes(sharding, mesh)


def _parsed(state: str, mesh: Sequence[MeshAxis]) -> Sharding | None:
    try:
        sharding = Sharding.parse(state)
    except ValueError:
        return None
    return sharding if len(sharding.placements) == len(mesh) else None


def _readers(plan: Plan, group: ParamGroup) -> list[tuple[OpTotal, str]]:
    """The ops that read these parameters, each with the state in which it does."""
    base = PARAM + general_text(group.name)
    return [
        (op, state)
        for op in plan.estimates.ops.values()
        for name, state in op.inputs
        if name.partition("~")[0] == base
    ]


def _role(stored: Placement, taken: Placement | None) -> str:
    """What one axis does to a parameter."""
    if taken is None:
        return "replicated" if stored.kind == "R" else f"stored in shards, {stored}"
    if taken.kind != "R":
        return f"each rank computes with its shard, {taken}"
    if stored.kind == "R":
        return "replicated: every rank stores and computes with all of it"
    return f"stored in shards, {stored}, and gathered to compute (ZeRO)"


def _option(option: str, is_partial: bool) -> str:
    if option == "-":
        return "every rank computes all of it"
    if option.startswith("+"):
        return "computes on partial sums, which are added up later"
    text = f"each rank computes its part of {option}"
    return f"{text}, which leaves partial sums" if is_partial else text
