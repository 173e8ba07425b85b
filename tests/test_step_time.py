"""What a recorded step takes: by hand, over streams and events."""

import pytest

pytest.importorskip("torch")

from meshwise.core.ledger import Ledger
from meshwise.estimate.collective import collective_times
from meshwise.machine.hardware import find_cluster
from meshwise.runtime.fakes import DeviceEvent, Stream
from meshwise.runtime.step_time import StepTime, step_time

CLUSTER = find_cluster("h100-80g-sxm:16")
ROWS = [
    {"op": "mm", "phase": "forward", "shape": (1, 8192, 8192, 8192), "dtype": "bf16", "flop": 2.0 * 8192**3}
    | {"read_bytes": 4.0 * 8192**2, "write_bytes": 2.0 * 8192**2},
    {"op": "all_reduce", "phase": "forward", "collective": "all_reduce", "axis": "dp", "group_size": 16}
    | {"payload_bytes": 1e9, "dtype": "bf16"},
    {"op": "add", "phase": "forward", "shape": (1000,), "dtype": "bf16", "flop": 0.0}
    | {"read_bytes": 4e9, "write_bytes": 2e9},
]


def played(*launches: tuple[int, list[int], list[int]]) -> StepTime:
    return step_time(Ledger.from_rows(ROWS), [(*each, 1) for each in launches], CLUSTER)


def test_what_is_not_waited_for_hides() -> None:
    """All-reduce, six matmuls, and what needs both: in turn, side by side, and with a host that waits."""
    matmuls = [(0, [i], []) for i in range(6)]
    in_turn = played((1, [], []), *matmuls, (2, [6], []))
    beside = played((1, [], []), (0, [], []), *[(0, [i], []) for i in range(1, 6)], (2, [0, 6], []))
    waiting = played((1, [], []), *matmuls, (2, [6], [6]))
    matmul_s, sent_s, added_s = in_turn.ledger["time_s"]
    (alone,) = collective_times("all_reduce", CLUSTER, [1e9], ranks=16)
    assert sent_s == pytest.approx(alone.time_s, rel=0.01)
    assert 6 * matmul_s > sent_s and 1.0 < added_s / (6e9 / 3.35e12) < 1.5
    for time in (in_turn, beside, waiting):
        assert sum(time.parts_s.values()) == pytest.approx(time.step_s)
        assert time.parts_s["compute"] == pytest.approx(6 * matmul_s, rel=1e-6)
        assert time.parts_s["comm_dp"] == pytest.approx(time.ledger["exposed_s"][1])
    assert in_turn.parts_s["comm_dp"] == pytest.approx(sent_s, rel=1e-6)
    assert 0 < beside.parts_s["comm_dp"] < 0.2 * sent_s  # what it takes from the matmuls
    assert waiting.parts_s["host"] == pytest.approx(in_turn.parts_s["host"] + 1.5e-5)


def test_streams_and_events_say_what_an_op_begins_after() -> None:
    Stream.begin()
    side, main = Stream(), Stream.current()
    assert main.launched(0) == ([], [])
    event = main.record_event()
    assert main.launched(1) == ([0], [])
    with side:
        assert Stream.current() is side and side.launched(2) == ([], [])
        event.wait()
        assert side.launched(3) == ([0, 2], [])
        side.synchronize()
    main.wait_stream(side)
    assert main.launched(4) == ([1, 3], [3])
    after = DeviceEvent()
    after.record()
    assert after.after == {4} and Stream.default() is main is Stream.current()
