"""Profiles: measured on this machine in small, written, read back, and put into a price."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

from autopar.cli.main import main
from autopar.cluster.devices import DEVICES
from autopar.cluster.measured import device_from_profile
from autopar.cluster.profile import PROFILE_VERSION, LeftOut, Matmul, Pointwise, Profile
from autopar.cost_model.roofline import matmul_s, pointwise_s, stream_s
from autopar.errors import ClusterError
from autopar.ir.graph import itemsize
from autopar.runtime.measuring import kernels, measure, stopwatch
from autopar.runtime.measuring.cases import cases
from autopar.runtime.measuring.measure import profile
from autopar.runtime.process.world import World
from autopar.runtime.torch_private import TorchDispatchMode

CPU = next(device for device in DEVICES.values() if device.kind == "cpu")


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Generator[None]:
    """Objects of the tests before these are not looked at by the collection before each entry: it
    takes half a second where there are millions."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def found(small_heap: None) -> Profile:
    return profile("cpu", quick=True)


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of the list, measured once, briefly and on one set of operands, where no figure
    is looked at."""
    brief = replace(cases("cpu", quick=True), repeats=1, round_s=1e-4)
    monkeypatch.setattr(kernels, "_MAX_COPIES", 1)
    monkeypatch.setattr(measure, "cases", lambda *_, **__: brief)


def made_up(*, kind: str = "cuda") -> Profile:
    return Profile(
        schema=PROFILE_VERSION,
        device="Device of the test",
        kind=kind,
        torch="2.13.0",
        cluster="H100",
        sizes=(1,),
        memory_bytes=2**36,
        launch_ns=4_000,
        matmuls=(
            Matmul(512, 512, 512, "bfloat16", 2_000),
            Matmul(8192, 8192, 8192, "bfloat16", 1_400_000),
            Matmul(4096, 4096, 4096, "float32", 2_600_000),
        ),
        attentions=(),
        # The small one comes from a cache: its rate is no ceiling of the memory.
        pointwise=(Pointwise(2**20, "float32", 200), Pointwise(2**31, "float32", 716_000)),
        collectives=(),
        overlaps=(),
        left_out=(LeftOut("matmul 1x1x1 float64", "out of memory"),),
    )


def test_every_entry_of_the_list_is_measured(found: Profile) -> None:
    wanted = cases("cpu", quick=True)
    assert [(e.m, e.k, e.n, e.dtype) for e in found.matmuls] == list(wanted.matmuls)
    assert [(e.batch, e.heads, e.sequence, e.head_dim, e.dtype) for e in found.attentions] == list(
        wanted.attentions
    )
    assert [(e.num_bytes, e.dtype) for e in found.pointwise] == [
        (3 * elements * itemsize(dtype), dtype) for elements, dtype in wanted.pointwise
    ]
    assert (found.kind, found.collectives, found.left_out) == ("cpu", (), ())


def test_larger_takes_longer(found: Profile) -> None:
    small, *_, large = (e for e in found.matmuls if e.dtype == "float32")
    assert small.flops * 64 == large.flops
    assert small.time_ns < large.time_ns
    assert found.pointwise[0].time_ns < found.pointwise[-1].time_ns
    assert 10 < found.launch_ns < 1_000_000


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_lists_have_what_a_profile_must_have(kind: str, quick: bool) -> None:
    wanted = cases(kind, quick=quick)
    assert "float32" in {dtype for *_, dtype in wanted.matmuls}
    assert wanted.pointwise
    assert len(set(wanted.matmuls)) == len(wanted.matmuls)


@pytest.mark.gpu
def test_cuda_is_measured() -> None:
    found = profile("cuda", quick=True)
    assert found.kind == "cuda"
    assert found.left_out == ()


def test_file_reads_back(found: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    found.save(path)
    assert Profile.load(path) == found
    assert path.read_bytes() == found.to_bytes()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b'"time_ns": 1400000', b'"time_ns": 0', r"matmuls\[1\].time_ns"),
        (b'"time_ns": 1400000', b'"time_ns": 1.5', r"matmuls\[1\].time_ns"),
        (b'"time_ns": 1400000', b'"time_ns":  1400000', "not in canonical form"),
        (b'"kind"', b'"kin"', "unknown field `kin`"),
        (b'"schema": 2', b'"schema": 3', "schema version 3"),
        (b'"float32"', b'"float33"', "unknown dtype 'float33'"),
        (b'"float32"', b'"float64"', "no float32 matmul.*1x1x1 float64 was left out"),
    ],
)
def test_damaged_file_is_refused(old: bytes, new: bytes, complaint: str) -> None:
    data = made_up().to_bytes()
    assert data.count(old) >= 1
    with pytest.raises(ClusterError, match=f"lab.json: .*{complaint}"):
        Profile.from_bytes(data.replace(old, new, 1), "lab.json")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read profile .*none\.json: No such file"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ClusterError, match=r"cannot write profile .*: No such file"):
        made_up().save(tmp_path / "no" / "where.json")


@pytest.mark.parametrize("index", [1, 2])
def test_price_gives_measured_matmuls_back(index: int) -> None:
    device = device_from_profile(made_up(), DEVICES["H100"])
    entry = made_up().matmuls[index]
    predicted_s = matmul_s(entry.m * entry.n, entry.k, entry.num_bytes, entry.dtype, device)
    assert predicted_s == pytest.approx(entry.time_ns * 1e-9, rel=1e-12)


def test_price_gives_measured_pointwise_op_back() -> None:
    device = device_from_profile(made_up(), DEVICES["H100"])
    assert stream_s(2**31, device) == pytest.approx(716e-6, rel=1e-12)
    assert pointwise_s(2**20, device, device.kernels.pointwise, starts=True) == pytest.approx(2e-7)


def test_a_cpu_takes_longer_for_an_op_among_others() -> None:
    """By as much for each: points were measured of one op that is called again and again."""
    matmuls = tuple(
        Matmul(m, k, m, "float32", m * m * k // 8 + 2_000) for m in (8, 512) for k in (8, 512)
    )
    points = (Pointwise(2**13, "float32", 1_000), Pointwise(2**31, "float32", 716_000_000))
    given = msgspec.structs.replace(made_up(kind="cpu"), matmuls=matmuls, pointwise=points)
    apart, among = (
        device_from_profile(msgspec.structs.replace(given, launch_ns=ns), CPU)
        for ns in (500, 4_000)
    )
    part = CPU.kernels.pointwise
    for num_bytes in (2**13, 2**20, 2**31):
        longer = [pointwise_s(num_bytes, each, part, starts=True) for each in (apart, among)]
        assert longer[1] - longer[0] == pytest.approx(3e-6)
        longer = [pointwise_s(num_bytes, each, part, starts=False) for each in (apart, among)]
        assert longer[1] == longer[0]
    for side in (8, 512):
        longer = [matmul_s(side * side, side, 1, "float32", each) for each in (apart, among)]
        least_s = matmuls[0].time_ns * 1e-9
        assert longer[1] - longer[0] == pytest.approx(4e-6 - least_s)


class Counting(TorchDispatchMode):
    """How many ops are called."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_launch_is_the_mean_of_so_many_ops() -> None:
    x, weight = torch.randn(4, 8, 16), torch.randn(16, 16)
    with Counting() as counting:
        made = kernels.ops_of_a_layer(x, weight)
    assert counting.count == kernels.OPS_PER_ROUND
    assert made.shape == x.shape


