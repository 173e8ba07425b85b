"""Hand-made Kineto traces with known answers, for the trace tests."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwise.trace.summary import Summary, summarize_paths

BASE_NS = 1_790_857_026_000_000_000
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start_us: float, dur_us: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    """A GPU kernel, memcpy or memset on a stream."""
    category = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
    event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start_us, "dur": dur_us}
    return event | {"args": {"device": 0, "stream": stream, **args}}


def all_reduce(
    start_us: float, dur_us: float, elements: int, ranks: list[int], **args: Any
) -> dict[str, Any]:
    """An NCCL all-reduce kernel with the metadata that PyTorch attaches."""
    about = {"Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements}
    about |= {"dtype": "BFloat16", "Group size": len(ranks), "Process Group Ranks": str(ranks)}
    return kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", start_us, dur_us, 20, **about, **args)


def message(
    kind: str, start_us: float, dur_us: float, elements: int, peer: int, **args: Any
) -> dict[str, Any]:
    """An NCCL send to, or receive from, `peer`, with the metadata that PyTorch attaches."""
    about = {"Collective name": kind, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
    about |= {"Group size": 4, "Process Group Ranks": "[0, 1, 2, 3]", "Process Group Name": "0"}
    about |= {"Dst Rank" if kind == "send" else "Src Rank": peer}
    return kernel(SEND_RECV, start_us, dur_us, 24, **about, **args)


def host(
    category: str, name: str, start_us: float, dur_us: float, tid: int = 1, **args: Any
) -> dict[str, Any]:
    """An event of a CPU thread."""
    event = {"ph": "X", "cat": category, "name": name, "pid": 100, "tid": tid, "ts": start_us, "dur": dur_us}
    return event | {"args": args}


def launched(name: str, at_us: float, start_us: float, dur_us: float, number: int) -> list[dict[str, Any]]:
    """The call that launches a kernel at `at_us`, and the kernel."""
    call = host("cuda_runtime", "cudaLaunchKernel", at_us, 1, correlation=number)
    return [call, kernel(name, start_us, dur_us, correlation=number)]


def operator(
    name: str, start_us: float, dur_us: float, dims: list[Any], dtype: str = "c10::BFloat16", **args: Any
) -> dict[str, Any]:
    """An operator with the shapes of what it takes."""
    shapes = {"Input Dims": dims, "Input type": [dtype if dim else "Scalar" for dim in dims]}
    return host("cpu_op", name, start_us, dur_us, **shapes, **args)


def write_trace(
    path: Path,
    events: list[dict[str, Any]],
    rank: int | None = None,
    world_size: int = 8,
    further: bytes = b"",
    **about: Any,
) -> Path:
    """A trace file in the layout that Kineto writes; `further` events are JSON already."""
    head: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, **about}
    if rank is not None:
        head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
    if further:
        begin = json.dumps(head)[:-1].encode() + b', "traceEvents": ['
        path.write_bytes(begin + further + b"," + json.dumps(events)[1:].encode() + b"}")
        return path
    path.write_text(json.dumps(head | {"traceEvents": events, "traceName": path.name}, indent=2))
    return path


def summary_of(folder: Path, ranks: Iterable[list[dict[str, Any]]], **about: Any) -> Summary:
    """The summary of a job whose rank r recorded the events `ranks[r]`."""
    events = list(ranks)
    for rank, own in enumerate(events):
        write_trace(folder / f"rank-{rank}.json", own, rank, len(events), **about)
    return summarize_paths([folder])
