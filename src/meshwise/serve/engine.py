"""Serving engines: how each forms its passes, and what a request pays before its first pass.

Every engine batches continuously: before each pass it decides which sequences take part. They differ in
if prompts and decodes share a pass (`mixes`), if a prompt may be cut (`chunks`), how many tokens and
sequences a pass takes, and how much of the cache a sequence reserves when it is admitted. What was not
reserved may run out: then the sequence admitted last gives its cache back and starts again, its generated
tokens now part of the prompt.

Defaults of the servers as read in their sources: vLLM 0.19.0 (`vllm/config/scheduler.py`,
`v1/core/sched/scheduler.py`), SGLang 0.5.9 (`srt/server_args.py`, `srt/managers/schedule_policy.py`),
TensorRT-LLM 1.x (`llmapi/llm_args.py`, `_torch/pyexecutor/scheduler.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import WorkloadError
from meshwise.serve.fitted import fitted

_CONSTANTS = fitted().constants


def _sizes(*spans: tuple[int, int, int]) -> tuple[int, ...]:
    """Batch sizes 1, 2, 4 and those of each (first, last, step)."""
    return (1, 2, 4, *(size for first, last, step in spans for size in range(first, last + 1, step)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The scheduler of an engine; tokens and sequences are those of one attention group (dp rank).

    `reserve_frac`: share of a request's output that must have room in the cache when it is admitted.
    `graph_sizes`: decode batches for which a CUDA graph was captured; others are padded up to the next of
    these where the engine `pads_batches`, or launched kernel by kernel. Without any, all are captured.
    `lag_passes`: passes that are under way or planned when a request arrives, before one can take it;
    `poll_passes`: decode passes from one look at what has arrived to the next; `align_passes`: passes that
    prompts wait at most until every dp rank has one and they fill `fill_frac` of a pass (TensorRT-LLM's
    attention_dp_config and batch_wait_timeout_iters).
    `widens_hopper_cache`: decoding on Hopper takes as long with keys and values in 8 bits as in 16
    (FlashAttention-3 transposes the values of fp8 in the kernel, arXiv 2407.08608, section 3.3).
    `expert_tile`: rows of a tile of the experts' grouped matmuls in fp8 on Hopper. DeepGEMM has 128 and fills
    every expert up to a tile, and where the host does not know how many tokens each gets, by 127 rows.
    `graphs_prompts`: passes with prompts are replayed too (TensorRT-LLM's enable_piecewise_cuda_graph).
    `plans_while_guessing`: the host works ahead while a pass checks guesses; SGLang does not unless told
    (SGLANG_ENABLE_SPEC_V2, its documentation of speculative decoding).
    The last three are those of all engines (`serve.fitted.Constants`).
    """

    name: str
    version: str
    max_tokens: int = 8192
    max_sequences: int = 1024
    mixes: bool = True
    chunks: bool = True
    reserve_frac: float = 0.0
    graph_sizes: tuple[int, ...] = ()
    pads_batches: bool = True
    lag_passes: int = 1
    poll_passes: int = 1
    align_passes: int = 0
    fill_frac: float = 0.0
    widens_hopper_cache: bool = False
    expert_tile: int = 1
    graphs_prompts: bool = False
    plans_while_guessing: bool = True
    front_s: float = _CONSTANTS.front_s
    front_token_s: float = _CONSTANTS.front_token_s
    reply_s: float = _CONSTANTS.reply_s


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name="vllm",
            version="0.19.0",
            graph_sizes=_sizes((8, 248, 8), (256, 512, 16)),
            widens_hopper_cache=True,
        ),
        Engine(
            name="sglang",
            version="0.5.9",
            mixes=False,
            reserve_frac=0.7,
            plans_while_guessing=False,
            graph_sizes=_sizes((8, 256, 8), (272, 512, 16)),
        ),
        Engine(name="trtllm", version="1.2", chunks=False, reserve_frac=1.0, max_sequences=2048),
    )
}
"""Engines by name, with the settings that their servers start with on GPUs of 70 GB and more."""


SETTINGS = ("max_tokens", "max_sequences", "poll_passes", "align_passes", "fill_frac", "reserve_frac")
"""What a user may set of an engine."""


def parse_engine(text: str) -> Engine:
    """`vllm`, or with settings of its own: `vllm,max_tokens=2048,max_sequences=256`."""
    name, *words = text.split(",")
    if name not in ENGINES:
        raise WorkloadError(f"no engine is called {name!r}; choose one of {', '.join(ENGINES)}")
    settings = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in SETTINGS:
            raise WorkloadError(f"engine: {key!r} is no setting; choose among {', '.join(SETTINGS)}")
        settings[key] = _setting(key, value)
    return replace(ENGINES[name], **settings)


def _setting(key: str, value: str) -> Any:
    kind, most = (float, 1) if key.endswith("_frac") else (int, 2**31)
    try:
        number = kind(value)
    except ValueError:
        number = -1
    if not (kind is float or number) or not 0 <= number <= most:
        raise WorkloadError(
            f"engine: {key}={value} must be a {'share' if kind is float else 'count above 0'}"
        )
    return number
