"""Frameworks as their makers publish them: their trainers as one rank, their parsers on what `launch` writes.

`make frameworks` installs them into an environment of their own; without them each test skips.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

import meshwise as mw
from data_tables import SCRIPTS
from meshwise.runtime.torch_private import release

pytestmark = pytest.mark.usefixtures("forked")
CLUSTER = "h100-80g-sxm:64"


def last_line(code: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """What a framework says of our arguments, in a process of its own."""
    command, env = [sys.executable, "-c", code, *arguments], os.environ | (environment or {})
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("ranks", [8, 1024])
def test_llama_of_transformers_under_fsdp2(ranks: int) -> None:
    """What FSDP2 exchanges and a Llama multiplies, by arithmetic on its config; a mask of ones is none."""
    pytest.importorskip("transformers")
    found = mw.dry_run_script(["python", str(SCRIPTS / "llama.py")], ranks=ranks, rank=ranks * 3 // 4)
    layers, hidden, ffn, vocab, tokens = 4, 1024, 4096, 32768, 4096
    matmul = 2 * hidden * 16 * 128 + 2 * hidden * 8 * 128 + 3 * hidden * ffn
    layer, rest = matmul + 2 * hidden, 2 * vocab * hidden + hidden
    payloads = {one["collective"]: one["payload_bytes"] for one in found.collectives()}
    assert payloads["all_gather"] == 2 * (2 * layers * layer + rest)  # bf16, layers again for the backward
    # No reduce_dtype is stated: that of the sharded weights from PyTorch 2.15 on, before of the matmuls.
    width = 4 if release(version("torch")) >= (2, 15) else 2
    assert payloads["reduce_scatter"] == width * (layers * layer + rest)
    assert "masked_fill" not in {row["op"] for row in found.step_ledger.to_json()}
    rows = [row for row in found.step_ledger.to_json() if row["shape"].count("x") == 3]
    flop = sum(row["count"] * (row["flop"] or 0) for row in rows)
    assert flop == 6 * tokens * (layers * matmul + vocab * hidden)
    assert found.alive_at_peak["optimizer states"] == 8 * (layers * layer + rest) // ranks
    model = replace(
        mw.find_model("llama3-8b"), num_layers=layers, hidden=hidden, ffn_hidden=ffn, vocab=vocab,
        num_heads=16, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    plan = "zero=3,implementation=fsdp2,software=torch-2024-eager"
    closed = mw.estimate(model, f"h100-80g-sxm:{ranks}", plan=plan, batch=ranks, seq=tokens)
    assert found.time.step_s == pytest.approx(closed.step_s, rel=0.1 if ranks == 8 else 0.2)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatch", [1, 4])
def test_gradients_of_one_card_take_the_place_of_activations(microbatch: int, recompute: str) -> None:
    """Overhead apart, with the places that a loss gives back."""
    pytest.importorskip("transformers")
    script = ["python", str(SCRIPTS / "llama_alone.py"), str(microbatch), recompute]
    peak_bytes = mw.dry_run_script(script, ranks=1).peak_bytes
    model = replace(mw.find_model("llama3.2-3b"), num_layers=8)
    plan = "implementation=huggingface,software=torch-2024-eager,grad_dtype=bf16,optimizer=adam-bf16"
    plan, sizes = f"{plan},recompute={recompute}", {"seq": 2048, "microbatch": microbatch}
    memory = mw.estimate(model, "h100-80g-sxm:1", plan, **sizes).rank_step(0).stages[-1].memory
    assert -0.01 < (memory.total - memory.overhead) / peak_bytes - 1.0 < 0.08


ACCELERATE = (
    "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no"
)
LLAMA = 2 * 512 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128
MLP = 64 * 256 + 256 + 256 * 16 + 16


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize(
    ("package", "script", "kind", "num_params"),
    [
        ("transformers", "hf_trainer.py", "ddp", LLAMA),
        ("transformers", "hf_trainer.py", "fsdp2", LLAMA),
        ("accelerate", "hf_accelerate.py", "ddp", MLP),
        ("accelerate", "hf_accelerate.py", "fsdp2", MLP),
        ("lightning", "fabric.py", "ddp", MLP),
        ("lightning", "fabric.py", "fsdp1", MLP),
    ],
)
def test_trainers_that_save(
    package: str, script: str, kind: str, num_params: int, rank: int, tmp_path: Path
) -> None:
    """The rank that saves, and another one: all gradients once a step, no weights on the disk."""
    pytest.importorskip(package)
    found = mw.dry_run_script(
        ["python", str(SCRIPTS / script), str(tmp_path / "out"), kind], ranks=8, rank=rank
    )
    payloads = {one["collective"]: one["payload_bytes"] for one in found.collectives()}
    grads = payloads["all_reduce"] / 4 if kind == "ddp" else payloads["reduce_scatter"] / 2  # in bf16
    assert grads == pytest.approx(num_params, rel=1e-3)  # and losses
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 4 * MLP


@pytest.mark.parametrize("launcher", ["deepspeed.launcher.runner --num_gpus 2", ACCELERATE])
def test_launchers_of_others_start_the_one_rank(launcher: str, tmp_path: Path) -> None:
    """Each starts two ranks; the one asked for reports, the other ends at once."""
    pytest.importorskip(launcher.partition(".")[0])
    path = tmp_path / "train.py"
    path.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "dist.all_reduce(torch.ones(1 + dist.get_rank(), device='cuda'))\n"
    )
    found = mw.dry_run_script(["python", "-m", *launcher.split(), str(path)], ranks=2, rank=1)
    assert [(row["group_size"], row["payload_bytes"]) for row in found.collectives()] == [(2, 8)]


@pytest.mark.parametrize("rank", [0, 1])
def test_triton_kernels_do_no_work(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    """But what they are said to do: each is named with the way round, and a `triton_op` that states its work
    has it. Triton's complaints of leaks stay unsaid when the program ends."""
    pytest.importorskip("triton")
    path = SCRIPTS / "triton_kernels.py"
    found = mw.dry_run_script(["python", str(path)], ranks=2, rank=rank)
    guesses = {one["place"]: one for one in found.guesses if one["what"] == "the Triton kernel add"}
    launches = [n for n, line in enumerate(path.read_text().splitlines(), 1) if "[(8,)](" in line]
    assert len(launches) == 2 and set(guesses) >= {f"{path}:{n}" for n in launches}
    assert all("torch.library.triton_op" in one["remedy"] for one in guesses.values())
    rows = [(row["op"], row["phase"], row["flop"]) for row in found.ledger.to_json() if row["flop"]]
    assert rows == [("add", "forward", 8), ("add", "backward", 8)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rank", [0, 5])
def test_generation_of_transformers(rank: int) -> None:
    """What the matmuls of two runs of 8 tokens after a prompt of 16 take; logits of the last token only."""
    pytest.importorskip("transformers")
    rows = mw.dry_run_script(["python", str(SCRIPTS / "generate.py")], ranks=8, rank=rank).ledger.to_json()
    flop = sum(row["count"] * row["flop"] for row in rows if row["shape"].count("x") == 3 and row["flop"])
    layers, head, batch, runs = LLAMA - 2 * 512 * 128 - 5 * 128, 512 * 128, 2, 2
    assert flop == runs * 2 * batch * (layers * (16 + 7) + head * 8)


WORDS = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(1000)}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": i, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for word, i in list(WORDS.items())[:3]
    ],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"},
}


