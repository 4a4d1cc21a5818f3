"""Ops whose ranks communicate while they compute: the nodes of each family."""
