"""Anybody's script as one rank: against the same on real ranks, in large worlds, and where it breaks."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_tables import DATA, SCRIPTS, table

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import meshwise as mw
from forks import start_script
from other_python import other_python

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

FSDP2, DDP = (["python", str(SCRIPTS / name)] for name in ("fsdp2.py", "ddp.py"))
LAYERS, STEPS = 3, 2


def collectives(rows: list[dict[str, Any]]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for row in rows:
        if row["collective"]:
            found[row["collective"], row["group_size"], row["payload_bytes"]] += row["count"]
    return found


def total(rows: list[dict[str, Any]], column: str, **wanted: Any) -> float:
    return sum(row["count"] * (row[column] or 0) for row in rows if wanted.items() <= row.items())


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(4, "--tp 2 --ac"), *((2, f"--accumulate 2 --wrap {how}") for how in ("fsdp1", "ddp"))],
)
def test_agrees_with_real_ranks(ranks: int, options: str, tmp_path: Path) -> None:
    """Collectives and FLOP to the last digit; the peak but for the scalars that AdamW keeps on the CPU."""
    record = tmp_path / "record"
    words = [FSDP2[1], *options.split(), "--device", "cpu", "--backend", "gloo", "--record", str(record)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    world["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    places = [world | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(ranks)]
    scripts = [start_script(tmp_path, words, place) for place in places]
    assert [script.end() for script in scripts] == [0] * ranks
    real = json.loads(Path(f"{record}.1").read_text())
    fake = mw.dry_run_script([*FSDP2, *options.split()], ranks=ranks, rank=1)
    rows = fake.ledger.to_json()
    assert collectives(rows) == collectives(real["ledger"])
    assert total(rows, "flop") == total(real["ledger"], "flop") > 0
    assert fake.tensors_peak_bytes == pytest.approx(real["peak_bytes"], rel=1e-3)


def test_a_rank_of_a_large_world(meshwise: Any) -> None:
    words = ("--ranks", "1024", "--rank", "777", "--json", "--", *FSDP2, "--tp", "2", "--ac")
    document = meshwise("dryrun", *words).document
    assert {"program", "ranks", "rank", "device", "peak_bytes", "steps", "ledger"} <= set(document)
    assert document["num_steps"] == STEPS
    found = {(one["axis"], one["group_size"], one["collective"]) for one in document["collectives"]}
    assert found == {("dp", 512, "all_gather"), ("dp", 512, "reduce_scatter"), ("tp", 2, "all_reduce")}
    rows = document["step_ledger"]
    blocks = [row for row in rows if row["module"].startswith("blocks.")]
    kept = [row for row in blocks if not row["module"].endswith(".mlp_down")]  # torch stops early
    assert total(rows, "flop", phase="recompute") == total(kept, "flop", phase="forward") > 0
    assert {f"blocks.{i}.mlp_down" for i in range(LAYERS)} <= {row["module"] for row in rows}
    assert document["peak"]["op"] and document["fits"]
    assert document["step_s"] == pytest.approx(sum(document["time_s"].values()))
    assert document["time_s"].keys() >= {"compute", "memory", "host", "comm_dp", "comm_tp"}
    assert all(row["time_s"] > 0 for row in rows if row["collective"] or row["flop"])
    tensors = sum(one["bytes"] for one in document["alive_at_peak"])
    assert tensors <= document["tensors_peak_bytes"] < document["peak_bytes"]


def test_ddp_with_all_that_goes_around_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gradients go round once for two microbatches, SyncBatchNorm's statistics in each; no file."""
    monkeypatch.chdir(tmp_path)
    found = mw.dry_run_script(DDP, ranks=8, rank=0)
    assert found.num_steps == 4096 // 8 // 32 // 2
    assert "DistributedDataParallel/gradient buckets (forward)" in found.alive_at_peak
    num_params = 64 * 512 + 512 + 2 * 512 + 512 * 10 + 10
    payloads = {one["collective"]: one["payload_bytes"] for one in found.collectives()}
    assert payloads == {
        "all_reduce": 4 * num_params + 2 * 4 * (2 * 512),
        "all_gather": 2 * 4 * 8 * (2 * 512 + 1),
        "broadcast": 4 * (2 * 512) + 8,  # the buffers
    }
    assert found.states_bytes["parameters"] == 4 * num_params
    assert f"rank 0: 16 batches, {found.peak_bytes:.0f} bytes" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_torch_distributed(tmp_path: Path) -> None:
    """What is saved comes back, what one real process has written is read, and nothing is overwritten."""
    weights = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": weights.state_dict(), "step": 7}, checkpoint_id=tmp_path / "real")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "real").iterdir())
    words = [str(SCRIPTS / "checkpoint.py"), str(tmp_path / "saved"), str(tmp_path / "real")]
    found = mw.dry_run_script(["python", *words], ranks=8, rank=5)
    (reduced,) = (one for one in found.collectives() if one["collective"] == "reduce_scatter")
    assert reduced["payload_bytes"] == 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "real").iterdir()) == before
    assert not list((tmp_path / "saved").glob("*"))


