"""The solver: `Problem` in, `Solution` out."""

from autopar.solver.driver import solve
from autopar.solver.evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate", "solve"]
