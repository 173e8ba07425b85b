"""Draws the figures of docs/search.md and prints its table of large runs: `python docs/figures/search.py`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import meshwise as mw
from meshwise.report.answer import INK, OTHER_COLOR, Chart, ChartAxis, Names, Picture, Series
from meshwise.report.pages import draw
from meshwise.search.difference import reasons

GPT3 = mw.find_model("gpt3-175b")
GPT3_64K = replace(GPT3, name="GPT-3 175B, 64,000 tokens", vocab=64000)
MEGASCALE = replace(GPT3_64K, name="MegaScale 175B", parallel_block=True, num_norms=1)
NEMOTRON = replace(
    GPT3, name="Nemotron-4 340B", hidden=18432, ffn_hidden=73728, head_dim=192, num_kv_heads=8, vocab=256000,
    max_seq=4096, positions="rotary", tied_embedding=False, linear_bias=False, qkv_bias=False, out_bias=False,
    dropout_frac=0.0,
)  # fmt: skip
RUNS = [
    ("GPT-3 175B, 64 A100, 2022", "gpt3-175b", "a100-80g-sxm:64", 64, 2048,
     "tp=8,pp=8,vpp=3,recompute=selective,zero=0,stages=even", "dtype=bf16", 13.75,
     "[2205.05198](https://arxiv.org/abs/2205.05198)"),
    ("Megatron-LM 530B, 280 A100, 2022", "mt-nlg-530b", "a100-80g-sxm:280", 280, 2048,
     "tp=8,pp=35,vpp=3,recompute=selective,zero=0,stages=even", "dtype=bf16", 37.83,
     "[2205.05198](https://arxiv.org/abs/2205.05198)"),
    ("Megatron-LM 175B, 12,288 A100, 2024", GPT3_64K, "a100-80g-sxm:12288", 6144, 2048,
     "tp=8,pp=8,vpp=6,recompute=selective,overlap_dp=0,overlap_pp=0,stages=even", "dtype=bf16", 8.57,
     "[2402.15627](https://arxiv.org/abs/2402.15627)"),
    ("MegaScale 175B, 12,288 A100, 2024", MEGASCALE, "a100-80g-sxm:12288", 6144, 2048,
     "tp=8,pp=8,vpp=6,recompute=selective,overlap_tp=1,stages=even", "overlap_tp=0|1", 6.34,
     "[2402.15627](https://arxiv.org/abs/2402.15627)"),
    ("Nemotron-4 340B, 6,144 H100, 2024", NEMOTRON, "h100-80g-sxm:6144", 2304, 4096,
     "tp=8,pp=12,vpp=8,stages=even", "dtype=bf16", 8.0, "[2406.11704](https://arxiv.org/abs/2406.11704)"),
    ("Llama 3 405B, 16,384 H100, 2024", "llama3-405b", "h100-80g-sxm:16384", 2048, 8192,
     "tp=8,pp=16,vpp=8,zero=1", "dtype=bf16", "41 % MFU",
     "[2407.21783](https://arxiv.org/abs/2407.21783)"),
    ("DeepSeek-V3, 2,048 H800, 2024", "deepseek-v3", "h800-sxm:2048", 15360, 4096,
     "pp=16,ep=64,schedule=dualpipe,dtype=fp8,stages=even", "dtype=fp8", 19.9,
     "[2412.19437](https://arxiv.org/abs/2412.19437)"),
]  # fmt: skip
"""Run, model, cluster, batch, sequence, published plan, what the search is told, measured, source."""

FREED = ("offload_activations", "offload_optimizer", "overlap_pp", "overlap_dp", "overlap_tp", "sp")
"""Keys that Calculon varies too: first those of the whole step, then those that change its ops."""


def large_runs() -> None:
    print("| run | measured | published plan, predicted | best plan | best that a framework runs | why |")
    print("| --- | --- | --- | --- | --- | --- |")
    for run, model, cluster, batch, seq, plan, told, measured, source in RUNS:
        found = mw.search(model, cluster, told, batch=batch, seq=seq, top=1, beside=plan)
        beside, runnable = found.beside, found.runnable and found.runnable[0]
        assert beside is not None
        shown = measured if isinstance(measured, str) else f"{measured:g} s"
        cells = (_plan(beside), _plan(found.best[0]), _plan(runnable) if runnable else "none")
        print(f"| {run} {source} | {shown} | {' | '.join(cells)} | {_gains(beside, runnable)} |", flush=True)


def _plan(priced: mw.Estimate) -> str:
    fits = "" if priced.fits else ", does not fit"
    memory = f"{priced.memory_bytes['total'] / 1e9:.0f} GB{fits}"
    plan = f"`{mw.plan_text(priced.plan)}`, microbatch {priced.workload.microbatch}"
    return f"{plan}: {priced.step_s:.3g} s, MFU {priced.mfu:.0%}, {memory}"


def _gains(beside: mw.Estimate, best: mw.Estimate | None) -> str:
    """The changes that shorten the published step most, on the way to the best that a framework runs."""
    changes = reasons(beside, best) if best else []
    largest = sorted(changes, key=lambda one: -one.gain_s)[:2]
    return "; ".join(f"{one.text}: {-one.gain_s / beside.step_s:+.0%}" for one in largest if one.gain_s > 0)


def draw_cost(path: Path) -> None:
    """Draw the time of a search against its plans, as one key more is freed each time."""
    plans, seconds = [], []
    for num in range(len(FREED) + 1):
        freed = ",".join(f"{key}=*" for key in FREED[:num])
        for _ in range(2):  # the second finds its tables made, as the largest does
            began = time.process_time()
            found = mw.search("gpt3-175b", "a100-80g-sxm:512", freed, batch=1536, seq=2048)
            taken_s = time.process_time() - began
        plans.append(found.plans_considered)
        seconds.append(taken_s)
    names = ["usual keys", *(f"+ {key}" for key in FREED)]
    marks = [
        Series(plans, seconds, "measured", size=7),
        Series(
            plans,
            [seconds[0] * num / plans[0] for num in plans],
            "in proportion to the plans",
            OTHER_COLOR,
            "dash",
        ),
        Names(plans, seconds, names, [INK] * len(names)),
    ]
    axes = ChartAxis("distinct plans", log=True), ChartAxis("CPU time of one core", "s", log=True)
    draw(Picture([[Chart("What a search takes", marks, *axes)]]), path)
    print(*zip(plans, seconds, strict=True), sep="\n")


def main() -> None:
    here = Path(__file__).parent
    draw_cost(here / "search_cost.png")
    job = ("llama3-70b", "h100-80g-sxm:64")
    draw(mw.search(*job, batch=128, seq=8192), here / "search_front.png")
    gpus = "gpus=64|128|256|512|1024|2048|4096"
    draw(mw.study(*job, gpus, batch=1024, seq=8192), here / "search_scaling.png")
    large_runs()


if __name__ == "__main__":
    main()
