"""The published runs: their facts, which of them can be expressed, and how each was arranged.

`benchmarks/data/published.csv` has a row per run: the model's sizes, the devices, the degrees of
parallelism, the batch, what was measured, and the source. `vtrain.csv` beside it has many
arrangements of each of 77 workloads. A blank cell is not stated by the source.

Left out, by rule, is a run with

- float8, which no plan has yet;
- context parallelism, where parameters are sharded as well;
- stages of a pipeline that have not as many layers each, or whose ranks share out parameters;
- a part of its activations recomputed in backward, other than the scores of attention, or a source
  that does not say whether they were (large runs that do not say so hardly fit without), unless
  they cannot have been, and nothing else had to be: with the kernels of Megatron-core, which hold
  little, products would have run faster than any do (`TOO_FAST`);
- devices that no preset describes, or sizes of the model that the source does not state;
- a kind of data parallelism that is not among `SCHEMES`.

How a run is read: `microbatch` sequences on each rank of the data-parallel group, `accumulation`
times before the optimizer steps (where it is not stated, as often as the global batch asks for).
FSDP gathers parameters and scatters gradients in every microbatch. HSDP shards within a node and
replicates across nodes. DDP reduces gradients once, after the last microbatch. A network of so many
Gbps per node is shared evenly by its devices; where none is stated it is the preset's. Full
recompute does the forward of each block once more. Stages of a pipeline go forward and backward in
turn (1F1B); where a rank has several (`chunks`), they are interleaved. Attention is one fused
kernel, except in the GPT of Megatron and vTrain, which write its scores to memory. Megatron-core
(2023 and after) reduces gradients of a stage when its last microbatch is through, while others are
at work, and every rank of the data-parallel group steps a part of them. What kernels,
what handling of gradients and what else on the host a trainer had is in `trainers.py`.

A third of the runs is kept apart: those whose source and model have a digest divisible by three.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from autopar.cluster.devices import DEVICES

DATA = Path(__file__).resolve().parents[1] / "data"
FILES = (DATA / "published.csv", DATA / "vtrain.csv")

PRESETS: Mapping[str, str] = {
    "A100": "A100",
    "A100-40GB": "A100-40G",
    "A100-80GB": "A100",
    "DGX-B200": "B200",
    "DGX-GB200": "GB200",
    "DGX-GB300": "GB300",
    "DGX-H100": "H100",
    "H100": "H100",
    "H100-80GB": "H100",
    "H200": "H200",
    "H200-141GB": "H200",
}
"""The preset of a device as sources call it, where it is the same part; one that autopar does not
know yet is none."""

GATED = ("Llama",)
UNGATED = ("MPT", "GPT", "Megatron-GPT")
"""Models with Llama's block and with GPT's, by how their names begin."""

VOCABULARY: Mapping[str, int] = {"GPT-3-175B": 51_200}
"""Words of models whose source does not state them: GPT-3's 50,257, filled up as in the rows of
Megatron's own run of the model."""

TOO_FAST = 0.67
"""Of the peak FLOPs of an H100 or H200 no run of the table does more whose source states what is
recomputed (0.584, and 0.666)."""

SELECTIVE = "selective (attention)"
"""How sources begin to say that scores of attention alone are recomputed."""

MEGATRON_CORE = "Megatron-core"
"""How the kernels of trainers are named that have Megatron's core of 2023 and after."""

MEGATRON = "arXiv 2205.05198"
"""The source of runs of Megatron's own."""


class Scheme(NamedTuple):
    """How parameters lie on the axis of data parallelism: as they are stored, and as they are kept
    from forward to backward, in the words of pins. `within_node`: on the ranks of a node alone."""

    stored: str
    kept: str
    within_node: bool = False


