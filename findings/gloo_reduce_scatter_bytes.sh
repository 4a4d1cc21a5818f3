#!/usr/bin/env bash
# On CPUs a reduce-scatter over gloo sends as much as an all-reduce: twice what a ring needs.
#
# Version: torch 2.13.0, CPU, Linux.
# Behaviour: each rank of a reduce-scatter keeps one n-th of the sum, and a ring of n ranks sends the tensor n - 1
# times in all, as an all-gather does. torch.distributed.reduce_scatter_tensor and reduce_scatter over gloo send
# it 2 (n - 1) times: all of it is reduced on every rank, and each keeps its part. So the gradients of
# fully_shard take as long on a slow network as those of DistributedDataParallel, and the gathers come on top.
# Seen, of four ranks on one machine, in tensors sent through its loopback:
#   all_reduce 6, reduce_scatter_tensor 6, reduce_scatter 6, all_gather_into_tensor 3, all_to_all_single 3
# This script installs that version in a temporary folder, runs it, and fails if any of that changes. Other
# programs that send much through the loopback disturb it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==${1:-2.13.0}" "numpy>=2,<3"
cat > "$folder/count.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, SIZE, TIMES = 4, 1 << 22, 3


def through_loopback():
    """Bytes so far."""
    lines = (line.split() for line in open("/proc/net/dev"))
    return next(int(fields[1]) for fields in lines if fields[0] == "lo:")


def count(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    whole, part = torch.ones(SIZE), torch.ones(SIZE // RANKS)
    told = []
    for name, run in (
        ("all_reduce", lambda: dist.all_reduce(whole)),
        ("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(part, whole)),
        ("reduce_scatter", lambda: dist.reduce_scatter(part, list(whole.chunk(RANKS)))),
        ("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(whole, part)),
        ("all_to_all_single", lambda: dist.all_to_all_single(torch.empty(SIZE), whole)),
    ):
        run()
        dist.barrier()
        before = through_loopback()
        dist.barrier()
        for _ in range(TIMES):
            run()
        dist.barrier()
        told.append(f"{name} {(through_loopback() - before) / (4 * SIZE * TIMES):.0f}")
    if rank == 0:
        print(", ".join(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(count, args=(sys.argv[1],), nprocs=RANKS, start_method="spawn")
PYTHON
GLOO_SOCKET_IFNAME=lo "$folder/venv/bin/python" -W ignore "$folder/count.py" "$folder" > "$folder/seen" 2> "$folder/errors" ||
    { cat "$folder/errors"; exit 1; }
diff "$folder/seen" - <<'SEEN'
all_reduce 6, reduce_scatter_tensor 6, reduce_scatter 6, all_gather_into_tensor 3, all_to_all_single 3
SEEN
echo "as stated"
