"""Measured latencies of single ops and collectives, read from CSV into one plain form.

Two kinds of file are read, told apart by their header: one latency a row
(`hardware,op,dtype,n_gpus,shape,latency_us,kernel_or_library,source`), and figures as publications print
them (`source,hardware,op,shape_or_size,ranks,value,unit,notes`: microseconds, milliseconds, TFLOP/s, or
NCCL's bus bandwidth). Each row becomes a `Measurement` of an op that `cost/` can time, or a `Problem`
that says in one sentence why not: a cell that is wrong (with file, line and column), or an op or a
machine that the model does not know. Good rows count whatever the others hold.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwise.cost.collective import sent_bytes
from meshwise.errors import ClusterError, DataError
from meshwise.hardware import find_chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured time. `op` is gemm, attention, decode, experts or collective.

    variant: the dtype, the kernel, or the kind of collective. shape: gemm m n k batch cast; attention batch
    heads kv_heads seq qk_dim v_dim causal passes (1 forward, 2 backward, 3 both); decode batch heads kv_len
    kv_bytes_per_token qk_dim v_dim; experts tokens hidden inter topk experts tp; collective bytes ranks
    ranks_per_node. software: the library, or the network between nodes, where the constants depend on it.
    """

    chip: str
    op: str
    variant: str
    software: str
    shape: dict[str, float]
    seconds: float
    source: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A row that is no measurement of ours: its input is bad, or it is merely not modelled."""

    where: str
    reason: str
    bad_input: bool


@dataclass(frozen=True, slots=True)
class Measurements:
    """What files held, in their order."""

    rows: list[Measurement] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


OPS_COLUMNS = ("hardware", "op", "dtype", "n_gpus", "shape", "latency_us", "kernel_or_library", "source")
PUBLISHED_COLUMNS = ("source", "hardware", "op", "shape_or_size", "ranks", "value", "unit", "notes")

# Names that the files give to chips of the catalog, beyond its own names and aliases.
_HARDWARE = {
    "a100-sxm-80gb": "a100-80g-sxm",
    "a100-sxm4-80gb": "a100-80g-sxm",
    "h100-sxm-80gb": "h100-80g-sxm",
    "h100-sxm5-80gb": "h100-80g-sxm",
    "h200-sxm-141gb": "h200-sxm",
    "h20": "h20-96g-sxm",
    "h800": "h800-80g-sxm",
    "8x h200 (nvlink4, nvswitch)": "h200-sxm",
    "8x h200 node": "h200-sxm",
    "8x b200 (nvlink5)": "b200-sxm",
    "8x b200 node": "b200-sxm",
    "8x a100 (nvlink3)": "a100-80g-sxm",
    "gb200 (4 gpus per tray)": "gb200",
    "h100, one node": "h100-80g-sxm",
}
_NETWORKS = (
    ("A100, Perlmutter-like nodes", "a100-80g-sxm", "slingshot"),
    ("4 nodes x 8 B200, 8x50GB/s EFA", "b200-sxm", "efa"),
    ("DGX A100, 8x200Gb/s", "a100-80g-sxm", "infiniband"),
    ("DGX H100, 8x400Gb/s", "h100-80g-sxm", "infiniband"),
)
"""Hardware of runs on several nodes by the start of its description: its chip and its network."""

_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "nvfp4": "fp4", "fp32": "fp32"}
_CAST_LIBRARIES = ("CutlassFP8ScaledMMLinearKernel", "FlashInferCuteDslNvFp4LinearKernel")
"""Linear layers timed from bf16 activations: the cast is in the figure. TensorRT-LLM's fp8 ones likewise."""

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class _Unmodelled(Exception):
    """The row is sound, but no formula of ours times it."""


class _BadCell(Exception):
    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column


def read(*paths: Path) -> Measurements:
    """The measurements of `paths`. A file that cannot be read or has the wrong header raises DataError."""
    found = Measurements()
    for path in paths:
        _read_file(path, found)
    return found


