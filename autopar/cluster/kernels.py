"""What kernels reach of the rates of datasheets, by generation of devices.

The figures are fitted to published measurements; those of devices that nobody measured are their
generation's, and the device's source says so. Products: sweeps of torch's linear in bfloat16
(ai-dynamo/aiconfigurator, systems/data/*/gemm: m 16 to 32,768, n and k 512 to 65,536), of which
half was held out; the residuals, median and 90th percentile, are of that half. Collectors of the
same card differ by 7 %. Attention is that of FlashAttention 2, the kernel of
`runtime/ops/attention.py`, forward under a causal mask in vLLM (same source); its later versions
reach more. Backward on A100 was not measured: 0.83 of forward's rate, as on Hopper and Blackwell.
Under a mask, and in float32, the memory-efficient kernel runs, which has no instructions of Hopper:
measured on one H100 (autopar::sdpa, torch 2.11, heads of 64 and 128, 512 to 2,048 tokens). Both
figures are estimates for other generations: under a mask about what its rate there comes to by
multiprocessors and clocks, in float32 half to two thirds of the peak.
Streams: te42kyfo/gpu-benches, microsoft/vidur, and RMSNorm in NVIDIA/cudnn-frontend, whose backward
under torch.compile comes to 0.37 of the bandwidth on H200 and 0.33 on GB200.

Beside them what the host behind a GPU takes to launch a kernel, whatever the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.mesh import Kernels

LAUNCH_S = 8e-6
"""Host time of an op that launches one kernel. Eager, from Python: 8 us behind an A100
(flagos-ai/Torch-FL, pull request 27, "cuda_sub" of add); published breakdowns have 5 to 25. One of
inductor's kernels takes as long: 6.8 us without arguments and 9.1 with 19 of them behind a GB200
(meta-pytorch/tritonbench, pull request 1017, `CachingAutotuner.run`). It launches fewer."""

LAUNCHES_PER_COLLECTIVE = 5.6
"""How many such launches take the host as long as one collective: 45 us, of 64 all-reduces in 2,865
us (pytorch/pytorch, pull request 98793, CPU time before calls were joined)."""

AMPERE_KERNELS = Kernels(
    start_s=2e-6,
    matmul_start_s=5.8e-6,
    matmul=0.814,
    matmul_memory=0.675,
    wave=0.09,
    depth=125,
    processors=108,
    attention=0.584,
    attention_narrow=0.92,
    attention_backward=0.83,
    attention_tokens=378,
    attention_float32=0.584,
    attention_masked=0.38,
    pointwise=0.86,
    reduction=0.7,
    reduction_backward=0.37,
)
SUSTAINED: Mapping[str, float] = {"H100": 0.9, "H200": 0.9}
"""What is left of the rate of products once the power limit lowers the clock, which sweeps are too
short to see: 720 TFLOP/s on shapes of Llama-70B with normally distributed operands (SemiAnalysis,
"MI300X vs H100 vs H200 Benchmark Part 1: Training", 2024), where the sweeps' fit has 798 and 790.
A100 does 257 (thonking.ai, "Strangely, Matrix Multiplications..."), and 249 by the sweeps."""

HOPPER_KERNELS = Kernels(
    start_s=2.4e-6,
    matmul_start_s=2.9e-6,
    matmul=0.849 * SUSTAINED["H100"],
    matmul_memory=0.847,
    wave=0.15,
    depth=164,
    processors=132,
    attention=0.33,
    attention_narrow=0.92,
    attention_backward=0.87,
    attention_tokens=300,
    attention_float32=0.66,
    attention_masked=0.32,
    pointwise=0.8,
    reduction=0.8,
    reduction_backward=0.37,
)
H200_KERNELS = replace(
    HOPPER_KERNELS,
    matmul_start_s=3e-6,
    matmul=0.83 * SUSTAINED["H200"],
    matmul_memory=0.787,
    wave=0.09,
    depth=124,
)
BLACKWELL_KERNELS = Kernels(
    start_s=2.4e-6,
    matmul_start_s=2.4e-6,
    matmul=0.736,
    matmul_memory=0.739,
    wave=0.23,
    depth=89,
    processors=148,
    attention=0.19,
    attention_narrow=0.88,
    attention_backward=0.87,
    attention_tokens=300,
    attention_float32=0.57,
    attention_masked=0.25,
    pointwise=0.75,
    reduction=0.65,
    reduction_backward=0.33,
)
GB200_KERNELS = replace(
    BLACKWELL_KERNELS, matmul=0.692, matmul_memory=0.749, wave=0.24, depth=77, attention=0.171
)
B300_KERNELS = replace(BLACKWELL_KERNELS, matmul=0.818, matmul_memory=0.713, wave=0.24, depth=81)
GB300_KERNELS = replace(BLACKWELL_KERNELS, matmul=0.809, wave=0.26, depth=80, attention=0.171)
ADA_KERNELS = Kernels(
    start_s=1.6e-6,
    matmul_start_s=1.5e-6,
    matmul=0.625,
    matmul_memory=0.764,
    wave=0,
    depth=180,
    processors=142,
    attention=0.486,
    attention_narrow=0.97,
    attention_backward=0.83,
    attention_tokens=204,
    attention_float32=0.486,
    attention_masked=0.38,
    pointwise=0.9,
    reduction=0.7,
    reduction_backward=0.37,
)
GRAPHICS_BLACKWELL_KERNELS = replace(
    ADA_KERNELS,
    matmul_start_s=3.1e-6,
    matmul=0.8,
    matmul_memory=0.891,
    wave=0.07,
    depth=124,
    processors=188,
    attention=0.626,
    attention_narrow=0.92,
    attention_tokens=253,
)
# Without FlashAttention 2, which starts at compute capability 8.0.
VOLTA_KERNELS = replace(
    AMPERE_KERNELS, processors=80, attention=0.15, pointwise=0.91, reduction=0.65
)
CDNA_KERNELS = replace(AMPERE_KERNELS, processors=304, matmul=0.51, attention=0.35, pointwise=0.8)
