"""Measured latencies of single ops and collectives, read from CSV into one plain form.

Two kinds of file are read, told apart by their header: one latency a row
(`hardware,op,dtype,n_gpus,shape,latency_us,kernel_or_library,source`), and figures as publications print
them (`source,hardware,op,shape_or_size,ranks,value,unit,notes`: microseconds, milliseconds, TFLOP/s, or
NCCL's bus bandwidth). Each row becomes a `Measurement` of an op that `cost/` can time, or a `BadRow`
that says in one sentence why not: a cell that is wrong (with file, line and column), or an op or a
machine that the model does not know. Good rows count whatever the others hold.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

from meshwise.calibrate.table import BadCell, BadRow, Unmodelled, header, lacking, read_each
from meshwise.core.errors import ClusterError
from meshwise.core.expressions import formulas, value_of
from meshwise.core.files import read_catalog
from meshwise.core.units import positive
from meshwise.cost.collective import Collective, sent_bytes
from meshwise.machine.hardware import find_chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured time. `op` is gemm, attention, decode, memory, experts, dispatch, collective or
    peer_all_reduce.

    variant: the dtype, the kernel, or the kind of collective. shape: gemm m n k batch cast; attention batch
    heads kv_heads seq qk_dim v_dim causal passes (1 forward, 2 backward, 3 both); decode batch heads kv_len
    kv_bytes_per_token qk_dim v_dim; memory bytes; experts tokens hidden inter topk experts tp, of one rank;
    dispatch tokens token_bytes topk experts ranks ranks_per_node cores (0: as many as the kernel takes);
    collective bytes ranks ranks_per_node; peer_all_reduce bytes ranks ranks_per_node graph. software: the
    library, or the network between nodes, where the constants depend on it.
    """

    chip: str
    op: str
    variant: str
    software: str
    shape: dict[str, float]
    seconds: float
    source: str
    where: str


OPS_COLUMNS = ("hardware", "op", "dtype", "n_gpus", "shape", "latency_us", "kernel_or_library", "source")
PUBLISHED_COLUMNS = ("source", "hardware", "op", "shape_or_size", "ranks", "value", "unit", "notes")

NAMES = read_catalog("measured_names.toml")
_DTYPES: dict[str, str] = NAMES["dtypes"]
_EXPERT_DTYPES: dict[str, str] = NAMES["expert_dtypes"]
_OPS: dict[str, Any] = read_catalog("measured_ops.toml")

_PUBLISHED: list[dict[str, Any]] = _OPS.pop("published")

BEST = "best"
"""In place of the software: the fastest of many shapes, which says what a chip can reach."""


Stated = tuple[str, str, dict[str, float], str]
"""Op, variant, shape and software of a row."""


def read(path: Path) -> tuple[list[Measurement], list[BadRow]]:
    """The measurements of a file, and its other rows; DataError where it is none, or its header is wrong."""
    names, kinds = header(path), {OPS_COLUMNS: _from_ops, PUBLISHED_COLUMNS: _from_published}
    if (convert := next((kinds[columns] for columns in kinds if {*columns} <= {*names}), None)) is None:
        raise lacking(path, names, kinds)

    def measurement(cells: dict[str, str], where: str, _: int) -> Measurement:
        chip, (op, variant, shape, software), seconds = convert(cells)
        return Measurement(
            chip=chip, op=op, variant=variant, software=software, shape=shape, seconds=seconds,
            source=cells["source"], where=where,
        )  # fmt: skip

    return read_each(path, measurement)


# --- cells -------------------------------------------------------------------------------------


def _positive(text: str, column: str) -> float:
    value = positive(text)
    if value is None or not 1e-18 <= value <= 1e18:  # as of tables of runs
        raise BadCell(f"{text!r} is not a number above zero", column)
    return value


@lru_cache
def _chip(text: str) -> str:
    name = text.strip().lower()
    try:
        return find_chip(NAMES["chips"].get(name, name)).name
    except ClusterError:
        raise Unmodelled(f"no chip of the catalog is called {text!r}") from None


def _numbers(text: str, column: str, names: Iterable[str], optional: Iterable[str] = ()) -> dict[str, float]:
    """The numbers called `names`, and those called `optional`, in a cell like `m=16 n=512 k=1024`."""
    cells = dict(re.findall(r"(\w+)=(\S+)", text))
    if missing := [name for name in names if name not in cells]:
        raise BadCell(f"{text!r} lacks {missing[0]}=", column)
    return {name: _positive(cells[name], column) for name in (*names, *optional) if name in cells}


