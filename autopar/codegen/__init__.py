"""Code generation: from a plan to the local graphs that ranks run."""

from autopar.codegen.bind import bind
from autopar.codegen.emit import generate
from autopar.runtime.program.program import Program

__all__ = ["Program", "bind", "generate"]