def test_pipeline_stages_tell_each_other_shapes() -> None:
    """1F1B of 8 microbatches: a middle stage receives and sends an activation and a gradient for each."""
    found = mw.dry_run_script(["python", str(SCRIPTS / "pipeline.py")], ranks=3, rank=1)
    exchanged = collectives(found.ledger.to_json())
    message_bytes = 16 // 8 * 32 * 128 * 4
    messages = {what: count for what, count in exchanged.items() if what[2] > 4}  # which says hello
    assert messages == {(kind, 3, message_bytes): 16 for kind in ("send", "recv")}
    num_matmuls = 8 * 3 + 2  # before the first step torch tries the stage, without a gradient of its weights
    assert total(found.ledger.to_json(), "flop") == num_matmuls * 2 * (2 * 32) * 128 * 128


def written(folder: Path, text: str) -> list[str]:
    path = folder / "train.py"
    path.write_text("import os, torch, torch.distributed as dist\n" + text)
    return ["python", str(path)]


def test_what_is_waited_for_is_open(tmp_path: Path) -> None:
    """An all-to-all, messages both ways, an all-reduce waited for too early; streams share the device."""
    text = """dist.init_process_group("nccl")
g, h, a = (torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, device="cuda"))])
for _ in range(3):
    dist.all_to_all_single(h, g, async_op=True).wait()
    h @ a
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, g, 1), dist.P2POp(dist.irecv, h, 7)]):
        work.wait()
    h @ a
    dist.all_reduce(g, async_op=True).wait()
    for stream in torch.cuda.Stream(), torch.cuda.Stream():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            a @ a
    optimizer.step()
"""
    found = mw.dry_run_script(written(tmp_path, text), ranks=8)
    rows = {row["op"]: row for row in found.step_ledger.rows()}
    parts, seconds = found.time.parts_s, {op: row["time_s"] for op, row in rows.items()}
    assert found.num_steps == 3 and parts["compute"] == pytest.approx(4 * seconds["mm"], rel=1e-4)
    assert seconds["send"] == seconds["recv"] and rows["all_to_all"]["exposed_s"] == seconds["all_to_all"]
    sent_s = seconds["all_to_all"] + seconds["send"] + seconds["all_reduce"]
    assert sent_s < parts["comm_world"] < sent_s + 0.2 * seconds["send"]


def test_objects_of_other_ranks_are_data() -> None:
    with pytest.raises(mw.MeshwiseError, match=r"rank 0 sends an object of fractions\.Fraction"):
        mw.dry_run_script(["python", str(SCRIPTS / "objects.py")], ranks=2, rank=1)


def test_frozen_weights_are_parameters_too() -> None:
    found = mw.dry_run_script(["python", str(SCRIPTS / "frozen.py")])
    assert found.states_bytes["parameters"] == found.alive_at_peak["parameters"] == 2 * 4 * 512**2


