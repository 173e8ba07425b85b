"""The hardware catalog against published figures, against first principles, and against bad input.

Three kinds of proof. Golden: figures as their makers print them (often per board or rack, with sparsity,
or both directions added), converted here and not in the catalog. Oracle: a peak is cores x FLOP per
clock x clock, a memory bandwidth is bus width x data rate. Properties: what every entry must obey.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.errors import ClusterError
from meshwise.machine.hardware import (
    Chip,
    Cluster,
    chips,
    cluster_names,
    cluster_text,
    find_chip,
    find_cluster,
    parse_cluster,
    rates,
    sliced,
)

CHIPS = sorted(chips())
CLUSTERS = sorted(cluster_names())
GIB = 2.0**30
T = 1e12
SPARSE = 2.0  # 2:4 sparsity doubles the printed peak
BOTH = 2.0  # link rates are printed with both directions added


def check_close(actual: float, expected: float, rel: float = 5e-3) -> None:
    assert actual == pytest.approx(expected, rel=rel)


# --- golden: figures as published -----------------------------------------------------------------

MATRIX = [
    ("NVIDIA V100 datasheet, SXM2", "v100-16g-sxm", {"fp16": 125}),
    ("NVIDIA V100 datasheet, SXM2", "v100-32g-sxm", {"fp16": 125}),
    ("NVIDIA A100 datasheet", "a100-40g-sxm", {"fp64": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    ("NVIDIA A100 datasheet", "a100-80g-sxm", {"fp64": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    ("NVIDIA A100 datasheet", "a100-40g-pcie", {"fp64": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    ("NVIDIA A100 datasheet", "a100-80g-pcie", {"fp64": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    ("NVIDIA A800 datasheet", "a800-80g-sxm", {"fp64": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    (
        "NVIDIA H100 datasheet, SXM, with sparsity",
        "h100-80g-sxm",
        {
            "fp64": 67,
            "tf32": 989 / SPARSE,
            "bf16": 1979 / SPARSE,
            "fp16": 1979 / SPARSE,
            "fp8": 3958 / SPARSE,
        },
    ),
    (
        "NVIDIA H100 datasheet, PCIe, with sparsity",
        "h100-80g-pcie",
        {
            "fp64": 51,
            "tf32": 756 / SPARSE,
            "bf16": 1513 / SPARSE,
            "fp16": 1513 / SPARSE,
            "fp8": 3026 / SPARSE,
        },
    ),
    ("torchtitan H100 96 GB benchmarks, H100 peak", "h100-96g-sxm", {"bf16": 989}),
    (
        "NVIDIA H800 datasheet, with sparsity",
        "h800-80g-sxm",
        {"fp64": 1, "tf32": 989 / SPARSE, "bf16": 1979 / SPARSE, "fp8": 3958 / SPARSE},
    ),
    ("NVIDIA H20 datasheet", "h20-96g-sxm", {"fp64": 1, "tf32": 74, "bf16": 148, "fp16": 148, "fp8": 296}),
    (
        "NVIDIA H200 datasheet, SXM, with sparsity",
        "h200-sxm",
        {"fp64": 67, "tf32": 989 / SPARSE, "bf16": 1979 / SPARSE, "fp8": 3958 / SPARSE},
    ),
    (
        "NVIDIA HGX B200, 8 GPUs, with sparsity",
        "b200-sxm",
        {
            "fp64": 296 / 8,
            "tf32": 18e3 / 8 / SPARSE,
            "bf16": 36e3 / 8 / SPARSE,
            "fp8": 72e3 / 8 / SPARSE,
            "fp4": 144e3 / 8 / SPARSE,
        },
    ),
    (
        "NVIDIA GB200 NVL72, 72 GPUs, with sparsity",
        "gb200",
        {
            "fp64": 2880 / 72,
            "tf32": 180e3 / 72 / SPARSE,
            "bf16": 360e3 / 72 / SPARSE,
            "fp8": 720e3 / 72 / SPARSE,
            "fp4": 1440e3 / 72 / SPARSE,
        },
    ),
    (
        "NVIDIA DGX B300, 8 GPUs, with sparsity but fp4 dense",
        "b300-sxm",
        {"bf16": 36e3 / 8 / SPARSE, "fp8": 72e3 / 8 / SPARSE, "fp4": 108e3 / 8},
    ),
    (
        "NVIDIA GB300 NVL72, 72 GPUs, with sparsity but fp4 dense",
        "gb300",
        {"bf16": 360e3 / 72 / SPARSE, "fp8": 720e3 / 72 / SPARSE, "fp4": 1080e3 / 72},
    ),
    ("NVIDIA L40S datasheet", "l40s", {"tf32": 183, "bf16": 362.05, "fp16": 362.05, "fp8": 733}),
    (
        "AMD MI250X datasheet, two GCDs",
        "mi250x",
        {"fp64": 95.7 / 2, "fp32": 95.7 / 2, "bf16": 383 / 2, "fp16": 383 / 2},
    ),
    (
        "AMD MI300X datasheet",
        "mi300x",
        {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
    ),
    ("Google Cloud TPU v4", "tpu-v4", {"bf16": 275}),
    ("Google Cloud TPU v5p", "tpu-v5p", {"bf16": 459, "fp8": 459}),
    ("Google Cloud TPU v5e", "tpu-v5e", {"bf16": 197}),
    ("Google Cloud TPU v6e", "tpu-v6e", {"bf16": 918}),
    ("Google Cloud TPU7x", "tpu-v7", {"bf16": 2307, "fp8": 4614}),
    ("Ada whitepaper, fp32 accumulation", "rtx-4090", {"tf32": 82.6, "bf16": 165.2, "fp8": 330.3}),
    (
        "NVIDIA L4 datasheet, with sparsity",
        "l4",
        {"tf32": 120 / SPARSE, "bf16": 242 / SPARSE, "fp8": 485 / SPARSE},
    ),
    ("RTX Blackwell whitepaper, fp32 accumulation", "rtx-5090", {"bf16": 209.5, "fp8": 419, "fp4": 1676}),
    ("NVIDIA RTX PRO 6000, with sparsity", "rtx-pro-6000", {"bf16": 1e3 / SPARSE, "fp4": 4e3 / SPARSE}),
    ("NVIDIA DGX Spark, with sparsity", "dgx-spark", {"fp4": 1e3 / SPARSE}),
    (
        "NVIDIA Vera Rubin NVL72, 72 GPUs",
        "vr200",
        {"bf16": 288e3 / 72, "fp8": 1260e3 / 72, "fp4": 2520e3 / 72},
    ),
    ("AMD MI325X datasheet", "mi325x", {"fp64": 163.4, "bf16": 1307.4, "fp8": 2614.9}),
    ("AMD MI350X datasheet", "mi350x", {"fp64": 72.1, "bf16": 2300, "fp8": 4600, "fp4": 9200}),
    ("AMD MI355X datasheet", "mi355x", {"fp64": 78.6, "bf16": 2516, "fp8": 5033, "fp4": 10066}),
    ("AWS Neuron documentation", "trainium2", {"fp32": 181, "bf16": 667, "fp8": 1299}),
    ("AWS Neuron documentation", "trainium3", {"fp32": 183, "bf16": 671, "fp8": 2517}),
    ("Intel, Hot Chips 2024", "gaudi3", {"bf16": 1835, "fp8": 1835}),
]


@pytest.mark.parametrize(("source", "name", "tflop_per_s"), MATRIX, ids=[f"{s}-{n}" for s, n, _ in MATRIX])
def test_matrix_peaks_are_the_published_dense_ones(
    source: str, name: str, tflop_per_s: dict[str, float]
) -> None:
    for dtype, published in tflop_per_s.items():
        check_close(find_chip(name).matrix_peak(dtype), published * T)


def test_every_chip_has_published_peaks_to_be_held_against() -> None:
    assert {name for _, name, _ in MATRIX} == set(CHIPS)


LINKS = [  # chip, GB/s as printed for the innermost level, what the print adds up, ranks in its domain
    ("NVIDIA V100 datasheet", "v100-16g-sxm", 300 / BOTH, 8),
    ("NVIDIA A100 datasheet", "a100-80g-sxm", 600 / BOTH, 8),
    ("NVIDIA A100 datasheet, PCIe Gen4", "a100-80g-pcie", 64 / BOTH, 8),
    ("NVIDIA A800 datasheet", "a800-80g-sxm", 400 / BOTH, 8),
    ("NVIDIA H100 datasheet", "h100-80g-sxm", 900 / BOTH, 8),
    ("NVIDIA H100 datasheet, PCIe Gen5", "h100-80g-pcie", 128 / BOTH, 8),
    ("NVIDIA H800 datasheet", "h800-80g-sxm", 400 / BOTH, 8),
    ("NVIDIA H20 datasheet", "h20-96g-sxm", 900 / BOTH, 8),
    ("NVIDIA H200 datasheet", "h200-sxm", 900 / BOTH, 8),
    ("NVIDIA DGX B200 datasheet, 8 GPUs", "b200-sxm", 14.4e3 / 8 / BOTH, 8),
    ("NVIDIA GB200 NVL72, 72 GPUs", "gb200", 130e3 / 72 / BOTH, 72),
    ("NVIDIA GB300 NVL72, 72 GPUs", "gb300", 130e3 / 72 / BOTH, 72),
    ("NVIDIA L40S datasheet, PCIe Gen4", "l40s", 64 / BOTH, 8),
    ("Frontier user guide, GCDs of one MI250X", "mi250x", 200, 2),
    ("AMD MI300X platform, 7 links of 128 GB/s", "mi300x", 7 * 128 / BOTH, 8),
    ("Jouppi et al. ISCA 2023, 6 links of 50 GB/s", "tpu-v4", 6 * 50, 16 * 16 * 16),
    ("Google Cloud TPU v5p, both directions", "tpu-v5p", 1200 / BOTH, 16 * 20 * 28),
    ("Google Cloud TPU v5e, both directions", "tpu-v5e", 400 / BOTH, 16 * 16),
    ("Google Cloud TPU v6e, both directions", "tpu-v6e", 800 / BOTH, 16 * 16),
    ("Google Cloud TPU7x, both directions", "tpu-v7", 1200 / BOTH, 9216),
    ("AMD CDNA 4 whitepaper, 7 links of 153.6 GB/s", "mi355x", 7 * 153.6 / BOTH, 8),
    ("NVIDIA Vera Rubin NVL72", "vr200", 3600 / BOTH, 72),
    ("AWS Neuron documentation, NeuronLink-v3 in an instance", "trainium2", 1024 / BOTH, 16),
    ("Intel, 21 of 24 ports of 200 Gb/s", "gaudi3", 21 * 200 / 8, 8),
]


@pytest.mark.parametrize(
    ("source", "name", "gb_per_s", "ranks"), LINKS, ids=[f"{r[0]}-{r[1]}" for r in LINKS]
)
def test_the_innermost_link_is_the_published_one_per_direction(
    source: str, name: str, gb_per_s: float, ranks: int
) -> None:
    level = find_chip(name).levels[0]
    check_close(level.bytes_per_s, gb_per_s * 1e9)
    assert level.ranks == ranks


ADAPTERS = [  # cluster, Gb/s of network per node, ranks per node
    ("NVIDIA DGX A100 datasheet, 8 x 200 Gb/s", "dgx-a100", 8 * 200, 8),
    ("NVIDIA DGX H100 datasheet, 8 x 400 Gb/s", "dgx-h100", 8 * 400, 8),
    ("NVIDIA DGX H200 datasheet, 8 x 400 Gb/s", "dgx-h200", 8 * 400, 8),
    ("NVIDIA DGX B200 datasheet, 8 x 400 Gb/s", "dgx-b200", 8 * 400, 8),
    ("NVIDIA DGX B300 datasheet, 8 x 800 Gb/s", "dgx-b300", 8 * 800, 8),
    ("NVIDIA GB200 NVL72, 72 x 400 Gb/s", "gb200-nvl72", 72 * 400, 72),
    ("NVIDIA GB300 NVL72, 72 x 800 Gb/s", "gb300-nvl72", 72 * 800, 72),
    ("SC21 arXiv 2104.04473, 8 x 200 Gb/s", "selene", 8 * 200, 8),
    ("NERSC documentation, 4 x 200 Gb/s", "perlmutter", 4 * 200, 4),
    ("BigScience tr11-176B, 4 x 100 Gb/s", "jean-zay", 4 * 100, 8),
    ("InternEvo train_performance.md, 4 x 100 Gb/s", "internevo-a100", 4 * 100, 8),
    ("llm-foundry benchmarking README, 1600 Gb/s", "mosaicml-a100-40g", 1600, 8),
    ("llm-foundry benchmarking README, 1600 Gb/s", "mosaicml-a100-80g", 1600, 8),
    ("vTrain ground truth, 800 Gb/s", "vtrain-a100", 800, 8),
    ("Frontier user guide, 4 x 200 Gb/s", "frontier", 4 * 200, 8),
]


@pytest.mark.parametrize(("source", "name", "gbit_per_s", "ranks"), ADAPTERS, ids=[r[0] for r in ADAPTERS])
def test_the_network_of_a_node_is_shared_by_its_ranks(
    source: str, name: str, gbit_per_s: float, ranks: int
) -> None:
    node, network = find_cluster(name).levels[-2:]
    assert node.ranks == ranks
    check_close(network.bytes_per_s * ranks, gbit_per_s * 1e9 / 8)


SIZES = [
    ("TOP500 Nov 2020: 555,520 cores, per node 2 x 64 of CPU and 8 x 108 SM", "selene", 555_520 / 992 * 8),
    ("NERSC documentation: 1536 nodes of 4", "perlmutter", 1536 * 4),
    ("IDRIS: 52 nodes of 8", "jean-zay", 52 * 8),
    ("OLCF: 9,856 nodes of 4 MI250X", "frontier", 9856 * 8),
    ("NVIDIA GB200 NVL72", "gb200-nvl72", 72),
]


@pytest.mark.parametrize(("source", "name", "num_chips"), SIZES, ids=[r[0] for r in SIZES])
def test_systems_have_their_real_size(source: str, name: str, num_chips: float) -> None:
    assert find_cluster(name).num_chips == num_chips


DRIVER_MIB = [  # what nvidia-smi prints as total; a framework sees up to 3 % less
    ("nvidia-smi A100-SXM4-40GB", "a100-40g-sxm", 40960),
    ("nvidia-smi A100-SXM4-80GB", "a100-80g-sxm", 81920),
    ("nvidia-smi H100 80GB HBM3", "h100-80g-sxm", 81559),
    ("nvidia-smi H20", "h20-96g-sxm", 97871),
    ("nvidia-smi H200", "h200-sxm", 143771),
    ("nvidia-smi B200", "b200-sxm", 183359),
    ("nvidia-smi B300 SXM6 AC", "b300-sxm", 275040),
    ("nvidia-smi GB200", "gb200", 189471),
    ("nvidia-smi GB300", "gb300", 284208),
    ("nvidia-smi L40S", "l40s", 46068),
    ("nvidia-smi L4", "l4", 23034),
    ("nvidia-smi GeForce RTX 4090", "rtx-4090", 24564),
    ("nvidia-smi GeForce RTX 5090", "rtx-5090", 32607),
    ("nvidia-smi RTX PRO 6000 Blackwell", "rtx-pro-6000", 97887),
    ("HBM of MI325X, GiB", "mi325x", 256 * 1024),
    ("HBM of MI355X, GiB", "mi355x", 288 * 1024),
    ("HBM of TPU v4, GiB", "tpu-v4", 32 * 1024),
    ("HBM of TPU v5e, GiB", "tpu-v5e", 16 * 1024),
    ("HBM of TPU v6e, GiB", "tpu-v6e", 32 * 1024),
    ("HBM of MI250X, GiB, two GCDs", "mi250x", 128 * 1024 / 2),
    ("HBM of MI300X, GiB", "mi300x", 192 * 1024),
]


@pytest.mark.parametrize(("source", "name", "mib"), DRIVER_MIB, ids=[r[0] for r in DRIVER_MIB])
def test_memory_is_what_the_driver_reports_less_its_reserve(source: str, name: str, mib: float) -> None:
    driver_bytes = mib * 2**20
    tpu_reserve = 0.04 if name.startswith("tpu") else 0.0
    assert (0.965 - tpu_reserve) * driver_bytes < find_chip(name).memory_bytes < driver_bytes


def test_the_nersc_notebook_has_its_own_machine() -> None:
    cluster = find_cluster("nersc-notebook")
    machine = rates(cluster, "fp16")
    assert cluster.num_chips == 4
    assert cluster.chip.memory_bytes == 40e9
    assert machine.matrix_flop_per_s == 312e12
    assert machine.vector_flop_per_s == 78e12
    assert cluster.chip.vector_peak("fp32") == 19.5e12
    assert machine.memory_bytes_per_s == 1555e9
    assert machine.link_bytes_per_s == (600e9, 100e9)
    assert machine.link_latency_s == (0.0, 0.0)
    assert machine.link_ranks[0] == 4
    assert rates(cluster, "bf16").matrix_flop_per_s == machine.matrix_flop_per_s


# --- oracles: a peak is cores x FLOP per clock and core x clock ---------------------------------------

CLOCKS = [  # chip, unit and dtype, FLOP per clock and core, clock in GHz
    ("GV100 whitepaper, boost", "v100-16g-sxm", "matrix", "fp16", 1024, 1.53),
    ("GV100 whitepaper, boost", "v100-16g-sxm", "vector", "fp32", 128, 1.53),
    ("GA100 whitepaper, boost", "a100-80g-sxm", "matrix", "bf16", 2048, 1.41),
    ("GA100 whitepaper, boost", "a100-80g-sxm", "matrix", "tf32", 1024, 1.41),
    ("GA100 whitepaper, boost", "a100-80g-sxm", "vector", "fp32", 128, 1.41),
    ("GA100 whitepaper, boost", "a100-80g-sxm", "vector", "fp16", 512, 1.41),
    ("GA100 whitepaper, boost", "a100-80g-sxm", "vector", "bf16", 256, 1.41),
    ("H100 whitepaper, matrix boost", "h100-80g-sxm", "matrix", "bf16", 4096, 1.83),
    ("H100 whitepaper, matrix boost", "h100-80g-sxm", "matrix", "fp8", 8192, 1.83),
    ("H100 whitepaper, vector boost", "h100-80g-sxm", "vector", "fp32", 256, 1.98),
    ("H100 whitepaper, vector boost", "h100-80g-sxm", "vector", "bf16", 512, 1.98),
    ("H100 whitepaper, PCIe matrix boost", "h100-80g-pcie", "matrix", "bf16", 4096, 1.62),
    ("H100 whitepaper, PCIe vector boost", "h100-80g-pcie", "vector", "fp32", 256, 1.755),
    ("AD102 whitepaper, boost", "l40s", "vector", "fp32", 256, 2.52),
    ("AD102 whitepaper, boost", "l40s", "matrix", "fp8", 2048, 2.52),
    ("AD102 whitepaper, GeForce boost", "rtx-4090", "vector", "fp32", 256, 2.52),
    ("AD102 whitepaper, GeForce boost", "rtx-4090", "matrix", "bf16", 512, 2.52),
    ("RTX Blackwell whitepaper, boost", "rtx-5090", "vector", "fp32", 256, 2.407),
    ("RTX Blackwell whitepaper, boost", "rtx-5090", "matrix", "bf16", 512, 2.407),
    ("CDNA 4 whitepaper, peak engine clock", "mi355x", "matrix", "bf16", 4096, 2.4),
    ("CDNA 4 whitepaper, peak engine clock", "mi350x", "matrix", "fp4", 16384, 2.2),
    ("CDNA 2 whitepaper, peak engine clock", "mi250x", "matrix", "bf16", 1024, 1.7),
    ("CDNA 2 whitepaper, peak engine clock", "mi250x", "vector", "fp32", 128, 1.7),
    ("CDNA 3 whitepaper, peak engine clock", "mi300x", "matrix", "bf16", 2048, 2.1),
    ("CDNA 3 whitepaper, peak engine clock", "mi300x", "matrix", "fp8", 4096, 2.1),
    ("CDNA 3 whitepaper, peak engine clock", "mi300x", "vector", "fp32", 256, 2.1),
    ("Jouppi et al. ISCA 2023, 4 MXU per core", "tpu-v4", "matrix", "bf16", 4 * 2 * 128 * 128, 1.05),
    ("How to Scale Your Model, 4 MXU per core", "tpu-v5e", "matrix", "bf16", 4 * 2 * 128 * 128, 1.5),
    ("How to Scale Your Model, VPU 8 x 128 x 4", "tpu-v5e", "vector", "fp32", 8 * 128 * 4, 1.5),
    ("How to Scale Your Model, VPU 8 x 128 x 4", "tpu-v5p", "vector", "fp32", 8 * 128 * 4, 1.75),
]


@pytest.mark.parametrize(
    ("source", "name", "unit", "dtype", "flop_per_clock", "ghz"),
    CLOCKS,
    ids=[f"{r[0]}-{r[1]}-{r[2]}-{r[3]}" for r in CLOCKS],
)
def test_peak_is_cores_times_flop_per_clock_times_clock(
    source: str, name: str, unit: str, dtype: str, flop_per_clock: int, ghz: float
) -> None:
    chip = find_chip(name)
    peak = chip.matrix_peak(dtype) if unit == "matrix" else chip.vector_peak(dtype)
    check_close(peak, chip.num_cores * flop_per_clock * ghz * 1e9, rel=1e-2)


BUSES = [  # chip, bus width in bits, data rate per pin in Gb/s
    ("V100 HBM2, 4 stacks at 877 MHz", "v100-16g-sxm", 4096, 2 * 0.877),
    ("A100 40 GB HBM2, 5 stacks at 1215 MHz", "a100-40g-sxm", 5120, 2 * 1.215),
    ("A100 80 GB HBM2e, 5 stacks at 1593 MHz", "a100-80g-sxm", 5120, 2 * 1.593),
    ("A100 80 GB PCIe HBM2e, 5 stacks at 1512 MHz", "a100-80g-pcie", 5120, 2 * 1.512),
    ("H100 HBM3, 5 stacks at 2619 MHz", "h100-80g-sxm", 5120, 2 * 2.619),
    ("L40S GDDR6 at 18 Gb/s", "l40s", 384, 18.0),
    ("RTX 4090 GDDR6X at 21 Gb/s", "rtx-4090", 384, 21.0),
    ("RTX 5090 GDDR7 at 28 Gb/s", "rtx-5090", 512, 28.0),
    ("L4 GDDR6 at 12.5 Gb/s", "l4", 192, 12.5),
    ("MI250X HBM2e, 4 stacks per GCD at 3.2 Gb/s", "mi250x", 4096, 3.2),
    ("MI300X HBM3, 8 stacks at 5.2 Gb/s", "mi300x", 8192, 5.2),
]


@pytest.mark.parametrize(("source", "name", "bits", "gbit_per_s"), BUSES, ids=[r[0] for r in BUSES])
def test_memory_bandwidth_is_bus_width_times_data_rate(
    source: str, name: str, bits: int, gbit_per_s: float
) -> None:
    check_close(find_chip(name).memory_bytes_per_s, bits / 8 * gbit_per_s * 1e9)


# --- properties of every entry ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_is_documented_and_plausible(name: str) -> None:
    chip = find_chip(name)
    assert chip.source
    assert datetime.date.fromisoformat(chip.checked)
    assert chip.num_cores > 0
    assert 8e9 < chip.memory_bytes < 1e12
    slowest_ms = 500 if name == "dgx-spark" else 80  # LPDDR; to read all of it once
    assert 2 < chip.memory_bytes / chip.memory_bytes_per_s * 1e3 < slowest_ms
    dtype = "fp16" if chip.generation == "volta" else "bf16"
    balance_flop_per_byte = chip.matrix_peak(dtype) / chip.memory_bytes_per_s
    assert 10 < balance_flop_per_byte < 1000


@pytest.mark.parametrize("name", CHIPS)
def test_narrower_types_are_never_slower(name: str) -> None:
    matrix = find_chip(name).matrix_flop_per_s
    peaks = [matrix[d] for d in ("fp64", "fp32", "tf32", "bf16", "fp8", "fp4") if d in matrix]
    assert peaks == sorted(peaks)
    vector = find_chip(name).vector_flop_per_s
    assert vector.get("fp64", 0) <= vector["fp32"] <= vector.get("fp16", math.inf)
    assert max(vector.values()) <= max(matrix.values())


@pytest.mark.parametrize("name", [n for n in CHIPS if find_chip(n).generation not in ("volta", "tpu")])
def test_bf16_matrices_run_at_the_fp16_rate_since_ampere(name: str) -> None:
    assert find_chip(name).matrix_peak("bf16") == find_chip(name).matrix_peak("fp16")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CHIPS
        if "fp8" in find_chip(name).matrix_flop_per_s
        and find_chip(name).generation not in ("tpu", "rubin", "trainium", "gaudi3")
    ],
)
def test_fp8_is_twice_bf16(name: str) -> None:
    check_close(find_chip(name).matrix_peak("fp8"), 2 * find_chip(name).matrix_peak("bf16"), rel=2e-2)


def check_levels(owner: Chip | Cluster) -> None:
    levels = owner.levels
    assert levels[-1].ranks == math.inf
    for inner, outer in pairwise(levels):
        assert inner.ranks < outer.ranks
        assert inner.bytes_per_s >= outer.bytes_per_s
        assert inner.latency_s <= outer.latency_s


@pytest.mark.parametrize("name", CHIPS)
def test_links_of_chips_get_slower_outward_and_never_beat_memory(name: str) -> None:
    check_levels(find_chip(name))
    assert find_chip(name).levels[0].bytes_per_s < find_chip(name).memory_bytes_per_s


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_are_documented_and_their_links_get_slower_outward(name: str) -> None:
    cluster = find_cluster(name)
    check_levels(cluster)
    assert cluster.source
    assert datetime.date.fromisoformat(cluster.checked)
    assert cluster.num_chips >= cluster.levels[0].ranks or len(cluster.levels) == 1
    assert cluster.num_chips % min(8, cluster.levels[0].ranks) == 0


def test_no_name_or_alias_means_two_things() -> None:
    names = [n for name, chip in chips().items() for n in (name, *chip.aliases)] + CLUSTERS
    assert len(names) == len(set(names))
    assert all(n == n.lower() and ":" not in n and "/" not in n for n in names)


# --- finding ----------------------------------------------------------------------------------------

ALIASES = [
    ("h100", "h100-80g-sxm"),
    ("H100-SXM", "h100-80g-sxm"),
    ("a100", "a100-80g-sxm"),
    ("h200", "h200-sxm"),
    ("h200-141g-sxm", "h200-sxm"),
    (" b200 ", "b200-sxm"),
    ("v100", "v100-16g-sxm"),
]


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_aliases_find_their_chip_in_any_case(alias: str, name: str) -> None:
    assert find_chip(alias) is find_chip(name)
    assert find_cluster(f"{alias}:16").chip is find_chip(name)


def test_a_count_makes_a_cluster_of_a_chip_or_resizes_a_preset() -> None:
    assert find_cluster("a100-80g-sxm:512").num_chips == 512
    assert find_cluster("a100-80g-sxm:512").levels == find_chip("a100-80g-sxm").levels
    assert find_cluster("perlmutter:64").num_chips == 64
    assert [x.name for x in find_cluster("perlmutter:64").levels] == ["nvlink3", "slingshot11"]


NOT_FOUND = [
    ("h1000:8", "h100"),
    ("a100-80gb-sxm:8", "a100-80g-sxm"),
    ("perlmuter", "perlmutter"),
    ("zzz", "dgx-h100"),
    ("", "dgx-h100"),
    ("h100", "h100-80g-sxm:8"),
    ("dgx-h100:", "not a number"),
    ("dgx-h100:0", "from 1"),
    ("dgx-h100:-8", "not a number"),
    ("dgx-h100:8.5", "not a number"),
    ("dgx-h100:eight", "not a number"),
    ("dgx-h100:8:8", "not a number"),
    ("dgx-h100:" + "9" * 5000, "not a number"),
    ("dgx-h100:10000000000", "from 1"),
    ("no/such/file", "no/such/file"),
    ("missing.toml", "missing.toml"),
    ("a\0b.toml", "no file"),
    ("x" * 5000 + "/y.toml", "File name too long"),
]


@pytest.mark.parametrize(("text", "hint"), NOT_FOUND, ids=[t[:20] or "empty" for t, _ in NOT_FOUND])
def test_what_cannot_be_found_is_one_sentence_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ClusterError) as caught:
        find_cluster(text)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_chip_and_a_missing_dtype_name_what_there_is() -> None:
    with pytest.raises(ClusterError, match=r"did you mean .*mi300x"):
        find_chip("mi300")
    with pytest.raises(ClusterError, match=r"v100-16g-sxm has no fp8 units; choose .* fp16"):
        find_chip("v100").matrix_peak("fp8")
    assert find_chip("v100").matrix_peak("fp32") == find_chip("v100").vector_peak("fp32") == 15.7e12
    assert find_chip("v100").vector_peak("bf16") == 15.7e12


# --- users' own files ---------------------------------------------------------------------------------

LEVELS = [
    {"name": "nvlink", "ranks": 4, "bytes_per_s": 200e9, "latency_s": 1e-6},
    {"name": "ethernet", "bytes_per_s": 12.5e9, "latency_s": 2e-5},
]
OWN_CHIP = {
    "vendor": "acme",
    "generation": "first",
    "memory_bytes": 64e9,
    "memory_bytes_per_s": 2e12,
    "matrix_flop_per_s": {"bf16": 500e12},
    "vector_flop_per_s": {"fp32": 50e12},
}
OWN = {"chip": OWN_CHIP, "num_chips": 32, "levels": LEVELS, "source": "our machine room"}


def to_toml(value: Any) -> str:
    """`value` as a TOML value; tables inline."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_toml(str(k))} = {to_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(to_toml(v) for v in value) + "]"
    return repr(value)


