"""One forward pass of a mixture-of-experts GPT on one rank, op by op with its tensors: what
`runtime.programs.transformer_lm` does.

Notation, that of GShard (arXiv 2006.16668): B sequences of T tokens, S = B T; width M, feed-forward F,
experts of width X, E of them; H heads, V words, P ranks of tensor parallelism. Each token visits `top_k`
experts, and an expert has C *slots* a rank: its capacity. W ranks share the experts, so a rank holds E / W of
them and its expert GEMMs have W C rows. Between ranks two all-to-alls carry every slot, filled or not: their
size does not depend on where the router sends the tokens. *Dense dispatch* writes the routing as a tensor [S,
E, C] and moves tokens by matrix products, 2 S E C M FLOP each; *sparse dispatch* copies the rows that are
routed.

Ops carry torch's own
names (`mm`, `addmm`, `bmm`, ...), so that a recorder's can be laid beside them;
their *part* says what they are for. The matrix products, the collectives, what goes into a cache of keys
and values, and the kernels as large as [S, E, C], as an expert's rows, as attention scores or as logits are
stated; what the gate does on [S, E] and smaller is not, nor norms, sums and embeddings on [S, M], but the
tensors that these leave are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.core.numbers import added
from meshwise.core.refusals import refuse
from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.cost.op import matmul_flop
from meshwise.model.gpt_config import GptConfig
from meshwise.program.lifetime import Script, moment
from meshwise.program.op import Op, Tensor


def capacity(num_tokens: Num, num_experts: Num, *, token_fraction: Num, top_k: int = 2) -> Num:
    """Tokens that one expert takes from one rank: ceil(token_fraction x tokens) in evaluation.

    A `token_fraction` of 0 or less gives the rule of training, top_k x ceil(tokens / experts).
    Source: fairseq's top2gate.py and top1gate.py (branch moe).
    """
    training = top_k * np.ceil(np.divide(num_tokens, num_experts))
    return np.where(np.greater(token_fraction, 0), np.ceil(np.multiply(token_fraction, num_tokens)), training)


def num_slots(config: GptConfig, num_tokens: int) -> int:
    """Slots of an expert for a batch of `num_tokens` on one rank."""
    token_frac = config.moe_eval_capacity_token_fraction
    return int(capacity(num_tokens, config.moe_expert_count, token_fraction=token_frac, top_k=config.top_k))


def check_tp(config: GptConfig, tp: int) -> None:
    """PlanError where `tp` does not divide heads, hidden widths or words."""
    refuse("gpt tp", PlanError, of=config, tp=tp)


class Placement(NamedTuple):
    """A world of tp x dp ranks, tp on neighbours; each `ep` consecutive ranks of dp share the experts."""

    tp: int
    dp: int
    ep: int


def place(num_ranks: int, num_experts: int, *, tp: int = 1, ep: int | None = None) -> Placement:
    """The placement of `num_experts` (0: a model without any) on `num_ranks`, or PlanError.

    `ep` None: as many as there are data-parallel ranks, or experts if those are fewer.
    """
    dp = num_ranks // tp
    ep = ep or min(dp, num_experts or 1)
    refuse("gpt ranks", PlanError, num_ranks=num_ranks, num_experts=num_experts, tp=tp, dp=dp, ep=ep)
    return Placement(tp, dp, ep)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """A forward pass: the architecture in `config`, and what may vary, as numbers or arrays.

    `batch` B sequences of `length` T tokens; with a cache they follow `past` tokens, and only the last one's
    logits are made. `capacity` C, `ep` W, `tp` P; `grouped`: the experts of a
    rank in one batched GEMM. `tp_rank` matters only to which biases count as weights.
    """

    config: GptConfig
    batch: int
    length: int
    capacity: Num
    past: int = 0
    last_only: bool = False
    ep: Num = 1
    tp: int = 1
    dtype: str = "fp16"
    grouped: bool = False
    tp_rank: int = 0

    @property
    def elem_bytes(self) -> float:
        """Bytes of an element of weights and activations."""
        return DTYPE_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """S, tokens of a rank and pass."""
        return self.batch * self.length

    @property
    def keys(self) -> int:
        """Tokens that the last query sees."""
        return self.past + self.length

    @property
    def heads(self) -> int:
        """Attention heads of a rank, of all sequences."""
        return self.batch * self.config.decoder_attention_heads // self.tp

    @property
    def local_words(self) -> int:
        """Words whose logits a rank makes."""
        return self.config.vocab_size // self.tp

    @property
    def logits(self) -> tuple[int, int, int]:
        """Shape of the logits."""
        return self.batch, 1 if self.last_only else self.length, self.local_words

    @property
    def slots(self) -> Num:
        """E C, rows that one rank sends."""
        return self.config.moe_expert_count * self.capacity

    @property
    def local_experts(self) -> Num:
        """E / W."""
        return self.config.moe_expert_count / self.ep

    @property
    def routing_size(self) -> Num:
        """S E C, elements of a dense routing tensor."""
        return self.tokens * self.slots


FIRST_POSITION = 2
"""Rows of the table of positions before that of the first token: fairseq's padding index, and one."""


