"""Reading traces: exact times, any layout and age, and what is left of damaged files."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kineto import BASE_NS, host, kernel, write_trace
from meshwise.errors import DataError
from meshwise.trace import read
from meshwise.trace.events import Kind, kind_of
from meshwise.trace.read import read_trace, read_traces

DATA = Path(__file__).parent / "data" / "traces"
EVENTS = [host("cpu_op", f"aten::op{i}", 10.0 * i, 7.125, **{"External id": i + 1}) for i in range(50)]


def _times(path):
    trace, notes = read_trace(path)
    assert trace is not None
    return trace.start_ns.tolist(), notes


@given(
    st.lists(st.integers(0, 7_889_238_000_000_000), min_size=1, max_size=20),
    st.sampled_from([0, 1_712_195_495_000_000_000]),
)
def test_every_nanosecond_survives(tmp_path_factory, times_ns, epoch_ns):
    """Three decimals of µs, counted from the base (three months at most) or from 1970, come back exactly."""
    events = [
        f'{{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": {t // 1000}.{t % 1000:03d}}}'
        for t in (epoch_ns + t for t in times_ns)
    ]
    path = tmp_path_factory.mktemp("t") / "rank-0.json"
    path.write_text('{"traceEvents": [' + ",\n".join(events) + "]}")
    assert _times(path)[0] == sorted(epoch_ns + t for t in times_ns)


def test_base_time_and_whole_microseconds(tmp_path):
    path = write_trace(tmp_path / "a.json", [kernel("k", 1_665_536_373_729_077, 4)], 0, baseTimeNanoseconds=0)
    trace, _ = read_trace(path)
    assert trace.start_ns.tolist() == [1_665_536_373_729_077_000] and trace.duration_ns.tolist() == [4000]
    trace, _ = read_trace(write_trace(tmp_path / "b.json", [kernel("k", 1.5, 0.25)], 0))
    assert trace.start_ns.tolist() == [BASE_NS + 1500] and trace.duration_ns.tolist() == [250]


def test_times_as_text(tmp_path):
    """Ascend writes timestamps as strings."""
    events = [kernel("k", 0, 1) | {"ts": "1717570123456789.123", "dur": "2.5"}]
    trace, _ = read_trace(write_trace(tmp_path / "a.json", events, 0, baseTimeNanoseconds=0))
    assert trace.start_ns.tolist() == [1_717_570_123_456_789_123] and trace.duration_ns.tolist() == [2500]


@pytest.mark.parametrize("block", [64, 300, 1000, 4096])
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_do_not_matter(tmp_path, monkeypatch, block, packed):
    turned = [dict(reversed(event.items())) if i % 3 else event for i, event in enumerate(EVENTS)]
    events = [*turned, {"ph": "M", "name": "thread_name", "pid": 100, "tid": 1, "args": {"name": "main"}}]
    path = write_trace(tmp_path / "rank-3.json", events, 3)
    whole, _ = read_trace(path)
    if packed:
        path = tmp_path / "packed"
        path.write_bytes(gzip.compress((tmp_path / "rank-3.json").read_bytes()))
    monkeypatch.setattr(read, "_BLOCK_BYTES", block)
    pieces, notes = read_trace(path)
    assert notes == [] and pieces.rank == 3 and len(pieces) == 50
    assert pieces.start_ns.tolist() == whole.start_ns.tolist()
    assert [pieces.name(i) for i in range(50)] == [whole.name(i) for i in range(50)]
    assert list(pieces.track_names.values()) == ["main"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9, 0.99])
def test_truncated_file_gives_its_beginning(tmp_path, share, packed):
    content = write_trace(tmp_path / "rank-1.json", EVENTS, 1).read_bytes()
    content = gzip.compress(content, mtime=0) if packed else content
    path = tmp_path / "rank-1.json"
    path.write_bytes(content[: int(len(content) * share)])
    traces, problems = read_traces([path])
    assert any("ends in the middle" in p.reason for p in problems) or "no traceEvents" in problems[0].reason
    for trace in traces:
        names = [trace.name(i) for i in range(len(trace))]
        assert names == [e["name"] for e in EVENTS[: len(names)]]
    assert packed or share < 0.5 or len(traces[0]) >= 50 * share - 3


def test_damage_stays_local(tmp_path):
    """Bad UTF-8, quotes that old Kineto left unescaped, and one event beyond repair."""
    content = write_trace(tmp_path / "a.json", EVENTS, 0).read_bytes()
    content = content.replace(b'aten::op7"', b'aten::\xff\xfe7"').replace(b"aten::op20", b'run "fast" op20')
    content = content.replace(b'"name": "aten::op30",', b'"name": [1,,2],')
    (tmp_path / "a.json").write_bytes(content)
    trace, notes = read_trace(tmp_path / "a.json")
    names = {trace.name(i) for i in range(len(trace))}
    assert len(trace) == 49 and 'run "fast" op20' in names and "aten::\ufffd\ufffd7" in names
    assert any(note.startswith("2 events") and "repaired" in note for note in notes)
    assert any(note.startswith("1 events could not be read") for note in notes)


def test_ids_above_int64():
    """HolisticTraceAnalysis #324: a `Comms Id` of 10159970886766084423."""
    trace, notes = read_trace(DATA / "hta" / "rank-70.json.gz")
    assert len(trace) == 2 and trace.rank == 70
    assert notes == ["the file does not tell its rank; taken as 70 from its name"]