def test_device_keeps_what_was_not_measured() -> None:
    device = device_from_profile(made_up(), DEVICES["H100"])
    assert device.peak("float64") == DEVICES["H100"].peak("float64")
    assert device.memory_bytes == DEVICES["H100"].memory_bytes
    assert device.launch_s == pytest.approx(4e-6)
    told = f"profile {made_up().digest} of Device of the test with torch 2.13.0; float16"
    assert device.source.startswith(told)
    assert "bfloat16" not in device.source


def test_matmul_bound_by_memory_gives_no_absurd_peak() -> None:
    base = made_up()
    thin = Matmul(1, 2**15, 2**15, "float32", 700_000)
    device = device_from_profile(msgspec.structs.replace(base, matmuls=(thin,)), DEVICES["H100"])
    assert device.peak("float32") == pytest.approx(thin.flops / (0.849 * 0.9 * 700e-6))


def test_profile_of_another_kind_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"Device of the test, kind cuda; .* cpu is of kind cpu"):
        device_from_profile(made_up(), CPU)


@pytest.mark.usefixtures("short_rounds")
def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(12 * elements for elements, _ in cases("cpu", quick=True).pointwise)
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 2 * largest - 1)
    found = profile("cpu", quick=True)
    assert [gap.entry for gap in found.left_out] == [f"pointwise {largest // 12} float32"]
    assert found.left_out[0].reason == f"needs {largest} bytes, and {2 * largest - 1} are free"
    assert found.pointwise


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory\nsee docs"), MemoryError("out of memory")]
)
def test_running_out_of_memory_leaves_one_entry_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    multiply = torch.mm

    def greedy(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if len(a) > 128 and a.shape[1] > 64:
            raise error
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", greedy)
    found = profile("cpu", quick=True)
    assert found.left_out == (LeftOut("matmul 256x256x256 float32", "out of memory"),)
    assert [e.m for e in found.matmuls] == [64, 64, 256, 128]


@pytest.mark.usefixtures("short_rounds")
def test_no_memory_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 0)
    with pytest.raises(ClusterError, match=r"no float32 matmul.*left out: needs 49152 bytes, and"):
        profile("cpu", quick=True)


