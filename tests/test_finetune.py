"""Does a fine-tuning run fit a card: ordering of methods, and what others measured."""

from __future__ import annotations

import pytest

import meshwise as mw

FULL, LORA, QLORA = (
    "recompute=full",
    "recompute=full,lora_rank=16",
    "recompute=full,lora_rank=16,frozen_dtype=int4",
)


@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama3-8b", "mixtral-8x7b"])
def test_adapters_need_less_than_all_weights_and_narrow_ones_still_less(model: str) -> None:
    full, lora, qlora = (
        mw.estimate(model, "h200-sxm:1", plan, batch=1, seq=512).memory_bytes["total"]
        for plan in (FULL, LORA, QLORA)
    )
    assert full > lora > qlora


def test_few_bits_are_for_the_matrices_of_blocks() -> None:
    """Half a byte in place of two for these; embedding and head stay as they are."""
    plain, narrow = (
        mw.estimate("llama3-8b", "h200-sxm:1", plan, batch=1, seq=512).memory_bytes["weights"]
        for plan in (LORA, QLORA)
    )
    matrices = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert plain - narrow == 1.5 * matrices


@pytest.mark.parametrize(
    ("model", "card", "plan", "seq", "fits"),
    [
        pytest.param("llama2-7b", "rtx-4090", QLORA, 2048, True, id="torchtune: QLoRA of 7B below 10 GB"),
        pytest.param("llama3-8b", "rtx-4090", LORA, 512, True, id="torchtune: LoRA of 8B on a 24 GB card"),
        pytest.param("llama3-8b", "a100-80g-sxm", FULL, 512, False, id="16 bytes a parameter: 128 GB"),
        pytest.param(
            "llama2-70b", "l40s", QLORA.replace("16", "64") + ",offload_optimizer=1", 512, True,
            id="arXiv 2305.14314: QLoRA of 65B on 48 GB, paged optimizer",
        ),
    ],
)  # fmt: skip
def test_what_is_known_to_fit(model: str, card: str, plan: str, seq: int, fits: bool) -> None:
    run = mw.estimate(model, f"{card}:1", plan, batch=1, seq=seq)
    assert run.fits == fits
    if model == "llama2-7b":
        assert run.memory_bytes["total"] < 10e9
