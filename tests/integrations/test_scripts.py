"""Scripts of other libraries give the numbers of one process without autopar."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.runtime.spawn import spawn

LIBRARIES = ("trainer", "accelerate", "lightning", "peft")
WORKERS = "tests.integrations.script_workers"
Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """What each script saw: plain, and compiled on each of two ranks."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setenv("SCRIPTS_FOLDER", str(tmp_path_factory.mktemp("scripts")))
        alone = pool.submit(spawn, f"{WORKERS}.plain", 1, timeout_s=600.0)
        ranks = pool.submit(spawn, f"{WORKERS}.compiled", 2, timeout_s=600.0).result()
        yield {"plain": alone.result()[0], "rank 0": ranks[0], "rank 1": ranks[1]}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each script saw of a compiled model in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCRIPTS_FOLDER", str(tmp_path_factory.mktemp("scripts")))
        return spawn(f"{WORKERS}.compiled", 1, timeout_s=600.0)[0]


@pytest.mark.processes
@pytest.mark.parametrize("who", ["rank 0", "rank 1"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_numbers_are_those_of_one_process(results: Results, library: str, who: str) -> None:
    check(results[who], results["plain"], library)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("library", LIBRARIES)
def test_numbers_of_one_process_stay(results: Results, compiled: Any, library: str) -> None:
    check(compiled, results["plain"], library)


def check(found: Any, wanted: Any, library: str) -> None:
    different = list(differences(found[library], wanted[library], library))
    assert not different, different[:8]


def differences(found: Any, wanted: Any, where: str, rel: float = 2e-4) -> Iterator[str]:
    """Where they differ, in structure or by more than rounding."""
    if isinstance(wanted, dict):
        yield from () if found.keys() == wanted.keys() else [f"{where}: {found} not {wanted}"]
        for key in wanted.keys() & found.keys():
            yield from differences(found[key], wanted[key], f"{where}.{key}", rel)
    elif isinstance(wanted, list):
        yield from () if len(found) == len(wanted) else [f"{where}: {found} not {wanted}"]
        for index, pair in enumerate(zip(found, wanted)):
            yield from differences(*pair, f"{where}.{index}", rel)
    elif isinstance(wanted, float):
        if found != pytest.approx(wanted, rel=rel, abs=1e-6):
            yield f"{where}: {found} not {wanted}"
    elif found != wanted:
        yield f"{where}: {found} not {wanted}"
