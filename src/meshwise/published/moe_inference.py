"""What the evaluation of a mixture-of-experts GPT costs a rank, in closed form, and what would change it.

Everything is a sum over the ops of `program.expert_pass`: the calls of torch's ops as its profiler counts
them, bytes that a profiler sees stay behind, FLOP by what they are for, and how many of them are useful,
that is, spent on tokens that the router sent and not on empty slots or on moving tokens by products.
Memory and time follow. The fields of a `Pass` may be arrays, so a what-if is the same call on a grid.

The example that all this was derived from is the evaluation of fairseq's 15B model on four V100; its
printed profile is held against these functions in `tests/test_moe.py`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.estimate.timing import machine, op_times
from meshwise.machine.hardware import Cluster
from meshwise.model.gpt_config import GptConfig, to_model
from meshwise.model.weights import num_active_params, num_params
from meshwise.program.expert_pass import Pass, evaluation, new_pass, rank_params
from meshwise.program.generation import Generation, generation_events, merged, pass_ops
from meshwise.program.lifetime import ops_of, peak_bytes
from meshwise.program.op import Op

# --- calls -------------------------------------------------------------------------------------


def aten_calls(of: Pass, passes: int = 1) -> dict[str, Num]:
    """Calls of torch's ops on one rank, as its profiler counts them (composite ones beside their parts)."""
    ops = ops_of(evaluation(of))
    products = {name: _count(ops, name) for name in ("addmm", "mm", "bmm", "baddbmm", "gelu")}
    moves = sum(op.count for op in ops if op.part in ("dispatch", "combine"))
    matmuls = products["mm"] - moves  # the products that are linear layers without a bias
    calls = products | {"matmul": matmuls, "linear": products["addmm"] + matmuls}
    return {f"aten::{name}": passes * calls[name] for name in calls}


def exchanges(of: Pass, passes: int = 1) -> Num:
    """All-to-alls of one rank: two in each MoE layer."""
    return passes * _count(ops_of(evaluation(of)), "all_to_all")


def exchange_bytes(of: Pass) -> Num:
    """Bytes of one all-to-all on one rank, the part that it keeps included."""
    return of.slots * of.config.decoder_embed_dim * of.elem_bytes


def host_reads(block_tokens: int, blocks: int) -> int:
    """Single numbers that the token loop of eval_lm fetches from the device: 4 a token, one less a block."""
    return blocks * (4 * block_tokens - 1)


def _count(ops: Iterable[Op], name: str) -> Num:
    return sum((op.count for op in ops if op.name == name), start=0)


# --- FLOP --------------------------------------------------------------------------------------


def flop_by_role(of: Pass) -> dict[str, Num]:
    """FLOP of one pass on one rank, by what they are for."""
    parts: dict[str, Num] = defaultdict(float)
    for op in ops_of(evaluation(of)):
        if op.kind == "matmul":
            parts[op.part] += op.count * op.cost.flop
    return dict(parts)


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
    written: dict[str, Num] = defaultdict(float)
    for op in ops_of(evaluation(of)):
        is_narrowed = op.name == "_to_copy" and op.part in ("dense_ffn", "experts") and op.dtype == of.dtype
        for what in (op.name, f"part {op.part}", "narrowed" if is_narrowed else "others"):
            written[what] += op.count * op.cost.write_bytes
    moves = written["part dispatch"] + written["part combine"]
    residuals = 2 * config.decoder_layers * of.tokens * config.decoder_embed_dim * of.elem_bytes
    figures = {
        "MoELayer": config.num_moe_layers * moe_layer_kept_bytes(of),
        "TransformerDecoder": decoder_kept_bytes(of),
        "aten::add": written["add"] + residuals,
        "aten::reshape": written["part chunks"],
        "aten::type_as": written["narrowed"],
        "aten::matmul": written["mm"] - moves,
    }
    figures |= {f"aten::{name}": written[name] for name in ("addmm", "bmm", "gelu", "mm") if name in written}
    return {name: passes * size for name, size in figures.items()}


# --- time --------------------------------------------------------------------------------------


def pass_s(of: Pass, cluster: Cluster) -> Num:
    """Seconds of one pass on a rank of `cluster`, by the model of kernels and links of `estimate.timing`.

    The GPU's side only: a host that launches kernels more slowly than they run, as a loop over experts
    makes it, adds to that.
    """
    return _seconds(ops_of(evaluation(of)), cluster, of.dtype)


def _seconds(stated: Sequence[Op], cluster: Cluster, dtype: str) -> Num:
    """Seconds of the `stated` ops, one after the other: fairseq waits for each exchange."""
    times = op_times(stated, machine(cluster, dtype))
    return sum((op.count * time_s for op, time_s in zip(stated, times, strict=True)), start=0.0)


def has_rate(cluster: Cluster, dtype: str) -> bool:
    """Whether the chip computes in `dtype`."""
    return dtype in cluster.chip.matrix_flop_per_s or dtype in cluster.chip.vector_flop_per_s


# --- all of it ---------------------------------------------------------------------------------


