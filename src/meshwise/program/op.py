"""The words in which a layout states a block: ops and collectives, each once, and the tensors between them.

A layout is a generator of `Op`s: everything one rank does for one block and one microbatch, forward and
backward. Functions take the tensors that their ops read and return what the last one makes (`y = yield from
linear(...)`), so that the statement is the dataflow: what an op reads, makes, and keeps for its backward.
`program.walk` derives from it what is alive when; `estimate` says how long each op takes, `compare` holds a
running program against it. Sizes may be arrays: one list of ops then states the block for a grid of plans.

A step has a hundred ops: they are msgspec's records, which take an eighth of the time of a dataclass to make.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec import Struct, structs

from meshwise.core.numbers import added
from meshwise.core.units import DTYPE_BYTES, WEIGHT_BITS, Num
from meshwise.cost.collective import sent_bytes
from meshwise.cost.op import KERNELS, Cost, matmul, matmul_flop
from meshwise.model.weights import Weight

ELEMENT_BYTES = DTYPE_BYTES | {"int64": 8.0, "bool": 1.0, "uint8": 1.0}


class Tensor(Struct, frozen=True, eq=False, gc=False):
    """`shape` elements of `dtype` on one rank; sizes may be arrays over a grid of plans.

    Two tensors are the same only if they are the same object. Where `is_view` holds (an array over a grid),
    it is not memory of its own but lies in `storage`: what an exchange among one rank makes is what it read.
    It lives from the op that makes it to the last that reads or keeps it (`program.walk`,
    `program.lifetime`); `is_weight`: it is a weight of the model, or part of one.
    """

    name: str
    shape: tuple[Num, ...]
    dtype: str
    storage: Tensor | None = None
    is_view: Any = True
    is_weight: bool = False

    @property
    def elements(self) -> Num:
        """Their number."""
        return prod(self.shape)

    @property
    def bytes(self) -> Num:
        """Of all its elements."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @property
    def memory(self) -> Tensor:
        """The tensor in whose memory a view of it lies: itself, unless it is one."""
        return self.storage or self

    def view(self, name: str, *shape: Num) -> Tensor:
        """Some of its elements under another name and shape."""
        return Tensor(name, shape, self.dtype, self.memory, is_weight=self.is_weight)


def bytes_of(tensors: Iterable[Tensor]) -> Num:
    """Of all elements of several tensors."""
    return added(tensor.bytes for tensor in tensors)


def made(module: str, name: str, shape: tuple[Num, ...], dtype: str) -> Tensor:
    """What the op `name` of `module` makes."""
    return Tensor(f"{module}.{name}", shape, dtype)


def exchanged(x: Tensor, name: str, shape: tuple[Num, ...], group_size: Num) -> Tensor:
    """What a collective of `group_size` ranks makes of `x`: among one rank, `x` itself."""
    return Tensor(name, shape, x.dtype, x, group_size == 1)


class BroughtWeight(NamedTuple):
    """A weight as a rank holds it: 1 / `shards` of it, `num_params` parameters."""

    weight: Weight
    shards: Num
    num_params: Num


