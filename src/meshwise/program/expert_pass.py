"""One forward pass of a mixture-of-experts GPT on one rank, op by op: the closed form of
`programs.transformer_lm`.

Notation: B sequences of T tokens, S = B T; width M, feed-forward F, experts of width X, E of them with C
slots a rank, W ranks share them; H heads, V words, P ranks of tensor parallelism, n = ceil(V / P) words on
each. Rows carry torch's own names (`mm`, `addmm`, `bmm`, ...), so that a recorder's can be laid beside them;
the *role* says what the product is for. The matrix products, the collectives, what goes into a cache of keys
and values, and the kernels as large as [S, E, C], as an expert's rows, as attention scores or as logits are
stated; what the gate does on [S, E] and smaller is not, nor norms, sums and embeddings on [S, M].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.cost.collective import sent_bytes
from meshwise.cost.op import Cost, matmul
from meshwise.model.gpt_config import GptConfig
from meshwise.program.expert_parallel import num_local_words
from meshwise.program.op import Op


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """A forward pass: the architecture in `config`, and what may vary, as numbers or arrays.

    `batch` B sequences of `length` T tokens; with a cache (`cached` columns, 0: none) they follow `past`
    tokens, and only the last one's logits are made. `capacity` C, `ep` W, `tp` P; `grouped`: the experts of a
    rank in one batched GEMM. `tp_rank` matters only to which biases count as weights. `section`: the part of
    the program that the model runs in, which its rows are named by.
    """

    config: GptConfig
    batch: int
    length: int
    capacity: Num
    past: int = 0
    cached: int = 0
    last_only: bool = False
    ep: Num = 1
    tp: int = 1
    dtype: str = "fp16"
    grouped: bool = False
    tp_rank: int = 0
    section: str = "eval_lm"

    @property
    def elem_bytes(self) -> float:
        """Bytes of an element of weights and activations."""
        return DTYPE_BYTES[self.dtype]

    @property
    def gate_dtype(self) -> str:
        """The type that the gate computes in."""
        return "fp32" if self.config.moe_gating_use_fp32 else self.dtype

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
        """n, words whose logits a rank makes, padding included."""
        return num_local_words(self.config.vocab_size, self.tp)

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

    @property
    def decoder(self) -> str:
        """Module of the whole model's own ops."""
        return f"{self.section}/TransformerDecoder"

    @property
    def dense(self) -> str:
        """Module of the layers without experts."""
        return f"{self.decoder}/TransformerDecoderLayer without MoE"

    @property
    def moe(self) -> str:
        """Module of the layers with experts."""
        return f"{self.decoder}/TransformerDecoderLayer with MoE"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One kind of op: its role, and the op with its count in a whole pass."""

    role: str
    op: Op


def forward_rows(of: Pass) -> list[Row]:
    """Every stated op of one evaluation pass, loss included; the attention of all layers first."""
    return occurring([*model_rows(of), *_loss(of)])


def model_rows(of: Pass) -> Iterator[Row]:
    """The ops of the model alone, from tokens to logits."""
    config = of.config
    yield _reduced(of, of.decoder, 1, role="embedding")
    yield from _attention(of, of.dense, config.num_dense_layers)
    yield from _attention(of, of.moe, config.num_moe_layers)
    yield from _dense_feed_forward(of)
    if config.num_moe_layers:
        yield from _moe_layer(of)
    rows, width = of.logits[0] * of.logits[1], config.decoder_embed_dim
    yield product(of, of.decoder, "lm_head", "mm", rows, of.local_words, width, weights=True)


def occurring(rows: Iterable[Row]) -> list[Row]:
    """`rows` without those that never occur, and without collectives of one rank (arrays of ranks stay)."""
    return [row for row in rows if _occurs(row.op)]


def ledger_cells(op: Op, elem_bytes: float) -> dict[str, Any]:
    """The ledger's columns of one occurrence of `op`, as a recorder fills them."""
    cells: dict[str, Any] = {
        "module": op.module,
        "shape": tuple(int(dim) for dim in op.shape),
        "dtype": op.dtype,
    }
    if op.kind == "collective":
        sent = sent_bytes(op.collective, op.payload_bytes, op.group_size)  # type: ignore[arg-type]
        cells |= {"collective": op.collective, "axis": op.axis, "group_size": op.group_size}
        return cells | {"payload_bytes": op.payload_bytes, "sent_bytes": float(sent)}
    cells |= {"flop": op.cost.flop, "read_bytes": op.cost.read_bytes, "write_bytes": op.cost.write_bytes}
    return cells | {"weight_bytes": op.num_params * elem_bytes}


