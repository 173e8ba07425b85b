"""What generating text costs a rank: FLOP, exchanges and time, beside those of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.machine.hardware import Cluster
from meshwise.program.expert_pass import Pass, evaluation
from meshwise.program.generation import Generation, merged, pass_ops
from meshwise.program.lifetime import ops_of
from meshwise.program.op import Op
from meshwise.published.moe_inference import time_of


@dataclass(frozen=True, slots=True, eq=False)
class Work:
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
) -> Work:
    """The work of `ops`, which say what `passes` passes do with `tokens` tokens."""
    calls: dict[str, float] = {}
    for _, op in ops:
        if op.kind == "matmul" or op.name == "gelu":
            calls[op.name] = calls.get(op.name, 0.0) + float(op.count)
    exchanges = [op for _, op in ops if op.collective == "all_to_all"]
    return Work(
        passes=passes,
        tokens=tokens,
        calls=calls,
        flop=float(sum(op.count * op.cost.flop for _, op in ops)),
        exchanges=float(sum(op.count for op in exchanges)),
        exchange_bytes=float(sum(op.count * op.payload_bytes for op in exchanges)),
        launches=float(sum(op.count for _, op in ops)),
        seconds={name: float(time_of(ops, cluster, dtype).total_s) for name, cluster in clusters.items()},
    )


def side_by_side(evaluated: Pass, of: Generation, clusters: dict[str, Cluster]) -> dict[str, Work]:
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
