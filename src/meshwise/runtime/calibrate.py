"""`calibrate`: what this machine really does, as a cluster file that `estimate` reads.

The chip's matrix rate by dtype is the best of its GEMM samples, its memory rate that of a copy (read plus
write). Its vector rate on a CPU is that of a multiply-add inside the cache; on a GPU that of its fp32 GEMMs,
which run on the ordinary units (on AMD's matrix units: there it is a bound). Bandwidth and latency of the
link are fitted to the collectives (least squares of the relative error), with the same formulas that
`estimate` uses. As these rates are what kernels reach, `estimate` takes no efficiency off them.

Each time of an op or a collective is that of the fastest of several batches of calls, for interference only
ever adds time. A GPU is timed between two events on its stream, a CPU by the host's clock. Batches are long
enough for the clock, and the first ones, which find out how many calls that takes, warm the machine up.
Operands are random (on zeros and ones a GPU draws less power and clocks higher), and there are so many of
them that none is left in the last cache from the call before.
"""

import itertools
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from meshwise.calibrate.cluster_file import Calibration, Sample, fit_link, measured_cluster
from meshwise.core.columns import grouped
from meshwise.core.errors import PlanError
from meshwise.core.files import read_catalog
from meshwise.core.ledger import Collective
from meshwise.core.refusals import told
from meshwise.cost.op import attended_pairs, flash_attention, flash_attention_backward, matmul_flop
from meshwise.machine.hardware import Level
from meshwise.runtime.launch import RankPlace, check_world, launch
from meshwise.runtime.programs import attention_kernels as kernels
from meshwise.runtime.programs.context import TORCH_DTYPES
from meshwise.runtime.torch_private import scaled_mm

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "all_to_all")
_MOST_CALLS = 1 << 16
_MOST_OPERANDS = 64


EFFORTS = {
    (device, pace == "quick"): SimpleNamespace(**effort)
    for device, paces in read_catalog("efforts.toml").items()
    for pace, effort in paces.items()
}
"""How much is measured, by device and whether it is to be quick; the catalog says what its fields mean."""


def gemm_dtypes(device: str) -> tuple[str, ...]:
    """The dtypes whose matmuls are measured: on NVIDIA's GPUs those that their matrix units have."""
    if device == "cpu":
        return ("fp32", "bf16", "fp64")
    if torch.version.hip is not None:
        return ("bf16", "fp16", "fp32", "fp64")
    capability = torch.cuda.get_device_capability()
    needs = {"fp8": (8, 9), "bf16": (8, 0), "fp16": (0, 0), "tf32": (8, 0), "fp32": (0, 0), "fp64": (0, 0)}
    return tuple(dtype for dtype, least in needs.items() if capability >= least)


OpCall = tuple[str, str, str, Callable[[], Any], float, str]
"""A sample before it is measured: what, its shape and dtype, the call, its work, and the unit of its rate."""


def op_samples(device: str, quick: bool) -> Iterator[Sample]:
    """Everything that one rank measures alone."""
    effort = EFFORTS[device, quick]
    for what, shape, dtype, call, work, unit in op_calls(device, effort):
        seconds = fastest_s(call, device, effort)
        yield Sample(what, shape, dtype, seconds, work / seconds, unit)


def op_calls(device: str, effort: Any) -> Iterator[OpCall]:
    """Square GEMMs, one with a short sum, one with few rows; memory, attention, and an op on one element."""
    dtypes, last = gemm_dtypes(device), effort.gemm_sides[-1]
    shapes = [*((side, side, side) for side in effort.gemm_sides), (last, last, 128), (64, last, last)]
    for dtype, (m, n, k) in itertools.product(dtypes, shapes):
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        call, flop = gemm(dtype, m, n, k, device), float(matmul_flop(m, n, k))
        yield "gemm", f"{m}x{n}x{k}", dtype, call, flop, "FLOP/s"
    yield from memory_calls(device, effort.copy_bytes)
    for tokens in effort.tokens if "bf16" in dtypes else ():  # flash attention needs what bf16 needs
        yield from attention_calls(tokens, device)
    yield "launch", "1", "fp32", partial(torch.ones(1, device=device).add_, 1), 1, "1/s"


