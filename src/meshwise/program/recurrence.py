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
from meshwise.program.op import Op, collective, elementwise
from meshwise.program.tensor_1d import column_linear, leave, norm, plain_linear, row_linear

MODULE = "recurrence"
CHUNK = {"delta": 64.0, "ssd": 256.0}
"""Tokens of a chunk: of flash-linear-attention, and of mamba_ssm."""
SCAN_FLOP = 9.0


def recurrence(model: Model, cut: Cut) -> Iterator[Op]:
    """Norm, and the recurrence behind it."""
    yield from norm(model, cut, MODULE, "norm1")
    yield from behind_norm(model, cut)


def behind_norm(model: Model, cut: Cut) -> Iterator[Op]:
    """Projections, convolution, recurrence, gated norm, output projection, residual."""
    own, prec = model.recurrence, cut.precision
    assert own is not None
    local = {name: _local(size, units, cut) for name, (size, units) in own.projected.items()}
    yield from column_linear(MODULE, "in_proj", model.hidden, local, cut, bias=own.bias)
    yield from _exchange("heads_of_all_tokens", cut, sum(local.values()))
    if own.gate_rank:
        yield from _gates(own, cut, model.hidden)
    keys = _local(own.num_groups * own.state_dim, own.num_groups, cut)
    inner = own.inner / cut.tp
    channels = inner + 2.0 * keys * (own.convolved > own.inner)
    yield from elementwise(MODULE, "conv", "conv", cut.tokens, channels, prec)
    if own.kind == "scan":
        yield from _scan(own, cut, inner)
    elif own.kind != "conv":
        yield from _chunks(own, cut, keys)
    yield from elementwise(MODULE, "gate_norm" if own.norm else "gate", "gated_norm", cut.tokens, inner, prec)
    yield from _exchange("tokens_of_all_heads", cut, inner)
    yield from row_linear(MODULE, "out_proj", "out", inner, model.hidden, cut, bias=own.bias)
    yield from leave(model, cut, MODULE, 1)


def state_bytes(own: Recurrence, cut: Cut) -> Num:
    """What a block keeps of a sequence on a rank: its state in fp32, the last inputs of the convolution."""
    state = 4.0 * own.inner * own.state_dim
    return (state + cut.precision.act_bytes * (own.taps - 1) * own.convolved) / cut.tp


def _local(size: float, units: int, cut: Cut) -> Num:
    return size / (np.minimum(cut.tp, units) if units else cut.tp)


def _exchange(name: str, cut: Cut, width: Num) -> Iterator[Op]:
    payload, ranks = cut.tokens * width * cut.precision.act_bytes, cut.ulysses * cut.ring
    for phase in ("forward", "backward"):
        yield collective(MODULE, name, phase, "all_to_all", "cp", payload, ranks, stride=cut.cp_stride)


def _chunks(own: Recurrence, cut: Cut, keys: Num) -> Iterator[Op]:
    """The two matmuls of each chunk and head: among its tokens, and with the state before it."""
    delta, act_bytes = own.kind == "delta", cut.precision.act_bytes
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
        op = Op(
            module=MODULE, name=name, phase="forward", kind="matmul", shape=shape, cost=cost,
            dtype="bf16" if cut.precision.casts else cut.precision.dtype,
            saved_bytes=inputs if name == "chunk" else states,
        )  # fmt: skip
        yield op
        twice = (2.0 * chunks, *shape[1:])
        yield structs.replace(op, phase="backward", cost=cost * 2.0, shape=twice, saved_bytes=0.0)


def _gates(own: Recurrence, cut: Cut, hidden: float) -> Iterator[Op]:
    """Two layers of width `gate_rank`, on every rank, and of each the rank's own channels."""
    down = dict.fromkeys(("a_down", "z_down"), float(own.gate_rank))
    yield from plain_linear(MODULE, "gate_down", cut.tokens, hidden, down, cut, saved_rows=0.0)
    for name in ("a_up", "z_up"):
        parts = {name: own.inner / cut.tp}
        yield from plain_linear(MODULE, name, cut.tokens, float(own.gate_rank), parts, cut)


def _scan(own: Recurrence, cut: Cut, inner: Num) -> Iterator[Op]:
    prec, rows, steps = cut.precision, cut.tokens, float(own.dt_rank + 2 * own.state_dim)
    yield from plain_linear(MODULE, "x_proj", rows, inner, {"x_proj": steps}, cut)
    for phase in ("forward", "backward"):
        payload = rows * steps * prec.act_bytes
        yield collective(MODULE, "x_proj", phase, "all_reduce", "tp", payload, cut.tp, stride=cut.tp_stride)
    if own.inner_norms:
        yield from elementwise(MODULE, "x_norm", "rmsnorm", rows, steps, prec)
    yield from plain_linear(MODULE, "dt_proj", rows, float(own.dt_rank), {"dt_proj": inner}, cut, bias=True)
    moved = prec.act_bytes * rows * (2.0 * inner + 2.0 * own.state_dim)
    cost = Cost(SCAN_FLOP * rows * inner * own.state_dim, moved, prec.act_bytes * rows * inner)
    op = Op(
        module=MODULE, name="scan", phase="forward", kind="kernel", shape=(rows, inner), cost=cost,
        saved_bytes=moved, dtype=prec.dtype,
    )  # fmt: skip
    yield op
    yield structs.replace(op, phase="backward", cost=cost * 2.0, saved_bytes=0.0)
