"""Does a fine-tuning run fit a card: ordering of methods, and what others measured."""

import re
from typing import Any

import pytest

import meshwise as mw
from data_tables import DATA, table
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.model.weights import num_params

FULL, LORA = "recompute=full", "recompute=full,lora_rank=16"
QLORA = f"{LORA},frozen_dtype=int4"

KNOWN = table("finetune")


def memory_bytes(model: str, plan: str) -> dict[str, float]:
    return mw.estimate(model, "h200-sxm:1", plan, batch=1, seq=512).memory_bytes


@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama3-8b", "mixtral-8x7b"])
def test_adapters_need_less_than_all_weights_and_narrow_ones_still_less(model: str) -> None:
    full, lora, qlora = (memory_bytes(model, plan)["total"] for plan in (FULL, LORA, QLORA))
    assert full > lora > qlora


def test_few_bits_are_for_the_matrices_of_blocks() -> None:
    """Half a byte in place of two for these; embedding and head stay as they are."""
    plain, narrow = (memory_bytes("llama3-8b", plan)["weights"] for plan in (LORA, QLORA))
    assert plain - narrow == 1.5 * 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)


@pytest.mark.parametrize("source", KNOWN)
def test_what_is_known_to_fit(source: str) -> None:
    model, card, plan, seq = KNOWN[source]["run"]
    run = mw.estimate(model, f"{card}:1", plan, batch=1, seq=seq)
    assert run.fits == KNOWN[source]["fits"]
    if model == "llama2-7b":
        assert run.memory_bytes["total"] < 10e9


def test_an_optimizer_in_the_backward_holds_no_sum_of_gradients() -> None:
    """torchtune's 8B_full_single_device.yaml: paged 8-bit AdamW, optimizer_in_bwd; 18.9 GiB (README)."""
    plan = "recompute=full,optimizer=adam-8bit,grad_dtype=bf16,offload_optimizer=1,loss_chunks=8"
    beside, within = (
        mw.estimate("llama3-8b", "rtx-4090:1", plan + more, batch=2, microbatch=2, seq=2048)
        for more in ("", ",optimizer_in_bwd=1")
    )
    assert beside.memory_bytes["gradients"] == 2 * num_params(find_model("llama3-8b"))
    assert within.memory_bytes["gradients"] == 0 and within.fits and not beside.fits
    assert within.memory_bytes["total"] < 18.9 * 2**30 * 1.2
    with pytest.raises(mw.MeshwiseError, match="one microbatch, not 2"):
        mw.estimate("llama3-8b", "rtx-4090:1", f"{plan},optimizer_in_bwd=1", batch=2, seq=2048)


def test_fsdp2_keeps_on_the_host_all_that_it_shards() -> None:
    """Its CPUOffloadPolicy: what is gathered comes over the link to the host, and gradients go back.

    Answer.AI (2024, fsdp_qlora) trains adapters of 70B so on two cards of 24 GB.
    """
    known = "zero=3,recompute=full,lora_rank=64,frozen_dtype=int4,implementation=fsdp2,offload_optimizer=1"
    assert mw.estimate("llama2-70b", "rtx-3090:2", known, batch=4, microbatch=2, seq=512).fits
    plan, job = "zero=3,recompute=full,implementation=fsdp2", {"batch": 8, "microbatch": 2, "seq": 2048}
    on_chip, on_host = (
        mw.estimate("qwen3-8b", "rtx-4090:2", f"{plan},offload_optimizer={share}", **job) for share in (0, 1)
    )
    assert not on_chip.fits and on_host.fits
    assert [on_host.memory_bytes[name] for name in ("weights", "gradients", "optimizer")] == [0, 0, 0]
    states_gb = 16 * num_params(find_model("qwen3-8b")) / 1e9
    assert any(f"takes up to {states_gb:.0f} GB of a host's memory" in note for note in on_host.notes())
    shards = sum(on_chip.memory_bytes[name] for name in ("weights", "gradients", "optimizer"))
    less = on_chip.memory_bytes["total"] - on_host.memory_bytes["total"]
    assert 0.95 * shards < less < 1.1 * shards
    alone = mw.estimate("qwen3-8b", "rtx-4090:1", f"{plan},offload_optimizer=1", **job)
    assert sum(alone.time_s.values()) == pytest.approx(alone.step_s) and alone.time_s["comm_dp"] > 0
    link_bytes_per_s = find_cluster("rtx-4090:2").chip.host_bytes_per_s
    moved = 2 * (2 * 2 + 2) * num_params(find_model("qwen3-8b"))  # fp32 halves, twice in, once out, two times
    spent = {of: sum(of.hidden_s.values()) + sum(of.time_s.values()) for of in (on_chip, on_host)}
    assert spent[on_host] - spent[on_chip] > moved / link_bytes_per_s


