"""A recurrence in place of attention: a state of fixed size, which each token updates and reads.

The projections are a pair of matmuls as in attention, cut by tp over heads; between them come a short causal
convolution, the recurrence and a gated norm, on the rank's own heads. Training computes a recurrence in
*chunks* of c tokens: inside a chunk like attention, c^2 (s + d) FLOP a head for keys of width s and values of
width d (gated delta rule: c^2 (3 s + 2 d), whose triangular solve of c^3 / 3 is left out), and between chunks
by their states, 4 c s d (6 c s d). Source: Mamba 2, arXiv 2405.21060, section 6; Gated DeltaNet, arXiv
2412.06464, section 3.3. Several kernels do it, which pass each other states and scores through memory, and
the backward makes them again (`CHUNKED`). Mamba 1 has no chunks: nine FLOP for each token and element of the
state, in one kernel (arXiv 2312.00752).

Context parallelism exchanges tokens for heads by all-to-all before and behind, as Megatron-LM does
(megatron/core/ssm/mamba_context_parallel.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, structs

from meshwise.core.files import read_catalog
from meshwise.core.numbers import added
from meshwise.core.units import Num
from meshwise.cost.op import Cost
from meshwise.model.architecture import Model, Recurrence
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, Tensor, both_ways, changed, collective, elementwise, linears, made
from meshwise.program.tensor_1d import column_linear, leave, norm, plain_linear, row_linear

MODULE = "recurrence"

SCAN_FLOP = 9.0


class ChunkPass(Struct, frozen=True):
    """The kernels of one pass over the chunks: their number, what they read and write, and their products.

    Read and written: keys of groups, keys of heads, values, states of chunks in fp32 (half in 16 bits),
    scores among the tokens of a chunk in fp32. Products: keys with keys, scores with values, either with
    states.
    """

    kernels: float
    reads: tuple[float, float, float, float, float]
    writes: tuple[float, float, float, float, float]
    products: tuple[float, float, float]


class Chunked(Struct, frozen=True):
    """How a library does a recurrence, in chunks of so many `tokens`."""

    tokens: float
    library: str
    forward: ChunkPass
    backward: ChunkPass


CHUNKED = msgspec.convert(read_catalog("recurrences.toml"), dict[str, Chunked])
STEP = ChunkPass(1.0, (2.0, 0.0, 1.0, 1.0, 0.0), (0.0, 0.0, 1.0, 1.0, 0.0), (1.0, 1.0, 2.0))
"""A pass of one token: the kernel reads and writes the state."""


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
    yield from _exchange("heads_of_all_tokens", cut, added(local.values()))
    if own.gate_rank:
        yield from _gates(own, cut, model.hidden)
    keys = _local(own.num_groups * own.state_dim, own.num_groups, cut)
    inner = own.inner / cut.tp
    channels = inner + 2.0 * keys * (own.convolved > own.inner)
    projected = made(MODULE, "projected", (cut.tokens, channels), prec.act_dtype)
    if own.taps:
        yield from changed(elementwise(MODULE, "conv", "conv", projected, prec), _by("mamba_ssm", cut))
    if own.kind in ("scan", "lru"):
        yield from (_time_steps if own.kind == "scan" else _lru_gates)(own, cut, inner)
        yield from _scan(own, cut, inner)
    elif own.kind != "conv":
        yield from _chunks(own, cut, keys)
    made_by, gate = (made(MODULE, name, (cut.tokens, inner), prec.act_dtype) for name in ("result", "gate"))
    name = "gate_norm" if own.norm else "gate"
    library = CHUNKED[own.kind].library if own.kind in CHUNKED else ""
    y = yield from changed(elementwise(MODULE, name, "gated_norm", (made_by, gate), prec), _by(library, cut))
    yield from _exchange("tokens_of_all_heads", cut, inner)
    out = yield from row_linear(MODULE, "out_proj", "out", y, model.hidden, cut, bias=own.bias)
    return (yield from leave(model, cut, MODULE, 1, out, x))


def state_bytes(own: Recurrence, cut: Cut) -> Num:
    """What a block keeps of a sequence on a rank: its state in fp32, the last inputs of the convolution."""
    state = 4.0 * own.inner * own.state_dim
    return (state + cut.precision.act_bytes * max(own.taps - 1, 0) * own.convolved) / cut.tp


def _local(size: float, units: int, cut: Cut) -> Num:
    return size / (np.minimum(cut.tp, units) if units else cut.tp)


def _by(library: str, cut: Cut) -> Callable[[Op], Op]:
    """Makes an op one of a library; those of a single token run at the bandwidth of memory."""
    return lambda op: structs.replace(op, library=library * (cut.kind != "decode"))


def _exchange(name: str, cut: Cut, width: Num) -> Iterator[Op]:
    payload, ranks = cut.tokens * width * cut.precision.act_bytes, cut.ulysses * cut.ring
    there = collective(MODULE, name, "forward", "all_to_all", "cp", payload, ranks, stride=cut.cp_stride)
    yield from both_ways(there)


def _chunks(own: Recurrence, cut: Cut, keys: Num) -> Iterator[Op]:
    """The kernels of each pass: among the tokens of a chunk, and with the state before it."""
    tokens, act_bytes = cut.tokens, cut.precision.act_bytes
    is_wide = own.kind == "wkv" or (own.kind == "delta" and (own.gate_rank or own.wide_decay))
    done = CHUNKED["wide_delta" if is_wide else own.kind]
    passes = (
        {"forward": STEP} if cut.kind == "decode" else {"forward": done.forward, "backward": done.backward}
    )
    length, state = np.minimum(done.tokens, cut.seq), float(own.state_dim)
    heads, inner = own.num_heads / cut.tp, own.inner / cut.tp
    has_groups = own.kind == "ssd"  # which share scores, and whose backward makes its input again
    scored = keys / state if has_groups else heads
    of_tokens = (act_bytes * tokens * width for width in (keys, heads * state, inner))
    sizes = *of_tokens, 4.0 * tokens / length * inner * state, 4.0 * tokens * length * scored
    inverse = length * heads * (own.kind != "linear")
    kept = Tensor(f"{MODULE}.chunk_input", (act_bytes * tokens * (inner + 2.0 * keys + inverse),), "uint8")
    tensors: dict[str, Any] = {"reads": (kept,), "keeps": () if has_groups else (kept,)}
    for phase, work in passes.items():
        among = 0.5 * length * (work.products[0] * scored * state + work.products[1] * inner)
        flop = 2.0 * tokens * (among + work.products[2] * inner * state)
        read, write = (
            added(times * size for times, size in zip(moved, sizes, strict=True))
            for moved in (work.reads, work.writes)
        )
        op = Op(
            module=MODULE, name="chunk", phase=phase, kind="chunks", cost=Cost(flop, read, write),
            shape=(work.kernels, tokens / length, length, heads, state, float(own.head_dim)),
            dtype=cut.precision.act_dtype, launches=work.kernels, **tensors,
        )  # fmt: skip
        yield _by(done.library, cut)(op)
        tensors = {}


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
