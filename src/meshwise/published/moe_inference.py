"""What the evaluation of a mixture-of-experts GPT costs a rank, in closed form, and what would change it.

Everything is a sum over the ops of `program.expert_pass`: the calls of torch's ops as its profiler counts
them, bytes that a profiler sees stay behind, FLOP by what they are for, and how many of them are useful,
that is, spent on tokens that the router sent and not on empty slots or on moving tokens by products.
Memory and time follow. The fields of a `Pass` may be arrays, so a what-if is the same call on a grid.

The example that all this was derived from is the evaluation of fairseq's 15B model on four V100; its
printed profile is held against these functions in `tests/test_moe.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.estimate.timing import machine, op_times
from meshwise.machine.hardware import Cluster
from meshwise.model.gpt_config import to_model
from meshwise.model.weights import num_active_params, num_params
from meshwise.program.expert_pass import Pass, evaluation, rank_params
from meshwise.program.generation import Generation, merged, pass_ops
from meshwise.program.lifetime import ops_of, peak_bytes
from meshwise.program.op import Op

# --- calls -------------------------------------------------------------------------------------


def aten_calls(of: Pass, passes: int = 1) -> dict[str, Num]:
    """Calls of torch's ops on one rank, as its profiler counts them (composite ones beside their parts)."""
    ops = ops_of(evaluation(of))
    products = {name: _count(ops, name) for name in ("addmm", "mm", "bmm", "baddbmm", "gelu")}
    moves = sum(op.count for part, op in ops if part in ("dispatch", "combine"))
    matmuls = products["mm"] - moves  # the products that are linear layers without a bias
    calls = products | {"matmul": matmuls, "linear": products["addmm"] + matmuls}
    return {f"aten::{name}": passes * calls[name] for name in calls}


def exchanges(of: Pass, passes: int = 1) -> Num:
    """All-to-alls of one rank: two in each MoE layer."""
    return passes * _count(ops_of(evaluation(of)), "all_to_all")


def exchange_bytes(of: Pass) -> Num:
    """Bytes of one all-to-all on one rank, the part that it keeps included."""
    return of.slots * of.config.decoder_embed_dim * of.elem_bytes


def expert_calls(of: Pass, passes: int = 1) -> Num:
    """Feed-forwards of experts on one rank, where a loop runs over them."""
    return passes * of.local_experts * of.config.num_moe_layers


def host_reads(block_tokens: int, blocks: int) -> int:
    """Single numbers that the token loop of eval_lm fetches from the device: 4 a token, one less a block."""
    return blocks * (4 * block_tokens - 1)


def _count(ops: Iterable[tuple[str, Op]], name: str) -> Num:
    return sum((op.count for _, op in ops if op.name == name), start=0)


# --- FLOP --------------------------------------------------------------------------------------


def flop_by_role(of: Pass) -> dict[str, Num]:
    """FLOP of one pass on one rank, by what they are for."""
    parts: dict[str, Num] = {}
    for part, op in ops_of(evaluation(of)):
        if op.kind == "matmul":
            parts[part] = parts.get(part, 0.0) + op.count * op.cost.flop
    return parts


def total_flop(of: Pass) -> Num:
    """FLOP of one pass on one rank."""
    return sum(flop_by_role(of).values())