def test_adapters_beside_some_layers_are_counted_beside_those_alone() -> None:
    """Three products of training each; the others are of k, o, gate, up and down."""
    every, few = (
        mw.estimate("llama3-8b", "h200-sxm:1", LORA + more, batch=1, seq=512)
        for more in ("", ",lora_targets=q+v")
    )
    others = (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336)
    assert every.flop_per_step - few.flop_per_step == 3 * 2 * 16 * others * 32 * 512
    assert few.mfu < few.hfu


def test_a_frozen_layer_casts_its_operands_once() -> None:
    """What is transposed is for the gradient of a weight: 1 byte written, not 2."""
    plans = "dtype=fp8", "dtype=fp8,lora_rank=16"
    rows = [mw.estimate("llama3-8b", "h100-80g-sxm:8", plan).rank_ledger(0).to_json() for plan in plans]
    trained, frozen = ([row["write_bytes"] for row in of if row["op"] == "fc2_cast"] for of in rows)
    assert trained == [2 * num for num in frozen] and len(frozen) == 2


@pytest.mark.parametrize("implementation", ["fsdp2", "megatron", "huggingface"])
def test_narrow_weights_are_gathered_narrow(implementation: str) -> None:
    """NF4 tensors are gathered as they are kept (torchao): two blocks of 405B are 3.3 GB, not 12.7."""
    plan = f"zero=3,recompute=full,lora_rank=16,optimizer=adam-bf16,implementation={implementation}"
    plans = (plan, f"{plan},frozen_dtype=int4")
    wide, narrow = (mw.estimate("llama3-405b", "a100-80g-sxm:8", one, batch=8, seq=2048) for one in plans)
    less = wide.memory_bytes["buffers"] - narrow.memory_bytes["buffers"]
    assert 0.7 * 9.5e9 < less < 9.5e9  # beside them, one widened matrix
    links_s = [one.time_s["comm_dp"] + one.hidden_s["comm_dp"] for one in (wide, narrow)]
    assert 3.2 < links_s[0] / links_s[1] < 4.0


def test_what_fits_a_card_is_what_estimate_says(meshwise: Any) -> None:
    """A row goes into `estimate` as it is; no other microbatch that fits is faster."""
    found = mw.fit_card("3090", models=["llama3-8b", "qwen3-1.7b"], tokens=1e7, price=0.3).to_json()
    most = found["memory_frac"] * found["memory_bytes"]
    assert [row["fits"] for row in found["rows"]] == [True, True, True, False, True, True]
    for row in found["rows"]:
        words = (row["model"], "rtx-3090:1", row["plan_text"])
        same = mw.estimate(*words, batch=16, seq=2048, microbatch=row["microbatch"])
        assert row["memory_bytes"] == same.memory_bytes["total"]
        assert row["fits"] == (row["memory_bytes"] <= most)
        if row["fits"]:
            others = [mw.estimate(*words, batch=16, seq=2048, microbatch=size) for size in (1, 2, 4, 8, 16)]
            fitting = [one.step_s for one in others if one.memory_bytes["total"] <= most]
            assert row["step_s"] == same.step_s == min(fitting)
            assert row["hours"] == pytest.approx(1e7 / same.tokens_per_s / 3600)
            assert row["cost"] == pytest.approx(0.3 * row["hours"])
    answer = meshwise("fit-card", "3060", "--models", "llama3-70b", "--tokens", "10M", "--all")
    assert answer.code == 1 and re.search(r"too large: llama3-70b \(50(\.\d)? GB by QLoRA\)", answer.out)


PASCAL = str(DATA / "own_pascal.toml")


@pytest.mark.parametrize(("card", "dtype"), [("h200-sxm", "bf16"), ("v100", "fp16"), (PASCAL, "fp32")])
def test_every_open_dense_model_of_the_catalog_is_priced_on_a_card(card: str, dtype: str) -> None:
    """transformers 5 has experts in one tensor: bitsandbytes leaves it wide, PEFT copies it."""
    found = mw.fit_card(card, methods=["qlora"])
    assert {"gpt-oss-20b", "mixtral-8x7b"} <= found.refused.keys()
    assert all(find_model(name).moe for name in found.refused) and len((*found.runs, *found.refused)) > 25
    assert {one.run.plan.dtype for one in found.runs} == {dtype}


def test_8_bit_adam_of_transformers_has_no_fp32_weights() -> None:
    """bitsandbytes on bf16 weights keeps a byte of each moment; Megatron's keeps fp32 weights beside."""
    params = num_params(find_model("smollm3-3b"))
    for how, size in (("huggingface", 2), ("megatron", 6)):
        plan = f"optimizer=adam-8bit,implementation={how}"
        states = mw.estimate("smollm3-3b", "h200-sxm:1", plan, batch=1, seq=512).memory_bytes["optimizer"]
        assert states == size * params