# --- one latency a row -------------------------------------------------------------------------


def _from_ops(row: dict[str, str]) -> tuple[str, Stated, float]:
    seconds = _positive(row["latency_us"], "latency_us") * 1e-6
    return _chip(row["hardware"]), _stated(row, _positive(row["n_gpus"], "n_gpus")), seconds


def _stated(row: dict[str, str], ranks: float) -> Stated:
    """What a row is of, by the formulas of `catalog/measured_ops.toml`."""
    op, text, library = row["op"], row["shape"], row["kernel_or_library"]
    dtype, _, kv_dtype = row["dtype"].partition("/kv:")
    of = _table(op)
    if of is None:
        raise Unmodelled(f"no formula times op {op!r} of {library}")
    if op == "moe_experts":
        return "experts", _one_of(dtype, _EXPERT_DTYPES), _experts(row, of["needs"]), _expert_library(row)
    heads = re.sub(r"cfg=(\d+)-(\d+)-(\d+)", r"h=\1 kv=\2 d=\3 kvrank=\2 rope=\3", text)
    needs = next((names for names in of.get("either", ()) if f"{names[0]}=" in heads), of["needs"])
    names = {"op": op, "library": library, "dtype": dtype, "kv_dtype": kv_dtype or dtype, "ranks": ranks}
    names |= _FUNCTIONS | _numbers(heads, "shape", needs, of.get("optional", ()))
    return of["kind"], value_of(of["variant"], names), formulas(of["shape"], names), value_of(of["of"], names)


@cache
def _table(op: str) -> dict[str, Any] | None:
    return next((table for pattern, table in _OPS.items() if re.fullmatch(pattern, op)), None)


def _one_of(text: str, among: dict[str, str] = _DTYPES, column: str = "dtype") -> str:
    if text not in among:
        raise BadCell(f"{text!r} is not one of {', '.join(among)}", column)
    return among[text]


def _collective_seconds(kind: Collective, value: float, unit: str, size: float, ranks: float) -> float:
    if unit.startswith("us"):
        return value * 1e-6
    if unit == "ms":
        return value * 1e-3
    if unit == "GB/s busbw":  # bus bandwidth is what one rank's link carries: sent bytes over time
        return float(sent_bytes(kind, size, ranks)) / (value * 1e9)
    raise Unmodelled(f"{unit!r} of a collective is not a time or a bus bandwidth")


_FUNCTIONS: dict[str, Any] = {
    **{"dtype_of": _one_of, "one_of": _one_of, "positive": _positive, "float": float, "min": min},
    **{"seconds_of": _collective_seconds, "best": BEST},
    **_OPS.pop("names"),
}
"""What the formulas call, and tables of names."""


# --- experts: one rank of an expert-parallel group ----------------------------------------------
#
# The collector (aiconfigurator, collector/vllm/collect_moe.py and helper.py) runs one physical rank, the
# first of `ep`. All `tokens` reach it with the router's scores over all experts, and it computes the
# choices that fall on its own experts / ep. `balanced` scores deal the choices out evenly; `pl<alpha>`
# draws the experts' shares from a power law on [1, 0.8 tokens] (on [0.01, 2] where there are no more
# choices than experts), rounds them to whole tokens, and hands the first rank the busiest group.
#
# vLLM 0.24 routes DeepSeek-V3 (256 experts of hidden size 7168) as the model does: of 8 groups of experts
# a token may use 4. Balanced scores name one expert in each group, so only 4 choices remain; the others
# are ties, which go to the first experts of all, on the first rank. Choices drawn from a power law crowd
# in fewer groups, nearly always the busiest among them: the first rank keeps its choices and gains a tie.

_WITHOUT_GROUPS = ("vllm_fused_moe", "moe_torch_flow_cutlass")
"""Collectors that route DeepSeek-V3 freely: of vLLM 0.14, and of TensorRT-LLM."""

_EXPERT_LIBRARIES = ("triton", "cutlass", "trtllm")


def _expert_library(row: dict[str, str]) -> str:
    """The library that runs the experts, as the constants name it: TensorRT-LLM's own is `torch_flow`."""
    library = row["kernel_or_library"]
    if library.startswith("moe_torch_flow"):
        return "torch_flow"
    return next((name for name in _EXPERT_LIBRARIES if f"_{name}" in library), "triton")