def new_pass(
    config: GptConfig, *, ep: Num = 1, tp: int = 1, tp_rank: int = 0, dtype: str = "fp16",
    grouped: bool = False, token_fraction: Num | None = None,
) -> Pass:  # fmt: skip
    """The pass of `config` in evaluation, with the capacity that its fraction (or `token_fraction`) gives.

    A `token_fraction` of 0 is the rule of training.
    """
    batch, length, experts = config.batch_size_valid, config.tokens_per_sample, config.moe_expert_count
    share = config.moe_eval_capacity_token_fraction if token_fraction is None else token_fraction
    slots = capacity(batch * length, max(experts, 1), token_fraction=share, top_k=config.top_k)
    return Pass(
        config=config, batch=batch, length=length, capacity=float(slots) if np.ndim(slots) == 0 else slots,
        ep=ep, tp=tp, tp_rank=tp_rank, dtype=dtype, grouped=grouped,
    )  # fmt: skip


def num_passes(num_batches: int, dp: int, max_valid_steps: int | None) -> int:
    """Passes of every rank: enough for all batches, and none behind number `max_valid_steps`, counted from 0.

    fairseq's eval_lm breaks *behind* that number, so `max_valid_steps=4` is five passes.
    """
    needed = -(-num_batches // dp)
    return needed if max_valid_steps is None else min(needed, max_valid_steps + 1)


def evaluation(of: Pass) -> list[Op]:
    """One pass of evaluation on a rank: the model, its running sums, a batch through it, and its loss."""
    s, config = Script(module="eval_lm", dtype=of.dtype), of.config
    held = [s.new("inputs", of.tokens, dtype="int64"), s.new("targets", of.tokens, dtype="int64")]
    held.append(s.new("running sums", 2 + 4 * config.top_k, dtype="fp64"))
    weights = model_tensors(of, s, config.tokens_per_sample)
    logits, left = forward(of, s, weights)
    _loss(of, s, logits)
    s.returns(*held, *weights.values(), *left, logits)
    return s.events


def model_tensors(of: Pass, s: Script, max_positions: int) -> dict[str, Tensor]:
    """What a rank holds of the model, all layers together: weights, positions, zeros for others' biases.

    Experts are cut by `ep`; words and matrices, experts' too, by `tp`. A bias that is added behind a cut
    product is a weight of the first rank of tp alone.
    """
    config, width, local = of.config, of.config.decoder_embed_dim, of.config.decoder_embed_dim // of.tp
    layers, dense, moe = config.decoder_layers, config.num_dense_layers, config.num_moe_layers
    experts = (moe, of.local_experts if moe else 0)
    shapes: dict[str, tuple[Num, ...]] = {
        "embed": (of.local_words, width),
        "norms": (layers, 4, width),
        "qkv": (layers, 3, local, width),
        "qkv_bias": (layers, 3, local),
        "out": (layers, width, local),
        "out_bias": (layers, width),
        "gate": (moe, config.moe_expert_count, width),
        "final_norm": (2, width),
    }
    for name, stack, ffn in (
        ("dense", (dense,), config.decoder_ffn_embed_dim // of.tp),
        ("experts", experts, config.expert_ffn_dim // of.tp),
    ):
        shapes |= {f"{name}_fc1": (*stack, ffn, width), f"{name}_fc1_bias": (*stack, ffn)}
        shapes |= {f"{name}_fc2": (*stack, width, ffn), f"{name}_fc2_bias": (*stack, width)}
    shapes["positions"] = (max_positions + FIRST_POSITION, width)
    constant = {"positions"} | ({"dense_fc2_bias", "experts_fc2_bias"} if of.tp_rank else set())
    return {name: s.new(name, *shape, is_weight=name not in constant) for name, shape in shapes.items()}


def rank_params(of: Pass) -> Num:
    """Parameters that a rank holds."""
    tensors = model_tensors(of, Script(module="", dtype=of.dtype), 0).values()
    return added(tensor.elements for tensor in tensors if tensor.is_weight)


def forward(
    of: Pass, s: Script, weights: dict[str, Tensor], cache: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """From tokens to logits, and what else the pass leaves: each layer's output, the routing's metrics.

    Alike layers are stated once, as often as they occur, where the last of them stands: more is alive there
    than in those before.
    """
    s = replace(s, module=f"{s.module}/TransformerDecoder")
    config, shape = of.config, (of.tokens, of.config.decoder_embed_dim)
    x = s.new("embedded", *shape)
    _reduced(of, s, x, "embedding")
    mask = [s.new("mask", of.length, of.keys)] if of.length > 1 else []
    left = [x]
    kinds = [config.is_moe_layer(i) for i in range(config.decoder_layers)]
    for i, is_moe in enumerate(kinds):
        if is_moe in kinds[i + 1 :]:
            x = s.new("x", *shape, reads=(x,))
            left += [x, _metrics(of, s)] if is_moe else [x]
        else:
            module = f"{s.module}/TransformerDecoderLayer {'with' if is_moe else 'without'} MoE"
            own = replace(s, module=module, times=kinds.count(is_moe))
            x, metrics = _layer(of, own, weights, x, cache, is_moe=is_moe)
            left += [x, *metrics]
    rows = of.logits[0] * of.logits[1]
    normed = s.new("normed", rows, shape[1], reads=(x,))
    logits = s.matmul("mm", (1.0, rows, of.local_words, shape[1]), (normed, weights["embed"]), part="lm_head")
    s.returns(*mask, normed)
    return logits, left


def _layer(
    of: Pass, s: Script, weights: dict[str, Tensor], x: Tensor, cache: Tensor | None, *, is_moe: bool
) -> tuple[Tensor, list[Tensor]]:
    """Attention, then the feed-forward or the experts; with experts, the routing's metrics too."""
    middle = s.new("x", *x.shape, reads=(x, _attention(of, s, weights, x, cache)))
    normed = s.new("normed", *x.shape, reads=(middle,))
    metrics: list[Tensor] = []
    if is_moe:
        result, metrics = _experts_layer(of, replace(s, module=f"{s.module}/MoELayer"), weights, normed)
    else:
        ffn = of.config.decoder_ffn_embed_dim
        result = _feed_forward(of, s, weights, "dense", normed, of.tokens, ffn, part="dense_ffn")
        _reduced(of, s, result)
    out = s.new("x", *x.shape, reads=(middle, result))
    s.returns(middle, normed)
    return out, metrics


def _attention(of: Pass, s: Script, weights: dict[str, Tensor], x: Tensor, cache: Tensor | None) -> Tensor:
    """Scores and their softmax in memory; with a cache, keys and values are read where it keeps them."""
    s = replace(s, module=f"{s.module}/MultiheadAttention")
    width, dim, heads = of.config.decoder_embed_dim, of.config.head_dim, of.heads
    local = width // of.tp
    normed = s.new("normed", of.tokens, width, reads=(x,))
    matrix = weights["qkv"].view("qkv", local, width)
    shape = 1.0, of.tokens, local, width
    q, k, v = (s.matmul("mm", shape, (normed, matrix), name, part="qkvo") for name in "qkv")
    scaled = s.new("q scaled", heads, of.length, dim, reads=(q, k, v))
    keys, values = (each.view(each.name, heads, of.keys, dim) for each in (k, v))
    if cache is not None:
        for new in (k, v):
            own = new.view("new", heads, of.length, dim)
            store = cache.view("store", *own.shape)
            s.op("copy_", "kernel", own.shape, reads=(store, own), writes=(store,), part="cache")
        s.returns(k, v)
        keys = values = cache.view("store", heads, of.keys, dim)
    scores = s.matmul("bmm", (heads, of.length, of.keys, dim), (scaled, keys), "scores", part="attention")
    shares = s.kernel("_softmax", (heads, of.length, of.keys), (scores,), part="softmax")
    mixed = s.matmul("bmm", (heads, of.length, dim, of.keys), (shares, values), "mixed", part="attention")
    if of.length > 1 and of.config.decoder_attention_heads > of.tp:
        mixed = s.new("joined", of.tokens, local, reads=(mixed,))
    rows, matrix = mixed.view("mixed", of.tokens, local), weights["out"].view("out", width, local)
    out = s.matmul("mm", (1.0, of.tokens, width, local), (rows, matrix), "out", part="qkvo")
    _reduced(of, s, out)
    s.returns(normed, scaled, keys, values, scores, mixed)
    return out


def _feed_forward(
    of: Pass, s: Script, weights: dict[str, Tensor], name: str, rows: Tensor, num_rows: Num, ffn: int, *,
    part: str, batch: Num | None = None, count: Num = 1.0,
) -> Tensor:  # fmt: skip
    """Rows [.., M] -> [.., F / P] -> GELU in fp32 -> [.., M], each product with its bias (`addmm`)."""
    width, hidden = of.config.decoder_embed_dim, ffn // of.tp
    op, size = ("addmm", 1.0) if batch is None else ("baddbmm", batch)
    shape = (num_rows, hidden) if batch is None else (batch, num_rows, hidden)
    how: dict[str, Any] = {"part": part, "count": count}
    fc1, bias1, fc2, bias2 = (weights[f"{name}_{each}"] for each in ("fc1", "fc1_bias", "fc2", "fc2_bias"))
    first = fc1.view("fc1", size, hidden, width), bias1.view("bias", size, hidden)
    second = fc2.view("fc2", size, width, hidden), bias2.view("bias", size, width)
    rows = rows.view("rows", size, num_rows, width)
    inner = s.matmul(op, (size, num_rows, hidden, width), (rows, *first), **how)
    wide = inner if of.dtype == "fp32" else s.kernel("_to_copy", shape, (inner,), dtype="fp32", **how)
    wide = s.kernel("gelu", shape, (wide,), dtype="fp32", **how)
    active = wide if of.dtype == "fp32" else s.kernel("_to_copy", shape, (wide,), **how)
    s.returns(inner)
    return s.matmul(op, (size, num_rows, width, hidden), (active, *second), **how)


# --- experts -----------------------------------------------------------------------------------


def _experts_layer(of: Pass, s: Script, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Gate, dispatch, all-to-all, experts, all-to-all, combine: the result and the routing's metrics."""
    width, num_experts = of.config.decoder_embed_dim, of.config.moe_expert_count
    matrix = weights["gate"].view("gate", num_experts, width)
    s.matmul("mm", (1.0, of.tokens, num_experts, width), (x, matrix), part="gate")
    metrics = _metrics(of, s)
    ways = _Sparse(of, s) if of.config.use_tutel_moe else _Dense(of, s)
    arrived = _exchanged(of, s, ways.scatter(x))
    made = _expert_results(of, s, weights, arrived)
    parts = (of.ep, of.local_experts, of.capacity, width)
    returned = _travelling(of, "returned", of.slots, width)
    s.op("cat", "kernel", parts, reads=(made[0].view("parts", *parts),), makes=returned, part="experts")
    back = _exchanged(of, s, returned)
    result = ways.gather(back)
    _reduced(of, s, result)
    s.returns(*arrived, *made, *back, *ways.tensors)
    return result, [metrics]


def _travelling(of: Pass, name: str, rows: Num, width: int) -> tuple[Tensor, Tensor]:
    """Rows of slots that go through an exchange, and those that stay since there is none: one is empty."""
    share = np.where(np.greater(of.ep, 1), 1.0, 0.0)
    return Tensor(name, (share, rows, width), of.dtype), Tensor(name, (1.0 - share, rows, width), of.dtype)


def _exchanged(of: Pass, s: Script, slots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The all-to-all of all slots, filled or not."""
    sent, stay = slots
    width = of.config.decoder_embed_dim
    arrived = s.new("arrived", sent.shape[0], of.slots, width, reads=(sent,))
    s.collective(
        "all_to_all", "all_to_all", (of.slots, width), "ep", of.ep, arrived, stride=float(of.tp),
        part="exchange",
    )  # fmt: skip
    s.returns(sent)
    return arrived, stay


def _expert_results(of: Pass, s: Script, weights: dict[str, Tensor], slots: Sequence[Tensor]) -> list[Tensor]:
    """What W ranks sent an expert [W, 1, C, M] is copied together first, unless it lies together.

    It lies apart where it is some of each of several ranks, between that of other experts. In a loop over
    experts the results of those before stay while the last one is computed.
    """
    num_rows, width, ffn = of.ep * of.capacity, of.config.decoder_embed_dim, of.config.expert_ffn_dim
    is_apart = np.greater(of.ep, 1) & np.greater(of.local_experts, 1) & np.greater(of.capacity, 1)
    is_copied = np.where(is_apart, 1.0, 0.0)

    def together(chunk: tuple[Num, ...], count: Num) -> Tensor:
        moved, rows = slots[0].view("chunk", *chunk), Tensor("rows", (is_copied, *chunk), of.dtype)
        s.op("clone", "kernel", chunk, reads=(moved,), makes=(rows,), count=is_copied * count, part="chunks")
        return rows

    def answer(rows: Tensor, count: Num, batch: Num | None = None) -> Tensor:
        how: dict[str, Any] = {"part": "experts", "count": count, "batch": batch}
        return _feed_forward(of, s, weights, "experts", rows, num_rows, ffn, **how)

    if of.grouped:
        rows = together((of.local_experts, of.ep, of.capacity, width), 1.0)
        made = [answer(rows, 1.0, of.local_experts)]
    else:
        chunk, num_before = (of.ep, 1, of.capacity, width), of.local_experts - 1
        rows_before = together(chunk, num_before)
        answer(rows_before, num_before)
        before = s.new("before", num_before, num_rows, width)
        rows = together(chunk, 1.0)
        s.returns(rows_before)
        made = [answer(rows, 1.0), before]
    s.returns(rows)
    return made


def _metrics(of: Pass, s: Script) -> Tensor:
    """The routing metrics of one MoE layer."""
    return s.new("metrics", 1 + 4 * of.config.top_k, dtype="fp32")


def _choices(of: Pass, s: Script) -> list[Tensor]:
    """Of each choice of each token: its expert and slot, whether it is kept, and its weight."""
    dtypes = ("int64", "int64", "bool", "fp32")
    return [s.new("choice", of.tokens, dtype=dtype) for _ in range(of.config.top_k) for dtype in dtypes]


class _Dense:
    """The routing as tensors [S, E, C]: an outer product a choice, their sum, and both casts."""

    def __init__(self, of: Pass, s: Script) -> None:
        self.of, self.s = of, s
        num_experts, gate = of.config.moe_expert_count, replace(s, dtype="fp32")
        size = (of.tokens, num_experts, of.capacity)
        choices, parts = _choices(of, s), []
        for _ in range(of.config.top_k):
            factors = gate.new("expert", of.tokens, num_experts), gate.new("slot", of.tokens, of.capacity)
            parts.append(gate.matmul("bmm", (*size, 1.0), factors, part="combine_outer"))
            gate.returns(*factors)
        total = gate.kernel("add", size, parts, part="routing") if len(parts) > 1 else parts[0]
        s.returns(*parts)
        combine = total if of.dtype == "fp32" else s.kernel("_to_copy", size, (total,), part="routing")
        flags = s.kernel("_to_copy", size, (total,), dtype="bool", part="routing")
        self.tensors = [combine, s.kernel("_to_copy", size, (flags,), part="routing")]
        s.returns(total, *choices)

    def scatter(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens into their slots by a product."""
        of, width = self.of, self.of.config.decoder_embed_dim
        made, flop = _travelling(of, "slots", of.slots, width), matmul_flop(of.slots, width, of.tokens)
        shape = (1.0, of.slots, width, of.tokens)
        self.s.op("mm", "matmul", shape, reads=(self.tensors[1], tokens), makes=made, flop=flop,
                  part="dispatch")  # fmt: skip
        return made

    def gather(self, slots: Sequence[Tensor]) -> Tensor:
        """And out again by another."""
        of, width = self.of, self.of.config.decoder_embed_dim
        rows = slots[0].view("slots", of.slots, width)
        return self.s.matmul("mm", (1.0, of.tokens, width, of.slots), (self.tensors[0], rows), part="combine")


class _Sparse:
    """The routing as a row of the slots and a weight for each token and choice."""

    def __init__(self, of: Pass, s: Script) -> None:
        self.of, self.s = of, s
        choices = _choices(of, s)
        self.rows = [s.new("row", of.tokens, dtype="int64") for _ in range(of.config.top_k)]
        self.weights = [s.new("weight", of.tokens) for _ in range(of.config.top_k)]
        self.tensors = [*self.rows, *self.weights]
        s.returns(*choices)

    def scatter(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows copied into their slots, one copy a choice; one more row takes what is dropped."""
        of, width = self.of, self.of.config.decoder_embed_dim
        made, shape = _travelling(of, "slots", of.slots + 1, width), (of.slots + 1, width)
        self.s.events.append(moment(makes=made))
        slots = made[0].view("slots", *shape)
        for index in self.rows:
            self.s.op("index_copy_", "kernel", shape, reads=(slots, tokens, index), writes=(slots,),
                      part="moves")  # fmt: skip
        return made

    def gather(self, slots: Sequence[Tensor]) -> Tensor:
        """And out again, each weighed."""
        of, s, shape = self.of, self.s, (self.of.tokens, self.of.config.decoder_embed_dim)
        rows = slots[0].view("slots", of.slots, shape[1])
        found = []
        for _ in self.rows:
            index = s.new("place", of.tokens, dtype="int64")
            found.append(s.kernel("index_select", shape, (rows, index), part="moves"))
        parts = [s.new("weighed", *shape, reads=(each, *self.weights)) for each in found]
        result = s.new("result", *shape, reads=parts) if len(parts) > 1 else parts[0]
        s.returns(*found, *parts)
        return result


# --- loss --------------------------------------------------------------------------------------


def _loss(of: Pass, s: Script, logits: Tensor) -> None:
    """The log-softmax of the logits; cut over tp, three numbers of a token are summed or compared."""
    row = (*of.logits[:-1], 1)
    if of.tp == 1:
        chosen = s.new("chosen", *row, dtype="fp32", reads=(_log_softmax(of, s, logits, of.logits),))
    else:
        shifted, total = _shifted_logits(of, s, logits, of.logits)
        chosen = s.new("own", *row, dtype="fp32", reads=(shifted, total))
        _reduced_numbers(of, s, chosen)
        s.returns(shifted, total)
    is_padding = s.new("is padding", of.tokens, dtype="bool")
    s.new("log-probabilities", of.tokens, dtype="fp32", reads=(chosen, is_padding))


def _log_softmax(of: Pass, s: Script, logits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Of rows that lie whole on a rank, in fp32."""
    wide = logits
    if of.dtype != "fp32":
        wide = s.kernel("_to_copy", shape, (logits.view("logits", *shape),), dtype="fp32", part="loss")
    return s.kernel("_log_softmax", shape, (wide,), dtype="fp32", part="loss")


def _shifted_logits(of: Pass, s: Script, logits: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits less the largest of all ranks; the log of the sum of all their exponentials."""
    row = (*shape[:-1], 1)
    wide = logits.view("logits", *shape)
    if of.dtype != "fp32":
        wide = s.kernel("_to_copy", shape, (wide,), dtype="fp32", part="loss")
    largest = s.new("largest", *row, dtype="fp32")
    _reduced_numbers(of, s, largest)
    shifted = s.kernel("sub", shape, (wide, largest), dtype="fp32", part="loss")
    powers = s.kernel("exp", shape, (shifted,), dtype="fp32", part="loss")
    total = s.new("total", *row, dtype="fp32", reads=(powers,))
    _reduced_numbers(of, s, total)
    log_total = s.new("log total", *row, dtype="fp32", reads=(total,))
    s.returns(largest, total, logits)
    return shifted, log_total


def logprobs_of(of: Pass, s: Script, logits: Tensor) -> Tensor:
    """The log-softmax of the last token; over tp from two numbers a row, then whole rows on each rank."""
    shape = (of.batch, of.local_words)
    if of.tp == 1:
        rows = _log_softmax(of, s, logits, shape)
        s.returns(logits)
        return rows
    shifted, total = _shifted_logits(of, s, logits, shape)
    own = s.kernel("sub", shape, (shifted, total), dtype="fp32", part="loss")
    gathered: tuple[int, ...] = (of.tp, *shape)
    how: dict[str, Any] = {"dtype": "fp32", "part": "tensor_parallel"}
    parts = s.collective("all_gather", "all_gather", gathered, "tp", of.tp, own, "parts", **how)
    joined = s.new("joined", *gathered, dtype="fp32", reads=(parts,)) if of.batch > 1 else parts
    s.returns(logits, shifted, total, parts)
    return joined


def _reduced_numbers(of: Pass, s: Script, numbers: Tensor) -> None:
    """An all-reduce over tp of a number in fp32 a token."""
    part = "tensor_parallel"
    s.collective("all_reduce", "all_reduce", numbers.shape, "tp", of.tp, numbers, dtype="fp32", part=part)


def _reduced(of: Pass, s: Script, x: Tensor, part: str = "tensor_parallel") -> None:
    """The sum over tensor-parallel ranks of a block's output, or of the embedding."""
    whole = part == "embedding" or s.module.endswith("MultiheadAttention")
    rows = (of.batch, of.length) if whole else (of.tokens,)
    s.collective("all_reduce", "all_reduce", (*rows, of.config.decoder_embed_dim), "tp", of.tp, x, part=part)