class Op(Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One op, or one collective, in one phase on one rank.

    `kind`: matmul, attention, decode_attention (one query a sequence over its cache), experts (the grouped
    matmuls of a serving engine), chunks (the kernels of a recurrence), kernel (element-wise), or collective.
    `shape`: of a matmul (batch, m, n, k); of attention (batch, heads, kv_heads, seq_q, seq_k, qk_dim,
    v_dim); of chunks (kernels, chunks, tokens of each, heads, key_dim, v_dim); of experts (tokens, choices of
    a token among them, experts, hidden, width); of a dispatch by DeepEP (tokens, experts, hidden); else of
    the result.
    `reads`, `makes`, `keeps`: tensors, of a forward op; its backward needs what it keeps. `saved_bytes` are
    those of the kept tensors that no op before it keeps (`walk.with_saved_bytes`).
    `remade`: instead of being kept, its result is made again where the backward needs it. `segment`: the run
    of ops that selective recomputation runs again with it; where that `drops` its results, nothing else keeps
    them, and `stays` are results of the op that it keeps all the same (`program.segments`). It runs the
    share `redone_frac` of the op again. `num_params`: parameters
    of the `weights` that this op brings (in its forward row); `num_frozen`: those of them that do not train.
    `kernel`: its row in the table of element-wise kernels.
    `is_weight_grad`: the op may wait, as zero-bubble schedules let it. `count`: occurrences.
    A collective has `collective` (its kind), the mesh axis, its group, and `payload_bytes`, the full
    tensor; it may run while the op `hides_behind` of the same module and phase computes (`behind_gradient`:
    only its gradient of the input, or of the weight). In a dispatch of
    tokens each token chooses so many `choices`, of some of `groups` of experts (`cost.experts.met_places`),
    and is sent once to each rank, and node, that they meet. Ranks lie `stride` apart, in `runs` of so many
    and that far apart (`Mesh.replica_runs`). `shards_copied`: ranks whose shards old software copies one by
    one, for each message; `host_bytes` come from the host before it, or go there behind it.
    `library`: whose kernel does it, where there are several: `mla` for decode attention over latents;
    `ragged` for matmuls of experts that have as many rows as chose them; for a collective `peer` (all-reduce
    by reading the memory of the peers), `deepep-ll` or `deepep-normal`; for a recurrence `mamba_ssm` or
    `fla`, whose kernels do not fill the bandwidth.
    `right_bytes`: bytes of an element of the weights in memory, where they are kept in fewer bits than they
    are computed in (else 0). `launches`: kernels that the host starts for it. `workspace_bytes`: what it
    holds on the way, beside what it reads and makes.
    `part`: of what part of a model it is, where modules do not tell (`program.lifetime`).
    """

    module: str
    name: str
    phase: str
    kind: str
    shape: tuple[Num, ...] = ()
    cost: Cost = Cost()
    reads: tuple[Tensor, ...] = ()
    makes: tuple[Tensor, ...] = ()
    keeps: tuple[Tensor, ...] = ()
    saved_bytes: Num = 0.0
    remade: bool = False
    segment: str = ""
    drops: bool = False
    stays: tuple[Tensor, ...] = ()
    redone_frac: Num = 0.0
    num_params: Num = 0.0
    num_frozen: Num = 0.0
    weights: tuple[BroughtWeight, ...] = ()
    kernel: str = ""
    count: Num = 1.0
    is_weight_grad: bool = False
    causal: bool = False
    dtype: str = ""
    collective: str = ""
    axis: str = ""
    group_size: Num = 1.0
    stride: Num = 1.0
    payload_bytes: Num = 0.0
    runs: tuple[Num, Num] = (np.inf, 1.0)
    shards_copied: Num = 0.0
    host_bytes: Num = 0.0
    choices: float = 0.0
    groups: tuple[float, float] = (0.0, 0.0)
    hides_behind: str = ""
    behind_gradient: str = ""
    library: str = ""
    right_bytes: float = 0.0
    launches: float = 1.0
    workspace_bytes: Num = 0.0
    part: str = ""

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to the experts, which expert parallelism spreads."""
        return self.name.startswith("expert_")


Stated = Generator[Op, None, Tensor]
"""Ops, and the tensor that the last of them makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes per element of what a block moves: activations, matmul operands, and weights.

    Under fp8 and fp4 the matmul operands are narrow and the activations between them stay bf16, so each
    operand is cast first: a kernel of its own. `dtype` names the matrix rate that the matmuls run at. An
    engine may keep the weights of layers, and of experts, in fewer `weight_bytes` and `expert_bytes`.
    `casts_weights`: weights are cast as well, by each matmul that reads them (else after the optimizer).
    """

    dtype: str = "bf16"
    act_bytes: float = 2.0
    operand_bytes: float = 2.0
    weight_bytes: float = 2.0
    expert_bytes: float = 2.0
    casts_weights: bool = False

    @property
    def stat_bytes(self) -> float:
        """Bytes of a row's statistic: fp32, or fp64 beside fp64 activations."""
        return max(4.0, self.act_bytes)

    @property
    def stat_dtype(self) -> str:
        """The type of a row's statistic."""
        return "fp64" if self.act_bytes > 4.0 else "fp32"

    @property
    def act_dtype(self) -> str:
        """The type of activations between matmuls."""
        return "bf16" if self.casts else self.dtype

    @property
    def casts(self) -> bool:
        """Whether matmul operands must be converted from the activations' type."""
        return self.operand_bytes != self.act_bytes


def precision(
    dtype: str, weight_dtype: str | None = None, expert_dtype: str | None = None, *,
    casts_weights: bool = False,
) -> Precision:  # fmt: skip
    """How a step in `dtype` stores activations and matmul operands, and an engine its weights."""
    sizes = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0}
    operand_bytes = sizes.get(dtype) or {"fp8": 1.0, "int8": 1.0, "fp4": 0.5}[dtype]
    weight_bytes = WEIGHT_BITS[weight_dtype] / 8.0 if weight_dtype else operand_bytes
    return Precision(
        dtype=dtype,
        act_bytes=sizes.get(dtype, 2.0),
        operand_bytes=operand_bytes,
        weight_bytes=weight_bytes,
        expert_bytes=WEIGHT_BITS[expert_dtype] / 8.0 if expert_dtype else weight_bytes,
        casts_weights=casts_weights,
    )


