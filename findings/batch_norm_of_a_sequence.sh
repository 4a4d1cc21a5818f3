#!/usr/bin/env bash
# On CPUs the gradients of BatchNorm2d are wrong where its input is a transposed sequence with a last dim of 1.
#
# Version: torch 2.13.0 (2.11.0 too), CPU.
# Behaviour: features of a sequence, of shape (N, L, C), come to BatchNorm2d as x.transpose(1, 2).unsqueeze(-1),
# whose strides are (LC, 1, C, 1). The result is right, and lies in channels_last. Backward takes the input,
# which with its stride of 1 in the last dim is contiguous in channels_last as well, and the gradient for
# tensors in one memory format, which they are not: the gradients of input, weight and bias are other
# numbers, without a word, in training and in inference. torch.autograd.gradcheck fails. The same numbers
# through .contiguous(), in a dim of more than 1, or as BatchNorm1d of (N, C, L) have the right gradients.
# Seen:
#   transposed, training: result right, gradients of input, weight, bias wrong, gradcheck fails
#   transposed, inference: result right, gradients of input, weight, bias wrong, gradcheck fails
#   through contiguous(), training: result right, gradients of input, weight, bias right, gradcheck passes
#   last dim of 2, training: result right, gradients of input, weight, bias right, gradcheck passes
#   BatchNorm1d, training: result right, gradients of input, weight, bias right, gradcheck passes
# This script installs that version in a temporary folder, runs it, and fails if any of that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==${1:-2.13.0}" "numpy>=2,<3"
"$folder/venv/bin/python" - > "$folder/seen" <<'PYTHON'
import torch
from torch import nn

torch.manual_seed(0)
SEQUENCE = torch.randn(5, 8, 4, dtype=torch.float64)


def image(x):
    return x.transpose(1, 2).unsqueeze(-1)


def by_hand(norm, x):
    """The same of sums and products alone."""
    dims, shape = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
    mean, var = norm.running_mean.reshape(shape), norm.running_var.reshape(shape)
    if norm.training:
        mean = x.mean(dims, keepdim=True)
        var = (x - mean).square().mean(dims, keepdim=True)
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight.reshape(shape) + norm.bias.reshape(shape)


def gradients(function, x, *params):
    out = function(x)
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()
    return out, torch.autograd.grad((out * weights).sum(), (x, *params))


def told(what, view, norm):
    norm = norm.double()
    x = SEQUENCE.clone().requires_grad_()
    found, wanted = (gradients(f, x, norm.weight, norm.bias) for f in (
        lambda x: norm(view(x)), lambda x: by_hand(norm, view(x))
    ))
    right = {True: "right", False: "wrong"}
    same = [torch.allclose(a, b) for a, b in zip(found[1], wanted[1])]
    grads = right[all(same)] if len(set(same)) == 1 else str(same)
    passes = torch.autograd.gradcheck(lambda x: norm(view(x)), (x,), raise_exception=False)
    mode = "training" if norm.training else "inference"
    print(f"{what}, {mode}: result {right[torch.allclose(found[0], wanted[0])]}, gradients of input, weight, "
          f"bias {grads}, gradcheck {'passes' if passes else 'fails'}")


told("transposed", image, nn.BatchNorm2d(4))
told("transposed", image, nn.BatchNorm2d(4).eval())
told("through contiguous()", lambda x: image(x).contiguous(), nn.BatchNorm2d(4))
told("last dim of 2", lambda x: image(x).repeat(1, 1, 1, 2), nn.BatchNorm2d(4))
told("BatchNorm1d", lambda x: x.transpose(1, 2), nn.BatchNorm1d(4))
PYTHON
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen" && echo "as it was"
