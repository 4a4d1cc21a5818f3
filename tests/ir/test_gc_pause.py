"""The collector is paused inside, and comes back as it was."""

from __future__ import annotations

import gc

import pytest

from autopar.ir.gc_pause import collection_paused


def test_the_collector_is_back_after_an_error() -> None:
    with pytest.raises(KeyError), collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
