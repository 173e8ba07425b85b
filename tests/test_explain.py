"""Predicted beside measured: both sides sum to their step; a trace of the prediction differs nowhere."""

import pytest

import meshwise as mw
from data_tables import GLOO4, SCRIPTS
from kineto import all_reduce, host, kernel, launched, operator, write_trace
from meshwise.trace.explain import PARTS, part_of_op

JOB = ("qwen3-0.6b", "a100-80g-sxm:2", "tp=2")
BACKWARD = "autograd::engine::evaluate_function: AddBackward0"
PATTERNS = {"matmul": "gemm", "attention": "flash_fwd", "other kernels": "norm"}
PATTERNS |= {"optimizer": "multi_tensor_adam"}


def _sums_up(found):
    for rows in (found.rows, found.classes):
        assert sum(row.measured_s for row in rows) == pytest.approx(found.measured_s)
        if found.predicted_s is not None:
            assert sum(row.predicted_s for row in rows) == pytest.approx(found.predicted_s)


def _played(folder, classes, slower=1.0):
    """Two ranks that do what the rows predict, twice; matmuls take `slower` times as long."""
    for rank in range(2):
        now, events = 0.0, []
        for step in range(2):
            begin = now
            for op, seconds in classes.items():
                length = round(seconds * 1e6 * (slower if op == "matmul" else 1.0), 3)
                if op in PATTERNS:
                    events.append(kernel(PATTERNS[op], now, length))
                else:
                    name = op.replace("_", "")
                    events.append(all_reduce(now, length, 100, [0, 1]))
                    events[-1]["args"]["Collective name"] = name
                number = len(events)
                events[-1]["args"]["correlation"] = number
                events.append(host("cuda_runtime", "cudaLaunchKernel", now, 1, correlation=number))
                now += length
            events.append(host("user_annotation", f"ProfilerStep#{step}", begin, now - begin))
        write_trace(folder / f"rank-{rank}.json", events, rank, 2, host_name="node")


def _classes(folder, plan=JOB[2]):
    """Seconds of each class of the predicted step."""
    _played(folder, {"matmul": 1e-3})
    found = mw.explain(folder, *JOB[:2], plan, batch=2, seq=512)
    return {row.op: row.predicted_s for row in found.classes if row.predicted_s}


def test_ops_of_a_model_with_an_encoder_are_parts_that_traces_show():
    found = mw.estimate("t5-11b", JOB[1], plan="dp=2", batch=2, seq=512)
    forward = [row for row in found.ledger.where(phase="forward").rows() if not row["collective"]]
    assert {part_of_op(row) for row in forward} <= {*PARTS}


@pytest.mark.parametrize(("plan", "slower"), [("tp=2", 1.0), ("tp=2", 1.5), ("pp=2", 1.0)])
def test_a_trace_of_the_prediction(tmp_path, plan, slower):
    expected = mw.estimate(*JOB[:2], plan, batch=2, seq=512)
    classes = _classes(tmp_path, plan)
    idle = {op: classes.pop(op) for op in ("waiting", "idle") if op in classes}
    assert idle.get("waiting", 0.0) >= expected.time_s["bubble"]
    _played(tmp_path, classes, slower)
    found = mw.explain(tmp_path, *JOB[:2], plan, batch=2, seq=512)
    _sums_up(found)
    assert found.predicted_s == pytest.approx(expected.step_s)
    for row in found.classes:
        times = slower if row.op == "matmul" else 0.0 if row.op in idle else 1.0
        assert row.measured_s == pytest.approx(times * row.predicted_s, rel=1e-4, abs=1e-8)
    if slower > 1:
        assert found.classes[0].op == "matmul" and "matmul" in found.findings[0]


def _played_ops(folder, expected, slower, apart):
    """One rank that does each matmul and reduction of a ledger once, `slower` ones in twice the time.

    `apart`: the width of an op, and the shares of it that run as matmuls of their own.
    """
    events, now, played = [host("cpu_op", BACKWARD, 0, 1)], 0.0, {}
    for row in expected.rows():
        place = (row["module"], f"{row['op']} {row['collective']}".strip(), row["phase"])
        length = round(1e6 * row["count"] * (row["time_s"] or 0.0), 3)
        if row["shape"].count("x") == 3:
            length *= 2 if row["op"] == slower else 1
            width, shares = apart.get(row["op"], (0, (1.0,)))
            for share in shares:
                sizes = map(int, row["shape"].split("x")[1:])
                m, n, k = (round(share * size) if size == width else size for size in sizes)
                events.append(operator("aten::mm", now, 2, [[n, k], [k, m]]))
                events += launched("gemm", now + 0.5, now + 3, share * length, len(events))
                now += share * length
        elif row["collective"] == "reduce_scatter":
            events.append(all_reduce(now, length, round(row["payload_bytes"] / 2), [0, 1]))
            events[-1]["args"]["Collective name"] = "reduce_scatter"
        else:
            continue
        played[place] = played.get(place, 0.0) + length / 1e6
        now += length + 5
    write_trace(folder / "rank-0.json", events, 0, world_size=2)
    return played


