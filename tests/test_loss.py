"""The loss: what is fused of it says what it holds and what it moves."""

import pytest

import meshwise as mw

LOGITS = 8 * 4096 * 151_936
PLAN = "dtype=bf16,zero=0,software={},loss_fusion={},tp={}"
"""Of a small model with a large vocabulary, whose peak is at its head."""


def priced(software: str, fusion: str, tp: int) -> mw.Estimate:
    plan = PLAN.format(software, fusion, tp)
    return mw.estimate("qwen3-0.6b", f"h200-sxm:{tp}", plan, batch=8, seq=4096, microbatch=8)


@pytest.mark.parametrize(
    ("software", "fusion", "tp", "held", "moved"),
    [  # bytes a logit: what an allocator books, and what kernels read and write
        ("megatron-2024", "none", 1, 6, 52),
        ("megatron-2024", "kernels", 1, 6, 32),
        ("megatron-2024", "in_place", 2, 2, 10),
        ("megatron-2024", "log_probs", 1, 18, 116 + 16 * 8),  # 16 for each of 8 sequences
        ("torch-2024", "none", 1, 14, 48),
        ("torch-2024", "none", 2, 18, 76),
        ("torch-2024", "kernels", 2, 4, 8),
    ],
)
def test_kernels_of_a_loss_are_its_memory_and_its_traffic(
    software: str, fusion: str, tp: int, held: float, moved: float
) -> None:
    """Megatron-LM core/tensor_parallel/cross_entropy.py, PyTorch SoftMax.cu, counted by hand."""
    of = priced(software, fusion, tp)
    rows = of.ledger.where(module="head", op="cross_entropy").rows()
    kernels = [row for row in rows if not row["collective"]]
    found = sum(row["count"] * (row["read_bytes"] + row["write_bytes"]) for row in kernels)
    assert found * tp == pytest.approx(moved * LOGITS)
    beyond = of.memory_bytes["buffers"] - priced(software, "in_place", tp).memory_bytes["buffers"]
    assert beyond * tp == pytest.approx((held - 2) * LOGITS)


def test_what_software_fuses() -> None:
    """As it does unless a plan says so; PyTorch's own parts and transformers do not."""
    for software, fusion in (
        ("megatron-2020", "none"),
        ("megatron-2024", "kernels"),
        ("torch-2023", "kernels"),
    ):
        stated, left = (
            mw.estimate("llama3-8b", "h100-80g-sxm:8", f"tp=8,software={software}{text}", batch=8, seq=4096)
            for text in (f",loss_fusion={fusion}", "")
        )
        assert stated.to_json()["memory_bytes"] == left.to_json()["memory_bytes"]
        assert stated.step_s == left.step_s
    with pytest.raises(mw.MeshwiseError, match="use loss_fusion=none"):
        mw.estimate(
            "llama3-8b", "h100-80g-sxm:8", "implementation=fsdp2,loss_fusion=in_place", batch=8, seq=4096
        )
