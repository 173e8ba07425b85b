"""Counts what a torch program does while it runs, real or on fake tensors, into a `Ledger`.

Every op and every collective of a program passes torch's dispatcher, below autograd; the recorder sits
there. Per op it notes shapes, FLOP (of matmuls and attention) and bytes; per collective its kind, mesh
axis, group and payload. A tensor's storage is alive from the op that makes it until its last reference
goes. What autograd keeps for the backward is counted with the op that first keeps it, each storage once,
weights apart.

A row is called by the program, not by torch: `module` is the path of the sections around it, `op` the
name given with `recorder.op("q")`, else torch's own. In the backward an op belongs to the section of the
forward op whose gradient it computes (autograd numbers its nodes; the numbers join the two).

A storage is kept for the backward from the moment a node of the graph saves a tensor in it until the last
such node lets go. What `torch.utils.checkpoint` computes again is kept by it, from then until the backward
takes it.
"""

from __future__ import annotations

import ctypes
import re
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
import torch.utils.checkpoint as checkpointing
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.utils.flop_counter import flop_registry

from meshwise.core.files import read_catalog
from meshwise.core.ledger import COLLECTIVES, Collective
from meshwise.cost.collective import sent_bytes
from meshwise.cost.op import attended_pairs, flash_attention, flash_attention_backward, matmul_flop
from meshwise.program.tape import Step, Tape
from meshwise.runtime import torch_private as private
from meshwise.runtime.fakes import DeviceFakes, Stream

aten = torch.ops.aten

DTYPE_NAMES = {
    **{torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"},
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "fp8"),
}

_DEVICE = torch.ops.prim.device.default
_NO_WORK = frozenset(
    ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "wait_tensor")
)

_READ_BACK = ("_local_scalar_dense", "equal", "_to_copy")
"""Ops that bring values to the host, which waits for them, where no result of theirs is on the device."""

DATA_DEPENDENT = read_catalog("scripts.toml")["data_dependent"]
"""Ops whose results have a shape that depends on values, which the host must know."""

_COLLECTIVES = {kind.replace("_", ""): kind for kind in sorted(COLLECTIVES, key=len, reverse=True)}
"""Kinds by how torch's names of them begin, without the underscores."""

