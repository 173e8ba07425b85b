"""Reading traces: exact times, any layout and age, and what is left of damaged files."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from data_tables import table
from kineto import BASE_NS, all_reduce, host, kernel, write_trace
from meshwise.core.errors import DataError
from meshwise.trace import decode
from meshwise.trace.events import Kind
from meshwise.trace.nesting import launchers
from meshwise.trace.read import read_trace, read_traces
from meshwise.trace.summary import summarize_paths

WRONG = table("wrong_inputs")
EVENTS = [host("cpu_op", f"aten::op{i}", 10.0 * i, 7.125, **{"External id": i + 1}) for i in range(50)]


@given(
    st.lists(st.integers(0, 7_889_238_000_000_000), min_size=1, max_size=20),
    st.sampled_from([0, 1_712_195_495_000_000_000]),
    st.sampled_from(["", '"']),
)
def test_every_nanosecond_survives(tmp_path_factory, times_ns, epoch_ns, quote):
    """Three decimals of µs, from the base (three months at most) or 1970, as numbers or (Ascend) texts."""
    events = [
        f'{{"ph": "X", "cat": "kernel", "name": "k", "ts": {quote}{t // 1000}.{t % 1000:03d}{quote}}}'
        for t in (epoch_ns + t for t in times_ns)
    ]
    path = tmp_path_factory.mktemp("t") / "rank-0.json"
    path.write_text('{"traceEvents": [' + ",\n".join(events) + "]}")
    assert read_trace(path)[0].start_ns.tolist() == sorted(epoch_ns + t for t in times_ns)


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
    monkeypatch.setattr(decode, "_BLOCK_BYTES", block)
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


def test_not_a_number_costs_nothing_but_itself(tmp_path):
    """Kineto writes the bandwidth of an empty copy as `inf`, Python's json writes NaN and Infinity."""
    content = write_trace(tmp_path / "a.json", EVENTS, 0).read_text()
    for old, new in (("op3", "nan"), ("op17", "-inf"), ("op49", "NaN")):
        content = content.replace(f'"aten::{old}",', f'"aten::{old}", "id": {new},')
    (tmp_path / "a.json").write_text(content.replace('"ts": 80.0', '"ts": Infinity'))
    trace, notes = read_trace(tmp_path / "a.json")
    assert len(trace) == 49 and "aten::op49" in {trace.name(i) for i in range(len(trace))}
    assert notes == [
        "4 values are no numbers (nan, inf); taken as missing",
        "1 events could not be read and are left out",
    ]


OTHER_TYPES = ({"args": ["x"]}, {"pid": True}, {"name": ["x"]}, {"ts": "noon"})
NO_TIMES = ({"ts": 1e30}, {"dur": 1e30}, {"ts": None})


@pytest.mark.parametrize("change", OTHER_TYPES + NO_TIMES, ids=str)
def test_fields_of_another_type(tmp_path, change):
    """They cost the event that has them; others are not touched."""
    events = [*EVENTS[:20], EVENTS[20] | change, *EVENTS[21:]]
    trace, notes = read_trace(write_trace(tmp_path / "a.json", events, 0))
    assert len(trace) == 49 and (trace.duration_ns == 7125).all()
    assert notes[0].startswith("1 events could not be read")


@pytest.mark.parametrize("at", [0.01, 0.4, 0.9, 1.0])
def test_damaged_gzip_gives_what_comes_before(tmp_path, at):
    """A flipped byte, the last of them in the checksum: everything before it is used, and it is said."""
    rng = random.Random(0)
    events = [host("cpu_op", f"op{rng.random()}", float(i), rng.random()) for i in range(400)]
    packed = bytearray(gzip.compress(write_trace(tmp_path / "rank-0.json", events, 0).read_bytes(), mtime=0))
    packed[min(int(at * len(packed)), len(packed) - 8)] ^= 0xFF
    (tmp_path / "rank-0.json").write_bytes(packed)
    traces, problems = read_traces([tmp_path])
    assert any("damaged" in p.reason or "ends in the middle" in p.reason for p in problems)
    found = sum(len(trace) for trace in traces)
    assert found == 400 if at == 1.0 else found <= 400 * at + 100
    assert at < 0.1 or found >= 400 * at - 150


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


@pytest.mark.parametrize(("content", "reason"), WRONG["unreadable"])
def test_unreadable_is_a_problem(tmp_path, content, reason):
    (tmp_path / "rank0.json").write_bytes(content.encode("latin-1"))
    traces, problems = read_traces([tmp_path])
    assert not traces and any(reason in p.reason for p in problems)


def test_missing_paths_are_errors(tmp_path):
    with pytest.raises(DataError, match="no such trace"):
        read_traces([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no trace in"):
        read_traces([tmp_path])


def test_a_bomb_is_given_up(tmp_path, monkeypatch):
    """A file that unpacks to far more than its size: what was read until then is kept, and it is said."""
    monkeypatch.setattr("meshwise.trace.decode._MOST_UNPACKED_BYTES", 1 << 20)
    event = b'{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "args": {"x": "%s"}},' % (b" " * 4000)
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + event * 10_000))
    trace, notes = read_trace(path)
    assert any("unpacks to more than 400 times" in note for note in notes)
    assert trace is not None and 0 < len(trace) < 10_000


def test_a_missing_rank_is_named(tmp_path):
    """Of a world of four; a file of another world, and a rank that met nobody, are told too."""
    for rank, world in ((0, 4), (1, 4), (3, 5)):
        calls = [all_reduce(100.0 * k, 50, 10, [0, 1]) for k in range(3)] if rank < 3 else []
        write_trace(tmp_path / f"rank-{rank}.json", [kernel("gemm", 0, 5), *calls], rank, world)
    reasons = [problem.reason for problem in summarize_paths([tmp_path]).problems]
    words = "no trace of rank 2 of 4", "rank 3 is of 5 ranks, others not", "rank 3 has no collective, others"
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))
    alone = write_trace(tmp_path / "alone.json", [kernel("gemm", 0, 5)], 1, 2)
    assert "no trace of rank 0 of 2" in summarize_paths([alone]).problems[0].reason


def test_parts_of_a_capture_are_one_trace(tmp_path):
    """Ids of launches and times begin anew in a part; groups and the profiler's record are of all parts."""
    for part, name in enumerate(("rank-0.json", "rank-0-again-1.json", "rank-0-again-2.json")):
        launch = host("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=7)
        own = kernel(f"part {part}", 5, 5, correlation=7)
        about = {"meshwise": {"groups": {str(part): [0, 1]}}, "meshwise_collectives": [{"call": part}]}
        path = write_trace(tmp_path / name, [launch, own], 0, **about)
        text = path.read_text().replace(str(BASE_NS), str(BASE_NS + 1000 * part))
        path.write_text(text)
    (trace,), problems = read_traces([tmp_path])
    assert [trace.name(i) for i in trace.where(Kind.COMPUTE)] == ["part 0", "part 1", "part 2"]
    assert (np.diff(trace.start_ns[trace.where(Kind.COMPUTE)]) == 1000).all()
    launcher = launchers(trace)[trace.where(Kind.COMPUTE)]
    assert launcher.tolist() == trace.where(Kind.RUNTIME).tolist()
    assert set(trace.groups) == {"0", "1", "2"} and len(trace.metadata["meshwise_collectives"]) == 3
    assert [problem.reason[:15] for problem in problems] == ["2 further parts"]
