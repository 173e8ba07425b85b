"""How InferenceX starts the engines that it measures, where its rows do not say so.

Most measured points come from this benchmark (github.com/SemiAnalysisAI/InferenceX; read at git 843c6254f and
at the dates below). Its client sends ten requests for each of `concurrency`, all at once under that limit,
draws lengths from 0.8 to 1 of the stated, and ignores ends of sequence, so that engines which reserve output
reserve all of it. Its scripts (`benchmarks/`) set the tokens of a pass, how often SGLang looks for arrivals,
how long TensorRT-LLM holds prompts back, and the type of the cache; some runs (`spec-decoding: mtp` in
`.github/configs/nvidia-master.yaml`) guess tokens. Rows of other clients run engines as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwise.serve.engine import Engine

LENGTHS = (("1024", "1024"), ("1024", "8192"), ("8192", "1024"))
"""Tokens of prompts and outputs that it measures."""

LENGTH_RATIO = 0.8
REQUESTS_EACH = 10

GUESSING_RUNS = {
    ("deepseek-r1", "trtllm"): ("2026-01-14", "2026-02-05", "2026-02-06"),
    ("deepseek-r1", "sglang"): ("2026-03-25",),
    ("qwen3.5-397b-a17b", "sglang"): ("2026-03-20",),
}
"""Days on which scripts with multi-token prediction ran (its pull requests 392, 632, 642, 943 and 898)."""

ACCEPTANCE = 0.81
"""Share of DeepSeek-R1's guesses that are right (vLLM, pull request 12755)."""


FP8_CACHES_SINCE = {
    ("minimax-m2.5", "fp8", "b"): "2026-04-03",
    ("minimax-m2.5", "fp4", "b"): "2026-04-08",
    ("minimax-m2.5", "fp8", "h"): "2026-05-26",
}
"""When scripts began to ask for a cache in 8 bits, by how the system's name begins; others did so at once."""

GRAPHED_PROMPTS = {
    ("fp8", False): ("2026-01-29", ((64, 4096), (128, 255), (64, 4096))),
    ("fp4", False): ("2026-02-03", ((1, 4096), (0, 0), (0, 0))),  # on eight ranks that spread experts
    ("fp8", True): ("2026-02-05", ((5, 4096), (9, 4096), (17, 4096))),
    ("fp4", True): ("2026-02-06", ((32, 128), (64, 64), (0, 0))),
}
"""TensorRT-LLM's scripts of DeepSeek on B200 with piecewise CUDA graphs, without attention-dp: by precision
and whether they guess, since when, and between how many clients for each of `LENGTHS`."""

QWEN_ON_B300, QWEN_SINCE = ("qwen3.5-397b-a17b", "fp8", "b300_sxm"), "2026-04-17"
"""What has a script of its own since then; before, as on B200."""

PADDED_SIZES = (1, 2, 4, *range(8, 129, 8), 256, 512, 1024, 2048)
"""Batches that TensorRT-LLM captures where it may pad (`cuda_graph_config.enable_padding`)."""


def is_row(row: Mapping[str, str]) -> bool:
    """Whether a row of the public sample is InferenceX's: it has its lengths."""
    return (row["input_tokens"], row["output_tokens"]) in LENGTHS


def _is_scripted(row: Mapping[str, str]) -> bool:
    """Whether a row is of a script that was read; recipes of two pools were not."""
    return is_row(row) and row["mode"] == "agg"


def speculation(row: Mapping[str, str], model: str, dp: int) -> str:
    """What `serve --speculate` would say of a row; empty where the run does not guess."""
    backend = row["backend"]
    if not _is_scripted(row) or row.get("measured", "") not in GUESSING_RUNS.get((model, backend), ()):
        return ""
    drafts = 2 if (model, backend) == ("deepseek-r1", "sglang") else 1 if dp > 1 else 3
    return f"drafts={drafts},accept={ACCEPTANCE}"


