"""Errors that autopar raises. Each says what is wrong, where, and what to do; `exit_status` is the
exit status of the command line."""

from __future__ import annotations

from collections.abc import Iterable


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""

    exit_status = 1


class ArgumentError(AutoparError, TypeError):
    """An argument that does not exist, or one that has an unusable type or value."""


class TraceError(AutoparError):
    """The model could not be captured as a graph."""


class GuardError(TraceError):
    """The model reads something that guards cannot watch for changes."""


class TargetError(AutoparError):
    """The function that a command names cannot be loaded, or does not return (model, inputs)."""


class ClusterError(AutoparError):
    """A cluster, mesh, device or profile description is not valid."""


class ConstraintError(AutoparError):
    """A pin, a forbidden axis or a strategy cannot be parsed, or names something that does not
    exist."""


class UnsuitedMeshError(ConstraintError):
    """A mesh to which a constraint does not apply: it lacks an axis that the constraint needs."""


class UndividedBatchError(UnsuitedMeshError):
    """A strategy shards a batch over a number of devices that does not divide its rows."""


class InfeasibleError(AutoparError):
    """No plan meets the limits."""

    exit_status = 3


class MicrobatchError(AutoparError):
    """A step cannot be split into microbatches, or not into that many."""


class LossChunksError(AutoparError):
    """A step has no loss that can be computed in chunks."""


class StageError(AutoparError):
    """A step cannot be cut into pipeline stages, or not at that place."""


class SolverError(AutoparError):
    """The solver failed, or ended without any plan."""


class ProblemFileError(AutoparError):
    """A problem file cannot be read, or does not describe a problem."""


class PlanError(AutoparError):
    """A plan file is malformed, damaged or of an unknown version."""


class RecipeError(AutoparError):
    """A recipe, the file that says how a golden plan is made, cannot be read."""


class PlanMismatchError(AutoparError):
    """A plan does not fit the model, the world size or the other ranks."""

    exit_status = 5


class RankError(AutoparError):
    """A rank did not reach a call of a compiled model, or left it."""

    exit_status = 5


class WeightsError(AutoparError):
    """A checkpoint does not fit the model, or a parameter cannot be initialised."""


class VerificationError(AutoparError):
    """The compiled program does not compute what eager computes."""

    exit_status = 4


class AutoparWarning(UserWarning):
    """Base of autopar's warnings."""


class NotImposedWarning(AutoparWarning):
    """The program for inputs of another shape cannot have an option or constraint of the user."""


class OldNameWarning(AutoparWarning, DeprecationWarning):
    """An option is passed by an old name, which the next release removes."""


class UnknownOpWarning(AutoparWarning):
    """An op has no sharding rule and runs replicated."""


class SideEffectWarning(AutoparWarning):
    """The model's forward has a side effect in Python, which its program does not repeat."""


class DenseGradientWarning(AutoparWarning):
    """The script asks for sparse gradients of an embedding, and those of the program are dense."""


class ManyProgramsWarning(AutoparWarning):
    """A value that the model reads changes from call to call, and each change leads to another
    program."""


class CacheWarning(AutoparWarning):
    """A file that one process leaves for the next cannot be read or written: its work is
    repeated."""


class OtherStepWarning(AutoparWarning):
    """A plan's problem, stated anew, has another best step: prices or options differ."""


class InterruptedSearchWarning(AutoparWarning):
    """Ctrl-C ended the search for a plan: it is the best so far."""


def listed(items: Iterable[object], most: int = 5) -> str:
    """`a, b and 7 more`: the first `most` of the items that a message names."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def sentence(error: BaseException) -> str:
    """The message for the user. That of an AutoparError is complete; others get their type, and a
    hint."""
    if isinstance(error, AutoparError):
        return str(error)
    return (
        f"{type(error).__name__}: {error} (autopar did not expect this: --debug shows where it "
        "happened, please report it)"
    )
