"""Which model and plan a job ran, from its traces: sizes of matmuls, groups of collectives, number of ranks.

A weight of [d_in, d_out] shows in a matmul whose sizes are d_in, d_out and the tokens of a microbatch, in any
order: forward, and both backward products. So each model of the catalog, cut by each degree of tensor
parallelism, is held against the matmuls of the job. It is recognised if every matrix of its dense blocks was
multiplied (q, k and v, or gate and up, apart or as one), its vocabulary too, and no other model explains as
much of the FLOP.

Where ranks send messages and only some of them multiply by the vocabulary, these end a pipeline, of which the
default schedule is taken. Where attention has only a part of the heads, an
all-to-all of that many ranks is that of context parallelism (Ulysses). Another is that of experts if the
model has any, else of context parallelism over keys. The other ranks are data parallel, with ZeRO stage 3 if
they gather and scatter among themselves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from meshwise.model.architecture import Model, layer_kinds
from meshwise.model.find import models
from meshwise.model.weights import Weight, block_weights
from meshwise.trace.op_rates import op_rates
from meshwise.trace.summary import Summary

_DEGREES = (1, 2, 4, 8)
_LEAST_FRAC = 0.5
_APART_FRAC = 0.01
_MESSAGES = ("send_recv", "send", "recv")
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recognised:
    """What ran, in the words of `estimate`."""

    model: str
    plan: str
    batch: int
    seq: int
    microbatch: int
    flop_frac: float
    """Share of the FLOP of all matmuls that the weights of the model explain."""

    @property
    def text(self) -> str:
        """In one sentence."""
        return (
            f"recognised from shapes, groups and ranks: {self.model}, {self.plan}, batch {self.batch} of "
            f"{self.seq} tokens, microbatch {self.microbatch} ({self.flop_frac:.0%} of the matmul FLOP); "
            "give --model and --plan if that is wrong"
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """FLOP and calls of matmuls by their sizes, and tokens and heads of each attention."""

    flop: dict[Sizes, float]
    calls: dict[Sizes, int]
    attended: set[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Match:
    """A model, cut by `tp`, on so many tokens, and the share of the FLOP that it explains."""

    frac: float
    model: Model
    tp: int
    tokens: int


def recognised(summary: Summary) -> Recognised | None:
    """The model and plan of a job; None where shapes were not recorded, or fit no model or several."""
    seen = _seen(summary)
    num_ranks = max([len(summary.traces), *(trace.world_size or 0 for trace in summary.traces)])
    sizes = {one.group_size for one in summary.collectives}
    match = _best(seen.flop, [tp for tp in _DEGREES if tp == 1 or (num_ranks % tp == 0 and tp in sizes)])
    if match is None:
        return None
    model, tp, tokens = match.model, match.tp, match.tokens
    pp, (cp, ep) = _num_stages(summary, model.vocab // tp), _exchanging(summary, match, seen.attended)
    replicas = num_ranks // (tp * pp)
    seq, heads = min(seen.attended, default=(tokens * cp, 0))
    if heads and heads * tp * cp != model.num_heads:
        seq *= cp
    is_sharded = replicas > 1 and replicas != tp and _shards(summary, replicas)
    degrees = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
    words = [f"{axis}={size}" for axis, size in degrees.items() if size > 1 or axis == "tp"]
    num_steps = len({step.number for step in summary.steps}) or 1
    down = next(w for w in _matrices(model) if w.op in ("fc2", "out_proj"))
    passes = 3 * model.num_layers / pp * num_steps * len(summary.traces)
    repeats = max(1, round(seen.calls[_sorted(_cut(down, tp), tokens)] / passes))
    microbatch = max(1, tokens * cp // seq)
    plan = ",".join([*words, *["zero=3"] * is_sharded])
    return Recognised(model.name, plan, repeats * (replicas // cp) * microbatch, seq, microbatch, match.frac)


def _seen(summary: Summary) -> _Seen:
    seen = _Seen(defaultdict(float), defaultdict(int), set())
    for one in op_rates(summary.traces):
        numbers = [int(number) for number in re.findall(r"\d+", one.shape)]
        if one.kind == "matmul":
            seen.flop[tuple(sorted(numbers))] += one.count * one.flop
            seen.calls[tuple(sorted(numbers))] += one.count
        elif one.kind == "attention":
            seen.attended.add((numbers[2], numbers[1]))
    return seen


def _best(flop: dict[Sizes, float], degrees: Sequence[int]) -> _Match | None:
    """What explains most of the FLOP; None where that is little, or another model explains as much."""
    tokens_seen, total = {size for shape in flop for size in shape}, sum(flop.values())
    found = [
        _Match(sum(flop[shape] for shape in shown) / total, model, tp, tokens)
        for model, tp, tokens in product(models().values(), degrees, tokens_seen)
        if (shown := _shown(model, tp, tokens, flop))
    ]
    best = max(found, key=lambda one: one.frac, default=None)
    if best is None or best.frac < _LEAST_FRAC:
        return None
    rivals = (one for one in found if one.model.name != best.model.name)
    return None if any(one.frac > best.frac - _APART_FRAC for one in rivals) else best


def _num_stages(summary: Summary, vocab: int) -> int:
    """Of pipelines that end on the ranks which multiply by the vocabulary; 1 where nobody sends messages."""
    if not any(one.name in _MESSAGES for one in summary.collectives):
        return 1
    ends = sum(
        any(one.kind == "matmul" and str(vocab) in re.findall(r"\d+", one.shape) for one in op_rates([trace]))
        for trace in summary.traces
    )
    return max(1, len(summary.traces) // max(ends, 1))


def _exchanging(summary: Summary, match: _Match, attended: set[tuple[int, int]]) -> tuple[int, int]:
    """The degrees of context and expert parallelism, by how many ranks exchange all to all."""
    rank = summary.traces[0].rank
    calls = [one for one in summary.collectives if one.name == "all_to_all" and rank in one.wait_s]
    sizes = list({one.group: one.group_size or 1 for one in calls}.values())
    heads = min(attended, default=(0, 0))[1]
    ulysses = match.model.num_heads // (heads * match.tp) if heads else 1
    if ulysses > 1 and ulysses in sizes:
        sizes.remove(ulysses)
        return ulysses, max(sizes, default=1)
    most = max(sizes, default=1)
    return (1, most) if match.model.moe else (most, 1)


def _shown(model: Model, tp: int, tokens: int, flop: dict[Sizes, float]) -> set[Sizes]:
    """The sizes of matmuls that the weights of a model explain; none unless each op is among them."""
    shown: set[Sizes] = set()
    by_op: dict[str, list[Weight]] = defaultdict(list)
    for weight in _matrices(model):
        by_op[weight.op].append(weight)
    for weights in by_op.values():
        cuts = [_cut(weight, tp) for weight in weights]
        as_one = (cuts[0][0], sum(columns for _, columns in cuts))
        seen = {one for one in (_sorted(cut, tokens) for cut in (*cuts, as_one)) if one in flop}
        if not seen:
            return set()
        shown |= seen
    head = {model.hidden, model.vocab // tp}
    logits = {shape for shape in flop if head <= set(shape)}  # of all tokens, or of the last ones
    return shown | logits if logits else set()


def _matrices(model: Model) -> Iterator[Weight]:
    """The matrices of the blocks, those of experts apart."""
    seen = (w for kind in layer_kinds(model) for w in block_weights(model, kind))
    return (w for w in dict.fromkeys(seen) if w.is_matrix and not w.is_expert and w.op != "router")


def _cut(weight: Weight, tp: int) -> tuple[int, int]:
    """[d_in, d_out] of what one rank holds."""
    rows, columns = weight.shape
    return rows // (tp if weight.cut == "rows" else 1), columns // (tp if weight.cut == "columns" else 1)


def _sorted(cut: tuple[int, int], tokens: int) -> Sizes:
    return tuple(sorted((*cut, tokens)))


def _shards(summary: Summary, dp: int) -> bool:
    """Whether the data-parallel ranks gather weights and scatter gradients."""
    names = {one.name for one in summary.collectives if one.group_size == dp}
    return {"all_gather", "reduce_scatter"} <= names
