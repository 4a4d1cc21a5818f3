"""The errors autopar raises. Each says what is wrong, where, and what to do; `exit_status` is the
status the command line ends with."""

from __future__ import annotations

from collections.abc import Iterable


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""

    exit_status = 1


class ArgumentError(AutoparError, TypeError):
    """An argument that is not there, or of a kind that says nothing."""


class TraceError(AutoparError):
    """The model could not be captured as a graph."""


class GuardError(TraceError):
    """What the model reads cannot be watched for changes."""


class TargetError(AutoparError):
    """The function that a command names cannot be loaded, or does not return (model, inputs)."""


class ClusterError(AutoparError):
    """A cluster, mesh, device or profile description is not valid."""


class ConstraintError(AutoparError):
    """A pin, a forbidden axis or a strategy cannot be read, or speaks of what is not there."""


class UnsuitedMeshError(ConstraintError):
    """A mesh on which a constraint means nothing: it lacks an axis that is named."""


class UndividedBatchError(UnsuitedMeshError):
    """A batch that a strategy cuts among more devices than its rows divide by."""


class InfeasibleError(AutoparError):
    """No plan meets the limits."""

    exit_status = 3


class MicrobatchError(AutoparError):
    """A step cannot be taken in microbatches, or not in so many."""


class LossChunksError(AutoparError):
    """A step has no loss that can be worked on in chunks."""


class StageError(AutoparError):
    """A step cannot be cut into stages, or not there."""


class SolverError(AutoparError):
    """The solver failed, or ended without any plan."""


class ProblemFileError(AutoparError):
    """A problem file cannot be read, or what it says is not a problem."""


class PlanError(AutoparError):
    """A plan file is malformed, damaged or of an unknown version."""


class RecipeError(AutoparError):
    """A file that says how a golden plan is made cannot be read."""


class PlanMismatchError(AutoparError):
    """A plan does not fit the model, the world size or the other ranks."""

    exit_status = 5


class RankError(AutoparError):
    """A rank did not come to a call of a compiled model, or left it."""

    exit_status = 5


class WeightsError(AutoparError):
    """A checkpoint does not fit the model, or a parameter cannot be initialised."""


class VerificationError(AutoparError):
    """The compiled program does not compute what eager computes."""

    exit_status = 4


class AutoparWarning(UserWarning):
    """Base of autopar's warnings."""


class NotImposedWarning(AutoparWarning):
    """A program for inputs of another shape cannot keep to what the user asked of the plan."""


class OldNameWarning(AutoparWarning, DeprecationWarning):
    """An option is called as it was; that name goes with the next release."""


class UnknownOpWarning(AutoparWarning):
    """An op has no sharding rule and runs replicated."""


class SideEffectWarning(AutoparWarning):
    """The model's forward does in Python what its program will not do again."""


class ManyProgramsWarning(AutoparWarning):
    """What the model reads changes from call to call, and each change makes another program."""


class CacheWarning(AutoparWarning):
    """What is kept from one process to the next cannot be read or written: work is done anew."""


class OtherStepWarning(AutoparWarning):
    """A plan's problem, stated again, has another best step: prices or options differ."""


def listed(items: Iterable[object], most: int = 5) -> str:
    """`a, b and 7 more`: the first few of what a message names."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def sentence(error: BaseException) -> str:
    """What to tell a person: an error raised on purpose says it itself."""
    if isinstance(error, AutoparError):
        return str(error)
    return (
        f"{type(error).__name__}: {error} (autopar did not expect this: --debug shows where it "
        "happened, please report it)"
    )