APART = {"qkv": (2048, (0.5, 0.25, 0.25)), "fc1": (3072, (0.5, 0.5))}  # of qwen3-0.6b, tp=2


@pytest.mark.parametrize(("slower", "apart"), [("fc1", {}), ("", APART)])
def test_matmuls_and_collectives_join_op_by_op(tmp_path, slower, apart):
    """Each matmul and reduction of the estimate once a step, fc1 twice as long as predicted, or in pieces."""
    expected = mw.estimate(*JOB, batch=2, seq=512).ledger
    played = _played_ops(tmp_path, expected, slower, apart)
    found = mw.explain(tmp_path, *JOB, batch=2, seq=512)
    _sums_up(found)
    joined = {(row.module, row.op, row.phase): row for row in found.rows if row.module}
    assert joined.keys() == played.keys()
    for (module, op, phase), row in joined.items():
        times = 2 if op == slower else 1
        assert row.measured_s == pytest.approx(times * row.predicted_s, rel=1e-3), (module, op, phase)


def _launched(events, name, now, length, of, dims=()):
    """An operator, and a kernel that it launches; the next kernel may begin when it has ended."""
    events.append(operator(of, now, 5, [*dims]))
    events += launched(name, now + 1, now + 2, length, len(events))
    return now + length + 10


def test_modules_join_what_sizes_do_not(tmp_path):
    """Gate and up apart: each has the sizes of fc2's gradient, and only the module tells what they are."""
    of_fc2 = (r["shape"] for r in mw.estimate(*JOB, batch=2, seq=512).ledger.rows() if r["op"] == "fc2")
    rows, width, inner = map(int, next(shape for shape in of_fc2 if shape.count("x") == 3).split("x")[1:])
    events: list = [host("python_function", "nn.Module: Qwen3DecoderLayer_0", 0, 400)]
    now = 10.0
    events.append(host("python_function", "nn.Module: Qwen3MLP_0", 5, 115))
    for _ in range(2):
        events.append(host("python_function", "nn.Module: Linear_0", now - 1, 40))
        now = _launched(events, "gemm", now, 30.0, "aten::mm", [[rows, width], [width, inner]])
    now = _launched(events, "void silu_kernel", now, 20.0, "aten::silu")
    events.append(host("python_function", "nn.Module: Qwen3RMSNorm_1", now, 20))
    _launched(events, "void silu_kernel", now, 7.0, "aten::mul")
    now = _launched(events, "void elementwise_kernel", 500.0, 9.0, BACKWARD)
    events.append(kernel("void elementwise_kernel", now + 50, 4.0))  # launched before the profiler began
    write_trace(tmp_path / "rank-0.json", events, 0, 2)
    found = mw.explain(tmp_path, *JOB, batch=2, seq=512)
    _sums_up(found)
    measured = {(r.module, r.op, r.phase): r.measured_s for r in found.rows if r.module and r.measured_s}
    of = {op: measured.get(("layer.mlp", op, "forward"), 0.0) for op in ("fc1", "fc2", "swiglu")}
    assert of["fc1"] + of["fc2"] == pytest.approx(60e-6) and of["fc1"] > of["fc2"]
    assert of["swiglu"] == pytest.approx(20e-6)
    forward = {op: seconds for (_, op, phase), seconds in measured.items() if phase == "forward"}
    assert sum(forward.get(op, 0.0) for op in ("norm1", "norm2", "final_norm")) == pytest.approx(7e-6)
    backward = [seconds for (_, _, phase), seconds in measured.items() if phase == "backward"]
    assert sum(backward) == pytest.approx(13e-6)
    assert any("100% of the measured work is joined" in text for text in found.findings)


def test_measured_alone(meshwise):
    found = mw.explain(GLOO4)
    _sums_up(found)
    assert found.predicted_s is None and any("rank 3" in text for text in found.findings)
    done = meshwise("explain", str(GLOO4), "--json")
    assert done.code == 0 and set(done.document) == {*("rows", "classes", "step_s", "findings", "mismatches")}
    assert set(done.document["rows"][0]) == {"module", "op", "phase", "predicted_s", "measured_s"}


def test_a_script_is_held_against_its_dry_run(tmp_path, forked, meshwise):
    """A trace of what it predicts differs nowhere, but for what the host is late by."""
    words = ["python", str(SCRIPTS / "fsdp2.py")]
    _played(tmp_path, {"matmul": 1e-3})
    first = mw.explain(tmp_path, cluster=JOB[1], command=words)
    step_s = mw.dry_run_script(words, ranks=2, device="a100-80g-sxm", stdout=2).time.step_s
    assert first.predicted_s == pytest.approx(step_s)
    classes = {row.op: row.predicted_s for row in first.classes if row.predicted_s}
    assert {"matmul", "optimizer", "all_gather", "reduce_scatter", "waiting"} <= classes.keys()
    gone = [classes.pop(name, 0.0) for name in ("idle", "waiting")]
    _played(tmp_path, classes)
    done = meshwise("explain", str(tmp_path), "--cluster", JOB[1], "--json", "--", *words)
    assert done.document["step_s"] == pytest.approx({"predicted": step_s, "measured": step_s - sum(gone)})
    for stated, told in (({"cluster": JOB[1], "plan": "tp=2"}, "the program says"), ({}, "its cluster")):
        with pytest.raises(mw.MeshwiseError, match=told):
            mw.explain(tmp_path, command=words, **stated)
    other = mw.explain(tmp_path, cluster="h100-80g-sxm:8", command=words)
    assert "stated cluster 8" in other.mismatches[0] and other.predicted_s is None


