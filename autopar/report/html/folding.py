"""Chains of a graph folded into one node each, so that no cycle comes of it."""

from __future__ import annotations

from collections.abc import Sequence


def fold(
    nodes: Sequence[tuple[str, str | None]], wires: Sequence[tuple[str, str, bool]]
) -> list[list[str]]:
    """Groups of nodes, in the order of `nodes` (which is a topological one).

    `nodes` are (name, kind): joined are two of one kind (None: of none) that a wire (from, to,
    whether it may vanish) leads between, if no other way leads from the one to the other.
    """
    names = [name for name, _ in nodes]
    kind = dict(nodes)
    home = {name: k for k, name in enumerate(names)}
    groups: dict[int, list[str]] = {k: [name] for k, name in enumerate(names)}
    follow: dict[int, set[int]] = {k: set() for k in groups}
    barred: set[tuple[int, int]] = set()
    for start, end, vanishes in wires:
        follow[home[start]].add(home[end])
        if not vanishes:
            barred.add((home[start], home[end]))
    changed = True
    while changed:
        changed = False
        for start, end, vanishes in wires:
            a, b = home[start], home[end]
            joins = vanishes and a != b and kind[start] is not None and kind[start] == kind[end]
            if joins and (a, b) not in barred and not _detour(follow, a, b):
                _join(groups, follow, home, barred, a, b)
                changed = True
    place = {name: k for k, name in enumerate(names)}
    found = [sorted(members, key=lambda name: place[name]) for members in groups.values()]
    return sorted(found, key=lambda members: place[members[0]])


def _detour(follow: dict[int, set[int]], start: int, end: int) -> bool:
    """Whether a way of more than one wire leads from `start` to `end`."""
    left, seen = [k for k in follow[start] if k != end], set[int]()
    while left:
        at = left.pop()
        if at == end:
            return True
        if at not in seen:
            seen.add(at)
            left += follow[at]
    return False


def _join(
    groups: dict[int, list[str]],
    follow: dict[int, set[int]],
    home: dict[str, int],
    barred: set[tuple[int, int]],
    a: int,
    b: int,
) -> None:
    """Make b a part of a."""
    for name in groups.pop(b):
        groups[a].append(name)
        home[name] = a
    follow[a] = (follow[a] | follow.pop(b)) - {a, b}
    for ends in follow.values():
        if b in ends:
            ends.discard(b)
            ends.add(a)
    moved = {(a if x == b else x, a if y == b else y) for x, y in barred}
    barred.clear()
    barred.update(moved)
