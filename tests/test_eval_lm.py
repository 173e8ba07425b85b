"""Evaluation over ranks: the loss does not depend on how the model is spread, nor on how it is read."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.profiler import profile

from meshwise.core.errors import DataError, MeshwiseError, ModelError, PlanError, WorkloadError
from meshwise.published.moe_inference import host_reads
from meshwise.runtime.launch import Place, Ranks
from meshwise.runtime.outcome import Outcome
from meshwise.runtime.programs.eval_lm import Options, check
from meshwise.runtime.programs.text_data import EOS, PAD, ByteTokenizer, find_tokenizer, read_blocks
from meshwise.runtime.programs.transformer_lm import sinusoidal_positions
from meshwise.runtime.run import run_rank

TINY = (
    "decoder_layers=2,tokens_per_sample=32,moe_expert_count=4,decoder_embed_dim=16,decoder_ffn_embed_dim=32,"
    "moe_eval_capacity_token_fraction=0.2"
)
BASE = Options(override=TINY, max_blocks=7, dtype="fp32")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four real ranks for the whole module."""
    with Ranks(4) as pool:
        yield pool


@contextmanager
def world_of_one() -> Iterator[Place]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield Place(0, 1, 0)
    finally:
        dist.destroy_process_group()


def alone(options: Options) -> Outcome:
    """The evaluation on one rank, in this process."""
    check(options, 1)
    with world_of_one() as place:
        return run_rank(place, "eval-lm", options, 0, True)


def profiled(options: Options) -> tuple[Outcome, int]:
    """The same, and how many single numbers were read from the device."""
    with profile() as profiler:
        outcome = alone(options)
    return outcome, sum(event.count for event in profiler.key_averages() if event.key == "aten::item")


def together(pool: Ranks, options: Options) -> list[Outcome]:
    """The evaluation on all ranks of the pool."""
    check(options, 4)
    return pool.call(run_rank, "eval-lm", options, 0, True)