def linear(
    module: str, name: str, x: Tensor, d_out: Num, prec: Precision, *, bias: bool = False,
    frozen: bool = False,
) -> Stated:  # fmt: skip
    """Y[rows, d_out] = X[rows, d_in] W + b, forward and backward (see `linears`)."""
    y = made(module, name, (*x.shape[:-1], d_out), prec.act_dtype)
    yield from linears(module, name, x, (y,), prec, bias=bias, frozen=frozen)
    return y


def linears(
    module: str, name: str, x: Tensor, results: Sequence[Tensor], prec: Precision, *, bias: bool = False,
    frozen: bool = False, grouped: bool = False, own: Tensor | None = None,
) -> Iterator[Op]:  # fmt: skip
    """Linear layers of one input in one matmul, which makes the `results` side by side, forward and backward.

    The bias is added in the matmul's epilogue; its gradient is a reduction of its own. A `grouped` matmul has
    a matrix for each batch of rows, and no epilogue: a kernel adds the bias. A `frozen` layer has no weight
    gradient and keeps nothing.
    `own`: the rank's own tokens of `x`, where it is gathered: of them it keeps a narrow copy.
    """
    *batches, rows, d_in = x.shape
    batch = batches[0] if batches else 1.0
    d_out = sum(result.shape[-1] for result in results)
    weight, d_weight = (
        Tensor(f"{module}.{name}.{end}", (batch, d_in, d_out), dtype, is_weight=True)
        for end, dtype in (("weight", prec.dtype), ("d_weight", prec.act_dtype))
    )
    d_y = made(module, f"d_{name}", (batch, rows, d_out), prec.dtype)
    d_x = made(module, f"d_{name}_input", (batch, rows, d_in), prec.act_dtype)
    read = whole = x
    copies = 1.0 if frozen else 2.0  # only the gradient of a weight reads what is transposed

    def multiply(
        phase: str, m: Num, n: Num, k: Num, reads: tuple[Tensor, Tensor], makes: tuple[Tensor, ...],
        **more: Any,
    ) -> Op:  # fmt: skip
        return Op(
            module=module, name=name, phase=phase, kind="matmul", shape=(batch, m, n, k), dtype=prec.dtype,
            cost=work(matmul_flop(m, n, k, batch=batch), reads, makes), reads=reads, makes=makes, **more,
        )  # fmt: skip

    if prec.casts:
        read = whole = made(module, f"{name}_cast", (x if own is None else own).shape, prec.dtype)
        reads_makes = {"reads": (x,), "makes": (read,)}
        yield cast(module, name, "forward", batch * rows, d_in, prec, copies=copies, **reads_makes)
        if own is not None:
            whole = exchanged(read, f"{read.name}.gathered", x.shape, 1.0)
    if prec.casts and prec.casts_weights:
        yield cast(module, name, "forward", batch * d_in, d_out, prec, copies=1.0)
    kept = () if frozen else (read,)
    yield multiply("forward", rows, d_out, d_in, (whole, weight), tuple(results), keeps=kept)
    if bias and grouped:
        yield kernel(module, f"{name}_bias", "add_bias", batch * rows, d_out, prec, phase="forward")
    if prec.casts:
        yield cast(module, name, "backward", batch * rows, d_out, prec, copies=copies)
        if prec.casts_weights:
            yield cast(module, name, "backward", batch * d_in, d_out, prec, copies=1.0)
    yield multiply("backward", rows, d_in, d_out, (d_y, weight), (d_x,))
    if frozen:
        return
    yield multiply("backward", d_in, d_out, rows, (whole, d_y), (d_weight,), is_weight_grad=True)
    if bias:
        yield kernel(module, f"{name}_bias", "add_bias", batch * rows, d_out, prec, phase="backward")