def _occurs(op: Op) -> bool:
    if np.ndim(op.count) == 0 and op.count == 0:
        return False
    alone = isinstance(op.group_size, int | float) and op.group_size == 1
    return op.kind != "collective" or not alone


def _attention(of: Pass, layer: str, num_layers: int) -> Iterator[Row]:
    config, module = of.config, f"{layer}/MultiheadAttention"
    width, dim = config.decoder_embed_dim, config.head_dim
    local, scores = width // of.tp, (of.heads, of.length, of.keys)
    on_heads: dict[str, Any] = {"batch": of.heads, "count": num_layers}
    yield product(of, module, "qkvo", "mm", of.tokens, local, width, weights=True, count=3 * num_layers)
    yield product(of, module, "qkvo", "mm", of.tokens, width, local, weights=True, count=num_layers)
    if of.cached:  # read as what is overwritten, and as what is new
        new, own = (of.heads, of.length, dim), of.elem_bytes
        yield kernel(module, "cache", "copy_", new, of.dtype, 2 * own, own, 2 * num_layers)
    yield product(of, module, "attention", "bmm", of.length, of.keys, dim, **on_heads)
    yield kernel(module, "softmax", "_softmax", scores, of.dtype, of.elem_bytes, of.elem_bytes, num_layers)
    yield product(of, module, "attention", "bmm", of.length, dim, of.keys, **on_heads)
    yield _reduced(of, module, num_layers)


def _dense_feed_forward(of: Pass) -> Iterator[Row]:
    config, count = of.config, of.config.num_dense_layers
    yield from _two_products(of, of.dense, "dense_ffn", of.tokens, config.decoder_ffn_embed_dim, count)
    yield _reduced(of, of.dense, count)


def _moe_layer(of: Pass) -> Iterator[Row]:
    config, module, count = of.config, f"{of.moe}/MoELayer", of.config.num_moe_layers
    width, num_experts = config.decoder_embed_dim, config.moe_expert_count
    yield product(of, module, "gate", "mm", of.tokens, num_experts, width, weights=True, count=count)
    if config.use_tutel_moe:
        yield from _sparse_moves(of, module, count)
    else:
        yield from _dense_routing(of, module, count)
        yield product(of, module, "dispatch", "mm", of.slots, width, of.tokens, count=count)
    exchange = _exchange(of, module, 2 * count)
    yield exchange
    yield from _experts(of, module, count)
    parts = (of.ep, of.local_experts, of.capacity, width)
    yield kernel(module, "experts", "cat", parts, of.dtype, of.elem_bytes, of.elem_bytes, count)
    if not config.use_tutel_moe:
        yield product(of, module, "combine", "mm", of.tokens, width, of.slots, count=count)
    yield _reduced(of, module, count)


def _dense_routing(of: Pass, module: str, count: int) -> Iterator[Row]:
    """The routing as tensors [S, E, C]: an outer product a choice, their sum, and both casts."""
    config, kind, own = of.config, of.gate_dtype, of.elem_bytes
    size, wide = (of.tokens, config.moe_expert_count, of.capacity), DTYPE_BYTES[of.gate_dtype]
    cost = matmul(size[1], size[2], 1.0, elem_bytes=wide, batch=size[0])
    shape = (size[0], size[1], size[2], 1.0)
    choices = config.top_k * count
    outer = Op(module=module, name="bmm", phase="forward", kind="matmul", shape=shape, cost=cost, dtype=kind,
               count=choices)  # fmt: skip
    yield Row("combine_outer", outer)
    sums = (config.top_k - 1) * count
    yield kernel(module, "routing", "add", size, kind, 2 * wide, wide, sums)
    casts = count if kind != of.dtype else 0
    yield kernel(module, "routing", "_to_copy", size, of.dtype, wide, own, casts)
    yield kernel(module, "routing", "_to_copy", size, "bool", wide, 1.0, count)
    yield kernel(module, "routing", "_to_copy", size, of.dtype, 1.0, own, count)


