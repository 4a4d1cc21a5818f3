"""Problems without flows that are too big for an integer program. `path` is the entry point."""
