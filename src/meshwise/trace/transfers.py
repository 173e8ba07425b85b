"""The communications of one rank, in the order in which they were called, with what the trace tells of each.

NCCL kernels carry their collective, elements, dtype and process group (PyTorch since 2.4); older ones only
a name, and the operators around their launch know more. Gloo records name and shapes; a trace captured
by meshwise adds PyTorch's flight recorder, which knows group, sequence and sizes of every call.

`payload_bytes` is the full tensor: what an all-gather leaves, what a reduce-scatter or all-reduce takes,
what an all-to-all sends in total from this rank (with uneven splits, ranks differ), what a message holds.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from meshwise.trace import events
from meshwise.trace.events import CommunicationArgs, Ints, Kind, Trace, collective_kind, is_shape
from meshwise.trace.nesting import around, launchers
from meshwise.trace.steps import Marks, launched_ns

POINT_TO_POINT = ("send", "recv")
_NAMED = ("nccl:", "rccl:", "c10d::")
"""How events that name the collective of a kernel begin."""
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "send_recv")
"""Collectives that no rank can leave before every rank has entered."""
_ELEMENT_BYTES: dict[str, int] = events.NAMES["element_bytes"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One communication on one rank; None where the trace does not tell."""

    event: int
    kind: str
    group: tuple[int, ...] | str
    """The ranks of the group, else its name, else the stream it ran on."""
    group_name: str
    """Its name in the program, for several groups may have the same ranks; empty where unknown."""
    group_size: int | None
    sequence: int | None
    payload_bytes: float | None
    dtype: str
    start_ns: int
    end_ns: int
    source: int | None = None
    """Of a message: who sends, who receives."""
    destination: int | None = None
    step: int = -1
    """The step in which it was launched; -1 where no step is marked."""
    is_buffered: bool = False
    """Whether a send may end before the other side has begun to receive."""

    @property
    def is_message(self) -> bool:
        """Whether this is a send or a receive."""
        return self.kind in POINT_TO_POINT


_Call = tuple[tuple[int, ...] | str, str, int | None, int | None, float | None, str]


class _Recorded(msgspec.Struct):
    """A call as PyTorch's flight recorder knows it."""

    profiling_name: str | None = None
    process_group: list[str] | None = None
    collective_seq_id: int | None = None
    input_sizes: list[list[int]] | None = None
    input_dtypes: list[str] | None = None
    output_sizes: list[list[int]] | None = None
    output_dtypes: list[str] | None = None


def transfers(trace: Trace, marked: Marks | None = None) -> list[Transfer]:
    """The selected communications of one rank as it called them, each with its step of `marked`."""
    found = list(_kernels(trace)) if trace.has_device else _host(trace)
    if trace.selected is not None:
        found = [one for one in found if trace.selected[one.event]]
    if marked is None or not len(marked.number):
        return found
    step = marked.step(launched_ns(trace)[[one.event for one in found]])
    return [replace(one, step=number) for one, number in zip(found, step.tolist(), strict=True)]