def test_an_environment_without_meshwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own Python has torch and its packages; meshwise and what it needs lie elsewhere."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    text = "import importlib.util\nassert importlib.util.find_spec('typer') is None\n"
    text += "x = torch.ones(8, 8, device='cuda')\nkept = x.new_empty(1 << 20)\nx @ x"
    words = written(tmp_path, text)
    found = mw.dry_run_script([other_python(tmp_path / "env"), words[1]], ranks=4)
    assert total(found.ledger.to_json(), "flop") == 2 * 8**3
    assert (found.peak_row["op"], found.alive_at_peak["new_empty (forward)"]) == ("mm", 4 << 20)


def test_pieces_of_scripts() -> None:
    """DDP that finds unused parameters reduces all, in bf16 by its hook; experts without dropping are
    balanced, their scores being unknown; known values are kept and exchanged; an op with a shape is a row."""
    pieces = SCRIPTS / "pieces.py"
    found = mw.dry_run_script(["python", str(pieces)], ranks=4, rank=3)
    rows = found.ledger.to_json()
    reduced = max(row["payload_bytes"] for row in rows if row["dtype"] == "bf16" and row["collective"])
    assert reduced == 2 * (8 * 4 + 4 + 8 * 8 + 8)
    forward = [row for row in rows if row["phase"] == "forward" and row["flop"]]
    shapes = Counter(row["shape"] for row in forward for _ in range(row["count"]))
    assert shapes == {"1x32x4x8": 2, "1x16x8x8": 2 * 4, "1x64x16x32": 1}
    guesses = {(one["what"], one["assumed"]): one for one in found.guesses}
    assert guesses["counts of unknown values", "the same of each"]["count"] == 2
    line = pieces.read_text().partition("# not known any more")[0].count("\n") + 1
    assert guesses["the value of a tensor", "1"]["place"].endswith(f"pieces.py:{line}")
    moved = {row["op"]: (row["collective"], row["payload_bytes"]) for row in rows}
    assert (moved["gather"], moved["scatter"]) == (("recv", 3 * 4 * 8), ("recv", 4 * 8))
    written_bytes = [(row["phase"], row["write_bytes"]) for row in rows if row["op"] == "half"]
    assert written_bytes == [("forward", 16), ("backward", 16)]


def test_attention_runs_a_kernel_that_is_enabled_and_takes_its_heads() -> None:
    """MATH keeps scores; of heads unlike those of v, and of fp64, CUDA's flash takes none."""
    rows = mw.dry_run_script(["python", str(SCRIPTS / "attention.py")]).ledger.rows()
    ran = [row["op"].split("_")[-2] for row in rows if re.search("softmax|attention", row["op"])]
    assert ran == ["efficient", "safe", "efficient", "safe"]


def test_what_the_second_gpu_of_a_host_finds() -> None:
    """Optimizers take `foreach`; half the pairs of each document, whose unknown ends are as far apart.

    Of four documents of 16 tokens that see 8, FlexAttention computes 100 pairs each.
    """
    found = mw.dry_run_script(["python", str(SCRIPTS / "second_gpu.py")], ranks=2, rank=1)
    rows = found.ledger.to_json()
    assert {"_foreach_sqrt", "_foreach_norm"} <= {row["op"] for row in rows}
    assert collectives(rows) == {("all_reduce", 2, 3 * 4 * 4 * 64): 1}
    forward = 2 * 2 * 64 * 16 * 4
    assert [row["flop"] for row in rows if "conv" in row["op"]] == [forward, 2 * forward]
    pairs = (16**2 + 48**2) / 2, 2 * 32**2 / 2
    assert [row["flop"] for row in rows if row["op"] == "_varlen_attn"] == [4 * 2 * 16 * n for n in pairs]
    flash = [row["flop"] for row in rows if "flash" in row["op"]]
    assert flash == [4 * 2 * 16 * 400, 10 * 2 * 16 * 400]
    assert "the replay of a CUDA graph" in {one["what"] for one in found.guesses}


def test_an_older_torch_is_refused(tmp_path: Path, meshwise: Any) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.9.1+cu128'\n")
    (tmp_path / "train.py").write_text("import torch\n")
    done = meshwise("dryrun", "--ranks", "2", "--", sys.executable, str(tmp_path / "train.py"))
    assert done.code == 3
    assert "dry runs of scripts need torch 2.13 or newer, and this is 2.9.1+cu128" in done.err
    assert len(done.err.splitlines()) == 1


