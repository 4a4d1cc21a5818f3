"""`autopar.profile`: this run's devices and their links, as one profile."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

import torch

from autopar.cluster.parsing import parse_cluster
from autopar.cluster.profile import PROFILE_VERSION, Profile
from autopar.errors import ClusterError
from autopar.ir.mesh import Cluster
from autopar.runtime.measuring import kernels, links
from autopar.runtime.measuring.cases import cases
from autopar.runtime.measuring.stopwatch import Notebook, Stopwatch
from autopar.runtime.process.hosts import text_of
from autopar.runtime.process.world import World, join, place_of_process


def profile(
    device: str | torch.device | None = None,
    *,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
    unfinished: str | os.PathLike[str] | None = None,
) -> Profile:
    """Measure `device`: a CUDA device if there is one, else the CPU with the threads torch uses.
    Under torchrun each rank measures its own, all at once, and the links between them.

    `cluster` says how they are joined ("2x8xH100"); without it nodes are those of torchrun. The
    list of sizes is fixed (`cases`); `quick` measures few of them. What does not fit in half of the
    free memory, runs out of it all the same, or does not run on this device is named in `left_out`.
    `progress` gets the name of each entry. What was measured so far is written to the file
    `unfinished`, from which an interrupted run goes on. ClusterError if there is no such device, if
    the cluster is another, or if not even one matmul and one pointwise op could be measured.
    """
    world = _world(device)
    described = _described(cluster, world)
    selected = cases(world.device.type, quick=quick)
    name = _device_name(world.device)
    sizes = tuple(level.size for level in described.levels) if described else (1,)
    what = f"{name}, torch {torch.__version__}, {'x'.join(map(str, sizes))}, {selected}"
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        watch = Stopwatch(
            world, selected, Notebook.open(unfinished, what), progress or (lambda _: None)
        )
        measured = _measure(watch, described, name, sizes)
    finally:
        torch.set_float32_matmul_precision(precision)
    try:
        measured.check()
    except ValueError as error:
        raise ClusterError(f"profile of {measured.device}: {error}") from None
    return measured


def _measure(
    watch: Stopwatch, cluster: Cluster | None, name: str, sizes: tuple[int, ...]
) -> Profile:
    on_links = cluster if watch.peers.world.size > 1 else None
    launch_ns = kernels.launch_ns(watch)
    matmuls, attentions = tuple(kernels.matmuls(watch)), tuple(kernels.attentions(watch))
    pointwise = tuple(kernels.pointwise_ops(watch))
    sent = tuple(links.collectives(watch, on_links)) if on_links else ()
    return Profile(
        schema=PROFILE_VERSION,
        device=name,
        kind=watch.device.type,
        torch=str(torch.__version__),
        cluster=cluster.name if cluster else "",
        sizes=sizes,
        memory_bytes=_memory_bytes(watch.device),
        launch_ns=launch_ns,
        matmuls=matmuls,
        attentions=attentions,
        pointwise=pointwise,
        collectives=sent,
        overlaps=tuple(links.overlaps(watch, on_links, sent)) if on_links else (),
        left_out=tuple(watch.left_out),
    )


def _world(device: str | torch.device | None) -> World:
    """The ranks that measure, each on its own device."""
    if place_of_process()[1] == 1:
        return World(0, 1, _device(device))
    return join(torch.device("cpu"), None if device is None else _device(device).type)


def _described(cluster: Cluster | str | os.PathLike[str] | None, world: World) -> Cluster | None:
    """How the ranks are joined; None for one device that no preset is of."""
    if cluster is None:
        try:
            return parse_cluster(world.cluster)
        except ClusterError:
            if world.size > 1:
                raise
            return None
    cluster = cluster if isinstance(cluster, Cluster) else parse_cluster(cluster)
    if cluster.num_devices != world.size or cluster.device.kind != world.device.type:
        raise ClusterError(
            f"cluster {cluster.name} has {cluster.num_devices} devices of kind "
            f"{cluster.device.kind}, and {world.size} of kind {world.device.type} are at hand: "
            "start as many processes with torchrun"
        )
    return cluster


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ClusterError(f"{device!r} is not a device: {str(error).splitlines()[0]}") from None
    if target.type not in ("cuda", "cpu"):
        raise ClusterError(f"{target} cannot be profiled: only CUDA devices and the CPU can")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ClusterError(
            f"there is no device {target} here: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    if target == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    lines = text_of("/proc/cpuinfo").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
