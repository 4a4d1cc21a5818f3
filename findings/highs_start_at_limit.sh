#!/usr/bin/env bash
# HiGHS drops a start of an integer program at a limit unless it has every column and is feasible as it is.
#
# Version: highspy 1.15.1 (1.13.1 too).
# Behaviour: what setSolution is given becomes the incumbent of a run that ends at its limit at once if
# all columns are there and keep all limits within the tolerance. Where columns are left out, or an
# integer one is off by more than 1e-6, HiGHS solves for the rest first; there is no time for that, and
# the run ends without any incumbent.
# Seen:
#   all columns: Time limit reached, feasible
#   integer columns off by 1e-9: Time limit reached, feasible
#   integer columns off by 1e-5: Time limit reached, none
#   integer columns alone: Time limit reached, not feasible
#   integer columns that are not 0 alone: Time limit reached, none
# This script installs that version in a temporary folder, runs it, and fails if any of that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "highspy==${1:-1.15.1}" "numpy>=2,<3"
"$folder/venv/bin/python" - > "$folder/seen" <<'PYTHON'
import highspy
import numpy as np

NUM = 20
WORDS = ("none", "not feasible", "feasible")


def sources():
    """20 sources that cost something once, of which 31.5 are bought, at most 7 of each."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("time_limit", 0.0)
    rows = np.zeros((NUM + 1, 2 * NUM))
    rows[:NUM, :NUM], rows[:NUM, NUM:] = -7 * np.eye(NUM), np.eye(NUM)
    rows[NUM, NUM:] = 1
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = 2 * NUM, NUM + 1
    model.col_cost_ = np.array([float(5 + i * 7 % 15) for i in range(NUM)] + [1.0 + i % 4 for i in range(NUM)])
    model.col_lower_, model.col_upper_ = np.zeros(2 * NUM), np.repeat([1.0, 10.0], NUM)
    model.row_lower_ = np.append(np.full(NUM, -np.inf), 31.5)
    model.row_upper_ = np.append(np.zeros(NUM), np.inf)
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.arange(0, rows.size + 1, 2 * NUM, dtype=np.int32)
    matrix.index_ = np.tile(np.arange(2 * NUM, dtype=np.int32), NUM + 1)
    matrix.value_ = rows.ravel()
    kinds = highspy.HighsVarType
    model.integrality_ = [kinds.kInteger] * NUM + [kinds.kContinuous] * NUM
    highs.passModel(model)
    return highs


def run(what, *start):
    highs = sources()
    highs.setSolution(*start)
    highs.run()
    found = WORDS[highs.getInfo().primal_solution_status]
    print(f"{what}: {highs.modelStatusToString(highs.getModelStatus())}, {found}")


def whole(off):
    start = highspy.HighsSolution()
    start.col_value = [1 - off] * 7 + [0.0] * 13 + [4.5] * 7 + [0.0] * 13
    return start


run("all columns", whole(0.0))
run("integer columns off by 1e-9", whole(1e-9))
run("integer columns off by 1e-5", whole(1e-5))
run("integer columns alone", NUM, np.arange(NUM, dtype=np.int32), np.repeat([1.0, 0.0], [7, 13]))
run("integer columns that are not 0 alone", 7, np.arange(7, dtype=np.int32), np.ones(7))
PYTHON
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen" && echo "as it was"
