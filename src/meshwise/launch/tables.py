"""What each framework calls the settings of a plan: one table per framework.

A table maps a fact (a key of the plan, or what follows from it: `facts.py`) to an argument that takes its
value, or to what is set for each value it may have. A value without an entry cannot be expressed. `ANY`
stands for all other values and `VALUE` for the value itself; an empty entry is what the framework does
unasked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ANY, VALUE = object(), object()


class Near(NamedTuple):
    """What comes nearest to a value that cannot be expressed, and in what it differs."""

    settings: dict[str, Any]
    differs: str


Setting = str | dict[Any, Any]
Table = dict[str, Setting]


def _above(neutral: Any, argument: str) -> Setting:
    """Nothing is written for `neutral`; every other value is `argument`'s."""
    return {neutral: {}, ANY: {argument: VALUE}}


_ONLY_1D: Table = {
    "layout": {"1d": {}},
    "lora_rank": {0: {}},
    "placement": {("tp", "cp", "dp", "pp"): {}},
    "imbalance": {ANY: {}},
    "software": {ANY: {}},
    "implementation": {ANY: {}},
}
"""What no framework expresses; and assumptions of an estimate, which are no settings of a job."""

_FSDP = {"--use-distributed-optimizer": True, "--use-megatron-fsdp": True}
_STRATEGY = "--data-parallel-sharding-strategy"
_STATES = ("--exp-avg-dtype", "--exp-avg-sq-dtype")

MEGATRON: Table = _ONLY_1D | {
    "tp": "--tensor-model-parallel-size",
    "sp": "--sequence-parallel",
    "cp": "--context-parallel-size",
    "cp_kind": {
        "ring": {"--cp-comm-type": ["p2p"]},
        "ulysses": {"--cp-comm-type": ["a2a"]},
        "all_gather": {"--cp-comm-type": ["allgather"]},
        "two_level": {"--cp-comm-type": ["a2a+p2p"]},
    },
    "levels": _above(None, "--hierarchical-context-parallel-sizes"),
    "pp": "--pipeline-model-parallel-size",
    "chunks": _above(1, "--num-virtual-stages-per-pipeline-rank"),
    "pipeline_layout": _above(None, "--pipeline-model-parallel-layout"),
    "schedule": {"1f1b": {}, "interleaved": {}},
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "dispatch": {
        "per_expert": {"--moe-token-dispatcher-type": "alltoall"},
        "per_rank": {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "deepep"},
    },
    "zero": {
        0: {},
        1: {"--use-distributed-optimizer": True},
        2: _FSDP | {_STRATEGY: "optim_grads"},
        3: _FSDP | {_STRATEGY: "optim_grads_params"},
    },
    "weights_sharded": {False: {}, True: {"--ckpt-format": "fsdp_dtensor"}},
    "instances": _above(1, "--num-distributed-optimizer-instances"),
    "recompute_form": {
        "none": {},
        "selective": {"--recompute-granularity": "selective", "--recompute-modules": ["core_attn"]},
        "full": {"--recompute-granularity": "full", "--recompute-method": "uniform"},
        "block": {"--recompute-granularity": "full", "--recompute-method": "block"},
    },
    "recompute_num": _above(None, "--recompute-num-layers"),
    "dtype": {
        "fp32": {},
        "bf16": {"--bf16": True},
        "fp16": {"--fp16": True},
        "fp8": {"--bf16": True, "--fp8-format": "hybrid"},
        "fp4": {"--bf16": True, "--fp4-format": "e2m1"},
    },
    "grad_dtype": {"fp32": {}, "bf16": {"--grad-reduce-in-bf16": True}},
    "optimizer": {
        "adam": {"--optimizer": "adam"} | dict.fromkeys(_STATES, "fp32"),
        "adam-8bit": {"--optimizer": "adam", "--use-precision-aware-optimizer": True}
        | dict.fromkeys(_STATES, "fp8"),
        "muon": {"--optimizer": "muon"},
        "sgd": {"--optimizer": "sgd"},
    },
    "attention": {
        "flash": {"--attention-backend": "flash"},
        "unfused": {"--attention-backend": "unfused"},
    },
    "offload_optimizer": {
        0.0: {},
        ANY: {
            "--optimizer-cpu-offload": True,
            "--use-precision-aware-optimizer": True,
            "--optimizer-offload-fraction": VALUE,
        },
    },
    "offload_activations": {
        0.0: {},
        ANY: {
            "--fine-grained-activation-offloading": True,
            "--offload-modules": ["core_attn", "attn_proj"],
            "--activation-offload-fraction": VALUE,
        },
    },
    "overlap_dp": "--overlap-grad-reduce",
    "gather_overlap": "--overlap-param-gather",
    "overlap_tp": "--tp-comm-overlap",
    "overlap_ep": "--overlap-moe-expert-parallel-comm",
    "p2p_overlap": {True: {}, False: {"--no-overlap-p2p-communication": True}},
    "placement": {("tp", "cp", "dp", "pp"): {}, ("tp", "cp", "pp", "dp"): {"--use-tp-pp-dp-mapping": True}},
    "microbatch": "--micro-batch-size",
    "batch": "--global-batch-size",
    "seq": "--seq-length",
}