def _kernels(trace: Trace) -> Iterator[Transfer]:
    end_ns, kernels = trace.end_ns, trace.where(Kind.COMMUNICATION)
    launcher, is_call = launchers(trace)[kernels], np.isin(trace.kind, (Kind.CPU_OP, Kind.ANNOTATION))
    told = np.zeros(len(trace), dtype=bool)
    told[list(trace.communications)] = True
    called = around(trace, launcher, is_call & trace.named(lambda name: name.startswith(_NAMED)))
    argued = around(trace, launcher, is_call & told)
    streams = {stream: k for k, stream in enumerate(np.unique(trace.stream[kernels]).tolist())}
    for i, call, other in zip(kernels.tolist(), called.tolist(), argued.tolist(), strict=True):
        args = trace.communications.get(i) or trace.communications.get(other) or CommunicationArgs()
        said = (args.collective, trace.name(call) if call >= 0 else None, trace.name(i))
        kind = next((k for k in map(collective_kind, filter(None, said)) if k != "unknown"), "unknown")
        ranks = trace.groups.get(args.group or "")
        named = f"group {args.group}" if args.group else f"communication stream {streams[trace.stream[i]]}"
        source, destination = _ends(trace.rank, kind, args, ranks)
        dtype, payload = _shape_bytes(trace, call) if call >= 0 and kind != "all_gather" else ("", None)
        if args.dtype:
            dtype, payload = args.dtype, _elements(kind, args) * element_bytes(args.dtype)
        size = args.group_size or (len(ranks) if ranks else None)
        payload = payload if args.dtype else payload or None
        about = (ranks or named, args.group or "", size, args.sequence, payload, dtype)
        yield Transfer(i, kind, *about, int(trace.start_ns[i]), int(end_ns[i]), source, destination)


def _elements(kind: str, args: CommunicationArgs) -> float:
    """Elements of the full tensor; of an all-to-all those that leave this rank."""
    taken, left = args.in_elements or 0, args.out_elements or 0
    return float(taken if kind == "all_to_all" and taken else max(taken, left))


def _ends(
    rank: int, kind: str, args: CommunicationArgs, ranks: tuple[int, ...] | None
) -> tuple[int | None, int | None]:
    """Who sends and who receives a message; a pair needs no peer named."""
    if kind not in POINT_TO_POINT:
        return None, None
    peer = args.destination if kind == "send" else args.source
    if peer is None and ranks and len(ranks) == 2 and rank in ranks:
        peer = ranks[1 - ranks.index(rank)]
    return (rank, peer) if kind == "send" else (peer, rank)


def _host(trace: Trace) -> list[Transfer]:
    recorded, end_ns, launcher = _flight_record(trace), trace.end_ns, launchers(trace)
    peers, stages = _peers(trace), _stages(trace, recorded)
    found = []
    moved = trace.where(Kind.HOST_COMMUNICATION).tolist()
    unrecorded = Counter(trace.name(i) for i in moved)  # the recorder keeps the last calls only
    unrecorded.subtract({name: len(calls) for name, calls in recorded.items()})
    for i in moved:
        name = trace.name(i)
        unrecorded[name] -= 1
        call = recorded[name].popleft() if unrecorded[name] < 0 and recorded[name] else None
        asked = collective_kind(trace.name(launcher[i])) if launcher[i] >= 0 else ""
        # gloo reduces all, then scatters
        kind = asked if asked == "reduce_scatter" else collective_kind(name)
        args = peers[kind].popleft() if peers[kind] else CommunicationArgs()
        source, destination = _ends(trace.rank, kind, args, None)
        if stages and kind in POINT_TO_POINT:  # a call numbers the ranks of its group
            rank_of: dict[int | None, int] = dict(enumerate(stages))
            source = source if kind == "send" else rank_of.get(source)
            destination = destination if kind == "recv" else rank_of.get(destination)
        about = _recorded_call(trace, call, kind) if call else _unrecorded_call(trace, i, kind)
        ends_ns, buffered = (int(trace.start_ns[i]), int(end_ns[i])), kind in POINT_TO_POINT
        one = Transfer(i, kind, *about, *ends_ns, source, destination, is_buffered=buffered)
        found.append(replace(one, payload_bytes=0.0) if kind == "barrier" else one)
    launched = launched_ns(trace)  # worker threads may begin them in another order
    return sorted(found, key=lambda one: int(launched[one.event]))


def _recorded_call(trace: Trace, call: _Recorded, kind: str) -> _Call:
    """Group, its name and size, number, payload and type of a call, as PyTorch recorded it."""
    name = (call.process_group or [""])[0]
    group = trace.groups.get(name) or f"group {name}"
    size = len(group) if isinstance(group, tuple) else None
    dtype, payload = (call.input_dtypes or [""])[0], _call_bytes(call, kind, size or 1)
    return group, name, size, call.collective_seq_id, payload, dtype


