"""All ranks of a program in one process, and the comparison with eager."""