def write_toml(path: Path, table: dict[str, Any]) -> str:
    lines = [f"{to_toml(key)} = {to_toml(value)}\n" for key, value in table.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_a_file_of_ones_own_is_a_cluster(tmp_path: Path) -> None:
    cluster = find_cluster(write_toml(tmp_path / "mine.toml", {**OWN, "checked": "2026-11-20"}))
    assert (cluster.name, cluster.num_chips, cluster.chip.vendor) == ("mine", 32, "acme")
    assert [(x.name, x.ranks) for x in cluster.levels] == [("nvlink", 4), ("ethernet", math.inf)]
    assert cluster.chip.levels[0].bytes_per_s == 200e9
    assert (cluster.source, cluster.checked) == ("our machine room", "2026-11-20")
    assert rates(cluster, "bf16").matrix_flop_per_s == 500e12


def test_a_file_may_name_a_chip_of_the_catalog(tmp_path: Path) -> None:
    cluster = find_cluster(write_toml(tmp_path / "pod", {"chip": "h100", "num_chips": 24}))
    assert cluster.chip is find_chip("h100")
    assert cluster.levels == find_chip("h100").levels


def changed(path: str, value: Any) -> dict[str, Any]:
    """`OWN` with the field at the dotted `path` set to `value`, or removed if it is None."""
    table: Any = json.loads(json.dumps(OWN))
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    target = table
    for key in parents:
        target = target[key]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return table


BAD_FIELDS = [
    ("chip", None, "chip"),
    ("chip", "h1000", "h1000"),
    ("chip", 7, "chip"),
    ("num_chips", None, "num_chips"),
    ("num_chips", 0, "num_chips"),
    ("num_chips", -8, "num_chips"),
    ("num_chips", 8.5, "num_chips"),
    ("num_chips", True, "num_chips"),
    ("num_chips", "8", "num_chips"),
    ("num_chips", 10**10, "num_chips"),
    ("num_chips", 10**300, "num_chips"),
    ("num_chip", 8, "num_chip"),
    ("levels", [], "levels"),
    ("levels", {}, "levels"),
    ("levels.0.ranks", None, "ranks"),
    ("levels.0.ranks", 0, "ranks"),
    ("levels.0.ranks", 2.5, "ranks"),
    ("levels.1.ranks", 4, "ranks"),
    ("levels.1.ranks", 2, "ranks"),
    ("levels.0.bytes_per_s", None, "bytes_per_s"),
    ("levels.0.bytes_per_s", 0.0, "bytes_per_s"),
    ("levels.0.bytes_per_s", math.inf, "bytes_per_s"),
    ("levels.0.bytes_per_s", "fast", "bytes_per_s"),
    ("levels.1.latency_s", -1e-6, "latency_s"),
    ("levels.1.latency_s", math.nan, "latency_s"),
    ("chip.vendor", None, "vendor"),
    ("chip.generation", 3, "generation"),
    ("chip.memory_bytes", None, "memory_bytes"),
    ("chip.memory_bytes", math.nan, "memory_bytes"),
    ("chip.memory_bytes", 0, "memory_bytes"),
    ("chip.memory_bytes", -80e9, "memory_bytes"),
    ("chip.memory_bytes", "80 GB", "memory_bytes"),
    ("chip.memory_bytes", 10**400, "memory_bytes"),
    ("chip.memory_bytes_per_s", math.inf, "memory_bytes_per_s"),
    ("chip.matrix_flop_per_s", {"bf16": -1.0}, "matrix_flop_per_s.bf16"),
    ("chip.matrix_flop_per_s", {"bf17": 1e12}, "bf17"),
    ("chip.matrix_flop_per_s", 1e12, "matrix_flop_per_s"),
    ("chip.vector_flop_per_s", {}, "fp32"),
    ("chip.vector_flop_per_s", {"fp32": math.nan}, "vector_flop_per_s.fp32"),
    ("chip.num_cores", -1, "num_cores"),
    ("chip.cache_bytes", -1.0, "cache_bytes"),
    ("chip.op_host_s", -1.0, "op_host_s"),
    ("chip.power_watts", math.nan, "power_watts"),
    ("checked", "yesterday", "checked"),
    ("source", ["a"], "source"),
]


@pytest.mark.parametrize(
    ("path", "value", "named"), BAD_FIELDS, ids=[f"{p}={v!s:.12}" for p, v, _ in BAD_FIELDS]
)
def test_a_bad_field_is_one_sentence_that_names_file_and_field(
    tmp_path: Path, path: str, value: Any, named: str
) -> None:
    file = write_toml(tmp_path / "mine.toml", changed(path, value))
    with pytest.raises(ClusterError) as caught:
        find_cluster(file)
    message = str(caught.value)
    assert file in message
    assert named in message
    assert "\n" not in message


BAD_FILES = [
    (b"chip = ", "not valid TOML"),
    (b"\x00\x01\x02\xff\xfe", "not text"),
    (b"\x7fELF\x02\x01\x01", "not valid TOML"),
    (b"", "missing required field"),
    (b"num_chips = " + b"9" * 5000, "not valid TOML"),
    (b"a = " + b"[" * 60_000, "not valid TOML"),
    (b"a = " + b"[" * 100_000, "more than 65,536 bytes"),
]


@pytest.mark.parametrize(("content", "problem"), BAD_FILES, ids=[repr(c[:12]) for c, _ in BAD_FILES])
def test_a_file_that_is_no_cluster_is_one_sentence(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ClusterError, match=problem) as caught:
        find_cluster(str(file))
    assert str(file) in str(caught.value)


def test_a_directory_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no file is there"):
        find_cluster(str(tmp_path))


# --- fuzz -----------------------------------------------------------------------------------------------


def check_cluster_or_error(text: str) -> None:
    try:
        cluster = find_cluster(text)
    except ClusterError as error:
        assert str(error)
        assert "\n" not in str(error)
    else:
        assert cluster.num_chips >= 1
        assert all(math.isfinite(level.bytes_per_s) and level.bytes_per_s > 0 for level in cluster.levels)
        assert math.isfinite(cluster.chip.memory_bytes)


names = st.sampled_from([*CHIPS, *CLUSTERS, "h100", "tpu"])


@given(st.text() | st.builds("{}:{}".format, names, st.text(max_size=12) | st.integers()))
def test_any_text_is_a_cluster_or_an_error(text: str) -> None:
    check_cluster_or_error(text)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | names
    | st.just("2026-11-20")
)
values = st.recursive(scalars.filter(lambda v: v is not None), lambda inner: st.lists(inner, max_size=3))
tables = st.dictionaries(st.sampled_from([*OWN, *OWN_CHIP, "fp32", "bf16", "x"]), values, max_size=6)
paths = st.sampled_from(
    [*OWN, *(f"chip.{key}" for key in OWN_CHIP)]
    + [f"levels.{i}.{key}" for i in (0, 1) for key in ("name", "bytes_per_s", "latency_s")]
)