def test_kernels_of_no_class_are_listed(tmp_path):
    events = [kernel("my_gemm", 0, 60), kernel("strange_thing", 60, 30), kernel("attn_fwd", 90, 10)]
    found = mw.explain(write_trace(tmp_path / "rank-0.json", events, 0))
    _sums_up(found)
    assert any("30.0% of a step: strange_thing" in text for text in found.findings)


def test_what_an_optimizer_runs_is_its_own(tmp_path):
    """By the mark of PyTorch's `Optimizer.step`, whatever the kernels are called."""
    events = [host("user_annotation", "Optimizer.step#AdamW.step", 0, 50)]
    for at, length in ((10, 30), (60, 10)):
        events += launched("vectorized_elementwise_kernel", at, at + 10, length, at)
    found = mw.explain(write_trace(tmp_path / "rank-0.json", events, 0))
    seconds = {row.op: row.measured_s for row in found.classes}
    assert seconds["optimizer"] == pytest.approx(30e-6) and seconds["other kernels"] == pytest.approx(10e-6)


def test_set_up_and_warm_up_are_no_step(tmp_path):
    """5 ms before the first mark, a first step of 4 ms, three of 1 ms, of which 0.2 ms are idle."""
    events = [kernel("gemm", 0, 5000, correlation=99)]
    for number, (begin, length) in enumerate(((5000, 4000), (9000, 1000), (10_000, 1000), (11_000, 1000))):
        events.append(host("user_annotation", f"ProfilerStep#{number}", begin, length))
        events += launched("gemm", begin, begin + 50, 0.8 * length, number + 1)
    found = mw.explain(write_trace(tmp_path / "rank-0.json", events, 0))
    _sums_up(found)
    seconds = {row.op: row.measured_s for row in found.classes}
    assert found.measured_s == pytest.approx(1e-3) and seconds["matmul"] == pytest.approx(0.8e-3)


def test_data_parallel_gradients_are_all_reduced(tmp_path):
    """The same class on both sides, also where the plan does not say how states are sharded."""
    assert "all_reduce" in _classes(tmp_path, "zero=0") and "all_reduce" not in _classes(tmp_path, "zero=1")
    _played(tmp_path, {"matmul": 1e-3, "all_reduce": 1e-3})
    found = mw.explain(tmp_path, *JOB[:2], batch=2, seq=512)
    (row,) = (row for row in found.classes if row.op == "all_reduce")
    assert row.predicted_s and row.measured_s and "zero=0 (DDP)" in found.findings[-1]


OTHER_MATMUL = [host("cpu_op", BACKWARD, 0, 1)]
_launched(OTHER_MATMUL, "gemm", 9, 5.0, "aten::mm", [[64, 64], [64, 64]])
DEVICE = {"deviceProperties": [{"name": "Tesla V100-SXM2-32GB"}]}


@pytest.mark.parametrize(
    ("events", "world_size", "about", "words"),
    [
        ([host("cpu_op", "aten::mul", 0, 5), host("cpu_op", BACKWARD, 5, 5)], 2, {}, "are of CPUs"),
        ([kernel("gemm", 0, 5)], 2, DEVICE, "of Tesla V100-SXM2-32GB, the stated cluster is of a100-80g-sxm"),
        ([kernel("gemm", 0, 5)], 64, {}, "the job has 64 ranks, the stated cluster 2 chips"),
        ([host("cpu_op", "aten::mm", 0, 5), kernel("gemm", 5, 5)], 2, {}, "a forward pass alone"),
        (OTHER_MATMUL, 2, {}, "0% of the matmul FLOP in the traces has sizes of qwen3-0.6b under tp=2"),
    ],
    ids=["device", "other chip", "ranks", "phase", "model"],
)
def test_another_job_is_said_first_and_not_joined(tmp_path, meshwise, events, world_size, about, words):
    path = write_trace(tmp_path / "rank-0.json", events, 0, world_size, **about)
    found = mw.explain(path, *JOB, batch=2, seq=512)
    _sums_up(found)
    assert words in found.findings[0] and found.mismatches == found.findings[:1]
    assert found.predicted_s is None and not any(row.module for row in found.rows)
    done = meshwise("explain", str(path), "--model", JOB[0], "--cluster", JOB[1], "--plan", JOB[2])
    assert done.code == 0 and words[4:20] in done.out.partition("\n")[0]