@pytest.mark.parametrize(
    ("override", "options"),
    [
        ("", {}),  # seven blocks on four ranks: one has a dummy batch
        ("", {"tp": 2}),
        ("", {"tp": 4}),
        ("", {"tp": 2, "ep": 1, "grouped_gemm": True}),
        ("", {"ep": 2}),
        ("moe_expert_count=2", {}),  # fewer experts than ranks: two copies
        ("use_tutel_moe=True,moe_freq=1", {}),
        ("moe_second_expert_policy='sampling',use_tutel_moe=True", {"tp": 2}),
        ("moe_second_expert_policy='random',moe_batch_prioritized_routing=True", {}),
        ("moe_top1_expert=True,batch_size_valid=3,use_moe_pad_mask=True", {"tp": 2}),
        ("vocab_size=301", {"tp": 4}),  # 76 rows of the embedding a rank, the last three are padding
        ("vocab_size=301", {"tp": 2, "train_steps": 2, "train_batches": 4}),
        ("vocab_size=301", {"tp": 2, "dtype": "fp64"}),
        ("", {"train_steps": 2, "train_batches": 4}),
        ("use_tutel_moe=True", {"train_steps": 2, "train_batches": 4, "tp": 2, "grouped_gemm": True}),
        ("moe_expert_count=2", {"train_steps": 1, "train_batches": 4}),
    ],
)
def test_loss_does_not_depend_on_the_world(ranks: Ranks, override: str, options: dict[str, Any]) -> None:
    chosen = replace(BASE, override=f"{TINY},{override}".rstrip(","), **options)
    one = alone(replace(chosen, tp=1, ep=0)).result
    for outcome in together(ranks, chosen):
        assert outcome.result["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert outcome.result["train_loss"] == pytest.approx(one["train_loss"], rel=1e-6)
        assert outcome.result["routing"] == pytest.approx(one["routing"], rel=1e-4, abs=1e-4)
        for name in ("num_tokens", "num_blocks", "num_batches", "capacity"):
            assert outcome.result[name] == one[name]


def test_training_moves_the_router() -> None:
    trained = alone(replace(BASE, train_steps=6, train_batches=2, learning_rate=5e-3)).result
    assert trained["train_loss"][-1] < trained["train_loss"][0]
    fresh = alone(BASE).result
    assert trained["loss"] < fresh["loss"]
    assert trained["routing"] != fresh["routing"]


def test_dispatch_and_grouping_give_the_same_loss() -> None:
    wanted = alone(BASE).result["loss"]
    for override, grouped in (("use_tutel_moe=True", False), ("", True), ("use_tutel_moe=True", True)):
        chosen = replace(BASE, override=f"{TINY},{override}".rstrip(","), grouped_gemm=grouped)
        assert alone(chosen).result["loss"] == pytest.approx(wanted, rel=1e-6)


def test_exchange_is_two_all_to_alls_a_layer_and_pass(ranks: Ranks) -> None:
    for outcome in together(ranks, replace(BASE, max_valid_steps=1)):
        assert outcome.result["num_batches"] == 7  # of all ranks: two steps on each of four
        rows = outcome.ledger.where(op="all_to_all")
        assert sum(rows["count"]) == 2 * 2
        assert set(rows["payload_bytes"]) == {4 * 7 * 16 * 4.0}  # E x C x M x 4


def test_reading_token_by_token_gives_the_same_at_a_price(ranks: Ranks, tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    together(ranks, replace(BASE, word_probs=str(fast)))
    outcome, reads = profiled(replace(BASE, word_probs=str(slow), token_loop=True))
    _, few_reads = profiled(replace(BASE, word_probs=str(tmp_path / "again.json")))
    assert reads - few_reads == host_reads(32, 7)
    one, two = json.loads(fast.read_text()), json.loads(slow.read_text())
    assert [block["tokens"] for block in one["blocks"]] == [block["tokens"] for block in two["blocks"]]
    for mine, other in zip(one["blocks"], two["blocks"], strict=True):
        assert mine["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)
    nats = -sum(sum(block["logprobs"]) for block in two["blocks"])
    assert nats / np.log(2) / outcome.result["num_tokens"] == pytest.approx(outcome.result["loss"], rel=1e-6)
    assert sum(word["count"] for word in two["words"]) == outcome.result["num_tokens"]
    assert sum(word["missing_next"] for word in two["words"]) == 7


def test_checkpoint_is_read_by_any_world(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    saved = together(ranks, replace(BASE, tp=2, train_steps=1, save_checkpoint=str(folder)))[0].result
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.json", "rank-0.safetensors", "rank-1.safetensors", "shared.safetensors",
    ]  # fmt: skip
    read = replace(BASE, checkpoint=str(folder), seed=99)
    assert alone(read).result["loss"] == pytest.approx(saved["loss"], rel=1e-6)
    for options in ({}, {"tp": 4}, {"ep": 2}):
        found = together(ranks, replace(read, **options))[0].result  # type: ignore[arg-type]
        assert found["loss"] == pytest.approx(saved["loss"], rel=1e-6)


def test_padding_of_the_vocabulary_is_not_in_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    wide = replace(BASE, override=f"{TINY},vocab_size=301")
    wanted = alone(wide).result["loss"]
    written = set()
    for tp in (4, 2, 1):
        folder = tmp_path / str(tp)
        saved = together(ranks, replace(wide, tp=tp, save_checkpoint=str(folder)))[0].result
        assert saved["loss"] == pytest.approx(wanted, rel=1e-6)
        with safe_open(folder / "shared.safetensors", framework="pt") as tensors:
            assert tensors.get_slice("embed_tokens.weight").get_shape() == [301, 16]
        written.add((folder / "shared.safetensors").read_bytes())
        other = {4: 2, 2: 1, 1: 4}[tp]
        read = replace(wide, tp=other, checkpoint=str(folder), seed=99)
        assert together(ranks, read)[0].result["loss"] == pytest.approx(wanted, rel=1e-6)
    assert len(written) == 1  # so that any of them may read any


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    alone(replace(BASE, save_checkpoint=str(folder)))
    for change, says in (
        ("decoder_ffn_embed_dim=64", "has decoder_ffn_embed_dim=32, the config 64"),
        ("moe_expert_count=8", "has moe_expert_count=4, the config 8"),
        ("moe_expert_count=2", "has moe_expert_count=4, the config 2"),
        ("decoder_layers=4", "has decoder_layers=2, the config 4"),
        ("moe_freq=1", "use --override moe_freq=2"),
        ("vocab_size=400", "has vocab_size=260"),
    ):
        with pytest.raises(ModelError, match=says):
            check(replace(BASE, override=f"{TINY},{change}", checkpoint=str(folder)), 1)
    index = folder / "checkpoint.json"
    text = index.read_text()
    index.write_text(text.replace('"config"', '"made"'))  # tensors are looked at too, where no config is
    for change, says in (
        ("decoder_ffn_embed_dim=64", "fc1.weight is 32x16, the config asks for 64x16"),
        ("decoder_layers=4", "has no tensor layers"),
    ):
        with pytest.raises(ModelError, match=says):
            alone(replace(BASE, override=f"{TINY},{change}", checkpoint=str(folder)))
    index.write_text(text)
    with pytest.raises(DataError, match="exists; name another folder"):
        alone(replace(BASE, save_checkpoint=str(folder)))
    with pytest.raises(DataError, match="is no checkpoint"):
        alone(replace(BASE, checkpoint=str(tmp_path / "none")))
    file = folder / "shared.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        alone(replace(BASE, checkpoint=str(folder)))


def test_one_job_at_a_time_writes_a_checkpoint(tmp_path: Path) -> None:
    """While another job writes it, it is refused; what a killed job has left of it does not matter."""
    partial = tmp_path / "weights.partial"
    partial.mkdir()
    (partial / "left.safetensors").write_bytes(b"half")
    other = os.open(partial, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="another job is writing checkpoint"):
        alone(replace(BASE, save_checkpoint=str(tmp_path / "weights")))
    os.close(other)
    alone(replace(BASE, save_checkpoint=str(tmp_path / "weights")))
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert "left.safetensors" not in [path.name for path in (tmp_path / "weights").iterdir()]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(DataError, match="No space left on device"):
        alone(replace(BASE, save_checkpoint=str(tmp_path / "weights")))
    assert list(tmp_path.iterdir()) == []


def test_bare_run_gives_the_same_and_records_nothing(ranks: Ranks) -> None:
    recorded = together(ranks, BASE)[0]
    bare = ranks.call(run_rank, "eval-lm", BASE, 0, True, None, False)[0]
    assert bare.result["loss"] == recorded.result["loss"]
    assert bare.result["routing"] == recorded.result["routing"]
    assert len(recorded.ledger) > 0
    assert len(bare.ledger) == 0
    assert bare.to_json()["peak_bytes"] is None


def test_a_ledger_that_is_not_kept_cannot_be_written(meshwise: Callable[..., Any]) -> None:
    outcome = meshwise("run", "eval-lm", "--no-ledger", "--csv", "ledger.csv")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--no-ledger leaves out" in outcome.err


# --- text and positions ----------------------------------------------------------------------------


@given(
    texts=st.lists(st.binary(min_size=1, max_size=40).map(lambda text: text.replace(b"\0", b"0")), min_size=1,
                   max_size=4),
    length=st.integers(1, 16), most=st.integers(0, 6),
)  # fmt: skip
def test_every_token_is_predicted_once_from_those_before(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], length: int, most: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(text)
    tokenizer = ByteTokenizer()
    blocks = read_blocks(str(folder), tokenizer, length, most)
    stream = np.concatenate([part for text in texts for part in (tokenizer.encode(text), [EOS])])
    stream = stream[: most * length] if most else stream
    targets = blocks.targets.ravel()
    assert targets[: len(stream)].tolist() == stream.tolist()
    assert set(targets[len(stream) :]) <= {PAD}
    assert blocks.num_tokens == len(stream)
    assert blocks.inputs.ravel()[: len(stream)].tolist() == [EOS, *stream[:-1]]


@given(st.text())
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    encoded = text.encode(errors="replace")
    assert tokenizer.decode(tokenizer.encode(encoded).tolist()) == encoded.decode()


def test_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is optional")
    words = {"a": 0, "b": 1, "c": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="c"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    found = find_tokenizer(str(path))
    assert found.vocab_size == 7
    assert found.encode(b"b a c").tolist() == [5, 4, 6]


def test_positions_are_those_of_fairseq() -> None:
    # fairseq's SinusoidalPositionalEmbedding: padding index 1, so the first token has row 2.
    table = sinusoidal_positions(40, 8)
    assert table.shape == (40, 8)
    assert not table[PAD].any()
    for row in (0, 2, 39):
        for i in range(4):
            angle = row / 10000 ** (i / 3)
            assert float(table[row, i]) == pytest.approx(np.sin(angle), abs=1e-5)
            assert float(table[row, 4 + i]) == pytest.approx(np.cos(angle), abs=1e-5)
    assert torch.equal(sinusoidal_positions(5, 7)[:, 6], torch.zeros(5))


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks_", "options", "error", "says"),
    [
        (3, {}, PlanError, "4 experts do not divide by 3"),
        (4, {"tp": 3}, PlanError, "4 ranks do not divide by tp=3"),
        (8, {"tp": 8}, PlanError, "decoder_attention_heads=4 does not divide by tp=8"),
        (4, {"config": "none"}, ModelError, "no config 'none'"),
        (4, {"override": "moe_frequency=2"}, ModelError, "unknown field 'moe_frequency'"),
        (4, {"override": "vocab_size=100"}, ModelError, "smaller than the tokenizer's 260"),
        (4, {"text": "/none"}, WorkloadError, "no text /none"),
        (4, {"tokenizer": "/none"}, MeshwiseError, "tokenizer"),
        (4, {"dtype": "fp16", "train_steps": 1}, WorkloadError, "loss scaling"),
        (4, {"train_steps": 1, "train_batches": 3}, WorkloadError, "3 training batches do not divide by 4"),
        (4, {"token_loop": True}, WorkloadError, "give --word-probs FILE"),
        (4, {"word_probs": "/none/words.json"}, DataError, "there is no folder /none"),
        (4, {"word_probs": "/"}, DataError, "it is a folder"),
        (4, {"save_checkpoint": "/"}, DataError, "checkpoint / exists"),
        (4, {"checkpoint": "/none"}, DataError, "is no checkpoint"),
    ],
)
def test_wrong_input_is_one_sentence(
    ranks_: int, options: dict[str, Any], error: type[MeshwiseError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        check(replace(BASE, **options), ranks_)
    assert "\n" not in str(caught.value)


def test_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(WorkloadError, match="is empty"):
        check(replace(BASE, text=str(tmp_path)), 1)
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    with pytest.raises(WorkloadError, match="holds no text"):
        read_blocks(str(tmp_path), ByteTokenizer(), 8)
