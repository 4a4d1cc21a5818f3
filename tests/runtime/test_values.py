"""Values of every dtype that ranks send one another, and values as a script reads them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime import value_workers
from tests.runtime.spawn import spawn


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.value_workers.all_of_them", 2)


def check_dtypes(seen: dict[str, Any]) -> None:
    assert len(value_workers.DTYPES) == 22
    for name, found in seen.items():
        assert found == [] if isinstance(found, list) else found < 1e-5, (name, found)


def check_readings(seen: dict[str, dict[str, list[str]]]) -> None:
    wrong = {
        (name, read): pair
        for name, each in seen.items()
        for read, pair in each.items()
        if pair[0] != pair[1]
    }
    assert not wrong
    # Not errors alone were compared.
    assert sum("Error" not in pair[0] for each in seen.values() for pair in each.values()) > 200


@pytest.mark.processes
def test_tensors_of_every_dtype_go_from_rank_to_rank(ranks: list[Any]) -> None:
    for each in ranks:
        check_dtypes(each["dtypes"])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_dtype_in_one_process() -> None:
    check_dtypes(value_workers.dtypes())


@pytest.mark.processes
def test_what_ranks_share_reads_as_on_one_device(ranks: list[Any]) -> None:
    for each in ranks:
        check_readings(each["readings"])


def test_what_one_process_has_reads_as_in_eager() -> None:
    check_readings(value_workers.readings())