def report(of: Pass, passes: int) -> dict[str, dict[str, float]]:
    """The whole arithmetic of `passes` passes on one rank, in groups of named numbers."""
    model = to_model(of.config)
    groups: dict[str, dict[str, Num]] = {
        "shapes": {
            **{name: getattr(of, name) for name in ("tokens", "capacity", "slots", "local_experts")},
            "rows_per_expert": of.ep * of.capacity,
            "slot_use_frac": of.config.top_k * of.tokens / of.slots,
        },
        "calls": {
            **aten_calls(of, passes),
            "all_to_all": exchanges(of, passes),
            "expert_ffn": passes * of.local_experts * of.config.num_moe_layers,
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
        "flop_per_pass": {**flop_by_role(of), "total": total_flop(of), "useful": useful_flop(of)},
    }
    return {name: {key: float(x) for key, x in group.items()} for name, group in groups.items()}


# --- what-ifs ----------------------------------------------------------------------------------


def variants(of: Pass, fractions: Iterable[float]) -> dict[str, Pass]:
    """The pass as it is, and with one thing changed at a time."""
    config, ranks = of.config, int(of.ep)
    sparse = replace(config, use_tutel_moe=True)

    def with_fraction(config: GptConfig, share: float, *, grouped: bool = False) -> Pass:
        return new_pass(config, ep=of.ep, tp=of.tp, dtype=of.dtype, token_fraction=share, grouped=grouped)

    shares = {f"fraction {share:g}" if share else "capacity as in training": share for share in fractions}
    more = [other for other in (2 * ranks, 4 * ranks, 16 * ranks) if config.moe_expert_count % other == 0]
    return {
        "as configured": of,
        **{name: with_fraction(config, share) for name, share in shares.items()},
        "sparse dispatch": replace(of, config=sparse),
        "grouped GEMM": replace(of, grouped=True),
        "sparse, grouped, as in training": with_fraction(sparse, 0.0, grouped=True),
        **{f"{other} ranks": replace(of, ep=other) for other in more},
    }


def what_if(name: str, of: Pass, clusters: Mapping[str, Cluster]) -> dict[str, Any]:
    """One variant's figures, its time on each cluster, and whether its tensors fit a chip of it."""
    return {
        "name": name,
        "capacity": float(of.capacity),
        "expert_rows": float(of.ep * of.capacity),
        "exchange_bytes": float(exchange_bytes(of)),
        "flop": float(total_flop(of)),
        "useful_frac": float(useful_flop(of) / total_flop(of)),
        "weight_bytes": float(rank_params(of) * of.elem_bytes),
        "launches": float(sum(op.count for op in ops_of(evaluation(of)))),
        "total_s": {chip: float(pass_s(of, on)) for chip, on in clusters.items() if has_rate(on, of.dtype)},
        **_room(peak_bytes(evaluation(of)), clusters),
    }


# --- evaluating beside generating ---------------------------------------------------------------


def side_by_side(evaluated: Pass, of: Generation, clusters: Mapping[str, Cluster]) -> dict[str, Any]:
    """One pass of eval_lm, and of generate its first pass, those after it, and all.

    Their tokens are those that are scored, and those that are decided on; a text counts once, whatever beams
    compete for it. Parts of generate fit where all of it does.
    """
    first = merged(pass_ops(of, of.passes[0]))
    rest = merged(op for one in of.passes[1:] for op in pass_ops(of, one))
    num, prompts, scored = of.num_passes, of.num_prompts, evaluation(evaluated)
    peak = peak_bytes(generation_events(of))
    works = {
        "eval_lm": (merged(ops_of(scored)), 1, evaluated.tokens, peak_bytes(scored)),
        "generate_prefill": (first, 1, prompts, peak),
        "generate_decode": (rest, num - 1, prompts * (num - 1), peak),
        "generate": (merged([*first, *rest]), num, prompts * num, peak),
    }
    return {
        name: {"passes": passes, "tokens": tokens, **_work(ops, clusters, of.dtype), **_room(peak, clusters)}
        for name, (ops, passes, tokens, peak) in works.items()
    }


def _room(peak: Num, clusters: Mapping[str, Cluster]) -> dict[str, Any]:
    """The most bytes that live at a time, and whether a chip of each cluster has room for them.

    The CUDA context and fragmentation come on top of the tensors; they are not counted.
    """
    fits = {chip: bool(peak <= on.chip.memory_bytes) for chip, on in clusters.items()}
    return {"peak_bytes": float(peak), "fits": fits}


def _work(ops: Sequence[Op], clusters: Mapping[str, Cluster], dtype: str) -> dict[str, Any]:
    """What `ops` cost one rank: calls by op, FLOP, all-to-alls, and seconds on each cluster."""
    calls: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.kind == "matmul" or op.name == "gelu":
            calls[op.name] += float(op.count)
    exchanges = [op for op in ops if op.collective == "all_to_all"]
    return {
        "calls": calls,
        "flop": float(sum(op.count * op.cost.flop for op in ops)),
        "exchanges": float(sum(op.count for op in exchanges)),
        "exchange_bytes": float(sum(op.count * op.payload_bytes for op in exchanges)),
        "launches": float(sum(op.count for op in ops)),
        "seconds": {
            name: float(_seconds(ops, on, dtype)) for name, on in clusters.items() if has_rate(on, dtype)
        },
    }