MEGATRON_MODEL: Table = {
    "num_layers": "--num-layers",
    "hidden": "--hidden-size",
    "ffn_hidden": "--ffn-hidden-size",
    "num_heads": "--num-attention-heads",
    "kv_groups": {None: {}, ANY: {"--group-query-attention": True, "--num-query-groups": VALUE}},
    "channels": _above(None, "--kv-channels"),
    "vocab": "--vocab-size",
    "padded": {False: {"--no-pad-vocab-size": True}, True: {}},
    "max_seq": "--max-position-embeddings",
    "activation": {"swiglu": {"--swiglu": True}, "relu2": {"--squared-relu": True}, "gelu": {}},
    "norms": {
        ("layernorm", True): {"--normalization": "LayerNorm"},
        ("rmsnorm", False): {"--normalization": "RMSNorm"},
    },
    "biases": {
        (True, True, True): {},
        (False, False, False): {"--disable-bias-linear": True},
        (False, True, False): {"--disable-bias-linear": True, "--add-qkv-bias": True},
    },
    "positions": {
        "learned": {"--position-embedding-type": "learned_absolute"},
        "rotary": {"--position-embedding-type": "rope"},
        "none": {"--position-embedding-type": "none"},
    },
    "tied_embedding": {True: {}, False: {"--untie-embeddings-and-output-weights": True}},
    "qk_norm": "--qk-layernorm",
    "sinks": {False: {}, True: {"--softmax-type": "learnable"}},
    "dropout_frac": {ANY: {"--hidden-dropout": VALUE, "--attention-dropout": VALUE}},
    "mtp_layers": _above(0, "--mtp-num-layers"),
    "mla": {False: {}, True: {"--multi-latent-attention": True}},
    "q_lora_rank": _above(None, "--q-lora-rank"),
    "kv_lora_rank": _above(None, "--kv-lora-rank"),
    "qk_nope_head_dim": _above(None, "--qk-head-dim"),
    "qk_rope_head_dim": _above(None, "--qk-pos-emb-head-dim"),
    "v_head_dim": _above(None, "--v-head-dim"),
    "num_experts": _above(None, "--num-experts"),
    "top_k": _above(None, "--moe-router-topk"),
    "expert_ffn": _above(None, "--moe-ffn-hidden-size"),
    "shared_ffn": _above(None, "--moe-shared-expert-intermediate-size"),
    "moe_layers": _above(None, "--moe-layer-freq"),
    "capacity_factor": _above(None, "--moe-expert-capacity-factor"),
    "expert_groups": _above(None, "--moe-router-num-groups"),
    "top_groups": _above(None, "--moe-router-group-topk"),
    "shared_gate": {False: {}, True: {"--moe-shared-expert-gate": True}},
    "balance_bias": {
        False: {},
        True: {"--moe-router-enable-expert-bias": True, "--moe-router-score-function": "sigmoid"},
    },
}
"""Facts of `shape.py`."""