@pytest.mark.parametrize(("ranks", "config"), [(8, "llama3_debugmodel"), (1024, "llama3_8b")])
def test_torchtitan_trains(
    ranks: int, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its own trainer; FSDP reduces fp32 gradients of as many parameters as it says that it has."""
    pytest.importorskip("torchtitan")
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "tokenizer/tokenizer.json": json.dumps(TOKENIZER),
        "tokenizer/tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}),
        "c4_test/data.json": (json.dumps({"text": " ".join(WORDS)}) + "\n") * 2048,
    }.items():
        path = tmp_path / "tests" / "assets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = ["--module", "llama3", "--config", config, "--training.steps", "2", "--validator.no-enable"]
    words += ["--dataloader.dataset", "c4_test", "--hf-assets-path", "tests/assets/tokenizer"]
    words += ["--parallelism.spmd-backend", "partial_dtensor", "--training.disable-cuda-graphs"]
    found = mw.dry_run_script(["python", "-m", "torchtitan.train", *words], ranks=ranks, rank=ranks * 3 // 4)
    said = re.search(r"size: ([\d,]+) total parameters", "".join(capfd.readouterr()))
    assert said is not None
    num_params = int(said[1].replace(",", ""))
    payloads = {one["collective"]: one["payload_bytes"] for one in found.collectives()}
    assert payloads["reduce_scatter"] == pytest.approx(4 * num_params, rel=2e-3)  # shards are padded
    assert found.num_steps == 2


def test_torchtitan_accepts_it() -> None:
    pytest.importorskip("torchtitan")
    plan = "tp=8,pp=4,vpp=2,recompute=full,zero=3,loss_chunks=4"
    job = mw.launch("llama3-70b", CLUSTER, plan, to="torchtitan", batch=64, seq=4096)
    code = (
        "import sys; from torchtitan.config import ConfigManager;"
        "c = ConfigManager().parse_args(sys.argv[1:]); p, t = c.parallelism, c.training;"
        "print(p.tensor_parallel_degree, p.pipeline_parallel_degree, p.pipeline_parallel_layers_per_stage,"
        "p.fsdp_reshard_after_forward, t.local_batch_size, t.global_batch_size, t.seq_len,"
        "c.loss.num_chunks)"
    )
    assert last_line(code, job.arguments) == "8 4 10 always 32 64 4096 4"


def test_accelerate_and_transformers_accept_what_peft_is_told(tmp_path: Path) -> None:
    """`zero=3` of 4-bit weights: FSDP2, which shards numbers of floating types alone."""
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import BitsAndBytesConfig

    plan = "zero=3,lora_rank=16,frozen_dtype=int4,recompute=full,optimizer=adam-fp32,loss_chunks=8"
    job = mw.launch("llama3-8b", "rtx-4090:2", plan, to="peft", batch=16, seq=2048)
    job.write(tmp_path)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (config.num_processes, config.distributed_type.value) == (2, "FSDP")
    assert config.fsdp_config["fsdp_version"] == 2 and config.fsdp_config["fsdp_reshard_after_forward"]
    (words,) = re.findall(r"BitsAndBytesConfig\(([^()]*)\)", job.files[0].text)
    quantized = eval(f"BitsAndBytesConfig({words})", {"BitsAndBytesConfig": BitsAndBytesConfig})
    assert quantized.bnb_4bit_quant_storage.is_floating_point


def test_accelerate_accepts_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    job = mw.launch("llama3-8b", CLUSTER, "tp=8,zero=3,recompute=full", to="accelerate", batch=64, seq=4096)
    job.write(tmp_path)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert config.num_processes == 64
    assert config.parallelism_config["parallelism_config_tp_size"] == 8
    assert config.fsdp_config["fsdp_reshard_after_forward"] is True


@pytest.mark.parametrize(("plan", "dp"), [("tp=4,sp=0,zero=2", 4), ("cp=2,cp_kind=ulysses", 8)])
def test_deepspeed_accepts_it(plan: str, dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer takes the file and what the job exports, and the ranks of an axis exchange activations."""
    pytest.importorskip("deepspeed")
    job = mw.launch("llama3-8b", "h100:16", plan, to="deepspeed", batch=8 * dp, microbatch=4, seq=4096)
    file, script = job.write(tmp_path)
    for name, value in re.findall(r"export ([AP]\w+)=(.*)", script.read_text()):
        monkeypatch.setenv(name, value)
    file.write_text(file.read_text().replace('"adamw"', '"adamw", "params": {"torch_adam": true}'))
    trainer = ["python", str(SCRIPTS / "hf_trainer.py"), str(tmp_path / "out"), str(file)]
    found = mw.dry_run_script(trainer, ranks=16).collectives()
    exchanged = {one["collective"] for one in found if one["group_size"] == 16 // dp}
    assert exchanged & {"all_reduce", "all_to_all"}