Storage = torch.UntypedStorage


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of `tensor`: an expanded tensor counts what it expands."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class OpRecorder(private.TorchDispatchMode):
    """Writes a `Tape` while torch runs; use it as a context manager around the program.

    `device_type` limits it to tensors on that kind of device. `is_timed` measures each op on the host's
    clock, collectives to their completion: for CPU runs, where an op returns when it is done.
    """

    def __init__(self, tape: Tape, *, device_type: str = "cpu", is_timed: bool = False) -> None:
        super().__init__()
        self.tape = tape
        self._device_type = device_type
        self._is_timed = is_timed
        self._modules: list[str] = []
        self._op_names: list[str] = []
        self._phases: list[str] = []
        self._setups: list[str] = []
        self._axes: dict[str, str] = {}
        self._shown_frac: float | None = None
        self._shown: dict[int, float] = {}  # storage of what an attention has made -> share of its pairs
        self._exchanges: defaultdict[str, Stream] = defaultdict(Stream)  # by lane, its collectives
        self._arriving: dict[int, int] = {}  # storage -> the collective that nobody has waited for yet
        self._live: dict[int, weakref.finalize] = {}
        self._seen: set[int] = set()  # storages on the device; those of fakes say that they lie on meta
        self._weights: set[int] = set()
        self._saved: set[int] = set()
        self._labels: dict[int | None, tuple[str, str]] = {}  # autograd node -> module and op of its forward
        self._last_label = ("", "")
        self._rows: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)  # node -> rows of its forward
        self._saved_bytes: Counter[int] = Counter()  # node -> what it keeps
        self.kept, self._holders = Tape("kept"), Counter[int]()  # for the backward, weights apart
        self._patches, self._shapes = ExitStack(), DeviceFakes()

    # --- what a program says -----------------------------------------------------------------

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Rows inside belong to module `name`, joined to those around it with a slash, as in traces."""
        with record_function(name), _pushed(self._modules, name):
            yield

    def op(self, name: str) -> AbstractContextManager[None]:
        """Rows inside carry `name` as their op."""
        return _pushed(self._op_names, name)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Rows inside belong to phase `name`; without one it is forward, or backward inside autograd."""
        return _pushed(self._phases, name)

    def setup(self) -> AbstractContextManager[None]:
        """Tensors made inside are alive and counted; ops inside write no rows (inputs, weights, checks)."""
        return _pushed(self._setups, "setup")

    @contextmanager
    def showing(self, shown_frac: float | None) -> Iterator[None]:
        """Attention inside, and its backward, is of that share of all query-key pairs (None: as it says)."""
        self._shown_frac = shown_frac
        yield
        self._shown_frac = None

    def weights(self, *tensors: torch.Tensor) -> None:
        """These tensors are weights: not counted as kept for the backward, but as read by an op."""
        storages = [own_part(tensor).untyped_storage() for tensor in tensors]
        self._weights.update(storage._cdata for storage in storages if storage.nbytes())

    def name_axis(self, group: dist.ProcessGroup, axis: str) -> None:
        """Collectives of `group` run along the mesh axis `axis`."""
        self._axes[group.group_name] = axis

    def hold(self, tensor: torch.Tensor, holder: object) -> None:
        """`tensor` is kept for the backward for as long as `holder` is there."""
        storage = own_part(tensor).untyped_storage()
        key = storage._cdata
        if self._setups or key not in self._live or key in self._weights:
            return
        self._holders[key] += 1
        if self._holders[key] == 1:
            self.kept.allocate(key, storage.nbytes())
        weakref.finalize(holder, self._let_go, key)

    def _let_go(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self.kept.release(key)

    def step(self, name: str, tensors: Mapping[str, torch.Tensor]) -> list[Step]:
        """The program has come to `name`; `tensors` by what the step prints: `{"q [h, N/P, d/h]": q}`."""
        return self.tape.step(name, {label: (tuple(one.shape), one.nbytes) for label, one in tensors.items()})

    # --- the dispatcher ----------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call of `__torch_dispatch__`

    def __enter__(self) -> OpRecorder:
        Stream.begin()
        resize, infer = Storage.resize_, private.ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            self._resized(storage, size_bytes)
            return resize(storage, size_bytes)

        def unseen(*args: Any, **kwargs: Any) -> Any:
            # DTensor tries an op's full shape on fake tensors, once
            with private.disable_current_modes(), self._shapes:
                return infer(*args, **kwargs)

        hooks, functional = saved_tensors_hooks(seen_through(self._keep), _unchanged), torch.autograd.graph
        without = partial(_put_aside, hooks, functional.disable_saved_tensors_hooks)
        for patch in (
            hooks,
            mock.patch.object(functional, "disable_saved_tensors_hooks", without),
            watched_checkpoints(self.hold),
            mock.patch.object(Storage, "resize_", resize_),
            mock.patch.object(private.ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen),
        ):
            self._patches.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        for number, size_bytes in self._saved_bytes.items():
            if rows := self._rows[number]:  # it counts with the first of them that does the node's work
                max(rows, key=_standing)["saved_bytes"] = size_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types or private.AsyncCollectiveTensor in types:
            return NotImplemented  # let it come back as ops on the tensors inside
        if func is _DEVICE and isinstance(args[0], private.FakeTensor):
            return args[0].fake_device  # half of all calls
        if func.namespace == "prim" or func._opname == "_wrap_tensor_autograd":  # whose result has no memory
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        if _is_bookkeeping(inputs):
            with private.disable_current_modes():
                return func(*args, **kwargs)
        kind = collective_of(func, args)
        inputs = self._recorded(inputs)
        begin_s = time.perf_counter()
        if kind is not None and self._is_timed and kind not in ("send", "recv"):
            result = _complete(func, args, kwargs)
        else:  # a send may have to wait for a receive that is yet to be posted
            result = func(*args, **kwargs)
        elapsed_s = time.perf_counter() - begin_s
        outputs = self._recorded(tensors_in(result))
        for storage in (tensor.untyped_storage() for tensor in outputs):
            self._seen.add(storage._cdata)
            if storage._cdata not in self._live:
                self._allocate(storage, storage.nbytes())
        if func._opname == "wait_tensor":
            self.waiting(inputs)
        is_read = not outputs and func._opname in _READ_BACK and not kwargs.get("non_blocking")
        if inputs and (is_read or func._opname in DATA_DEPENDENT):
            self.waiting(inputs).synchronize()
        if self._setups or func._opname in _NO_WORK:
            return result
        if kind is not None:
            row = self._collective_row(kind, func, args, result)
            made = given_and_made(func.namespace, args, result)[1]  # where only a `Work` comes back, too
            written = [] if kind == "send" else self._recorded(tensors_in(made))
        else:
            written = _written(func, args, kwargs, inputs, outputs)
            if not written:
                return result  # a view
            row = self._op_row(func, args, kwargs, result, inputs, written)
        if self._is_timed:
            row["time_s"] = elapsed_s
        self._write(row, written)
        self._launch([*inputs, *written], written, *_exchange(kind, func, args, kwargs))
        return result

    def _recorded(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The distinct ones of `tensors` that lie on the recorded kind of device."""
        distinct = {id(tensor): tensor for tensor in tensors}
        return [tensor for tensor in distinct.values() if tensor.device.type == self._device_type]

    def _op_row(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Any], written: list[Any]
    ) -> dict[str, Any]:
        named = named_arguments(func, args, kwargs)
        if self._shown_frac is not None:
            self._shown[written[0].untyped_storage()._cdata] = self._shown_frac
        outs = [*written, *tensors_in(named.get("out"))]  # a backward reads that of its forward
        shown = [self._shown[key] for one in outs if (key := one.untyped_storage()._cdata) in self._shown]
        shape, flop = _work(func, named | {"shown_frac": shown[-1]} if shown else named, args, kwargs, result)
        weights = [tensor for tensor in inputs if tensor.untyped_storage()._cdata in self._weights]
        computed_in = (inputs if func._opname in ("_scaled_mm", "_int_mm") else written)[0]
        return {
            "op": func._opname,
            "shape": shape or tuple(written[0].shape),
            "dtype": _dtype_name(computed_in.dtype),
            "flop": flop,
            "read_bytes": sum(map(tensor_bytes, inputs)),
            "write_bytes": sum(map(tensor_bytes, written)),
            "weight_bytes": sum(map(tensor_bytes, weights)),
            "is_matmul": bool(shape) and func._opname in _MATMULS,
        }

    def _collective_row(self, kind: Collective, func: Any, args: Any, result: Any) -> dict[str, Any]:
        group = group_of(args)
        given, made = given_and_made(func.namespace, args, result)
        size, is_message = group.size(), kind in ("send", "recv")
        is_given = kind in ("reduce_scatter", "all_to_all") or (kind == "send" and tensors_in(given))
        is_made = kind == "all_gather" or (func.namespace == "c10d" and not is_given)
        num_sent = max(size - 1, 1) if is_message else None  # the root of a gather or scatter keeps its own
        tensors = tensors_in(made if is_made else given)[:num_sent]
        payload_bytes = sum(tensor.nbytes for tensor in tensors)
        if kind == "all_to_all":  # of parts that are not alike the busier way
            payload_bytes = max(payload_bytes, sum(tensor.nbytes for tensor in private.tree_leaves(made)))
        return {
            "op": func._opname.strip("_") if is_message else kind,
            "shape": tuple(tensors[0].shape),
            "dtype": _dtype_name(tensors[0].dtype),
            "collective": kind,
            "axis": self._axes.get(group.group_name, "world"),
            "group_size": size,
            "payload_bytes": payload_bytes,
            "sent_bytes": float(sent_bytes(kind, payload_bytes, size)),
        }

    def _write(self, row: dict[str, Any], written: list[torch.Tensor]) -> dict[str, Any]:
        """Put the row of an op that wrote into these tensors on the tape, under the names of its place."""
        row = self.tape.op(**row | self._place(row["op"]))
        if private.current_graph_task_id() == -1:
            number = private.autograd_sequence_nr() - 1
            self._labels.setdefault(number, self._label())
            self._rows[number].append(row)
        return row

    def _launch(
        self, touched: list[torch.Tensor], written: list[torch.Tensor], stride: int, lane: str | None
    ) -> None:
        """Put on the tape what the op of the last row begins after.

        `stride`: how far apart the ranks of a collective are; `lane`: it runs there, beside its stream, until
        it is waited for or a result of it is touched.
        """
        number, stream = self.tape.num_rows - 1, self.waiting(touched)
        if lane is not None:
            self._exchanges[lane].wait_stream(stream)
            stream = self._exchanges[lane]
            self._arriving |= {tensor.untyped_storage()._cdata: number for tensor in written}
        self.tape.launches[number] = (*stream.launched(number), stride)

    def waiting(self, touched: list[torch.Tensor]) -> Stream:
        """The stream in which the program works, which waits for all that arrives in these tensors."""
        stream, keys = Stream.current(), {own_part(tensor).untyped_storage()._cdata for tensor in touched}
        stream.after.update(self._arriving.pop(key) for key in keys & self._arriving.keys())
        return stream

    def _place(self, op: str) -> dict[str, Any]:
        """The names of an op that runs now."""
        node = private.current_autograd_node()
        in_backward = private.current_graph_task_id() != -1
        module, named = self._label()
        phase = self._phases[-1] if self._phases else "backward" if in_backward else "forward"
        if in_backward and phase == "backward":
            # what adds to a parameter's gradient has no place of its own; it belongs to the op before it
            place = None if node is None else node._sequence_nr()
            self._last_label = self._labels.get(place, self._last_label)
            module, of_forward = self._last_label
            named = named or of_forward  # a backward written by hand may name its own ops
        return {"op": named or op, "module": module, "phase": phase}

    def _label(self) -> tuple[str, str]:
        """Where the program is now: its module, and the op that it names, if it does."""
        module = "/".join(self._modules).rpartition("//")[2].lstrip("/")  # a name with a slash begins anew
        return module, self._op_names[-1] if self._op_names else ""

    # --- storages ----------------------------------------------------------------------------

    def _allocate(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        if size_bytes:
            self.tape.allocate(storage._cdata, size_bytes)
            self._live[storage._cdata] = weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key: int) -> None:
        if self._live.pop(key, None) is not None:
            self.tape.release(key)
        self._weights.discard(key)
        self._saved.discard(key)
        self._arriving.pop(key, None)
        self._shown.pop(key, None)

    def _resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """FSDP frees and refills its unsharded parameters by resizing their storages."""
        key = storage._cdata
        if key not in self._seen:
            return
        finalizer = self._live.pop(key, None)
        if finalizer is not None:
            finalizer.detach()
            self.tape.release(key)
        self._allocate(storage, size_bytes)

    def _keep(self, tensor: torch.Tensor) -> Any:
        """Autograd keeps `tensor`; its storage counts once, with the op that keeps it first.

        A node that keeps its own result would be kept by it, so its hold is on the numbers alone.
        """
        storage = own_part(tensor).untyped_storage()
        key, number = storage._cdata, private.autograd_sequence_nr() - 1
        is_result = tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() == number
        held = SavedTensor(tensor.detach() if is_result else tensor, tensor._version)
        self.hold(tensor, held)
        if self._setups or key in self._weights or key in self._saved or key not in self._live:
            return held
        self._saved.add(key)
        self._labels.setdefault(number, self._label())
        self._saved_bytes[number] += storage.nbytes()
        return held


_MATMULS = ("_scaled_mm", "_int_mm", "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm")


def _standing(row: Mapping[str, Any]) -> int:
    """Of the rows of one autograd node: matmuls and attention first, then other ops, then collectives."""
    return 0 if row.get("collective") else 2 if row["flop"] else 1


def _work(func: Any, named: Mapping[str, Any], args: Any, kwargs: Any, result: Any) -> tuple[Any, float]:
    """Shape in the words of `layout.op` and FLOP of a matmul or attention; () and 0 for other ops."""
    if func._opname in _MATMULS:
        left = named.get("mat1", named.get("batch1", named.get("self")))
        right = named.get("mat2", named.get("batch2"))
        summed = left if "out_dtype" in named else named.get("self", left)
        if func._opname not in ("_scaled_mm", "_int_mm") and not left.dtype == right.dtype == summed.dtype:
            raise RuntimeError(f"{func._opname} of {summed.dtype}, {left.dtype} and {right.dtype}")
        batch = left.shape[0] if left.dim() == right.dim() == 3 else 1  # else groups share the rows
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        return (batch, m, n, k), float(matmul_flop(m, n, k, batch=batch))
    if re.search("attention|attn", func._opname) and "query" in named:
        return _attention_work(named, is_backward="backward" in func._opname)
    if func._overloadpacket is aten.convolution_backward:  # torch's formula leaves out groups
        each_flop = flop_registry[aten.convolution](*args[1:-1], out_val=args[0])
        return (), float(each_flop * sum(args[-1][:2]))  # gradients of the input and of the weight
    formula = flop_registry.get(func._overloadpacket)
    return (), float(formula(*args, **kwargs, out_val=result)) if formula else 0.0


def _attention_work(named: Mapping[str, Any], *, is_backward: bool) -> tuple[Any, float]:
    """Tensors are [batch, heads, tokens, head size]; under a causal mask, what the kernels really do."""
    query, key, value = named["query"], named["key"], named["value"]
    if "cu_seq_q" in named:  # [tokens, heads, head size]
        query, key, value = (x.flatten(0, -3).transpose(0, 1)[None] for x in (query, key, value))
    batch, heads, seq_q, qk_dim = query.shape
    kv_heads, seq_k, v_dim = key.shape[1], key.shape[2], value.shape[3]
    is_causal = bool(named.get("is_causal", False))
    if "shown_frac" in named:
        pairs = named["shown_frac"] * seq_q * seq_k
    elif "cu_seq_q" in named:
        pairs = _packed_pairs(named)
    else:  # queries that are not the last of the sequence say which they are: begin, end, begin, end, ...
        spans = numpy.reshape(named.get("query_spans") or [seq_k - seq_q, seq_k], (-1, 2))
        ends = spans[:, 1] if is_causal else seq_k
        pairs = numpy.sum(attended_pairs(numpy.diff(spans)[:, 0], ends, causal=is_causal))
    work = flash_attention_backward if is_backward else flash_attention
    sizes = (heads, kv_heads, seq_q, seq_k, qk_dim, v_dim)
    return (batch, *sizes), float(work(pairs, *sizes, batch=batch, elem_bytes=query.element_size()).flop)


def _packed_pairs(named: Mapping[str, Any]) -> Any:
    """Pairs of tokens of documents that lie one behind the other, each of which sees a window of its own.

    Where nobody knows the ends, which then are equal, all documents are as long.
    """

    def lengths(ends: torch.Tensor, tensor: str) -> Any:
        found = numpy.diff(ends.tolist())
        return found if found.any() else numpy.full(len(found), len(named[tensor]) / len(found))

    (left, right), used = named["window_size"], named.get("seqused_k")  # rows of a cache that are filled
    keys = lengths(named["cu_seq_k"], "key") if used is None else numpy.array(used.tolist())
    queries = lengths(named["cu_seq_q"], "query")
    return numpy.sum(attended_pairs(queries, keys, causal=right == 0, window=max(left + 1, 0)))


def _written(
    func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors that an op writes: those it mutates, and outputs in storages of their own."""
    if func._schema.is_mutable:
        return mutated(func, args, kwargs)
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    return [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]


def named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What an op is given, by the names of its schema."""
    return dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)) | kwargs


def mutated(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among its arguments that an op writes into."""
    named = named_arguments(func, args, kwargs)
    names = [arg.name for arg in func._schema.arguments if arg.alias_info and arg.alias_info.is_write]
    return [tensor for name in names for tensor in tensors_in(named.get(name))]


def collective_of(func: Any, args: Any) -> Collective | None:
    """The kind of the collective that `func` is; None of other ops.

    A gather or scatter is messages between each rank and the root, which alone has a list of tensors.
    """
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._opname.replace("_", "")
    if name in ("gather", "scatter"):
        return "send" if bool(args[name == "scatter"]) == (name == "scatter") else "recv"
    return next((kind for begin, kind in _COLLECTIVES.items() if name.startswith(begin)), None)


def _exchange(kind: Collective | None, func: Any, args: Any, kwargs: Any) -> tuple[int, str | None]:
    """How far apart the ranks of a collective are, and the lane in which it runs beside its stream.

    A message is as far as its peer (behind this rank, or before it), and those that come have a lane of their
    own. None: in the stream itself.
    """
    if kind is None:
        return 0, None
    group, named = group_of(args), named_arguments(func, args, kwargs)
    members = dist.get_process_group_ranks(group)
    peer, apart = named.get("dst", named.get("src")), [*members, members[0] + 1][1] - members[0]
    if kind in ("send", "recv") and isinstance(peer, int) and 0 <= peer < len(members):
        apart = members[peer] - dist.get_rank()
    lane = f"{group.group_name} {'in' if kind == 'recv' else 'out'}"
    return apart, lane if named.get("async_op", True) else None


def given_and_made(namespace: str, args: Any, result: Any) -> tuple[Any, Any]:
    """What a collective takes and makes; c10d takes the result first, where it is not the argument itself."""
    return (args[0], result) if namespace == "_c10d_functional" else (args[1], args[0])


def group_of(args: Any) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: the first object, or the last one, its name."""
    found = next((one for one in args if isinstance(one, torch.ScriptObject)), args[-1])
    by_name = dist.distributed_c10d._resolve_process_group
    return by_name(found) if isinstance(found, str) else dist.ProcessGroup.unbox(found)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, and what the result of a collective holds."""
    while private.is_transformed(tensor):
        tensor = private.untransformed(tensor)
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.elem if isinstance(part, private.AsyncCollectiveTensor) else part


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results of an op; pytree takes longer than most ops do on fakes."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for branch in branches for tensor in tensors_in(branch)]


def _is_bookkeeping(inputs: list[torch.Tensor]) -> bool:
    """Whether an op of a dry run works on real tensors: those in which a device mesh keeps its ranks."""
    on_fakes = type(private.current_dispatch_mode()) is DeviceFakes  # a user's program decides for itself
    return on_fakes and bool(inputs) and not any(isinstance(one, private.FakeTensor) for one in inputs)


def _complete(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective of gloo, complete when this returns: its `Work` is replaced by one that is done.

    gloo's threads let go of the tensors of a collective when they are scheduled, some time after the wait
    is over. So they get others over the same memory, which own nothing: what the program's tensors live
    does not depend on threads. The results of a functional collective, made inside it, are copied.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    originals: dict[int, torch.Tensor] = {}

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.untyped_storage().nbytes():
            return leaf
        storage = leaf.untyped_storage()
        if storage._cdata not in storages:
            memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
            storages[storage._cdata] = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        view = torch.empty(0, dtype=leaf.dtype)
        view.set_(storages[storage._cdata], leaf.storage_offset(), leaf.size(), leaf.stride())
        originals[id(view)] = leaf
        return view

    def finished(leaf: Any) -> Any:
        if isinstance(leaf, torch.ScriptObject):
            dist.Work.unbox(leaf).wait()
            return private.FakeWork().boxed()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if func.namespace == "_c10d_functional":
            torch.ops._c10d_functional.wait_tensor(leaf)
            return originals[id(leaf)] if id(leaf) in originals else leaf.clone()
        return originals.get(id(leaf), leaf)

    stand_ins = private.tree_map(stand_in, (args, kwargs))
    return private.tree_map(finished, func(*stand_ins[0], **stand_ins[1]))


def _dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@contextmanager
def _pushed(stack: list[str], item: str) -> Iterator[None]:
    stack.append(item)
    try:
        yield
    finally:
        stack.pop()


@dataclass(slots=True, weakref_slot=True, eq=False)
class SavedTensor:
    """A tensor that a node of the graph has saved, in place of the tensor itself, and its version then."""

    tensor: torch.Tensor
    version: int


def _unchanged(held: SavedTensor) -> torch.Tensor:
    """What a node of the graph has saved, of which torch does not look for changes where there are hooks."""
    if held.tensor._version != held.version:
        raise RuntimeError("a tensor that the backward needs was changed in place after it was saved")
    return held.tensor


@contextmanager
def _put_aside(hooks: saved_tensors_hooks, disabled: Any, message: str) -> Iterator[None]:
    """torch.func takes no hooks: what it keeps inside is not counted as kept."""
    with ExitStack() as stack:
        if private.saved_hooks_enabled():
            hooks.__exit__()
            stack.callback(hooks.__enter__)
        stack.enter_context(disabled(message))
        yield


def seen_through(pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """`pack` as a hook that a selective checkpoint takes for one of its own, of which it asks nothing.

    Before hooks of others torch 2.14 warns that it will hand them what it keeps, which is watched already.
    """
    hook = partial(pack)
    vars(hook).update(_checkpoint_internal=True, _user_hooks=None)
    return hook


def watched_checkpoints(keep: Callable[[torch.Tensor, object], None]) -> AbstractContextManager[Any]:
    """Tells `keep` what `torch.utils.checkpoint` holds beside its inputs, and what holds it."""
    holders: Any = {"_recomputation_hook": _recomputation_hook(keep), "_VersionWrapper": _kept_result(keep)}
    return mock.patch.multiple(checkpointing, **holders)


def _kept_result(keep: Callable[[torch.Tensor, object], None]) -> type:
    """torch's holder of a result that a recomputation takes as it is, which tells `keep` of it and itself."""

    class Watched(checkpointing._VersionWrapper):
        def __init__(self, value: Any, **hooks: Any) -> None:
            super().__init__(value, **hooks)
            if isinstance(value, torch.Tensor):
                keep(value, self)

    return Watched


def _recomputation_hook(keep: Callable[[torch.Tensor, object], None]) -> type:
    """torch's hook around a recomputation, which tells `keep` each tensor that comes back, and its holder."""

    class Watched(checkpointing._recomputation_hook):
        def __init__(self, frame_ref: Any, gid: Any) -> None:
            super().__init__(frame_ref, gid)
            pack: Callable[[torch.Tensor], Any] = self.pack_hook  # type: ignore[has-type]

            def watched_pack(tensor: torch.Tensor) -> Any:
                frame = frame_ref()
                number = frame.recomp_counter[gid]
                try:
                    return pack(tensor)
                finally:  # it raises at the last tensor where no more is computed than is needed
                    holder = frame.weak_holders[number]() if number < len(frame.weak_holders) else None
                    if holder is not None:
                        keep(tensor, holder.handles[gid])

            self.pack_hook = watched_pack

    return Watched