def _unrecorded_call(trace: Trace, event: int, kind: str) -> _Call:
    """The same by the shapes of the event, in the only group that the trace knows, or one unknown."""
    size = trace.world_size if trace.world_size and len(trace.groups) <= 1 else None
    dtype, payload = _shape_bytes(trace, event)
    if kind == "all_gather" and payload is not None:
        payload = payload * size if size else None
    group = tuple(range(trace.world_size)) if trace.world_size else "world"
    return group, "", size, None, payload, dtype


def _stages(trace: Trace, recorded: Mapping[str, Iterable[_Recorded]]) -> tuple[int, ...]:
    """The ranks of the group that is described as a pipeline's (`pp`): it sends the messages."""
    described = (call.process_group or [""] for calls in recorded.values() for call in calls)
    return next((trace.groups.get(name, ()) for name, *text in described if text[:1] == ["pp"]), ())


def _flight_record(trace: Trace) -> dict[str, deque[_Recorded]]:
    """The recorded calls in order, by the name that their events bear; none where the record is damaged."""
    recorded: dict[str, deque[_Recorded]] = defaultdict(deque)
    with suppress(msgspec.ValidationError):
        for call in msgspec.convert(trace.metadata.get("meshwise_collectives") or [], list[_Recorded]):
            recorded[str(call.profiling_name)].append(call)
    return recorded


def _peers(trace: Trace) -> dict[str, deque[CommunicationArgs]]:
    """The other rank of every send and receive, in order: gloo's events do not know it, their calls do."""
    peers: dict[str, deque[CommunicationArgs]] = defaultdict(deque)
    for i in sorted(trace.communications):
        if trace.label_kind[trace.label[i]] == Kind.CPU_OP and trace.name(i) in events.POINT_TO_POINT_CALLS:
            peers[collective_kind(trace.name(i))].append(trace.communications[i])
    return peers


def element_bytes(dtype: str | None) -> int:
    """Bytes of one element by any name of PyTorch's traces; 1 for 8-bit floats and unknown names."""
    return _ELEMENT_BYTES.get((dtype or "").lower(), 1)


def _call_bytes(call: _Recorded, kind: str, num_ranks: int) -> float:
    """The larger side of a call of the flight recorder; of an all-to-all what this rank sends.

    Of a coalesced all-gather it records the output as large as the input.
    """

    def side(sizes: list[list[int]] | None, dtypes: list[str] | None) -> float:
        pairs = zip(sizes or [], dtypes or [], strict=False)
        known = ((shape, dtype) for shape, dtype in pairs if is_shape(shape))
        return float(sum(math.prod(shape) * element_bytes(dtype) for shape, dtype in known))

    taken, left = side(call.input_sizes, call.input_dtypes), side(call.output_sizes, call.output_dtypes)
    if kind == "all_to_all":
        return taken
    return max(taken * (num_ranks if kind == "all_gather" else 1), left)


def _shape_bytes(trace: Trace, event: int) -> tuple[str, float | None]:
    """dtype and bytes of the tensors that an operator took; None where shapes were not recorded."""
    if trace.shape[event] < 0:
        return "", None
    tensors = trace.tensors(int(trace.shape[event]))
    known = [(dims, dtype) for dims, dtype in tensors if dtype.lower() in _ELEMENT_BYTES]
    total = sum(math.prod(dims) * element_bytes(dtype) for dims, dtype in known)
    return (tensors[0][1] if tensors else ""), float(total)


def times(found: Sequence[Transfer]) -> tuple[Ints, Ints]:
    """Start and end [ns] of the transfers as arrays."""
    start, end = np.array([(t.start_ns, t.end_ns) for t in found], dtype=np.int64).reshape(-1, 2).T
    return start, end
