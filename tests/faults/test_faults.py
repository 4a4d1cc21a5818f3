"""What is broken on purpose is noticed: every fault by the detector it names, which is content
without it. The judge (`lockstep`, and what it compares with) is never what is broken."""

from __future__ import annotations

import pytest

from autopar.errors import VerificationError
from tests.faults import (  # noqa: F401 - they enter themselves
    codegen_faults,
    collective_faults,
    rule_faults,
    runtime_faults,
    tracer_faults,
)
from tests.faults.table import FAULTS

DETECTORS = {str(fault.detector): fault.detector for fault in FAULTS.values()}


@pytest.mark.parametrize("name", DETECTORS)
def test_without_faults_the_detector_is_content(name: str) -> None:
    DETECTORS[name].run()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent fault gives wrong numbers, which only a comparison finds; any other may crash."""
    fault = FAULTS[name]
    fault.detector.prepare()
    expected = (AssertionError, VerificationError) if fault.silent else Exception
    with monkeypatch.context() as patch:
        fault.inject(patch)
        with pytest.raises(expected):
            fault.detector.run()


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 40
    assert sum(fault.silent for fault in FAULTS.values()) >= 25
