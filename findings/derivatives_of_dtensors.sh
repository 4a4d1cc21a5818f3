#!/usr/bin/env bash
# Of derivatives of a DTensor only backward ones exist: torch.func.grad and vmap work, jvp, hessian and duals raise.
#
# Version: torch 2.13.0 (CPU).
# Behaviour: torch.func.grad, vmap and autograd.grad of a DTensor give what they give of the whole tensor, also
# is_grads_batched=True while the gradients stay DTensors. All that goes forward raises: jvp and dual numbers, for
# want of a sharding strategy of an op that the forward mode asks with; hessian (forward over reverse) in an
# assertion of DTensor's own dispatch. So do several gradients at once through full_tensor(), the documented way to
# a plain tensor: its backward is a function of DTensor's that no batch goes through.
# Seen:
#   grad: equal
#   vmap: equal
#   is_grads_batched: equal
#   is_grads_batched through full_tensor(): NotImplementedError
#   jvp: NotImplementedError, aten._has_same_storage_numel.default
#   dual numbers: NotImplementedError, aten._has_same_storage_numel.default
#   hessian: AssertionError, out variant should have at least one out arg
# This script installs that version in a temporary folder, runs it, and fails if any of that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==${1:-2.13.0}" "numpy>=2,<3"
"$folder/venv/bin/python" - > "$folder/seen" 2> "$folder/log" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import grad, hessian, jvp, vmap

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)
plain = torch.randn(4, 6, dtype=torch.float64)


def energy(x):
    return (x.sin() * x).sum()


def dual(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(energy(forward_ad.make_dual(x, x))).tangent


def several(x):
    x = x.clone().detach().requires_grad_()
    made, directions = x.sin() * x, torch.stack([plain, plain * 2])
    if isinstance(x, DTensor):
        directions = distribute_tensor(directions, mesh, [Shard(1)])
    return torch.autograd.grad(made, x, directions, is_grads_batched=True)[0]


def several_of_whole(x):
    x = x.clone().detach().requires_grad_()
    made = energy(x)
    made = made.full_tensor() if isinstance(made, DTensor) else made
    directions = torch.arange(3.0, dtype=torch.float64)
    return torch.autograd.grad(made, x, directions, is_grads_batched=True)[0]


def tried(name, what, shown=""):
    try:
        found = what(distribute_tensor(plain, mesh, [Shard(0)]))
    except Exception as error:
        text = f", {shown}" if shown and shown in str(error) else ""
        print(f"{name}: {type(error).__name__}{text}")
    else:
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        print(f"{name}:", "equal" if torch.allclose(whole, what(plain)) else "other")


tried("grad", grad(energy))
tried("vmap", vmap(energy))
tried("is_grads_batched", several)
tried("is_grads_batched through full_tensor()", several_of_whole)
strategy = "aten._has_same_storage_numel.default"
tried("jvp", lambda x: jvp(energy, (x,), (x,))[1], strategy)
tried("dual numbers", dual, strategy)
tried("hessian", hessian(energy), "out variant should have at least one out arg")
dist.destroy_process_group()
PYTHON
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen" && echo "as it was"