BRIDGE: Table = MEGATRON | {
    "dtype": {
        "bf16": {"mixed_precision": "bf16_mixed"},
        "fp16": {"mixed_precision": "fp16_mixed"},
        "fp8": {"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"},
        "fp4": {"mixed_precision": "bf16_with_nvfp4_mixed"},
    },
    "grad_dtype": {"fp32": {"ddp.grad_reduce_in_fp32": True}, "bf16": {"ddp.grad_reduce_in_fp32": False}},
    "optimizer": {name: {"optimizer.optimizer": name} for name in ("adam", "muon", "sgd")},
}
BRIDGE_NAMES: dict[str, tuple[str, bool]] = {
    "--num-virtual-stages-per-pipeline-rank": ("model.virtual_pipeline_model_parallel_size", False),
    "--num-experts": ("model.num_moe_experts", False),
    "--overlap-grad-reduce": ("ddp.overlap_grad_reduce", False),
    "--overlap-param-gather": ("ddp.overlap_param_gather", False),
    "--no-overlap-p2p-communication": ("comm_overlap.overlap_p2p_comm", True),
    "--seq-length": ("dataset.seq_length", False),
    "--max-position-embeddings": ("model.seq_length", False),
    "--swiglu": ("model.gated_linear_unit", False),
    "--disable-bias-linear": ("model.add_bias_linear", True),
    "--untie-embeddings-and-output-weights": ("model.share_embeddings_and_output_weights", True),
}
"""Arguments that are not `section.argument_name` in Megatron-Bridge; True: inverted."""

_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CHECKPOINT = "activation_checkpoint"

TORCHTITAN: Table = _ONLY_1D | {
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "zero": {
        0: {},
        1: Near({"parallelism.fsdp_reshard_after_forward": "never"}, "zero=2 is written"),
        2: {"parallelism.fsdp_reshard_after_forward": "never"},
        3: {"parallelism.fsdp_reshard_after_forward": "always"},
    },
    "tp": "parallelism.tensor_parallel_degree",
    "sp": "parallelism.enable_sequence_parallel",
    "cp": "parallelism.context_parallel_degree",
    "cp_kind": {"all_gather": {}},
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": {
        "gpipe": {_SCHEDULE: "GPipe"},
        "1f1b": {_SCHEDULE: "1F1B"},
        "interleaved": {_SCHEDULE: "Interleaved1F1B"},
        "zb-v": {_SCHEDULE: "ZBVZeroBubble"},
        "dualpipe-v": {_SCHEDULE: "DualPipeV"},
    },
    "layers_per_chunk": {
        None: {},
        ANY: {
            "parallelism.pipeline_parallel_layers_per_stage": VALUE,
            "parallelism.pipeline_parallel_first_stage_less_layers": 0,
            "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        },
    },
    "pipeline_microbatch": _above(None, "parallelism.pipeline_parallel_microbatch_size"),
    "ep": "parallelism.expert_parallel_degree",
    "etp_beside_ep": {None: {}, 1: {}},
    "dispatch": {"per_expert": {}},
    "recompute_form": {
        "none": {_CHECKPOINT: "activation-checkpoint:none"},
        "selective": Near({_CHECKPOINT: "activation-checkpoint:selective"}, "its own list of ops is kept"),
        "full": {_CHECKPOINT: "activation-checkpoint:full"},
    },
    "dtype": {
        "bf16": {"training.mixed_precision_param": "bfloat16"},
        "fp32": {"training.mixed_precision_param": "float32"},
    },
    "grad_dtype": {"fp32": {"training.mixed_precision_reduce": "float32"}},
    "optimizer": {
        "adam": Near(
            {"training.dtype": "float32"}, "adam-fp32 is written: no bf16 copy of the weights stays"
        ),
        "adam-fp32": {"training.dtype": "float32"},
        "adam-bf16": {"training.dtype": "bfloat16"},
    },
    "attention": {"flash": {}},
    "offload_optimizer": {0.0: {"training.enable_cpu_offload": False}},
    "offload_activations": {0.0: {}},
    "overlap_dp": {True: {}},
    "overlap_tp": {
        False: {"compile.enable_async_tensor_parallel": False},
        True: {"compile.enable": True, "compile.enable_async_tensor_parallel": True},
    },
    "overlap_ep": {False: {}},
    "overlap_pp": {True: {}},
    "host_syncs": "training.disable_cuda_graphs",
    "local_batch": "training.local_batch_size",
    "batch": "training.global_batch_size",
    "seq": "training.seq_len",
}

