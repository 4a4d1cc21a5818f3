#!/usr/bin/env bash
# HiGHS's time_limit counts an integer program's run alone, and a linear program's with all runs before.
#
# Version: highspy 1.15.1 (1.13.1 too).
# Behaviour: getRunTime() adds up all runs of an instance. Of a linear program, time_limit is compared
# with that sum, whatever runs it is of; of an integer program, with the time of the run itself. So
# getRunTime() + t lets a second integer program go on for longer than t, and t alone ends a linear
# program at once after a run that took longer than t.
# Seen:
#   integer program, limit 1.0: Time limit reached
#   small integer program, limit 0.5, after 1.0 s of runs: Optimal
#   small linear program, limit 0.5, after 1.0 s of runs: Time limit reached
#   small linear program by interior point, limit 0.5, after 1.0 s of runs: Time limit reached
#   small linear program, limit 0.5 more than all runs: Optimal
# This script installs that version in a temporary folder, runs it, and fails if any of that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "highspy==${1:-1.15.1}" "numpy>=2,<3"
"$folder/venv/bin/python" - > "$folder/seen" <<'PYTHON'
import highspy
import numpy as np

highs = highspy.Highs()
highs.setOptionValue("output_flag", False)
highs.setOptionValue("threads", 1)
highs.setOptionValue("presolve", "off")


def knapsacks(size, rows, kind):
    random = np.random.default_rng(0)
    weights = random.integers(1, 100, (rows, size)).astype(float)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = size, rows
    model.col_cost_ = -random.integers(1, 100, size).astype(float)
    model.col_lower_, model.col_upper_ = np.zeros(size), np.ones(size)
    model.row_lower_, model.row_upper_ = np.full(rows, -np.inf), weights.sum(1) / 3
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.arange(0, size * rows + 1, size, dtype=np.int32)
    matrix.index_ = np.tile(np.arange(size, dtype=np.int32), rows)
    matrix.value_ = weights.ravel()
    model.integrality_ = [kind] * size
    highs.passModel(model)


def run(what, limit_s):
    highs.setOptionValue("time_limit", limit_s)
    highs.run()
    print(f"{what}: {highs.modelStatusToString(highs.getModelStatus())}")


INTEGER, CONTINUOUS = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
knapsacks(200, 60, INTEGER)
run("integer program, limit 1.0", 1.0)
assert highs.getRunTime() > 0.9
knapsacks(8, 3, INTEGER)
run("small integer program, limit 0.5, after 1.0 s of runs", 0.5)
knapsacks(8, 3, CONTINUOUS)
run("small linear program, limit 0.5, after 1.0 s of runs", 0.5)
highs.setOptionValue("solver", "ipm")
knapsacks(8, 3, CONTINUOUS)
run("small linear program by interior point, limit 0.5, after 1.0 s of runs", 0.5)
highs.setOptionValue("solver", "choose")
knapsacks(8, 3, CONTINUOUS)
run("small linear program, limit 0.5 more than all runs", highs.getRunTime() + 0.5)
PYTHON
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen" && echo "as it was"
