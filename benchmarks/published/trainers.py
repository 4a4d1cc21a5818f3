"""What the trainers behind the runs did otherwise than a plan of autopar's does.

    attention    MPT ran FlashAttention's Triton kernel, which FlashAttention 2 beats by 1.3 to 1.5
                 forward and by about 2 backward on A100 (arXiv 2307.08691, section 4.1)
    gradients    FSDP1 keeps a block's parameters in one flat tensor. Autograd concatenates their
                 gradients into one, which is cast, where it is reduced in float32 (Composer's
                 `mixed_precision: DEFAULT`), and divided before it is sent
                 (torch/distributed/fsdp/_runtime_utils.py, `_post_backward_hook`, and
                 algorithms/_comm_hooks/default_hooks.py, both of torch 2.0)
    host         The copy of Megatron that vTrain ran takes its host about 48 us for each op and
                 each collective, read off those of the given runs whose kernels are short (hidden
                 size 1,024, one or two sequences, up to four ranks of tensor parallelism): by least
                 squares 3.0 to 3.6 ms per layer and microbatch, for 65 ops and six collectives, or
                 none. No source says why it is six times what an eager op costs elsewhere
    batch        Before each forward, of every stage, Megatron sends sizes and tokens to the device
                 and to its tensor-parallel ranks, and makes masks and positions: twelve ops and two
                 collectives (`get_batch` in pretrain_gpt.py, megatron/mpu/data.py,
                 `get_ltor_masks_and_position_ids` in megatron/utils.py)
    exchange     A stage sends and receives in one batch of two (`batch_isend_irecv`)
    Megatron-core, by the configurations of its runs (NVIDIA/dgxc-benchmarking, commit 8f5cbb37:
                 llama3.1/configure.sh and llama3.1_*.yaml, nemo_megatron/configure.sh and
                 gpt3_175b_hydra.yaml), recomputes nothing, runs cuDNN's attention
                 (`NVTE_FUSED_ATTN`), and sends between tensors within their products
                 (`ub_tp_comm_overlap`): what is gathered in a ring beside them, what is scattered
                 forward in four splits, the last of which nothing hides, and backward beside
                 another product. Parts of a sequence exchange keys and values in a ring, while
                 attention computes on those that are there (`cp_comm_type` is "p2p" unless said,
                 megatron/core/transformer/transformer_config.py): a kernel for each part. What is
                 hidden slows what hides it as it does in a plan of autopar's (`Link.contention`)

The plan has attention as FlashAttention 2 does it, gradients that are sent in bfloat16 as they are
made, and the host of `cluster.kernels`.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster.kernels import LAUNCHES_PER_COLLECTIVE, SUSTAINED
from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cost_model.collectives import collective_s
from autopar.cost_model.roofline import stream_s
from autopar.ir.mesh import Cluster, Device
from autopar.plans.estimates import CollectiveTotal, Estimates, OpTotal, StageEstimates
from benchmarks.published.runs import CONTEXT, Run, arrangement

_TRITON_FORWARD, _TRITON_BACKWARD = 1.4, 2.0
_BFLOAT16, _FLOAT32 = 2, 4
_VTRAIN_LAUNCH_NS = 48_000
_CUDNN_FORWARD, _CUDNN_BACKWARD, _CUDNN_TOKENS = 0.715, 0.637, 404
"""Of the peak, with heads of 128 on H200 (NVIDIA/cudnn-frontend, benchmark/): residuals of 1 and 5
% forward, 2 and 6 % backward. H100 has the same cores. Close to the peak the power limit lowers the
clock, as it does for products (`SUSTAINED`)."""
_SPLITS = 4


def device_of(run: Run, device: Device) -> Device:
    """`device` with the kernels of the run."""
    if run.is_megatron_core and device.name in SUSTAINED:
        return replace(
            device,
            kernels=replace(
                device.kernels,
                attention=_CUDNN_FORWARD * SUSTAINED[device.name],
                attention_backward=_CUDNN_BACKWARD / _CUDNN_FORWARD,
                attention_tokens=_CUDNN_TOKENS * run.cp,
            ),
        )
    if not run.is_mpt:
        return device
    its = device.kernels
    return replace(
        device,
        kernels=replace(
            its,
            attention=its.attention / _TRITON_FORWARD,
            attention_backward=its.attention_backward * _TRITON_FORWARD / _TRITON_BACKWARD,
        ),
    )


def launch_ns(run: Run, each: OpTotal | CollectiveTotal) -> int:
    """In which the host launches the ops, or collectives, of one key."""
    if run.workload is None:
        return each.host_ns
    is_local = isinstance(each, CollectiveTotal) and each.kind == "slice"
    return 0 if is_local else each.count * _VTRAIN_LAUNCH_NS


def exposed_share(run: Run, found: StageEstimates, key: str, sent: CollectiveTotal) -> float:
    """The part of what the op `key` sends that a microbatch is longer by."""
    if (sent.axis, sent.kind, sent.phase) == (CONTEXT, "all_reduce", "backward"):
        return 0.0  # Runs add up gradients over parts of a sequence once, when they reduce them.
    is_hidden = sent.axis == CONTEXT or sent.kind in ("all_gather", "reduce_scatter")
    if run.is_megatron_core and key.startswith("blocks.") and is_hidden:
        is_split = (sent.axis, sent.kind, sent.phase) == ("tp", "reduce_scatter", "forward")
        last = 1 / _SPLITS if is_split else 0.0
        return last + (1 - last) * found.contention[sent.axis] / 1000
    return found.exposed_communication_ns / max(1, found.communication_ns)


def batch_ns(run: Run, cluster: Cluster) -> float:
    """In which the host makes a microbatch of what was read."""
    return _host_ns(run, cluster, ops=12, collectives=2)


def exchange_ns(run: Run, cluster: Cluster) -> float:
    """In which the host sends what a pass has made, and asks for what the next one reads."""
    return _host_ns(run, cluster, ops=0, collectives=2)


def _host_ns(run: Run, cluster: Cluster, *, ops: int, collectives: int) -> float:
    if run.workload is not None:
        return (ops + collectives) * _VTRAIN_LAUNCH_NS
    launches = ops + LAUNCHES_PER_COLLECTIVE * collectives
    return launches * cluster.device.host_launch_s * 1e9


def handling_ns(run: Run, found: Estimates, cluster: Cluster) -> int:
    """Of the gradients of a microbatch, before FSDP1 sends them: nanoseconds in which they are read
    and written."""
    if not _is_flat(run):
        return 0
    elements = run.dp * found.memory.gradients // _BFLOAT16
    concatenated, divided = 2 * _BFLOAT16, 2 * _BFLOAT16
    if run.reduced_in == "float32":
        divided = _BFLOAT16 + 3 * _FLOAT32
    return round(stream_s(elements * (concatenated + divided), cluster.device) * 1e9)


def wider_ns(run: Run, found: Estimates, cluster: Cluster) -> int:
    """By how much a microbatch is longer where its gradients are sent in float32: what backward has
    no time to hide, and what it is slowed down by the rest (`mesh.Link.contention`)."""
    if not (_is_flat(run) and run.reduced_in == "float32"):
        return 0
    axis = parse_mesh(arrangement(run).mesh, cluster)[0]
    backward = [
        e for e in found.stages[0].collectives if (e.axis, e.phase) == (axis.name, "backward")
    ]
    longer_s = 0.0
    for each in backward:
        if each.kind == "reduce_scatter":
            sent = each.num_bytes // each.count
            once_s, twice_s = (
                collective_s(each.kind, k * sent, k * sent // axis.size, axis) for k in (1, 2)
            )
            longer_s += each.count * (twice_s - once_s)
    computed_ns = sum(
        op.compute_ns for op in found.stages[0].ops.values() if op.phase == "backward"
    )
    idle_ns = max(0, computed_ns - sum(each.time_ns for each in backward))
    hidden_ns = min(longer_s * 1e9, idle_ns)
    slowed = found.stages[0].contention[axis.name] / 1000
    return round(longer_s * 1e9 - (1 - slowed) * hidden_ns)


def _is_flat(run: Run) -> bool:
    """Whether a block's parameters are one tensor, sharded."""
    return run.data_parallel.startswith("FSDP1") and run.dp > 1