_FULL = Scheme("S", "S")
SCHEMES: Mapping[str, Scheme] = {
    "FSDP": _FULL,
    "FSDP1 FULL_SHARD": _FULL,
    "FSDP2": _FULL,
    "JAX FSDP": _FULL,
    "SimpleFSDP (graph)": _FULL,
    "FSDP1 SHARD_GRAD_OP": Scheme("S", "R"),
    "HSDP": Scheme("S", "S", within_node=True),
    "DDP": Scheme("R", "R"),
    "Megatron DDP + distributed optimizer": Scheme("R", "R"),
    "none": Scheme("R", "R"),
}
"""The kinds of data parallelism that are expressed, as the table names them."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the table. `heads`, `kv_heads`, `ffn` and `vocab` count what their names say, `dp`,
    `tp`, `pp` and `cp` are degrees of parallelism, the measured figure is tokens per second and
    device. `reduced_in` is the dtype in which gradients are sent, `chunks` how many stages a rank
    has. Text that is not stated is empty.
    """

    name: str
    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    sequence: int
    gpu: str
    gpus: int
    gpus_per_node: int
    data_parallel: str
    dp: int
    tp: int
    pp: int
    cp: int
    microbatch: int
    global_batch: int
    float8: str
    tokens_s_gpu: float
    source: str
    ffn: int | None = None
    vocab: int | None = None
    chunks: int | None = None
    accumulation: int | None = None
    network: str = ""
    reduced_in: str = ""
    recompute: str = ""
    compiled: str = ""
    step_s: float | None = None
    peak_gib: float | None = None

    @property
    def microbatches(self) -> int:
        """How often a rank goes forward and backward in a step."""
        return self.accumulation or self.global_batch // (self.dp * self.microbatch)

    @property
    def stages(self) -> int:
        """How many stages the layers are shared out to."""
        return self.pp * (self.chunks or 1)

    @property
    def recomputes(self) -> bool:
        """Whether backward does the forward of every block once more."""
        return self.recompute == "full"

    @property
    def recomputes_scores(self) -> bool:
        """Whether backward makes the scores of attention once more, and nothing else."""
        return self.recompute.startswith(SELECTIVE)

    @property
    def is_too_fast_to_recompute(self) -> bool:
        """Whether it would have done more FLOPs than devices do, had it recomputed its blocks."""
        if self.preset not in ("H100", "H200") or self.ffn is None or self.words is None:
            return False
        again = msgspec.structs.replace(self, recompute="full")
        peak = dict(DEVICES[self.preset].flops_per_s)["bfloat16"]
        return self.float8 == "no" and self.tokens_s_gpu * again.flops_per_token > TOO_FAST * peak

    @property
    def is_compiled(self) -> bool:
        """Whether chains of pointwise ops are one kernel; not where the source says nothing."""
        return self.compiled == "1" or self.is_megatron_core

    @property
    def is_megatron_core(self) -> bool:
        """Whether the trainer is Megatron's of 2023 or after: pointwise ops are fused, a host does
        not wait for its device, and what is sent, and gradients, are sent while others compute."""
        return self.compiled.startswith(MEGATRON_CORE)

    @property
    def words(self) -> int | None:
        """The words of its vocabulary."""
        return self.vocab or VOCABULARY.get(self.model)

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced after the last microbatch alone."""
        return SCHEMES[self.data_parallel].stored == "R" and self.dp * self.cp > 1

    @property
    def workload(self) -> tuple[str, int, int, int] | None:
        """Of vTrain's runs what they share that are told apart by their arrangement alone: model,
        devices, global batch, sequence. None for others."""
        if not self.source.startswith("VIA-Research/vTrain"):
            return None
        return self.model, self.gpus, self.global_batch, self.sequence

    @property
    def is_megatron(self) -> bool:
        """Whether it is Megatron's GPT of 2022 and before, or the copy of it that vTrain ran:
        attention is two products with a softmax between them, the loss is not fused."""
        return self.source.startswith(MEGATRON) or self.workload is not None

    @property
    def is_mpt(self) -> bool:
        """Whether llm-foundry ran it, whose sweeps had attention in Triton and a loss of one kernel
        (scripts/train/benchmarking/submit_benchmarks.py, models/mpt/modeling_mpt.py)."""
        return self.model.startswith("MPT")

    @property
    def optimizer(self) -> str:
        """As autopar calls it: Megatron's is apex's `FusedAdam`."""
        return "adamw-fused" if self.is_megatron or self.is_megatron_core else "adamw"

    @property
    def gated(self) -> bool:
        """Whether the block is Llama's, not GPT's."""
        return self.model.startswith(GATED)

    @property
    def preset(self) -> str | None:
        """The device's name in autopar; None if it has none."""
        name = PRESETS.get(self.gpu)
        return name if name in DEVICES else None

    @property
    def network_bytes_per_s(self) -> float | None:
        """What a device has of the network between nodes; None if the source does not say."""
        stated = re.match(r"(\d+)Gbps/node", self.network)
        return int(stated[1]) * 1e9 / 8 / self.gpus_per_node if stated else None

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward: six per weight of a product, and 12 x layers x hidden x sequence
        of attention, as if nothing were masked (arXiv 2204.02311, appendix B); what is recomputed
        counts once more. ValueError if sizes are not stated."""
        kv = 2 * self.kv_heads * (self.hidden // self.heads)
        matrices = 3 if self.gated else 2
        weights = self.hidden * (2 * self.hidden + kv + matrices * self.stated("ffn"))
        blocks = self.layers * (2.0 * weights + 4.0 * self.hidden * self.sequence)
        head = 2.0 * self.stated("vocab") * self.hidden
        return (4 if self.recomputes else 3) * blocks + 3 * head

    def stated(self, size: Literal["ffn", "vocab"]) -> int:
        """A size that some sources leave out. ValueError if this one does."""
        found = self.ffn if size == "ffn" else self.words
        if found is None:
            raise ValueError(f"{self.name}: {size} is not stated")
        return found

    @property
    def kept_apart(self) -> bool:
        """Whether no figure may be fitted to this run."""
        key = f"{self.source}\n{self.model}".encode()
        return int.from_bytes(blake2b(key, digest_size=4).digest()) % 3 == 0


def read(path: Path) -> tuple[Run, ...]:
    """The runs in a file. `msgspec.ValidationError` if a row lacks a figure or has one too many."""
    with path.open(newline="", encoding="utf-8") as file:
        given = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    return tuple(msgspec.convert(row, Run, strict=False) for row in given)


def reasons(run: Run) -> tuple[str, ...]:
    """Why a run is left out; nothing if it can be expressed."""
    scheme = SCHEMES.get(run.data_parallel)
    is_sharded = scheme is not None and scheme.stored != "R" and run.dp > 1
    asked = {
        "stages of unequal size": run.layers % run.stages > 0,
        "stages with sharded parameters": run.pp > 1 and is_sharded,
        "context parallelism with sharded parameters": run.cp > 1 and is_sharded,
        "float8": run.float8 != "no",
        "a part is recomputed": bool(run.recompute)
        and not (run.recompute in ("none", "full") or (run.recomputes_scores and run.is_megatron)),
        "recompute is not stated": not run.recompute
        and not (run.is_megatron_core and run.is_too_fast_to_recompute),
        f"no preset for {run.gpu}": run.preset is None,
        "sizes of the model are not stated": run.ffn is None or run.words is None,
        f"no scheme for {run.data_parallel}": scheme is None,
        f"no model like {run.model}": not run.model.startswith((*GATED, *UNGATED)),
    }
    return tuple(reason for reason, holds in asked.items() if holds)


CONTEXT = "cp"
"""The axis over which sequences are cut: by price, as no strategy has it."""

_TENSORS = (
    "matmul:*=out on tp or in on tp",
    "param:*=unmoved on tp",
    "batched:*=not batch on tp",
)
"""Megatron's tensor parallelism, beside context parallelism, in the words of pins."""