def test_launchers_start_the_one_rank(tmp_path: Path, meshwise: Any) -> None:
    text = "dist.init_process_group('nccl')\ndist.all_reduce(torch.ones(dist.get_rank(), device='cuda'))\n"
    path = written(tmp_path, text)[1]
    launcher = ["python", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "8", path]
    (row,) = mw.dry_run_script(launcher, ranks=16, rank=9).collectives()
    assert (row["group_size"], row["payload_bytes"]) == (16, 36)
    done = meshwise("dryrun", "--ranks", "8", "--", *launcher)
    assert (done.code, done.err[:59]) == (2, "meshwise: the launcher starts 16 ranks, the dry run has 8; ")


def test_one_card_of_ones_own(tmp_path: Path, meshwise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the CUDA context it does not hold 15 of its 16 GB; plain `python` is no rank of torchrun's."""
    monkeypatch.setenv("RANK", "3")
    words = ("dryrun", "--device", str(DATA / "own_card.toml"), "--json", "--", "python")
    text = "assert 'RANK' not in os.environ\ntorch.zeros(15 * 10**9, dtype=torch.uint8, device='cuda')\n"
    found = meshwise(*words, *written(tmp_path, text)[1:]).document
    assert (found["fits"], found["peak_bytes"] // 10**9) == (False, 15)
    assert found["out_of_memory"]["limit_bytes"] == 14e9
    assert found["out_of_memory"]["place"] == {"phase": "forward", "module": "", "op": "zeros"}
    path = written(tmp_path, "dist.init_process_group('nccl')\ntorch.ones(1, device='cuda')\n")[1]
    assert "RANK expected, but not set; start it with torchrun" in meshwise(*words, path).err
    assert meshwise(*words, "-m", "torch.distributed.run", path).document["fits"]


@pytest.mark.parametrize("stated", table("breaking_scripts")["scripts"], ids=lambda of: of["says"][:40])
def test_what_breaks_is_named_with_its_place(stated: Any, tmp_path: Path, meshwise: Any) -> None:
    of = {"rank": 5, "code": 1} | stated
    done = meshwise("dryrun", "--ranks", "8", "--rank", str(of["rank"]), "--", *written(tmp_path, of["text"]))
    assert done.code == of["code"] and re.search(of["says"], done.err), done.err
    assert done.code == 1 or len(done.err.splitlines()) == 1


CONFIG = {"model_type": "gpt2", "n_embd": 256, "n_layer": LAYERS, "n_head": 4, "vocab_size": 1000,
          "n_positions": 128, "tie_word_embeddings": False}  # fmt: skip


def test_compared_with_a_stated_model(tmp_path: Path, meshwise: Any) -> None:
    """The script has no positions and one FSDP group for embedding and head; it computes what is stated."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    words = f"{path} --cluster h100-80g-sxm:4 --plan implementation=fsdp2,zero=3 --batch 8 --seq 128"
    done = meshwise("compare", "--estimate", words, "--rank", "3", "--json", "--", sys.executable, FSDP2[1])
    assert (done.code, done.document["agree"], done.document["ranks"]) == (1, False, 4)
    rows = {(row["module"], row["op"], row["phase"], row["column"]): row for row in done.document["rows"]}
    flop = {place: row for place, row in rows.items() if place[3] == "flop"}
    assert {place[0] for place in flop} == {"attention", "mlp", "head"}
    assert all(row["agrees"] for row in flop.values()) and "all_reduce" not in {place[1] for place in rows}
    states = rows["states", "parameters", "", "bytes"]
    missing = LAYERS * (2 + 3 + 1 + 4 + 1) * 256 + 2 * 256 + 128 * 256  # norms, biases, positions of GPT-2
    assert states["estimate"] - states["script"] == 4 * missing / 4
    gathers = rows["4 ranks", "all_gather", "", "count"]
    assert gathers["estimate"] > gathers["script"] == 2 * LAYERS + 1