def cache_dtype(row: Mapping[str, str], model: str) -> str:
    """The type of the cache: the 16 bits of the activations where a script does not ask for fp8."""
    if row["precision"] == "bf16":
        return "bf16"
    if not _is_scripted(row):
        return "fp8"
    chip = row["system"][0]
    is_wide = chip == "h" and (
        model.startswith("gpt-oss") or (model.startswith("deepseek") and row["backend"] == "sglang")
    )
    since = FP8_CACHES_SINCE.get((model, row["precision"], chip), "")
    return "bf16" if is_wide or row.get("measured", "") < since else "fp8"


def launched(engine: Engine, row: Mapping[str, str], model: str, dp: int) -> Engine:
    """`engine` as the script of a row starts it."""
    if not _is_scripted(row):
        return engine
    engine = replace(engine, **_SETTINGS[engine.name](row, model, dp))
    return replace(engine, graph_sizes=PADDED_SIZES) if engine.name == "trtllm" else engine


def _vllm(row: Mapping[str, str], model: str, _: int) -> dict[str, Any]:
    is_blackwell = row["system"].startswith(("b", "gb"))
    if model == "minimax-m2.5" and is_blackwell and row.get("measured", "") >= "2026-04":
        return {"max_tokens": 2 * int(row["input_tokens"])}
    return {}


def _sglang(row: Mapping[str, str], model: str, dp: int) -> dict[str, Any]:
    of_deepseek, polled = model.startswith("deepseek"), 30 if int(row["concurrency"]) >= 16 else 10
    if not row["system"].startswith(("b", "gb")):
        return {"max_tokens": 32768 if of_deepseek else 16384}
    if (model, row["precision"], row["system"]) == QWEN_ON_B300 and row.get("measured", "") >= QWEN_SINCE:
        return {"max_tokens": 16384, "poll_passes": 10}
    is_cut = of_deepseek and (row["precision"] == "fp4" or speculation(row, model, dp))
    return {"max_tokens": 16384 if is_cut else 32768, "poll_passes": 1 if dp > 1 else polled}


def _trtllm(row: Mapping[str, str], model: str, dp: int) -> dict[str, Any]:
    prompt, output, clients = (int(row[name]) for name in ("input_tokens", "output_tokens", "concurrency"))
    is_short = (prompt, output) == (1024, 1024)
    if model.startswith("llama"):
        held = {"align_passes": 20, "fill_frac": 0.9} if is_short and int(row["tp"]) < 8 else {}
        return {"max_tokens": 16384, **held}
    if model.startswith("gpt-oss"):
        return {"max_tokens": 20000}
    guesses = speculation(row, model, dp)
    graphs = {"graphs_prompts": dp == 1 and _graphs_prompts(row, bool(guesses))}
    if guesses:
        batch = clients // 4 if dp > 1 else clients
        return {"max_tokens": (2 if dp > 1 else 4) * batch + prompt + 64, **graphs}
    floor = 8192 if row.get("measured", "") >= "2026-01-21" else 0
    is_held = is_short and row["precision"] == "fp8" and row["system"] == "b200_sxm" and clients >= 64
    held = {"align_passes": 40, "fill_frac": 0.8} if is_held and dp == 1 else {}
    return {"max_tokens": max(clients + prompt + 64, floor), **held, **graphs}


def _graphs_prompts(row: Mapping[str, str], guesses: bool) -> bool:
    """Whether the script of a row of DeepSeek asks for piecewise CUDA graphs."""
    if row["system"] != "b200_sxm" or (row["precision"], guesses) not in GRAPHED_PROMPTS:
        return False
    since, clients = GRAPHED_PROMPTS[row["precision"], guesses]
    low, high = clients[LENGTHS.index((row["input_tokens"], row["output_tokens"]))]
    is_wide = row["precision"] == "fp8" or guesses or (row["tp"], row["moe_ep"]) == ("8", "8")
    is_asked = low <= int(row["concurrency"]) <= high and row.get("measured", "") >= since
    return is_wide and is_asked


_SETTINGS = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
