"""A recurrence in place of attention: a state of fixed size, which each token updates and reads.

The projections are a pair of matmuls as in attention, cut by tp over heads; between them come a short causal
convolution, the recurrence and a gated norm, on the rank's own heads. Training computes a recurrence in
*chunks* of c tokens: inside a chunk like attention, c^2 (s + d) FLOP a head for keys of width s and values of
width d (gated delta rule: c^2 (3 s + 2 d), whose triangular solve of c^3 / 3 is left out), and between chunks
by their states, 4 c s d (6 c s d). Source: Mamba 2, arXiv 2405.21060, section 6; Gated DeltaNet, arXiv
2412.06464, section 3.3. The kernels are fused: they move their inputs, their result, and one state a chunk in
fp32. Mamba 1 has no chunks: nine FLOP for each token and element of the state, in one kernel (arXiv
2312.00752).

Context parallelism exchanges tokens for heads by all-to-all before and behind, as Megatron-LM does
(megatron/core/ssm/mamba_context_parallel.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.op import Cost, matmul_flop
from meshwise.model.architecture import Model, Recurrence
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, Tensor, both_ways, changed, collective, elementwise, linears, made
from meshwise.program.tensor_1d import column_linear, leave, norm, plain_linear, row_linear

MODULE = "recurrence"
CHUNK = {"delta": 64.0, "wkv": 64.0, "linear": 64.0, "ssd": 256.0}
"""Tokens of a chunk: of flash-linear-attention, and of mamba_ssm."""
SCAN_FLOP = 9.0


def recurrence(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Norm, and the recurrence behind it."""
    normed = (yield from norm(model, cut, MODULE, "norm1", x)) if model.num_norms else x
    return (yield from behind_norm(model, cut, normed, x))


def beside_attention(model: Model, cut: Cut, x: Tensor) -> Stated:
    """The recurrence of a block whose attention reads the same norm, and keeps it."""
    return (yield from behind_norm(model, cut, made(MODULE, "normed", x.shape, x.dtype), x))


def behind_norm(model: Model, cut: Cut, normed: Tensor, x: Tensor) -> Stated:
    """Projections, convolution, recurrence, gated norm, output projection, residual."""
    own, prec = model.recurrence, cut.precision
    assert own is not None
    local = {name: _local(size, units, cut) for name, (size, units) in own.projected.items()}
    yield from column_linear(MODULE, "in_proj", normed, local, cut, bias=own.bias)
    yield from _exchange("heads_of_all_tokens", cut, sum(local.values()))
    if own.gate_rank:
        yield from _gates(own, cut, model.hidden)
    keys = _local(own.num_groups * own.state_dim, own.num_groups, cut)
    inner = own.inner / cut.tp
    channels = inner + 2.0 * keys * (own.convolved > own.inner)
    projected = made(MODULE, "projected", (cut.tokens, channels), prec.act_dtype)
    if own.taps:
        yield from elementwise(MODULE, "conv", "conv", projected, prec)
    if own.kind in ("scan", "lru"):
        yield from (_time_steps if own.kind == "scan" else _lru_gates)(own, cut, inner)
        yield from _scan(own, cut, inner)
    elif own.kind != "conv":
        yield from _chunks(own, cut, keys)
    made_by, gate = (made(MODULE, name, (cut.tokens, inner), prec.act_dtype) for name in ("result", "gate"))
    name = "gate_norm" if own.norm else "gate"
    y = yield from elementwise(MODULE, name, "gated_norm", (made_by, gate), prec)
    yield from _exchange("tokens_of_all_heads", cut, inner)
    out = yield from row_linear(MODULE, "out_proj", "out", y, model.hidden, cut, bias=own.bias)
    return (yield from leave(model, cut, MODULE, 1, out, x))


def state_bytes(own: Recurrence, cut: Cut) -> Num:
    """What a block keeps of a sequence on a rank: its state in fp32, the last inputs of the convolution."""
    state = 4.0 * own.inner * own.state_dim
    return (state + cut.precision.act_bytes * max(own.taps - 1, 0) * own.convolved) / cut.tp


def _local(size: float, units: int, cut: Cut) -> Num:
    return size / (np.minimum(cut.tp, units) if units else cut.tp)


def _exchange(name: str, cut: Cut, width: Num) -> Iterator[Op]:
    payload, ranks = cut.tokens * width * cut.precision.act_bytes, cut.ulysses * cut.ring
    there = collective(MODULE, name, "forward", "all_to_all", "cp", payload, ranks, stride=cut.cp_stride)
    yield from both_ways(there)


