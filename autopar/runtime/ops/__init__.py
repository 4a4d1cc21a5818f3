"""Ops of autopar's own, the same in a graph for every device."""
