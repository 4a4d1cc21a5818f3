"""What tools count."""

from __future__ import annotations

from tools.count_statements import ROOT, counted, statements


def test_statements_are_counted_without_texts() -> None:
    assert (
        statements('"""Text."""\n\n\ndef f(x):\n    """More."""\n    return (\n        x\n    )\n')
        == 2
    )
    assert statements("if a:\n    b = 1\nelse:\n    c()\n") == 3


def test_rooms_are_counted() -> None:

    found = counted(ROOT)
    assert found["driver"] > 1000 and found["."] > 100 and found.total() == sum(found.values())
