"""The work of a search: about the CPU nanoseconds of each of its parts, counted from sizes.

Two shared x86-64 cores, November 2026: Llama-405B, 29,445 nodes and 5,981 choices, takes 2.3 s to
price, 9.3 s to make a plan of a solution, and 6 s to check whether it surely does not fit; with 4
layers instead of 126 it takes 0.8 s, 0.7 s and nothing.
"""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.problem import Problem

_PRICED_CHOICE, _PRICED_NODE, _PLANNED_NODE, _CHECKED_NODE = 140_000, 50_000, 300_000, 75_000


def price_ns(graph: Graph, problem: Problem) -> int:
    """Of pricing a step."""
    return sum(map(len, problem.costs)) * _PRICED_CHOICE + len(graph.nodes) * _PRICED_NODE


def plan_ns(graph: Graph) -> int:
    """Of making the plan of a solution, with its simulation."""
    return len(graph.nodes) * _PLANNED_NODE


def check_ns(graph: Graph) -> int:
    """Of writing a step in another form, and of bounds on its memory."""
    return len(graph.nodes) * _CHECKED_NODE
