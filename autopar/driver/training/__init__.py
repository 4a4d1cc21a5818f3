"""The session of a training process: programs that are planned, bound to this rank and run."""
