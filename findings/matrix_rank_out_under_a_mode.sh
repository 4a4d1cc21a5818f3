#!/usr/bin/env bash
# torch.linalg.matrix_rank(out=) leaves out= as it was while any dispatch mode or tensor subclass looks on.
#
# Version: torch 2.13.0 (CPU).
# Behaviour: for tensors that are subclasses, and for all tensors inside a TorchDispatchMode, torch composes
# matrix_rank of ops without out=, and the result goes nowhere: no error, and the zeros of before stay. So
# a profiler, a counter of FLOPs or a FakeTensorMode around a script changes its result. The same call
# without the mode writes the rank, and det(out=) writes in both.
# Seen:
#   without a mode: [5, 5]
#   in a FlopCounterMode: [0, 0]
#   in a mode of one's own that changes nothing: [0, 0]
#   what the call returns in that mode: [0, 0]
#   det(out=) in that mode is det(): True
# This script installs that version in a temporary folder, runs it, and fails if any of that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==${1:-2.13.0}" "numpy>=2,<3"
"$folder/venv/bin/python" - > "$folder/seen" <<'PYTHON'
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Through(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


torch.manual_seed(0)
matrices = torch.randn(2, 5, 5)
out = torch.zeros(2, dtype=torch.int64)
torch.linalg.matrix_rank(matrices, out=out)
print("without a mode:", out.tolist())
out.zero_()
with FlopCounterMode(display=False):
    torch.linalg.matrix_rank(matrices, out=out)
print("in a FlopCounterMode:", out.tolist())
out.zero_()
with Through():
    returned = torch.linalg.matrix_rank(matrices, out=out)
print("in a mode of one's own that changes nothing:", out.tolist())
print("what the call returns in that mode:", returned.tolist())
value = torch.zeros(2)
with Through():
    torch.linalg.det(matrices, out=value)
print("det(out=) in that mode is det():", torch.equal(value, torch.linalg.det(matrices)))
PYTHON
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen" && echo "as it was"