def _sparse_moves(of: Pass, module: str, count: int) -> Iterator[Row]:
    """Rows copied into their slots and out again, one copy a choice each way."""
    own, width = of.elem_bytes, of.config.decoder_embed_dim
    slots, tokens, index = (of.slots + 1) * width * own, of.tokens * width * own, of.tokens * 8.0
    times = of.config.top_k * count
    into = Cost(0.0, slots + tokens + index, slots)
    out = Cost(0.0, of.slots * width * own + index, tokens)
    for name, shape, cost in (
        ("index_copy_", (of.slots + 1, width), into),
        ("index_select", (of.tokens, width), out),
    ):
        op = Op(module=module, name=name, phase="forward", kind="kernel", shape=shape, cost=cost,
                dtype=of.dtype, count=times)  # fmt: skip
        yield Row("moves", op)


def _experts(of: Pass, module: str, count: int) -> Iterator[Row]:
    """What W ranks sent an expert [W, 1, C, M] is copied together first, unless it lies together."""
    own, ffn, rows = of.elem_bytes, of.config.expert_ffn_dim, of.ep * of.capacity
    calls = count if of.grouped else of.local_experts * count
    first = (of.local_experts, of.ep) if of.grouped else (of.ep, 1)
    chunk = (*first, of.capacity, of.config.decoder_embed_dim)
    yield kernel(module, "chunks", "clone", chunk, of.dtype, own, own, is_copied(of) * calls)
    batch = of.local_experts if of.grouped else None
    yield from _two_products(of, module, "experts", rows, ffn, calls, batch=batch)


def is_copied(of: Pass) -> Num:
    """1 where an expert's rows lie apart: some of each of several ranks, and other experts'; else 0."""
    apart = np.greater(of.ep, 1) & np.greater(of.local_experts, 1) & np.greater(of.capacity, 1)
    return np.where(apart, 1.0, 0.0)


def _two_products(
    of: Pass, module: str, role: str, rows: Num, ffn: int, count: Num, *, batch: Num | None = None
) -> Iterator[Row]:
    """Rows [.., M] -> [.., F / P] -> GELU in fp32 -> [.., M], each product with its bias (`addmm`)."""
    width, hidden, own = of.config.decoder_embed_dim, ffn // of.tp, of.elem_bytes
    name = "addmm" if batch is None else "baddbmm"
    shape = (rows, hidden) if batch is None else (batch, rows, hidden)
    common = {"batch": 1.0 if batch is None else batch, "count": count}
    casts = 0 if of.dtype == "fp32" else count
    yield product(of, module, role, name, rows, hidden, width, weights=True, bias="own", **common)
    yield kernel(module, role, "_to_copy", shape, "fp32", own, 4.0, casts)
    yield kernel(module, role, "gelu", shape, "fp32", 4.0, 4.0, count)
    yield kernel(module, role, "_to_copy", shape, of.dtype, 4.0, own, casts)
    bias = "own" if of.tp_rank == 0 else "zero"
    yield product(of, module, role, name, rows, width, hidden, weights=True, bias=bias, **common)


def _loss(of: Pass) -> Iterator[Row]:
    """The log-softmax of the logits; cut over tp, three numbers of a token are summed or compared."""
    casts = 0 if of.dtype == "fp32" else 1
    yield kernel(of.section, "loss", "_to_copy", of.logits, "fp32", of.elem_bytes, 4.0, casts)
    if of.tp == 1:
        yield kernel(of.section, "loss", "_log_softmax", of.logits, "fp32", 4.0, 4.0)
        return
    yield from shifted_logits(of, of.logits)
    yield reduced_numbers(of, (*of.logits[:2], 1), 3)


