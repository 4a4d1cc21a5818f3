"""Tests of which some cases are for the night."""

from __future__ import annotations

from functools import reduce
from importlib import import_module

import pytest

from tests.conftest import BREADTH


@pytest.mark.parametrize("name", BREADTH)
def test_what_is_thinned_out_is_a_test(name: str) -> None:
    path, *names = name.split("::")
    module = import_module(path.removesuffix(".py").replace("/", "."))
    assert callable(reduce(getattr, names, module))
    assert BREADTH[name] > 1