def test_correlation_above_int64(tmp_path):
    trace, _ = read_trace(write_trace(tmp_path / "a.json", [kernel("k", 0, 1, correlation=2**64 - 1)], 0))
    assert len(trace) == 1 and trace.correlation.dtype == "int64"


def test_array_layout_without_end(tmp_path):
    """The JSON array format may lack its closing bracket."""
    (tmp_path / "rank2.json").write_text("[" + ",\n".join(map(json.dumps, EVENTS)))
    trace, _ = read_trace(tmp_path / "rank2.json")
    assert trace.rank == 2 and len(trace) >= 49


def test_ranks_are_inferred_and_said(tmp_path):
    write_trace(tmp_path / "a.json", EVENTS, 1)
    write_trace(tmp_path / "b.json", EVENTS, 1)
    write_trace(tmp_path / "c.json", EVENTS)
    write_trace(tmp_path / "trace_rank4.json", EVENTS)
    traces, problems = read_traces([tmp_path])
    assert [trace.rank for trace in traces] == [0, 1, 4]
    reasons = {Path(p.file).name: p.reason for p in problems}
    assert "rank 1 is already read" in reasons["b.json"]
    assert "taken as 0" in reasons["c.json"] and "taken as 4" in reasons["trace_rank4.json"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b'{"a": 1}', "not a trace"),
        (b'{"traceEvents": []}', "holds no event"),
        (b"\x1f\x8b", "ends in the middle"),
        (b"\x00\x01\x02", "not a trace"),
    ],
)
def test_unreadable_is_a_problem(tmp_path, content, reason):
    (tmp_path / "rank0.json").write_bytes(content)
    traces, problems = read_traces([tmp_path])
    assert traces == [] and any(reason in p.reason for p in problems)


def test_missing_paths_are_errors(tmp_path):
    with pytest.raises(DataError, match="no such trace"):
        read_traces([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no trace in"):
        read_traces([tmp_path])


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("kernel", "ncclDevKernel_Generic(ncclDevComm*)", Kind.COMMUNICATION),
        ("Kernel", "void gemm()", Kind.COMPUTE),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", Kind.MEMORY),
        ("Memset", "Memset (Device)", Kind.MEMORY),
        ("user_annotation", "gloo:all_reduce", Kind.HOST_COMMUNICATION),
        ("user_annotation", "MoELayer", Kind.ANNOTATION),
        ("cuda_sync", "Event Sync", Kind.OTHER),
        ("cuda_driver", "cuLaunchKernel", Kind.RUNTIME),
    ],
)
def test_kinds(category, name, kind):
    assert kind_of(category, name) is kind
