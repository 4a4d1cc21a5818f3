"""What is broken on purpose is noticed: every fault by the detector it names, which is content
without it. The judge (`spmd`, and what it compares with) is never what is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import VerificationError
from tests.faults.listing import page
from tests.faults.table import FAULTS

COMPARED = AssertionError, VerificationError
DETECTORS = {str(fault.detector): fault.detector for fault in FAULTS.values()}


@pytest.mark.breadth(7)
@pytest.mark.parametrize("name", DETECTORS)
def test_without_faults_the_detector_is_content(name: str) -> None:
    DETECTORS[name].run()


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent fault gives wrong numbers, which only a comparison finds. Any other may crash, but
    not as a fault does that itself fell behind the code it breaks (TypeError, AttributeError)."""
    fault = FAULTS[name]
    fault.detector.prepare()
    expected = COMPARED if fault.silent else (*COMPARED, RuntimeError, ValueError, IndexError)
    with monkeypatch.context() as patch:
        fault.inject(patch)
        with pytest.raises(expected):
            fault.detector.run()


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 80
    assert sum(fault.silent for fault in FAULTS.values()) >= 65


def test_the_page_lists_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    assert text == page(), "python -m tests.faults > docs/faults.md"
