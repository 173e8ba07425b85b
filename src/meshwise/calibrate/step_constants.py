"""The constants of `catalog/overheads.toml`: which are fitted, which are stated, and why.

A constant belongs to a generation of chips, a kind of network, software, or to all runs. It is fitted where
runs of two publications or more determine it; any other has a physical value with a source, or is tied to one
that is fitted. `meshwise fit` refuses a fitted constant that fewer determine or that ends at its limit.
"""

from __future__ import annotations

from meshwise.machine.overheads import SOFTWARE

Box = tuple[float, float, float]
"""Where the search of a constant starts (a physical guess, which few runs alone do not move far), and the
least and most that make sense."""

M20, T23, T24, M24, M26 = (f"software.{name}" for name in SOFTWARE)

TIME_BOXES: dict[str, Box] = {
    "power.hopper.bf16": (1.05e-12, 0.7e-12, 1.4e-12),  # 667 TFLOP/s: long matmuls of H200, 680 (AIC)
    "power.hopper.fp8": (0.55e-12, 0.3e-12, 1.2e-12),  # 1,270 TFLOP/s: the same, 1,230
    "power.blackwell.bf16": (1.05e-12, 0.6e-12, 1.25e-12),  # as Hopper, of the same process
    "power.blackwell.fp8": (0.5e-12, 0.2e-12, 1.1e-12),  # half the bits
    "older_attention.ampere": (1.5, 1.0, 3.0),  # FlashAttention-2's paper: 1.3 to 2 times version 1
    "older_attention.hopper": (1.9, 1.0, 4.0),  # FlashAttention-3's paper: 1.5 to 2 times version 2
    f"{M24}.moe_host_s": (4e-3, 1e-4, 1e-2),
    f"{M20}.kernel_passes": (1.2, 0.8, 4.0),
    f"{T23}.kernel_passes": (1.5, 0.8, 4.0),
    f"{T24}.kernel_passes": (1.2, 0.8, 4.0),
    f"{M24}.kernel_passes": (1.2, 0.8, 4.0),
    f"{T24}.cast_passes": (2.0, 0.8, 8.0),
    f"{M24}.cast_passes": (1.5, 0.8, 8.0),
    f"{M20}.accumulate_bytes": (6.0, 2.0, 20.0),
    f"{T23}.accumulate_bytes": (8.0, 2.0, 20.0),
    f"{T24}.accumulate_bytes": (8.0, 2.0, 20.0),
    f"{M24}.accumulate_bytes": (6.0, 2.0, 20.0),
    f"{T23}.attention_slowdown": (1.4, 1.0, 3.0),
    f"{T24}.attention_slowdown": (1.1, 1.0, 3.0),
    f"{M24}.interference_frac": (0.1, 0.01, 0.5),
    f"{M24}.tp_exposed_frac": (0.4, 0.05, 1.0),
    "network.roce": (0.8, 0.2, 1.0),
    "common.bucket_bytes": (1.6e8, 2.5e7, 1e9),
    "common.skew_s": (2e-5, 1e-6, 1e-4),
    "common.straggler_frac": (0.005, 0.0005, 0.02),
}
"""Constants fitted to step times; each is determined by the runs of two publications or more."""

MEMORY_BOXES: dict[str, Box] = {
    f"{T24}.fragment_frac": (0.05, 0.005, 0.3),
}
"""The same for memory."""