def shifted_logits(of: Pass, shape: tuple[int, ...], times: int = 1) -> Iterator[Row]:
    """Logits less one number a row (`times` such sums), and their exponentials."""
    size, rows = float(prod(shape)), float(prod(shape[:-1]))
    cost = Cost(0.0, 4.0 * (size + rows), 4.0 * size)
    op = Op(module=of.section, name="sub", phase="forward", kind="kernel", shape=shape, dtype="fp32",
            cost=cost, count=times)  # fmt: skip
    yield Row("loss", op)
    yield kernel(of.section, "loss", "exp", shape, "fp32", 4.0, 4.0)


def reduced_numbers(of: Pass, shape: tuple[int, ...], count: int) -> Row:
    """All-reduces over tp of so many fp32 numbers."""
    op = Op(module=of.section, name="all_reduce", phase="forward", kind="collective",
            collective="all_reduce", shape=shape, axis="tp", group_size=of.tp, dtype="fp32", count=count,
            payload_bytes=4.0 * prod(shape))  # fmt: skip
    return Row("tensor_parallel", op)


def product(
    of: Pass, module: str, role: str, name: str, m: Num, n: Num, k: Num, *, batch: Num = 1.0,
    count: Num = 1.0, weights: bool = False, bias: str = "",
) -> Row:  # fmt: skip
    """C[m, n] = A[m, k] B[k, n], `batch` times; B may be a weight, the bias one (`own`) or `zero`."""
    added = batch * n if bias else 0.0
    cost = matmul(m, n, k, elem_bytes=of.elem_bytes, batch=batch) + Cost(0.0, of.elem_bytes * added)
    params = batch * n * k * weights + (added if bias == "own" else 0.0)
    op = Op(module=module, name=name, phase="forward", kind="matmul", shape=(batch, m, n, k), cost=cost,
            num_params=params, count=count, dtype=of.dtype)  # fmt: skip
    return Row(role, op)


def kernel(
    module: str, role: str, name: str, shape: tuple[Num, ...], dtype: str, read_bytes: float,
    write_bytes: float, count: Num = 1.0,
) -> Row:  # fmt: skip
    """An element-wise kernel over `shape`, with so many bytes read and written an element."""
    size: Num = 1.0
    for dim in shape:
        size = size * dim
    op = Op(module=module, name=name, phase="forward", kind="kernel", shape=shape, dtype=dtype, count=count,
            cost=Cost(0.0, read_bytes * size, write_bytes * size))  # fmt: skip
    return Row(role, op)


def _exchange(of: Pass, module: str, count: int) -> Row:
    """The all-to-all of all slots, filled or not."""
    width = of.config.decoder_embed_dim
    times = 0 if of.config.dummy_a2a else count
    op = Op(module=module, name="all_to_all", phase="forward", kind="collective", collective="all_to_all",
            shape=(of.slots, width), axis="ep", group_size=of.ep, stride=float(of.tp), dtype=of.dtype,
            payload_bytes=of.slots * width * of.elem_bytes, count=times)  # fmt: skip
    return Row("exchange", op)


def _reduced(of: Pass, module: str, count: int, role: str = "tensor_parallel") -> Row:
    """The sum over tensor-parallel ranks of a block's output, or of the embedding."""
    whole = role == "embedding" or module.endswith("MultiheadAttention")
    rows = (of.batch, of.length) if whole else (of.tokens,)
    shape = (*rows, of.config.decoder_embed_dim)
    op = Op(module=module, name="all_reduce", phase="forward", kind="collective", collective="all_reduce",
            shape=shape, axis="tp", group_size=of.tp, dtype=of.dtype, count=count,
            payload_bytes=of.tokens * of.config.decoder_embed_dim * of.elem_bytes)  # fmt: skip
    return Row(role, op)