def cast(
    module: str, name: str, phase: str, rows: Num, width: Num, prec: Precision, *, copies: float = 2.0,
    **tensors: Any,
) -> Op:  # fmt: skip
    """The kernel that makes a narrow operand [rows, width] of the matmul `name`; a second is transposed."""
    size = rows * width
    cost = Cost(2.0 * size, prec.act_bytes * size, copies * prec.operand_bytes * size)
    name = f"{name}_cast"
    return Op(module=module, name=name, phase=phase, kind="kernel", shape=(rows, width), cost=cost, **tensors)


def elementwise(
    module: str, name: str, kind: str, reads: Tensor | Sequence[Tensor], prec: Precision, *,
    shape: tuple[Num, Num] | None = None,
) -> Stated:  # fmt: skip
    """Both phases of the element-wise kernel `kind` of `cost.op.KERNELS`, which makes `shape` elements.

    `shape` is [rows, width], that of what it reads unless it is given. A kernel keeps what it reads or what
    it makes (`Kernel.keeps`), and statistics of rows, or a mask, of its own.
    """
    reads = (reads,) if isinstance(reads, Tensor) else tuple(reads)
    rows, width = shape or flat(reads[0])
    rule = KERNELS[kind]
    y = made(module, name, (rows, width), prec.act_dtype)
    own: tuple[Tensor, ...] = ()
    if rule.row_bytes:
        row_bytes = rule.row_bytes * max(prec.act_bytes / 4.0, 1.0)
        own = (made(module, f"{name}_statistics", (rows, row_bytes), "uint8"),)
    if rule.mask_bytes:
        own += (made(module, f"{name}_mask", (rows, width), "bool"),)
    keeps = {"": (), "inputs": reads, "output": (y,)}[rule.keeps]
    tensors: dict[str, Any] = {"reads": reads, "makes": (y, *own), "keeps": (*keeps, *own)}
    yield kernel(module, name, kind, rows, width, prec, phase="forward", **tensors)
    yield kernel(module, name, kind, rows, width, prec, phase="backward")
    return y


def work(flop: Num, reads: Iterable[Tensor], makes: Iterable[Tensor]) -> Cost:
    """FLOP of an op, and the bytes of the tensors that it reads and makes."""
    return Cost(flop, bytes_of(reads), bytes_of(makes))


Made = TypeVar("Made")


def changed(stated: Generator[Op, None, Made], change: Callable[[Op], Op]) -> Generator[Op, None, Made]:
    """What is `stated`, each op changed; and what it makes."""
    ops: list[Op] = []
    made_by = collected(stated, ops)
    yield from map(change, ops)
    return made_by


def collected(stated: Generator[Op, None, Made], ops: list[Op]) -> Made:
    """What is `stated` makes, its ops put behind `ops`."""
    try:
        while True:
            ops.append(next(stated))
    except StopIteration as end:
        made_by: Made = end.value
        return made_by