STATED: dict[str, tuple[float, str]] = {
    "network.omnipath": (
        0.27,
        "bigscience experiments/bandwidth: 64 V100 all-reduce at 108 of 400 Gb/s",
    ),
    "power.cdna3.bf16": (750 / 620e12, "SemiAnalysis 2024-12, MI300X training benchmark: 620 TFLOP/s bf16"),
    "power.cdna3.fp8": (750 / 990e12, "the same: 990 TFLOP/s fp8"),
    "common.unaligned_frac": (
        0.5,
        "vTrain's single nodes (vocabulary 50257): 1.5 times for each halving of 16 bytes",
    ),
    "common.dispatch_cores": (24.0, "DeepEP dd758ca, README: SMs of its normal kernels"),
    "common.expert_spread": (0.19, "Wang et al. 2024 (2408.15664): busiest of 64 experts 0.72 over the mean"),
    f"{M20}.host_s": (5.6e-5, "five launches of 11 us an op of ours; only vTrain's small models show it"),
    f"{M20}.microbatch_s": (
        1e-3,
        "Megatron-LM v2.5 get_batch: copy, broadcast and mask of a microbatch",
    ),
    f"{M20}.shard_copy_s": (6e-6, "one small copy through PyTorch's dispatcher"),
    f"{M20}.misaligned_slowdown": (
        10.0,
        "A100 data sheet: fp32 units 19.5 TFLOP/s, 0.6 of the tensor cores' 312",
    ),
    f"{M20}.messages_per_block": (12.0, "DeepSpeed ZeRO-3 of 2021 gathers tensor by tensor"),
    **{f"{name}.messages_per_block": (1.0, "FSDP gathers block by block") for name in (T23, T24, M24)},
    f"{M20}.second_grad_bytes": (2.0, "fp16 gradients beside their fp32 sums"),
    f"{T23}.host_s": (3e-5, "an eager op of PyTorch with its backward; no run is bound by it"),
    f"{T24}.host_s": (1.5e-5, "the same, half the ops compiled away"),
    f"{M24}.host_s": (1.5e-5, "the same"),
    f"{M24}.expert_bias_passes": (
        16.0,
        "megatron/core/transformer/moe/experts.py: 75 passes where we have 4.7",
    ),
    f"{M26}.expert_bias_passes": (4.0, "a pass for the sum and one for its gradient, of both linears"),
    f"{M26}.host_s": (1e-6, "a node of a CUDA graph"),
    **{
        f"{name}.context_bytes": (2e9, "CUDA context 1.6 GB (bigscience tr11 prequel), NCCL")
        for name in (T23, T24, M24)
    },
    f"{M20}.context_bytes": (
        8.6e9,
        "CUDA context 1.6 GB (bigscience tr11 prequel), NCCL of 7 groups",
    ),
    f"{M20}.fragment_frac": (0.1, "no expandable segments before PyTorch 2.1"),
    f"{T23}.loss_bytes": (
        4.0,
        "flash_attn.losses.cross_entropy of llm-foundry and InternEvo: logits and gradient",
    ),
    f"{T24}.loss_bytes": (16.0, "torchtitan: logits, fp32 copy, log-softmax, and the gradients of the two"),
    f"{T24}.split_loss_bytes": (24.0, "the same over DTensor's vocabulary"),
    f"{M20}.loss_bytes": (8.0, "fp32 logits and their gradient"),
    f"{M24}.loss_bytes": (2.6, "Transformer Engine's cross entropy writes the gradient over the bf16 logits"),
}
"""Constants that runs of fewer than two publications determine: a physical value, and where it is from."""

TIED: dict[str, tuple[str, float]] = {
    "power.blackwell.fp4": ("power.blackwell.fp8", 0.5),
    **{
        f"power.blackwell-ultra.{dtype}": (f"power.blackwell.{dtype}", 0.88)
        for dtype in ("bf16", "fp8", "fp4")
    },
    "older_attention.blackwell": ("older_attention.hopper", 2.0),
    f"{T23}.cast_passes": (f"{T24}.cast_passes", 1.0),
    f"{T23}.fragment_frac": (f"{T24}.fragment_frac", 1.0),
    f"{M24}.fragment_frac": (f"{T24}.fragment_frac", 1.0),
    **{
        f"{name}.{key}": (f"{M24}.{key}", 1.0)
        for name in (M20, T23, T24, M26)
        for key in ("interference_frac", "tp_exposed_frac")
    },
    **{
        f"{M26}.{key}": (f"{M24}.{key}", 1.0)
        for key in (
            "kernel_passes",
            "cast_passes",
            "accumulate_bytes",
            "messages_per_block",
            "context_bytes",
            "fragment_frac",
            "loss_bytes",
        )
    },
}
"""Constants that are another one times a factor: fp4 moves half the bits of fp8; Blackwell Ultra, of the
same process, runs Megatron-Bridge's fp8 recipes of Llama 3 1.24 times as fast as Blackwell, so its matmuls
1.33 times, on 7/6 of the power; attention by the matrix instructions of a warp, which Blackwell does not
speed up, is as fast as on Hopper for each core; a CUDA graph runs the same kernels."""

LIMITS = TIME_BOXES | MEMORY_BOXES
START = {name: start for name, (start, _, _) in LIMITS.items()}
Constants = dict[str, float]


def every(fitted: Constants) -> Constants:
    """The fitted constants, those stated, and those tied to another."""
    known = {name: value for name, (value, _) in STATED.items()} | fitted
    for name, (other, factor) in TIED.items():
        known[name] = factor * known[other]
    return known
