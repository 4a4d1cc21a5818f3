"""The solver: `Problem` in, `Solution` out."""

from autopar.solver.driver import get_ready, solve
from autopar.solver.evaluate import Evaluation, evaluate
from autopar.solver.memory import least_usage_conflict

__all__ = ["Evaluation", "evaluate", "get_ready", "least_usage_conflict", "solve"]