def useful_flop(of: Pass) -> Num:
    """FLOP that the answer needs: every token at its `top_k` experts, none moved by a matrix product."""
    config, parts = of.config, flop_by_role(of)
    spent_on_routing = ("experts", "dispatch", "combine", "combine_outer")
    rest = sum(flop for role, flop in parts.items() if role not in spent_on_routing)
    visits = config.top_k * of.tokens * config.num_moe_layers
    return rest + visits * 4.0 * config.decoder_embed_dim * (config.expert_ffn_dim // of.tp)


def slot_use(of: Pass) -> Num:
    """Share of the slots that tokens can fill at most."""
    return of.config.top_k * of.tokens / of.slots


# --- what a profiler of memory shows --------------------------------------------------------------


def moe_layer_kept_bytes(of: Pass) -> Num:
    """What is alive of a dense MoE layer's own tensors when it ends, before they go.

    Combine weights and mask [S, E, C]; what came in, what the experts made, what came back [E C, M]; the
    result [S, M]; metrics in fp32, the gate's type (one entropy, four numbers a choice).
    """
    config = of.config
    scalars = (1 + 4 * config.top_k) * DTYPE_BYTES["fp32"]
    slots = 3 * of.slots * config.decoder_embed_dim
    return (2 * of.routing_size + slots + of.tokens * config.decoder_embed_dim) * of.elem_bytes + scalars


def decoder_kept_bytes(of: Pass) -> Num:
    """What a pass leaves: the logits and every layer's output, the embedded input among them."""
    config = of.config
    states = (config.decoder_layers + 1) * config.decoder_embed_dim
    return of.tokens * (of.local_words + states) * of.elem_bytes


def profiled_bytes(of: Pass, passes: int = 1) -> dict[str, Num]:
    """Bytes that a memory profile of `passes` dense passes gives: sections their net, ops their outputs."""
    config = of.config
    written: dict[str, Num] = {}
    moves: Num = 0.0
    chunks: Num = 0.0
    narrowed: Num = 0.0
    for part, op in ops_of(evaluation(of)):
        size_bytes = op.count * op.cost.write_bytes
        written[op.name] = written.get(op.name, 0.0) + size_bytes
        moves = moves + size_bytes * (part in ("dispatch", "combine"))
        chunks = chunks + size_bytes * (part == "chunks")
        is_narrowed = op.name == "_to_copy" and part in ("dense_ffn", "experts") and op.dtype == of.dtype
        narrowed = narrowed + size_bytes * is_narrowed
    residuals = 2 * config.decoder_layers * of.tokens * config.decoder_embed_dim * of.elem_bytes
    figures = {
        "MoELayer": config.num_moe_layers * moe_layer_kept_bytes(of),
        "TransformerDecoder": decoder_kept_bytes(of),
        "aten::add": written.get("add", 0.0) + residuals,
        "aten::reshape": chunks,
        "aten::type_as": narrowed,
        "aten::matmul": written["mm"] - moves,
    }
    figures |= {f"aten::{name}": written[name] for name in ("addmm", "bmm", "gelu", "mm") if name in written}
    return {name: passes * size for name, size in figures.items()}


# --- time --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PassTime:
    """Seconds of one pass on one rank: kernels, links, and how many kernels and collectives are launched."""

    compute_s: Num
    exchange_s: Num
    launches: Num

    @property
    def total_s(self) -> Num:
        """Both, one after the other: fairseq waits for each exchange."""
        return self.compute_s + self.exchange_s


def pass_time(of: Pass, cluster: Cluster, *, ideal: bool = False) -> PassTime:
    """Time of one pass on `cluster` by the model of kernels and links of `estimate.timing`.

    The GPU's side only: a host that launches kernels more slowly than they run, as a loop over experts
    makes it, adds to that; `launches` counts the stated ops. `ideal`: every kernel at the roofline.
    """
    return time_of(ops_of(evaluation(of)), cluster, of.dtype, ideal=ideal)


def time_of(stated: list[tuple[str, Op]], cluster: Cluster, dtype: str, *, ideal: bool = False) -> PassTime:
    """Time of the `stated` ops, one after the other."""
    ops = [op for _, op in stated]
    times = op_times(ops, machine(cluster, dtype, ideal=ideal))
    spent_s: dict[str, Num] = {"compute": 0.0, "exchange": 0.0}
    for op, time_s in zip(ops, times, strict=True):
        what = "exchange" if op.kind == "collective" else "compute"
        spent_s[what] = spent_s[what] + op.count * time_s
    return PassTime(
        compute_s=spent_s["compute"],
        exchange_s=spent_s["exchange"],
        launches=sum((op.count for op in ops), start=0.0),
    )


# --- all of it ---------------------------------------------------------------------------------


def report(of: Pass, passes: int) -> dict[str, dict[str, float]]:
    """The whole arithmetic of `passes` passes on one rank, in groups of named numbers."""
    model = to_model(of.config)
    flop = flop_by_role(of)
    groups: dict[str, dict[str, Num]] = {
        "shapes": {
            "tokens": of.tokens,
            "capacity": of.capacity,
            "slots": of.slots,
            "local_experts": of.local_experts,
            "rows_per_expert": of.ep * of.capacity,
            "slot_use_frac": slot_use(of),
        },
        "calls": {
            **aten_calls(of, passes),
            "all_to_all": exchanges(of, passes),
            "expert_ffn": expert_calls(of, passes),
            "host_reads_of_token_loop": host_reads(of.config.tokens_per_sample, passes),
        },
        "parameters": {
            "total": num_params(model),
            "rank": rank_params(of),
            "active_per_token": num_active_params(model),
        },
        "bytes": {
            "all_to_all": exchange_bytes(of),
            "all_to_all_sent": exchange_bytes(of) * (1 - 1 / of.ep),
            "weights": rank_params(of) * of.elem_bytes,
            "peak": peak_bytes(evaluation(of)),
        },
        "profiled_bytes": profiled_bytes(of, passes),
        "flop_per_pass": {**flop, "total": total_flop(of), "useful": useful_flop(of)},
    }
    return {name: {key: float(x) for key, x in group.items()} for name, group in groups.items()}


# --- what-ifs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class WhatIf:
    """One variant of the evaluation in figures, for one rank and pass."""

    name: str
    capacity: float
    expert_rows: float
    exchange_bytes: float
    flop: float
    useful_frac: float
    weight_bytes: float
    peak_bytes: float
    launches: float
    total_s: dict[str, float]
    fits: dict[str, bool]


def what_ifs(variants: dict[str, Pass], clusters: dict[str, Cluster]) -> list[WhatIf]:
    """Each variant's figures, its time on each cluster, and whether its tensors fit a chip of it.

    The CUDA context and fragmentation come on top of the tensors; they are not counted.
    """
    rows = []
    for name, of in variants.items():
        times = {chip: pass_time(of, cluster) for chip, cluster in clusters.items() if has_rate(cluster, of)}
        peak = float(peak_bytes(evaluation(of)))
        rows.append(
            WhatIf(
                name=name,
                capacity=float(of.capacity),
                expert_rows=float(of.ep * of.capacity),
                exchange_bytes=float(exchange_bytes(of)),
                flop=float(total_flop(of)),
                useful_frac=float(useful_flop(of) / total_flop(of)),
                weight_bytes=float(rank_params(of) * of.elem_bytes),
                peak_bytes=peak,
                launches=float(sum(op.count for _, op in ops_of(evaluation(of)))),
                total_s={chip: float(time.total_s) for chip, time in times.items()},
                fits={chip: peak <= cluster.chip.memory_bytes for chip, cluster in clusters.items()},
            )
        )
    return rows


def has_rate(cluster: Cluster, of: Pass) -> bool:
    """Whether the chip computes in the type of the pass."""
    chip = cluster.chip
    return of.dtype in chip.matrix_flop_per_s or of.dtype in chip.vector_flop_per_s


# --- evaluating beside generating ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PassesCost:
    """What some passes cost one rank: calls by op, FLOP, all-to-alls, and seconds on each cluster."""

    passes: int
    tokens: int
    calls: dict[str, float]
    flop: float
    exchanges: float
    exchange_bytes: float
    launches: float
    seconds: dict[str, float]


def work(
    ops: list[tuple[str, Op]], passes: int, tokens: int, clusters: dict[str, Cluster], dtype: str
) -> PassesCost:
    """The work of `ops`, which say what `passes` passes do with `tokens` tokens."""
    calls: dict[str, float] = {}
    for _, op in ops:
        if op.kind == "matmul" or op.name == "gelu":
            calls[op.name] = calls.get(op.name, 0.0) + float(op.count)
    exchanges = [op for _, op in ops if op.collective == "all_to_all"]
    return PassesCost(
        passes=passes,
        tokens=tokens,
        calls=calls,
        flop=float(sum(op.count * op.cost.flop for _, op in ops)),
        exchanges=float(sum(op.count for op in exchanges)),
        exchange_bytes=float(sum(op.count * op.payload_bytes for op in exchanges)),
        launches=float(sum(op.count for _, op in ops)),
        seconds={name: float(time_of(ops, cluster, dtype).total_s) for name, cluster in clusters.items()},
    )


def side_by_side(evaluated: Pass, of: Generation, clusters: dict[str, Cluster]) -> dict[str, PassesCost]:
    """One pass of eval_lm, and of generate its first pass, those after it, and all.

    Their tokens are those that are scored, and those that are decided on; a text counts once, whatever beams
    compete for it.
    """
    first = merged(pass_ops(of, of.passes[0]))
    rest = merged(op for one in of.passes[1:] for op in pass_ops(of, one))
    num, prompts, dtype = of.num_passes, of.num_prompts, of.dtype
    return {
        "eval_lm": work(merged(ops_of(evaluation(evaluated))), 1, evaluated.tokens, clusters, dtype),
        "generate_prefill": work(first, 1, prompts, clusters, dtype),
        "generate_decode": work(rest, num - 1, prompts * (num - 1), clusters, dtype),
        "generate": work(merged([*first, *rest]), num, prompts * num, clusters, dtype),
    }