@given(st.builds(changed, paths, scalars | values | tables | st.lists(tables, max_size=2)) | tables)
def test_any_table_is_a_cluster_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.toml"
    check_cluster_or_error(write_toml(file, table))


@given(st.binary(max_size=200))
def test_any_file_is_a_cluster_or_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz-binary.toml"
    file.write_bytes(content)
    check_cluster_or_error(str(file))


# --- many chips in one call -------------------------------------------------------------------------------

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")


# --- torus, rails, oversubscription ------------------------------------------------------------

LINKS_OF_A_FILE = """
chip = "h100"
num_chips = {num_chips}
levels = [
  {{ name = "inside", {inside}, bytes_per_s = 450e9, latency_s = 1e-6 }},
  {{ name = "outside", {outside}, bytes_per_s = 70e9, latency_s = 4e-6 }},
]
"""


@pytest.mark.parametrize(
    ("num_chips", "inside", "outside", "message"),
    [
        (64, "torus = [4, 4]", "torus = [2, 2, 8]", "only the innermost level can be a torus"),
        (64, "torus = [4, 4], ranks = 8", "rails = true", "ranks is 8, but torus 4 x 4 has 16"),
        (64, "torus = [4, 0]", "rails = true", "torus is 0"),
        (64, "ranks = 8, rails = true", "rails = true", "the innermost level has no rails"),
        (64, "ranks = 8", "oversubscription = 0.5", "oversubscription is 0.5; it must be 1 or more"),
        (64, "ranks = 8", "oversubscribed = 2", "oversubscribed"),
    ],
)
def test_links_that_cannot_be_are_refused(num_chips: int, inside: str, outside: str, message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        parse_cluster(LINKS_OF_A_FILE.format(num_chips=num_chips, inside=inside, outside=outside))


@pytest.mark.parametrize("name", [*CLUSTERS, "tpu-v5p:512", "trainium2:32"])
def test_a_cluster_is_read_again_from_its_own_text(name: str) -> None:
    cluster = find_cluster(name)
    again = parse_cluster(cluster_text(cluster), name)
    assert [repr(level) for level in again.levels] == [repr(level) for level in cluster.levels]
    gloo = parse_cluster(cluster_text(replace(cluster, reduce_scatter="all_reduce")), name)
    assert (again.reduce_scatter, gloo.reduce_scatter) == ("reduce_scatter", "all_reduce")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # The slices that Google Cloud offers (documentation of v4, v5p, v5e and TPU7x)
        *(("tpu-v5p:8", (2, 2, 2)), ("tpu-v5p:32", (2, 4, 4)), ("tpu-v5p:64", (4, 4, 4))),
        *(("tpu-v5p:128", (4, 4, 8)), ("tpu-v5p:256", (4, 8, 8)), ("tpu-v5p:1024", (8, 8, 16))),
        *(("tpu-v4:2048", (8, 16, 16)), ("tpu-v5p:6144", (16, 16, 24)), ("tpu-v5p:8960", (16, 20, 28))),
        *(("tpu-v5e:8", (2, 4)), ("tpu-v5e:128", (8, 16)), ("tpu-v6e:256", (16, 16))),
        *(("tpu-v7:9216", (16, 24, 24)), ("tpu-v5p:20000", (16, 20, 28)), ("trainium2:16", (4, 4))),
    ],
)
def test_a_part_of_a_torus_is_the_most_cubic_box(name: str, shape: tuple[int, ...]) -> None:
    cluster = find_cluster(name)
    assert sliced(cluster.levels, cluster.num_chips)[0].torus == shape
    ranks = [1.0, *rates(cluster, "bf16").link_ranks][: len(shape) + 1]
    assert tuple(outer / inner for inner, outer in pairwise(ranks)) == shape


def test_a_torus_of_its_own_does_not_grow() -> None:
    text = 'chip = "h100"\nnum_chips = 100\n'
    text += '[[levels]]\nname = "mesh"\ntorus = [4, 4]\nbytes_per_s = 1e11\nlatency_s = 1e-6'
    with pytest.raises(ClusterError, match="the torus 4 x 4 has 16 chips, not 100"):
        rates(parse_cluster(text), "bf16")