def _read_file(path: Path, into: Measurements) -> None:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            convert = _converter(path, table.fieldnames or [])
            for row in table:
                where = f"{path.name}:{table.line_num}"
                try:
                    if None in row.values() or None in row:
                        raise _BadCell("", f"the line does not have {len(table.fieldnames or [])} cells")
                    into.rows.append(convert(row, where))
                except _BadCell as error:
                    column = f", column {error.column}" if error.column else ""
                    into.problems.append(
                        Problem(
                            where=where,
                            reason=f"{path}, line {table.line_num}{column}: {error}",
                            bad_input=True,
                        )
                    )
                except _Unmodelled as error:
                    into.problems.append(Problem(where=where, reason=str(error), bad_input=False))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8: {error}") from None


def _converter(path: Path, header: Sequence[str]) -> Callable[[dict[str, str], str], Measurement]:
    for columns, convert in ((OPS_COLUMNS, _from_ops), (PUBLISHED_COLUMNS, _from_published)):
        if set(columns) <= set(header):
            return convert
    nearest = max((OPS_COLUMNS, PUBLISHED_COLUMNS), key=lambda columns: len(set(columns) & set(header)))
    missing = ", ".join(name for name in nearest if name not in header)
    raise DataError(f"{path}, line 1: the header lacks {missing}; expected {', '.join(nearest)}")


# --- cells -------------------------------------------------------------------------------------