def _chunks(own: Recurrence, cut: Cut, keys: Num) -> Iterator[Op]:
    """The two matmuls of each chunk and head: among its tokens, and with the state before it."""
    delta, act_bytes = own.kind in ("delta", "wkv"), cut.precision.act_bytes
    length = np.minimum(CHUNK[own.kind], cut.seq)
    heads, inner, state, dim = own.num_heads / cut.tp, own.inner / cut.tp, own.state_dim, own.head_dim
    chunks = cut.tokens / length * heads
    among = 3.0 * state + 2.0 * dim if delta else float(state + dim)
    inputs, outputs = act_bytes * cut.tokens * (inner + 2.0 * keys), act_bytes * cut.tokens * inner
    states = 4.0 * chunks * state * dim
    depth = (3.0 if delta else 2.0) * state
    for name, shape, read, write in (
        ("chunk", (chunks, length, among, 0.5 * length), inputs, outputs),
        ("state", (chunks, length, float(dim), depth), inputs + states, outputs + states),
    ):
        cost = Cost(matmul_flop(*shape[1:], batch=shape[0]), read, write)
        kept = Tensor(f"{MODULE}.{name}_input", (inputs if name == "chunk" else states,), "uint8")
        op = Op(
            module=MODULE, name=name, phase="forward", kind="matmul", shape=shape, cost=cost,
            dtype=cut.precision.act_dtype, reads=(kept,), keeps=(kept,),
        )  # fmt: skip
        yield from both_ways(op, (2.0 * chunks, *shape[1:]))


def _gates(own: Recurrence, cut: Cut, hidden: float) -> Iterator[Op]:
    """Layers of width `gate_rank`, on every rank, and of each the rank's own channels."""
    down = {f"{name}_down": float(own.gate_rank) for name in own.narrow_gates}
    read = made(MODULE, "all_tokens", (cut.tokens, hidden), cut.precision.act_dtype)
    stated = plain_linear(MODULE, "gate_down", read, down, cut)
    thin = yield from changed(stated, lambda op: structs.replace(op, keeps=()))
    for name, x in zip(own.narrow_gates, thin, strict=True):
        yield from plain_linear(MODULE, f"{name}_up", x, {f"{name}_up": own.inner / cut.tp}, cut)


def _lru_gates(own: Recurrence, cut: Cut, inner: Num) -> Iterator[Op]:
    """Two gates of each head, from its own channels."""
    prec, dim = cut.precision, float(own.head_dim)
    shape = inner / dim, cut.tokens, dim
    for name in ("input_gate", "decay_gate"):
        x, y = (made(MODULE, f"{name}_{end}", shape, prec.act_dtype) for end in ("input", "output"))
        yield from linears(MODULE, name, x, (y,), prec, bias=True, grouped=True, frozen=cut.lora_rank > 0)


def _time_steps(own: Recurrence, cut: Cut, inner: Num) -> Iterator[Op]:
    """Time steps, keys and queries of Mamba, of all channels."""
    prec, rows, steps = cut.precision, cut.tokens, float(own.dt_rank + 2 * own.state_dim)
    x = made(MODULE, "convolved", (rows, inner), prec.act_dtype)
    (y,) = yield from plain_linear(MODULE, "x_proj", x, {"x_proj": steps}, cut)
    sent = "all_reduce", "tp", rows * steps * prec.act_bytes, cut.tp
    yield from both_ways(collective(MODULE, "x_proj", "forward", *sent, stride=cut.tp_stride))
    if own.inner_norms:
        yield from elementwise(MODULE, "x_norm", "rmsnorm", y, prec)
    ranks = made(MODULE, "steps", (rows, float(own.dt_rank)), prec.act_dtype)
    yield from plain_linear(MODULE, "dt_proj", ranks, {"dt_proj": inner}, cut, bias=True)


def _scan(own: Recurrence, cut: Cut, inner: Num) -> Iterator[Op]:
    prec, rows = cut.precision, cut.tokens
    moved = prec.act_bytes * rows * (2.0 * inner + 2.0 * own.state_dim)
    cost = Cost(SCAN_FLOP * rows * inner * own.state_dim, moved, prec.act_bytes * rows * inner)
    kept = Tensor(f"{MODULE}.scan_input", (moved,), "uint8")
    result = made(MODULE, "scanned", (rows, inner), prec.act_dtype)
    op = Op(
        module=MODULE, name="scan", phase="forward", kind="kernel", shape=(rows, inner), cost=cost,
        reads=(kept,), makes=(result,), keeps=(kept,), dtype=prec.dtype,
    )  # fmt: skip
    yield from both_ways(op)