def _experts(row: dict[str, str], names: Sequence[str]) -> dict[str, float]:
    shape = _numbers(row["shape"], "shape", names)
    deepseek = (shape["hidden"], shape["experts"]) == (7168, 256)
    limited = deepseek and row["kernel_or_library"] not in _WITHOUT_GROUPS
    law = re.search(r"dist=pl([\d.]+)", row["shape"])
    routed = _routed(shape, float(law[1]) if law else None, limited=limited)
    # vLLM's Triton kernels keep a row for every choice, wherever its expert is; the others only their own.
    keeps_all = _expert_library(row) == "triton" and _EXPERT_DTYPES[row["dtype"]] in ("bf16", "fp8_block")
    moved = shape["topk"] if keeps_all else routed["local_topk"]
    return shape | routed | {"moved_topk": moved, "uneven": float(law is not None)}


def _routed(shape: dict[str, float], alpha: float | None, *, limited: bool) -> dict[str, float]:
    """Choices per token that fall on the first rank, and how many of its experts have work.

    `alpha` is that of the power law, None for balanced scores; `limited`: to 4 of 8 groups of experts.
    """
    tokens, topk, experts, ep = (shape[name] for name in ("tokens", "topk", "experts", "ep"))
    dealt_out = limited and alpha is None
    kept, tied = (4.0, 4.0) if dealt_out else (topk, 1.0 if limited else 0.0)
    busier, active_frac = 1.0, 1.0
    if alpha is not None:
        span = (1.0, 0.8 * tokens) if tokens * topk > experts else (0.01, 2.0)
        largest = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))  # of ep standard normals (Blom 1958)
        busier += largest * _spread(alpha, *span) / math.sqrt(experts / ep)
        active_frac = _active_frac(alpha, *span, tokens * topk / experts)
    scored = busier * kept / ep
    pairs = max(1.0, math.ceil(tokens * min(scored + tied, topk, experts / ep)))
    reached = active_frac * experts / ep * (0.5 if dealt_out and ep == 1 else 1.0)
    return {"local_topk": pairs / tokens, "active": max(1.0, min(reached, tokens * scored + tied, pairs))}


def _spread(alpha: float, low: float, high: float) -> float:
    """Standard deviation over mean of the power law x^-alpha on [low, high]."""

    moments = [_moment(order, alpha, low, high) for order in range(3)]
    return math.sqrt(moments[2] * moments[0] / moments[1] ** 2 - 1.0)


def _active_frac(alpha: float, low: float, high: float, mean_tokens: float) -> float:
    """Share of experts with a token, of shares drawn from the power law, `mean_tokens` each on average.

    Those below half a token round to none; what they lose in sum goes to as many idle experts.
    """
    count, total = (_moment(order, alpha, low, high) for order in range(2))
    half = min(max(0.5 * total / count / mean_tokens, low), high)
    above = _moment(0, alpha, half, high) / count
    lost = _moment(1, alpha, low, half) / total * mean_tokens
    return min(above + lost, 1.0)


def _moment(order: int, alpha: float, low: float, high: float) -> float:
    power = order + 1.0 - alpha
    return (high**power - low**power) / power


# --- figures as published ----------------------------------------------------------------------


def _from_published(row: dict[str, str]) -> tuple[str, Stated, float]:
    op, unit, size = row["op"], row["unit"], row["shape_or_size"]
    names: dict[str, Any] = {"op": op, "unit": unit, "row": row, "value": _positive(row["value"], "value")}
    of = next((each for each in _PUBLISHED if re.fullmatch(each["figure"], f"{op} [{unit}]")), {})
    found = re.search(of["size"], size) if of else None
    if found is None and "lacks" in of:
        raise BadCell(f"{size!r} lacks {of['lacks']}", "shape_or_size")
    if found is None:
        raise Unmodelled(f"no size in {size!r}" if of else f"no formula times {op!r} in {unit}")
    nodes = re.search(r"nodes? x (\d+) ", row["hardware"])
    names |= _FUNCTIONS | found.groupdict() | {"per_node": float(nodes[1]) if nodes else None}
    names |= {"variant": value_of(of["variant"], names)}
    shape, software = formulas(of["shape"], names), value_of(of["of"], names)
    seconds = value_of(of["seconds"], names | shape)
    chip = row["hardware"]
    for start in (start for start in NAMES["networks"] if row["hardware"].startswith(start)):
        chip, software = NAMES["networks"][start]  # of several nodes their network
    return _chip(chip), (of["kind"], names["variant"], shape, software), seconds
