"""A job's traces as a cluster: rates that were put in come back; noise and too few samples are refused."""

import json

import numpy as np
import pytest

import meshwise as mw
from kineto import all_reduce, launched, message, operator, write_trace
from meshwise.calibrate.from_traces import calibrate_from
from meshwise.core.errors import DataError
from meshwise.machine.hardware import find_cluster

FLOP_PER_S, BYTES_PER_S, LINK, HOP_S = 500e12, 2e12, 100e9, 3e-6
SMALL = {"hosts": "ab", "sizes": (1,), "way": lambda size: 30e-6}
SHAPES = ((4096, 4096, 1024), (1024, 8192, 4096), (8192, 1024, 1024))


def _ran(events, name, dims, now, length):
    """An operator at `now` whose kernel takes `length` us; when the next may begin."""
    events.append(operator(name, now, 2, dims))
    events += launched(name, now + 0.5, now + 3, round(length, 3), len(events))
    return now + length + 5


def _job(
    folder, *, steps=6, jitter=0.0, hosts=("node", "node"), sizes=(1 << 20, 1 << 24), early=0.0, way=None
):
    """Ranks on `hosts` that multiply, add and reduce at the rates above; times have `jitter`, relative noise.

    `way`: seconds of a collective by its bytes. They leave it in turns, one when the share `early` is left.
    """
    way = way or (lambda size: 2 * size / LINK + 2 * HOP_S)
    random, ranks = np.random.default_rng(0), [*range(len(hosts))]
    for rank in ranks:
        now, events = 0.0, []
        for step in range(steps):
            for m, n, k in SHAPES:
                noise = float(np.exp(random.normal(0, jitter)))
                length = 2e6 * m * n * k / FLOP_PER_S * noise
                now = _ran(events, "aten::mm", [[m, k], [k, n]], now, length)
            now = _ran(events, "aten::add", [[1 << 24], [1 << 24]], now, 6e6 * (1 << 24) / BYTES_PER_S)
            for number, size in enumerate(sizes):
                took = round(1e6 * way(size), 3)
                own = round(took * (1 - early if (step + number) % 2 == rank else 1), 3)
                events.append(all_reduce(now, own, size, ranks))
                now += took + 5
        write_trace(folder / f"rank-{rank}.json", events, rank, world_size=len(ranks), host_name=hosts[rank])


def test_rates_come_back(tmp_path, meshwise):
    _job(tmp_path, jitter=0.02)
    found = calibrate_from([tmp_path])
    assert found.cluster.chip.matrix_flop_per_s == {"bf16": pytest.approx(FLOP_PER_S, rel=0.02)}
    assert found.cluster.chip.memory_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.02)
    assert found.cluster.levels[0].bytes_per_s == pytest.approx(LINK, rel=0.02)
    assert found.cluster.levels[0].latency_s == pytest.approx(HOP_S, rel=0.05)
    path = tmp_path / "my.toml"
    done = meshwise("calibrate", "--from", str(tmp_path), "-o", str(path), "--json")
    assert done.code == 0 and done.document["file"] == str(path)
    cluster = find_cluster(str(path))
    assert cluster.chip.matrix_peak("bf16") == pytest.approx(FLOP_PER_S, rel=0.02)
    priced = mw.estimate("qwen3-0.6b", path, "tp=2,dtype=bf16", batch=4, seq=512)
    assert priced.step_s > 0 and priced.plan.tp == 2


def test_ranks_of_a_host_share_its_way_out(tmp_path):
    """A ring of four ranks on two hosts: two share a cable; one size tells no latency."""
    _job(tmp_path, hosts="aabb", sizes=(1 << 24,), way=lambda size: 2 * 0.75 * 2 * size / LINK + 6 * 2.5e-6)
    inner, outer = calibrate_from([tmp_path]).cluster.levels
    assert inner.ranks == 2 and inner.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.02)
    assert outer.bytes_per_s == pytest.approx(LINK / 2, rel=0.02) and outer.latency_s == pytest.approx(5e-6)
    assert (inner.name, outer.name) == ("nccl (assumed)", "nccl between hosts (latency assumed)")


def test_messages_tell_a_link_that_only_small_collectives_cross(tmp_path):
    """A pipeline over two hosts: the norm of the gradients, of two bytes, is all that is reduced."""
    _job(tmp_path, **SMALL)
    for rank, kind in enumerate(("send", "recv")):
        path = tmp_path / f"rank-{rank}.json"
        trace = json.loads(path.read_text())
        trace["traceEvents"] += [message(kind, 1e5 + 1000 * n, 400.0, 10**7, 1 - rank) for n in range(6)]
        path.write_text(json.dumps(trace))
    (link,) = calibrate_from([tmp_path]).cluster.levels
    assert link.bytes_per_s == pytest.approx(LINK, rel=0.05)


def test_a_collective_lasts_until_its_last_rank_has_left(tmp_path):
    _job(tmp_path, early=0.3)
    found = calibrate_from([tmp_path])
    assert found.cluster.levels[0].bytes_per_s == pytest.approx(LINK, rel=0.02)


def test_what_the_host_adds_to_a_matmul(tmp_path):
    """A rank without a device: 0.4 ms of nothing after each matmul of 1 ms."""
    events, now = [], 0.0
    for _ in range(8):
        for name, length, dims in (("mm", 1000, [[256, 512], [512, 128]]), ("add", 2000, [[1 << 20]] * 2)):
            events.append(operator(f"aten::{name}", now, length, dims, "float"))
            now += length + (400 if name == "mm" else 0)
    write_trace(tmp_path / "rank-0.json", events, 0, world_size=1)
    found = calibrate_from([tmp_path])
    assert found.cluster.chip.op_host_s == pytest.approx(4e-4)
    found.write(tmp_path / "my.toml")
    job = {"batch": 1, "seq": 64}
    late = mw.estimate("qwen3-0.6b", tmp_path / "my.toml", "tp=1,dtype=fp32", **job)
    free = tmp_path / "free.toml"
    lines = (tmp_path / "my.toml").read_text().splitlines()
    free.write_text("\n".join(line for line in lines if "op_host" not in line))
    early = mw.estimate("qwen3-0.6b", free, "tp=1,dtype=fp32", **job)
    served = [mw.serve("qwen3-0.6b", at, "tp=1,dtype=fp32", prompt=64) for at in (free, tmp_path / "my.toml")]
    waits = [one.to_json()["passes"][0]["time_s"]["engine"] for one in served]
    assert waits[0] == 0 and waits[1] > 28 * 4e-4
    matrix = [r for r in late.ledger.rows() if r["shape"].count("x") >= 3 and r["flop"]]
    num_matrix_ops = sum(row["count"] for row in matrix)
    host_s = late.time_s["host"] - early.time_s["host"]
    assert host_s == pytest.approx(4e-4 * num_matrix_ops)


NO_RATES = [({"jitter": 1.0}, "differ by"), ({"steps": 1}, "show no"), ({"sizes": ()}, "a link needs 5")]


@pytest.mark.parametrize(("job", "words"), [*NO_RATES, (SMALL, "2 bytes, too few to tell a bandwidth")])
def test_what_is_no_rate_is_refused(tmp_path, meshwise, job, words):
    _job(tmp_path, **job)
    with pytest.raises(DataError, match=words):
        calibrate_from([tmp_path])
    done = meshwise("calibrate", "--from", str(tmp_path), "-o", str(tmp_path / "my.toml"))
    assert done.code == 2 and words in done.err and not (tmp_path / "my.toml").exists()
