"""Calibration: sums to check by hand, a file that `estimate` reads, and a GPU's path by stand-ins."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_tables import DATA

pytest.importorskip("torch")

import torch

from meshwise.calibrate.cluster_file import fit_link
from meshwise.core.errors import PlanError
from meshwise.cost.collective import collective_s
from meshwise.machine.efficiency import IDEAL, constants
from meshwise.machine.hardware import Link, find_cluster
from meshwise.runtime import calibrate as measure
from meshwise.runtime.calibrate import COLLECTIVES, Sample, calibrate, from_samples
from ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def samples() -> Iterator[list[Sample]]:
    """Everything that `calibrate --quick` measures on this machine."""
    with Ranks(2) as pool:
        yield [*measure.op_samples("cpu", True), *pool.call(measure.collective_samples, True)[0]]


def test_rates_are_work_by_time(samples: list[Sample]) -> None:
    """FLOP and bytes written out; the rate times the time is the work."""
    work = {
        ("gemm", "256x256x128", "fp32"): 2 * 256 * 256 * 128,
        ("gemm", "64x256x256", "bf16"): 2 * 64 * 256 * 256,
        ("copy", str(32 << 20), "fp32"): 2 * (32 << 20),
        ("multiply-add", "32768", "fp32"): 2 * 32768,
        ("attention", "16x128x128", "bf16"): 4 * 16 * 128 * (128 * 128 / 2),
        ("attention backward", "16x128x128", "bf16"): 10 * 16 * 128 * (128 * 128 / 2),
        ("cast", f"{8 << 20} to bf16", "fp32"): 6 * (8 << 20),
        ("launch", "1", "fp32"): 1,
        ("all_reduce", str(1 << 20), "fp32"): 1 << 20,
    }
    found = {(sample.what, sample.shape, sample.dtype): sample.rate * sample.time_s for sample in samples}
    assert {key: found[key] for key in work} == pytest.approx(work)
    assert all(0 < sample.time_s < 10 for sample in samples)
    assert {sample.what for sample in samples} >= set(COLLECTIVES)


def test_the_file_is_read_back(samples: list[Sample], tmp_path: Path, meshwise: Any) -> None:
    file = tmp_path / "here.toml"
    found = from_samples(samples, "cpu", 2)
    found.write(file)
    cluster, made = find_cluster(str(file)), found.cluster
    assert cluster.num_chips == 2
    assert cluster.chip.matrix_flop_per_s == pytest.approx(made.chip.matrix_flop_per_s, rel=1e-3)
    assert cluster.chip.memory_bytes_per_s == pytest.approx(made.chip.memory_bytes_per_s, rel=1e-3)
    for read, level in zip(cluster.levels, made.levels, strict=True):
        assert read.bytes_per_s == pytest.approx(level.bytes_per_s, rel=1e-3)
        assert read.latency_s == pytest.approx(level.latency_s, rel=1e-3)
    assert constants(cluster.chip) is IDEAL  # the rates are what kernels reach
    words = ["--cluster", str(file), "--plan", "tp=2,dtype=fp32", "--batch", "2", "--seq", "64", "--json"]
    model = str(DATA / "tiny_llama.json")
    assert meshwise("estimate", model, *words).document["step_s"] > 0


@pytest.mark.parametrize(("ranks", "latency_s"), [(2, 0.0), (3, 1e-3), (8, 5e-6)])
def test_a_link_is_found_again(latency_s: float, ranks: int) -> None:
    """Times made by the formula give the link that made them."""
    links = (Link(3e9, latency_s, math.inf),)
    made = [
        (kind, float(size), ranks, float(collective_s(kind, size, ranks, links=links)))
        for kind in COLLECTIVES
        for size in (1 << 12, 1 << 20, 1 << 25)
    ]
    assert fit_link(made) == pytest.approx((3e9, latency_s), rel=1e-6, abs=1e-15)


# --- the path of a GPU ---------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A stand-in for torch.cuda: the properties of a chip."""

    def make(capability: tuple[int, int] = (9, 0)) -> None:
        properties = SimpleNamespace(L2_cache_size=50 << 20)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return make


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((7, 0), ("fp16", "fp32", "fp64")),
        ((8, 0), ("bf16", "fp16", "tf32", "fp32", "fp64")),
        ((9, 0), ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64")),
    ],
)
def test_dtypes_of_a_gpu(capability: tuple[int, int], dtypes: tuple[str, ...], gpu: Any) -> None:
    gpu(capability)
    assert measure.gemm_dtypes("cuda") == dtypes


@pytest.mark.parametrize(("side", "sets"), [(512, 64), (2048, 7), (8192, 1)])
def test_no_operand_is_left_in_the_cache(side: int, sets: int, gpu: Any) -> None:
    """A and B in bf16 are 1, 16 and 256 MiB; the cache of 50 MiB is passed twice before they come again."""
    gpu()
    operand_bytes = 2 * side * side * 2
    assert measure._num_operands(operand_bytes, "cuda") == sets
    assert sets == 64 or (sets - 1) * operand_bytes <= 100 << 20 < sets * operand_bytes


@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp16", "tf32", "fp32", "fp64"])
def test_every_matmul_of_a_gpu_is_one(dtype: str) -> None:
    """The calls are the GPU's, here on a CPU: A [m,k] times B [k,n] leaves [m,n]."""
    call = measure.gemm(dtype, 64, 32, 48, "cpu")
    assert call().shape == (64, 32)


def test_memory_of_a_gpu_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: str, quick: bool) -> list[Sample]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("meshwise.runtime.calibrate.op_samples", full)
    with pytest.raises(PlanError, match="free memory does not hold the operands"):
        calibrate("cuda")


# --- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.0, 60.0])
def test_command(meshwise: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: float) -> None:
    file = tmp_path / "here.toml"
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    outcome = meshwise("calibrate", "--quick", "--ranks", "1", "-o", str(file), "--json")
    document = json.loads(outcome.out)
    assert document["file"] == str(file) and document["num_ranks"] == 1
    assert ["kept 60.0 of" in note for note in document["notes"]] == [True] * bool(load)
    assert find_cluster(str(file)).chip.memory_bytes_per_s > 0