DEEPSPEED: Table = _ONLY_1D | {
    "tp": _above(1, "tensor_parallel.autotp_size"),
    "sp": {False: {}},
    "cp": _above(1, "sequence_parallel_size"),
    "cp_kind": {"ulysses": {}},
    "pp": {1: {}},
    "ep": {
        1: {},
        ANY: {"expert_parallel.enabled": True, "expert_parallel.autoep_size": VALUE},
    },
    "etp_beside_ep": _above(None, "expert_parallel.expert_tensor_parallel_size"),
    "dispatch": {
        "per_expert": {"expert_parallel.comm_backend": "comm"},
        "per_rank": {"expert_parallel.comm_backend": "deepep"},
    },
    "zero": "zero_optimization.stage",
    "recompute_form": {
        "none": {"--activation_checkpointing": False},
        "full": {"--activation_checkpointing": True},
    },
    "dtype": {
        "fp32": {},
        "bf16": {"bf16.enabled": True, "--bf16": True},
        "fp16": {"fp16.enabled": True, "--fp16": True},
    },
    "grad_dtype": "data_types.grad_accum_dtype",
    "optimizer": {
        "adam": {"optimizer.type": "adamw"},
        "adam-bf16": {
            "optimizer.type": "adamw",
            "bf16.bf16_master_weights_and_grads": True,
            "bf16.bf16_optimizer_states": True,
        },
        "muon": {"optimizer.type": "muon"},
        "sgd": {"optimizer.type": "sgd"},
    },
    "attention": {"flash": {}},
    "offload_optimizer": {
        0.0: {},
        ANY: {
            "zero_optimization.offload_optimizer.device": "cpu",
            "zero_optimization.offload_optimizer.ratio": VALUE,
        },
    },
    "offload_activations": {0.0: {}, 1.0: {"activation_checkpointing.cpu_checkpointing": True}},
    "overlap_dp": "zero_optimization.overlap_comm",
    "overlap_tp": "tensor_parallel.tp_overlap_comm",
    "overlap_ep": {False: {}},
    "microbatch": {
        ANY: {"train_micro_batch_size_per_gpu": VALUE, "--per_device_train_batch_size": VALUE},
    },
    "num_microbatches": {
        ANY: {"gradient_accumulation_steps": VALUE, "--gradient_accumulation_steps": VALUE},
    },
    "batch": "train_batch_size",
}

_SIZES = "parallelism_config.parallelism_config_"
_FSDP2 = "fsdp_config.fsdp_"
_FULL = {"none": False, "full": True}