def flat(x: Tensor) -> tuple[Num, Num]:
    """Rows and width of a tensor, batches of rows counted together."""
    return prod(x.shape[:-1], start=1.0), x.shape[-1]


def kernel(
    module: str, name: str, kind: str, rows: Num, width: Num, prec: Precision, *, phase: str,
    **tensors: Any,
) -> Op:  # fmt: skip
    """One phase of the element-wise kernel `kind` of `cost.op.KERNELS` on `rows` x `width` elements."""
    rule = KERNELS[kind]
    work = rule.forward if phase == "forward" else rule.backward
    return Op(
        module=module, name=name, phase=phase, kind="kernel", shape=(rows, width), kernel=kind,
        dtype=prec.dtype,
        cost=work(rows, width, elem_bytes=prec.act_bytes), **tensors,
    )  # fmt: skip


def collective(
    module: str, name: str, phase: str, kind: str, axis: str, payload_bytes: Num, group_size: Num, **more: Any
) -> Op:
    """A collective that serves op `name`; `payload_bytes` is the full tensor (see DESIGN.md)."""
    return Op(
        module=module, name=name, phase=phase, kind="collective", collective=kind, axis=axis,
        payload_bytes=payload_bytes, group_size=group_size, **more,
    )  # fmt: skip


def product(
    module: str, name: str, shape: tuple[Num, Num, Num, Num], prec: Precision, **tensors: Any
) -> Iterator[Op]:
    """A product `shape` (batch, m, n, k) of two activations: forward, then the gradient of each operand."""
    batch, m, n, k = shape
    for i, (rows, columns, depth) in enumerate(((m, n, k), (m, k, n), (k, n, m))):
        yield Op(
            module=module, name=name, phase="backward" if i else "forward", kind="matmul",
            shape=(batch, rows, columns, depth), dtype=prec.act_dtype,
            cost=matmul(rows, columns, depth, elem_bytes=prec.act_bytes, batch=batch),
            **({} if i else tensors),
        )  # fmt: skip


def both_ways(op: Op, shape: tuple[Num, ...] | None = None) -> Iterator[Op]:
    """A forward op, and a backward (of another shape) that does twice its work; what is sent goes back."""
    yield op
    shape, tensors = op.shape if shape is None else shape, {"reads": (), "makes": (), "keeps": ()}
    yield structs.replace(op, phase="backward", shape=shape, cost=op.cost * 2.0, **tensors)


def backward_last(ops: list[Op]) -> list[Op]:
    """`ops` as they run: all forward ones in order, then the backward ones, last module first."""
    forward = [op for op in ops if op.phase == "forward"]
    backward = (op for op in ops if op.phase != "forward")
    groups = [list(alike) for _, alike in groupby(backward, attrgetter("module", "name"))]
    return forward + [op for group in reversed(groups) for op in group]


def on_links(kind: Any, axis: str, group_size: Num, payload_bytes: Num) -> dict[str, Any]:
    """The columns of a collective."""
    return {
        "collective": kind,
        "axis": axis,
        "group_size": float(group_size),
        "payload_bytes": float(payload_bytes),
        "sent_bytes": float(sent_bytes(kind, payload_bytes, group_size)),
    }


def op_row(op: Op, *, weight_elem_bytes: float = 2.0) -> dict[str, Any]:
    """The columns of one occurrence of `op`, and how often it occurs.

    `weight_elem_bytes`: size [bytes] of an element of the weights that the op reads.
    """
    row: dict[str, Any] = {
        "module": op.module,
        "op": op.name,
        "phase": op.phase,
        "count": float(op.count),
        "shape": tuple(float(dim) for dim in op.shape),
        "dtype": op.dtype,
    }
    if op.kind == "collective":
        return row | on_links(op.collective, op.axis, op.group_size, op.payload_bytes)
    return row | {
        "flop": float(op.cost.flop),
        "read_bytes": float(op.cost.read_bytes),
        "write_bytes": float(op.cost.write_bytes),
        "saved_bytes": float(op.saved_bytes),
        "weight_bytes": float(op.num_params) * weight_elem_bytes,
    }
