"""Passes: from the graph of a step to another graph of it. Each is a function `graph -> graph`."""