def gemm(dtype: str, m: int, n: int, k: int, device: str) -> Callable[[], Any]:
    """A call of C[m,n] = A[m,k] B[k,n], each time on other operands, as many as the cache does not hold."""
    elem = torch.float8_e4m3fn if dtype == "fp8" else TORCH_DTYPES["fp32" if dtype == "tf32" else dtype]
    operand_bytes, calls = (m * k + k * n) * elem.itemsize, []
    for _ in range(_num_operands(operand_bytes, device)):
        a = torch.randn(m, k, device=device).to(elem)
        b = torch.randn(n, k, device=device).to(elem).t()  # fp8 takes it column by column
        if dtype == "fp8":
            one = torch.ones((), device=device)
            calls.append(partial(scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
        else:
            calls.append(partial(torch.mm, a, b.contiguous()))
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def _num_operands(operand_bytes: int, device: str) -> int:
    """So many sets of operands that the last cache holds half of them at most."""
    cache_bytes = 0 if device == "cpu" else torch.cuda.get_device_properties(0).L2_cache_size
    return min(1 + 2 * cache_bytes // operand_bytes, _MOST_OPERANDS)


def memory_calls(device: str, size_bytes: int) -> Iterator[OpCall]:
    """A copy and a cast beyond the caches, in bytes read plus written; on a CPU multiply-adds inside them."""
    num = size_bytes // 4
    source = torch.ones(num, device=device)
    yield "copy", str(4 * num), "fp32", partial(torch.empty_like(source).copy_, source), 8 * num, "B/s"
    yield "cast", f"{num} to bf16", "fp32", partial(source.to, torch.bfloat16), num * (4 + 2), "B/s"
    if device == "cpu":
        num = 1 << 15
        x, y, z = (torch.ones(num) for _ in range(3))
        yield "multiply-add", str(num), "fp32", partial(z.addcmul_, x, y), 2 * num, "FLOP/s"


def attention_calls(tokens: int, device: str) -> Iterator[OpCall]:
    """Fused causal attention of 16 heads of 128, forward and backward."""
    heads, width = 16, 128
    whole = 1, heads, tokens, width
    q, k, v, grad = (torch.randn(whole, device=device).to(torch.bfloat16) for _ in range(4))
    out, lse = kernels.flash_attention(q, k, v, True)
    forward = partial(kernels.flash_attention, q, k, v, True)
    backward = partial(kernels.flash_attention_backward, grad, q, k, v, out, lse, True)
    sizes = (attended_pairs(tokens, tokens, causal=True), heads, heads, tokens, tokens, width, width)
    for name, call, work in (
        ("attention", forward, flash_attention),
        ("attention backward", backward, flash_attention_backward),
    ):
        flop = float(work(*sizes, batch=1, elem_bytes=2).flop)
        yield name, f"{heads}x{tokens}x{width}", "bf16", call, flop, "FLOP/s"


def collective_samples(place: RankPlace, quick: bool) -> list[Sample]:
    """Runs on every rank: each kind at several payloads; the time is that of the slowest rank."""
    effort = EFFORTS[place.device_type, quick]
    samples = []
    for kind, size in itertools.product(COLLECTIVES, effort.payload_bytes):
        size_bytes = size - size % (4 * place.world_size)
        seconds = collective_time_s(place, kind, size_bytes, in_a_row=effort.collectives_in_a_row)
        samples.append(Sample(kind, str(size_bytes), "fp32", seconds, size_bytes / seconds, "B/s"))
    return samples


def collective_time_s(
    place: RankPlace,
    kind: Collective,
    payload_bytes: int,
    *,
    repeats: int = 5,
    in_a_row: int = 1,
    meet: Callable[[], Any] = dist.barrier,
) -> float:
    """Seconds of one collective over `payload_bytes`, the fastest repetition of the slowest rank.

    `meet` brings the ranks together before each repetition, which is `in_a_row` collectives; the first
    repetition is not counted.
    """
    num = payload_bytes // 4 // place.world_size
    full = torch.ones(num * place.world_size, device=place.device)
    other = torch.empty_like(full)
    part = torch.ones(num, device=place.device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather_single(full, part),
        "all_to_all": lambda: dist.all_to_all_single(other, full),
    }
    times = []
    for _ in range(repeats + 1):
        meet()
        times.append(elapsed_s(calls[kind], in_a_row, place.device_type))
    slowest = torch.tensor(times[1:], device=place.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.min())


def fastest_s(call: Callable[[], Any], device: str, effort: Any) -> float:
    """Seconds of one call in the fastest of at least five batches."""
    call()
    num = 1
    while (seconds := elapsed_s(call, num, device)) * num < effort.batch_s and num < _MOST_CALLS:
        num *= 2
    spent_s, batches = seconds * num, 1
    while batches < 5 or spent_s < effort.total_s:
        taken_s = elapsed_s(call, num, device)
        seconds, spent_s, batches = min(seconds, taken_s), spent_s + taken_s * num, batches + 1
    return seconds


def elapsed_s(call: Callable[[], Any], num: int, device: str) -> float:
    """Seconds of one of `num` calls in a row."""
    if device == "cpu":
        begin_s = time.perf_counter()
        for _ in range(num):
            call()
        return (time.perf_counter() - begin_s) / num
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(num):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / num


def calibrate(device: str = "cpu", *, ranks: int = 0, quick: bool = False) -> Calibration:
    """Measure `device` (cpu or cuda) of this machine, and collectives over `ranks` of it.

    0 ranks: two on a CPU, all GPUs. PlanError or MissingExtraError for what this machine has not.
    """
    if device not in ("cpu", "cuda"):
        raise PlanError(f"--device {device} is unknown; use cpu or cuda")
    ranks = ranks or (2 if device == "cpu" else max(1, torch.cuda.device_count()))
    check_world(ranks, device)
    notes = told("calibrated", device=device, load=os.getloadavg()[0], cores=os.cpu_count() or 1)
    try:
        samples = list(op_samples(device, quick))
    except torch.OutOfMemoryError:
        reason = "the GPU's free memory does not hold the operands"
        raise PlanError(f"{reason}; free some, or use --quick") from None
    if device == "cuda":
        torch.cuda.empty_cache()  # the first rank measures on the same GPU
    if ranks > 1:
        samples += (launch(collective_samples, ranks, quick, device_type=device) or [[]])[0]
    return replace(from_samples(samples, device, ranks), notes=notes)


def from_samples(samples: Sequence[Sample], device: str, ranks: int) -> Calibration:
    """The rates that follow from what was measured on this machine."""
    gemms = grouped((sample for sample in samples if sample.what == "gemm"), lambda sample: sample.dtype)
    matrix = {dtype: max(sample.rate for sample in of) for dtype, of in gemms.items()}
    best = {sample.what: sample.rate for sample in samples if sample.what in ("copy", "multiply-add")}
    calls: Any = [(s.what, float(s.shape), ranks, s.time_s) for s in samples if s.what in COLLECTIVES]
    bandwidth, latency = fit_link(calls) if calls else (best["copy"], 0.0)
    cores = f"{platform.machine()}-{os.cpu_count()}-cores"
    called = cores if device == "cpu" else torch.cuda.get_device_name(0)
    name = re.sub(r"[^A-Za-z0-9]+", "-", called).strip("-").lower()
    link = Level(name="gloo" if device == "cpu" else "nccl", bytes_per_s=bandwidth, latency_s=latency)
    cluster = measured_cluster(
        name, ranks, link, source=f"meshwise calibrate on {name}, torch {torch.__version__}",
        memory_bytes=_memory_bytes(device), memory_bytes_per_s=best["copy"], matrix_flop_per_s=matrix,
        vector_flop_per_s={"fp32": best.get("multiply-add", matrix["fp32"])},
    )  # fmt: skip
    return Calibration(cluster, samples)


def _memory_bytes(device: str) -> float:
    if device == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.cuda.get_device_properties(0).total_memory)