def _positive(text: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise _BadCell(column, f"{text!r} is not a number above zero")
    return value


def _chip(text: str) -> str:
    name = text.strip().lower()
    try:
        return find_chip(_HARDWARE.get(name, name)).name
    except ClusterError:
        raise _Unmodelled(f"no chip of the catalog is called {text!r}") from None


def _shape(text: str, column: str, *names: str) -> Iterator[float]:
    """The numbers called `names` in a cell like `m=16 n=512 k=1024`."""
    cells = dict(re.findall(r"(\w+)=(\S+)", text))
    for name in names:
        if name not in cells:
            raise _BadCell(column, f"{text!r} lacks {name}=")
        yield _positive(cells[name], column)


# --- one latency a row -------------------------------------------------------------------------


def _from_ops(row: dict[str, str], where: str) -> Measurement:
    seconds = _positive(row["latency_us"], "latency_us") * 1e-6
    ranks = _positive(row["n_gpus"], "n_gpus")
    library, source, op = row["kernel_or_library"], row["source"], row["op"]
    dtype, _, kv_dtype = row["dtype"].partition("/kv:")
    chip = _chip(row["hardware"])

    def make(op: str, variant: str, shape: dict[str, float], software: str = "") -> Measurement:
        return Measurement(
            chip=chip,
            op=op,
            variant=variant,
            software=software,
            shape=shape,
            seconds=seconds,
            source=source,
            where=where,
        )

    if op == "gemm":
        m, n, k = _shape(row["shape"], "shape", "m", "n", "k")
        cast = float(library in _CAST_LIBRARIES)
        return make("gemm", _dtype(dtype), {"m": m, "n": n, "k": k, "batch": 1.0, "cast": cast})
    if op.startswith("grouped_gemm"):
        return make("gemm", _dtype(dtype), _grouped(op, row["shape"]))
    if op in ("attn_prefill", "mla_prefill") and "cfg=" not in row["shape"]:
        return make("attention", "flash", _prefill(op, row["shape"]))
    if op in ("attn_decode", "mla_decode"):
        return make(
            "decode", "mla" if op == "mla_decode" else "flash", _decode(op, row["shape"], kv_dtype or dtype)
        )
    if op == "moe_experts":
        return make("experts", "bf16" if dtype == "bfloat16" else dtype, _experts(row), library)
    if op.startswith("nccl_"):
        kind = {"alltoall": "all_to_all", "send_recv": "p2p"}.get(op[5:], op[5:])
        (size,) = _shape(row["shape"], "shape", "bytes")
        per_node = ranks
        if "gpus_per_node=" in row["shape"]:
            (per_node,) = _shape(row["shape"], "shape", "gpus_per_node")
        shape = {"bytes": size, "ranks": ranks, "ranks_per_node": min(per_node, ranks)}
        return make("collective", kind, shape, "vidur" if source.startswith("VIDUR") else "")
    raise _Unmodelled(f"no formula times op {op!r} of {library}")


def _dtype(text: str) -> str:
    if text not in _DTYPES:
        raise _BadCell("dtype", f"{text!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[text]


def _grouped(op: str, text: str) -> dict[str, float]:
    """A grouped matmul: one matmul per local expert; `up` holds gate and up side by side."""
    experts, hidden, inter, tokens = _shape(text, "shape", "local", "hidden", "inter", "tokens_per_expert")
    n, k = (2 * inter, hidden) if "_up_" in op else (hidden, inter)
    return {"m": tokens, "n": n, "k": k, "batch": experts, "cast": 0.0}


# Libraries whose experts run like their matmuls: bf16 of all, fp8 with one scale per tensor of two.
_EXPERT_LIBRARIES = {
    "bf16": ("",),
    "fp8": ("moe_torch_flow_cutlass", "vllm_modeloptfp8moe_flashinfer_trtllm"),
}


def _experts(row: dict[str, str]) -> dict[str, float]:
    library, dtype = row["kernel_or_library"], row["dtype"]
    if not library.startswith(_EXPERT_LIBRARIES.get(_DTYPES.get(dtype, ""), ())):
        raise _Unmodelled(f"no formula times experts in {dtype} of {library}")
    names = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep")
    shape = dict(zip(names, _shape(row["shape"], "shape", *names), strict=True))
    if shape.pop("ep") != 1:
        raise _Unmodelled("expert-parallel rows follow the token semantics of their collector")
    return shape


def _prefill(op: str, text: str) -> dict[str, float]:
    batch, seq, heads = _shape(text, "shape", "b", "s", "h")
    if op == "mla_prefill":  # DeepSeek's dimensions: 128 + rope to compare, 128 to weigh
        (rope,) = _shape(text, "shape", "rope")
        kv_heads, qk_dim, v_dim = heads, 128 + rope, 128.0
    else:
        kv_heads, qk_dim = _shape(text, "shape", "kv", "d")
        v_dim = qk_dim
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "seq": seq,
        "qk_dim": qk_dim,
        "v_dim": v_dim,
        "causal": 1.0,
        "passes": 1.0,
    }


def _decode(op: str, text: str, kv_dtype: str) -> dict[str, float]:
    batch, kv_len = _shape(text, "shape", "b", "kvlen")
    elem_bytes = 1.0 if kv_dtype == "fp8" else 2.0
    if "cfg=" in text:  # heads-kvheads-dim, or heads-kvrank-rope for latent attention
        match = re.search(r"cfg=(\d+)-(\d+)-(\d+)", text)
        if match is None:
            raise _BadCell("shape", f"{text!r} lacks cfg=heads-kv-dim")
        heads, kv, dim = map(float, match.groups())
    elif op == "mla_decode":
        heads, kv, dim = _shape(text, "shape", "h", "kvrank", "rope")
    else:
        heads, kv, dim = _shape(text, "shape", "h", "kv", "d")
    latent = op == "mla_decode"
    return {
        "batch": batch,
        "heads": heads,
        "kv_len": kv_len,
        "kv_bytes_per_token": elem_bytes * (kv + dim if latent else 2 * kv * dim),
        "qk_dim": kv + dim if latent else dim,
        "v_dim": kv if latent else dim,
    }


# --- figures as published ----------------------------------------------------------------------


def _from_published(row: dict[str, str], where: str) -> Measurement:
    op, unit, size = row["op"], row["unit"], row["shape_or_size"]
    value = _positive(row["value"], "value")
    if op.startswith("GEMM ") and unit == "us":
        m, n, k = _shape(size, "shape_or_size", "m", "n", "k")
        variant = _dtype(op.split()[1])
        shape = {"m": m, "n": n, "k": k, "batch": 1.0, "cast": float(variant == "fp8")}
        seconds, kind, software = value * 1e-6, "gemm", "trtllm" if variant == "fp8" else ""
    elif op in ("attention fwd+bwd, FA2", "attention fwd FP16, FA2", "attention fwd FP16, FA3"):
        shape, flop = _published_attention(op, size)
        seconds, kind, variant, software = flop / (value * 1e12), "attention", "flash", op[-3:].lower()
    elif op == "all_reduce (nccl-tests, inter-node)" and size == "peak of sweep":
        # The peak of a sweep over sizes is what large messages reach, whatever the number of nodes.
        shape = {"bytes": 16.0 * 2**30, "ranks": 32.0, "ranks_per_node": 8.0}
        seconds, kind, variant = (
            _collective_seconds("all_reduce", value, unit, shape),
            "collective",
            "all_reduce",
        )
        software = ""
    elif op in _COLLECTIVES:
        shape = _published_collective(row)
        seconds, kind, variant, software = _collective_seconds(op, value, unit, shape), "collective", op, ""
    else:
        raise _Unmodelled(f"no formula times {op!r} in {unit}")
    chip, software = _published_chip(row["hardware"], software)
    return Measurement(
        chip=chip,
        op=kind,
        variant=variant,
        software=software,
        shape=shape,
        seconds=seconds,
        source=row["source"],
        where=where,
    )


def _published_chip(hardware: str, software: str) -> tuple[str, str]:
    """The chip and, for runs on several nodes, their network in place of the software."""
    for start, chip, network in _NETWORKS:
        if hardware.startswith(start):
            return find_chip(chip).name, network
    return _chip(hardware), software


def _published_attention(op: str, text: str) -> tuple[dict[str, float], float]:
    """Shape and FLOP as FlashAttention's benchmark counts them: 16k tokens, hidden 2048, half if causal."""
    cells = dict(re.findall(r"(\w+)=(\d+)", text))
    if not {"seq", "head_dim", "causal"} <= set(cells):
        raise _BadCell("shape_or_size", f"{text!r} lacks seq=, head_dim= or causal=")
    seq, dim, causal = float(cells["seq"]), float(cells["head_dim"]), float(cells["causal"])
    heads, batch, both = 2048 / dim, 16384 / seq, "fwd+bwd" in op
    shape = {
        "batch": batch,
        "heads": heads,
        "kv_heads": heads,
        "seq": seq,
        "qk_dim": dim,
        "v_dim": dim,
        "causal": causal,
        "passes": 3.0 if both else 1.0,
    }
    return shape, 4 * batch * seq**2 * heads * dim * (0.5 if causal else 1.0) * (3.5 if both else 1.0)


def _published_collective(row: dict[str, str]) -> dict[str, float]:
    match = re.fullmatch(r"([\d.]+)\s*([KMG]?i?B)", row["shape_or_size"])
    if match is None:
        raise _Unmodelled(f"no size in {row['shape_or_size']!r}")
    ranks = _positive(row["ranks"], "ranks")
    per_node = re.search(r"nodes? x (\d+) ", row["hardware"])
    return {
        "bytes": float(match[1]) * _UNITS[match[2]],
        "ranks": ranks,
        "ranks_per_node": min(float(per_node[1]), ranks) if per_node else ranks,
    }


def _collective_seconds(op: str, value: float, unit: str, shape: dict[str, float]) -> float:
    if unit.startswith("us"):
        return value * 1e-6
    if unit == "ms":
        return value * 1e-3
    if unit == "GB/s busbw":  # bus bandwidth is what one rank's link carries: sent bytes over time
        return float(sent_bytes(op, shape["bytes"], shape["ranks"])) / (value * 1e9)  # type: ignore[arg-type]
    raise _Unmodelled(f"{unit!r} of a collective is not a time or a bus bandwidth")
