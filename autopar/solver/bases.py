"""Where one relaxation ended, as the start of the next, of a problem that differs in little."""

from __future__ import annotations

import highspy
import numpy as np

from autopar.ir.problem import Basis, IntArray
from autopar.solver.ilp import Model

_STATUS = highspy.HighsBasisStatus


def as_basis(model: Model, found: highspy.HighsBasis) -> Basis:
    """The basis that HiGHS `found` for `model`."""
    columns = np.array([status.value for status in found.col_status], np.int64)
    rows = np.array([status.value for status in found.row_status], np.int64)
    return Basis(model.column_names, columns, model.row_names, rows)


def as_start(model: Model, basis: Basis) -> highspy.HighsBasis:
    """`basis` for HiGHS and `model`: columns that it does not know are taken to be 0, rows not to
    bind. HiGHS mends what is no basis then."""
    columns = _known(model.column_names, basis.column_names, basis.columns, _STATUS.kLower)
    rows = _known(model.row_names, basis.row_names, basis.rows, _STATUS.kBasic)
    found = highspy.HighsBasis()
    found.col_status = [_STATUS(status) for status in columns.tolist()]
    found.row_status = [_STATUS(status) for status in rows.tolist()]
    found.valid, found.alien = True, True
    return found


def _known(
    names: IntArray, known: IntArray, statuses: IntArray, other: highspy.HighsBasisStatus
) -> IntArray:
    """The status of each of `names`, of those that are `known`; `other` for the rest."""
    ours, theirs = _as_items(names), _as_items(known)
    order = np.argsort(theirs, kind="stable")
    match = order[np.searchsorted(theirs[order], ours).clip(max=len(known) - 1)]
    return np.where(theirs[match] == ours, statuses[match], other.value)


def _as_items(names: IntArray) -> IntArray:
    """Each name as one value that compares."""
    kinds = [(f"part{k}", names.dtype) for k in range(names.shape[1])]
    return np.ascontiguousarray(names).view(kinds).ravel()