class Arrangement(NamedTuple):
    """What autopar is told, so that it predicts the run as it was arranged."""

    mesh: str
    strategy: str
    pins: tuple[str, ...]


def arrangement(run: Run) -> Arrangement:
    """The mesh and constraints of a run that `reasons` has nothing against."""
    scheme = SCHEMES[run.data_parallel]
    if scheme.within_node:
        sizes = {"replicas": run.gpus // run.gpus_per_node, "shards": run.gpus_per_node // run.tp}
    else:
        sizes = {"shards": run.dp}
    sizes = {axis: size for axis, size in (sizes | {CONTEXT: run.cp}).items() if size > 1}
    mesh = ",".join(f"{axis}={size}" for axis, size in (sizes | {"tp": run.tp}).items() if size > 1)
    pins = [pin for axis in sizes for pin in _laid(axis, scheme)]
    if run.cp > 1:
        return Arrangement(mesh, "", (*pins, *(_TENSORS if run.tp > 1 else ())))
    if run.tp > 1:
        return Arrangement(mesh, "megatron", tuple(pins))
    return Arrangement(mesh, "", (*pins, "batched:*=batch on *", "unbatched:*=R on *"))


def _laid(axis: str, scheme: Scheme) -> Iterable[str]:
    stored, kept = ("R", "R") if axis in ("replicas", CONTEXT) else (scheme.stored, scheme.kept)
    return f"param:*={stored} on {axis}", f"for_backward:*={kept} on {axis}"
