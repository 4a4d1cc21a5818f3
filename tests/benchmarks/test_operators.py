"""Points that others measured: the table is read as it stands, and the prices are near them."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from autopar.cluster.devices import DEVICES
from benchmarks.operators import Point, main, predicted_us, read, scores, table

POINTS = read()
ERRORS = scores(POINTS)


def test_every_point_has_a_device_a_time_and_a_source() -> None:
    assert len(POINTS) > 700
    for point in POINTS:
        assert point.device in DEVICES and point.us > 0 and point.source, point
        assert predicted_us(point) > 0


def test_an_unknown_family_is_an_error() -> None:
    with pytest.raises(ValueError, match="points of 'magic' are not known"):
        predicted_us(Point("magic", "H100", "", 1.0, ""))


@pytest.mark.parametrize(
    ("family", "median", "ninth_decile"),
    [("product", 0.065, 0.18), ("attention", 0.08, 0.4), ("collective", 0.04, 0.16)],
)
def test_the_median_point_of_a_family_is_within_reach(
    family: str, median: float, ninth_decile: float
) -> None:
    """Products in two bytes an element; float32 and float8 have no fit."""
    kinds = (kind for kind in ERRORS if kind[0] == family and "float" not in kind[1])
    errors = np.abs(np.concatenate([ERRORS[kind] for kind in kinds]))
    assert np.median(errors) < median
    assert np.quantile(errors, 0.9) < ninth_decile


def test_the_command_prints_the_table_and_what_is_furthest_off() -> None:
    printed = CliRunner().invoke(main, ["--markdown"])
    assert printed.exit_code == 0
    assert printed.output.count("\n") == len(table(POINTS)) + 2
    worst = CliRunner().invoke(main, ["--worst", "3"])
    assert worst.output.count("\n") == 3