@pytest.mark.usefixtures("short_rounds")
def test_progress_names_entries_and_settings_are_put_back() -> None:
    told: list[str] = []
    torch.set_float32_matmul_precision("high")
    try:
        profile("cpu", quick=True, progress=told.append)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "matmul 128x128x128 float64" in told


@pytest.mark.parametrize("name", ["cuda:99", "meta", "toaster"])
def test_a_device_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(ClusterError, match=name):
        profile(name, quick=True)


@pytest.mark.usefixtures("short_rounds")
def test_command_writes_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    done = CliRunner().invoke(main, ["profile", "--device", "cpu", "--quick", "-o", str(path)])
    assert (done.exit_code, done.output) == (0, "")
    assert Profile.load(path).kind == "cpu"


def test_command_names_a_device_that_is_not_there() -> None:
    done = CliRunner().invoke(main, ["profile", "--device", "cuda:99"])
    assert done.exit_code == 1
    assert done.stderr.startswith("autopar: error: there is no device cuda:99 here: torch ")


@pytest.mark.usefixtures("short_rounds")
def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    kept, told = tmp_path / "unfinished", list[str]()

    def cut_off(name: str) -> None:
        told.append(name)
        if name.startswith("pointwise"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile("cpu", quick=True, progress=cut_off, unfinished=kept)
    before = msgspec.json.decode(kept.read_bytes(), type=stopwatch.Notebook).times_ns
    rest: list[str] = []
    found = profile("cpu", quick=True, progress=rest.append, unfinished=kept)
    assert list(before) == told[:-1]
    assert not set(before) & set(rest)
    assert [e.time_ns for e in found.matmuls] == [
        before[f"matmul {m}x{k}x{n} {dtype}"][0]
        for m, k, n, dtype in cases("cpu", quick=True).matmuls
    ]
    again: list[str] = []
    profile("cpu", progress=again.append, unfinished=kept, quick=True)
    assert again == []


@pytest.mark.usefixtures("short_rounds")
def test_what_was_measured_elsewhere_is_measured_again(tmp_path: Path) -> None:
    kept = tmp_path / "unfinished"
    kept.write_bytes(msgspec.json.encode(stopwatch.Notebook("lab", {"launch of ops": (1,)})))
    assert profile("cpu", quick=True, unfinished=kept).launch_ns > 1


def test_a_cluster_that_is_not_at_hand_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"cluster 2xcpu has 2 devices .* 1 of kind cpu are"):
        profile("cpu", quick=True, cluster="2xcpu")


def test_one_run_that_had_to_wait_does_not_make_rounds_short() -> None:
    """Rounds that are shorter than a turn on a core say nothing of whom it is shared with."""
    waited, count = 2, 0

    def run() -> None:
        nonlocal waited, count
        count += 1
        if waited and count > 1:
            waited -= 1
            time.sleep(0.005)

    wanted = replace(cases("cpu", quick=True), round_s=0.002)
    world = World(0, 1, torch.device("cpu"))
    watch = stopwatch.Stopwatch(world, wanted, stopwatch.Notebook("lab"), lambda _: None)
    assert watch.attempt("short", 0, lambda: (run,))
    assert count > 1000