ACCELERATE: Table = _ONLY_1D | {
    "num_gpus": "num_processes",
    "num_nodes": "num_machines",
    "launcher": {
        "FSDP": {"distributed_type": "FSDP", _FSDP2 + "version": 2},
        "MULTI_GPU": {"distributed_type": "MULTI_GPU"},
    },
    "replicate": _SIZES + "dp_replicate_size",
    "shard": _SIZES + "dp_shard_size",
    "zero": {
        0: {},
        1: Near({_FSDP2 + "reshard_after_forward": False}, "zero=2 is written"),
        2: {_FSDP2 + "reshard_after_forward": False},
        3: {_FSDP2 + "reshard_after_forward": True},
    },
    "tp": _SIZES + "tp_size",
    "sp": {False: {}},
    "cp_size": _SIZES + "cp_size",
    "sp_size": _SIZES + "sp_size",
    "cp_kind": {
        "all_gather": {_SIZES + "cp_comm_strategy": "allgather"},
        "ulysses": {_SIZES + "sp_backend": "deepspeed"},
    },
    "pp": {1: {}},
    "ep": {1: {}},
    "recompute_fsdp": {form: {_FSDP2 + "activation_checkpointing": on} for form, on in _FULL.items()},
    "recompute_ddp": {form: {"--activation_checkpointing": on} for form, on in _FULL.items()},
    "dtype": {
        "fp32": {"mixed_precision": "no"},
        "bf16": {"mixed_precision": "bf16"},
        "fp16": {"mixed_precision": "fp16"},
        "fp8": {"mixed_precision": "fp8", "fp8_config.fp8_backend": "ao"},
    },
    "optimizer": {
        "adam": Near(
            {"--optim": "adamw_torch_fused"}, "adam-fp32 is written: no bf16 copy of the weights stays"
        ),
        "adam-fp32": {"--optim": "adamw_torch_fused"},
        "adam-8bit": {"--optim": "adamw_bnb_8bit"},
        "sgd": {"--optim": "sgd"},
    },
    "attention": {"flash": {}},
    "offload_optimizer": {
        0.0: {},
        1.0: Near({_FSDP2 + "offload_params": True}, "weights and gradients move to the host too"),
    },
    "offload_activations": {0.0: {}, 1.0: {_FSDP2 + "activation_checkpointing_offload": True}},
    "overlap_dp": {True: {}},
    "microbatch": "--per_device_train_batch_size",
    "num_microbatches": "--gradient_accumulation_steps",
}

# --- serving -----------------------------------------------------------------------------------

_SERVED_DTYPES = {
    "bf16": {"--dtype": "bfloat16"},
    "fp16": {"--dtype": "float16"},
    "fp32": {"--dtype": "float32"},
    "fp8": {"--quantization": "fp8"},
}

VLLM: Table = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "ep_over_all": {False: {}, True: {"--enable-expert-parallel": True}},
    "dtype": _SERVED_DTYPES,
    "kv_dtype": {"bf16": {"--kv-cache-dtype": "bfloat16"}, "fp8": {"--kv-cache-dtype": "fp8"}},
    "placement": {("tp", "cp", "dp", "pp"): {}},
    "requests": "--max-num-seqs",
    "seq": "--max-model-len",
}
SGLANG: Table = VLLM | {
    "world_tp": "--tp-size",
    "pp": "--pp-size",
    "attention_dp": "--attn-dp-size",
    "copies": "--dp-size",
    "ep_within_tp": "--ep-size",
    "kv_dtype": {"bf16": {"--kv-cache-dtype": "bf16"}, "fp8": {"--kv-cache-dtype": "fp8_e4m3"}},
    "requests": "--max-running-requests",
    "seq": "--context-length",
    "num_nodes": "--nnodes",
}
TENSORRT_LLM: Table = VLLM | {
    "world_tp": "--tp_size",
    "pp": "--pp_size",
    "attention_dp": {1: {"enable_attention_dp": False}, ANY: {"enable_attention_dp": True}},
    "copies": {1: {}},
    "ep_within_tp": "--ep_size",
    "dtype": {"bf16": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16"}, "fp32": {"dtype": "float32"}},
    "kv_dtype": {"bf16": {"kv_cache_config.dtype": "auto"}, "fp8": {"kv_cache_config.dtype": "fp8"}},
    "requests": "--max_batch_size",
    "seq": "--max_seq_len",
}
for _table in (SGLANG, TENSORRT_LLM):
    for _key in ("tp", "dp", "ep_over_all"):
        del _table[_key]

CONSTANTS: dict[str, dict[str, Any]] = {
    "accelerate": {
        "compute_environment": "LOCAL_MACHINE",
        "machine_rank": 0,
        "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}
"""What is written whatever the plan."""

_DATA = {"seq": "set by the data", "batch": "product of microbatch, accumulation and ranks"}
OUTSIDE: dict[str, dict[str, str]] = {
    "deepspeed": _DATA
    | {
        "pp": "set by PipelineModule in the training script",
        "schedule": "PipelineModule in the training script runs 1f1b",
    },
    "accelerate": _DATA,
}
"""Where a key is set that the framework's settings do not say."""
