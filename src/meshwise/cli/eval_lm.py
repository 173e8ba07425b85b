"""`meshwise eval-lm`: what the program eval-lm costs a rank in closed form, and its what-ifs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from meshwise.core.errors import WorkloadError

if TYPE_CHECKING:
    from meshwise.program.expert_pass import Pass
    from meshwise.published.moe_inference import PassesCost, WhatIf


DTYPES = ("fp16", "bf16", "fp32", "fp64")
SHOWN = ("counts", "what-ifs", "programs", "all")
Count = Annotated[int, range(1, 10**6 + 1)]
Tokens = Annotated[int, range(1, 4096 + 1)]
"""Each token is priced by itself, so more of them take minutes."""


def eval_lm(
    config: str = "en-moe-lm-15b",
    *,
    ranks: Count = 4,
    passes: Count = 5,
    dtype: str = "fp16",
    tp: Count = 1,
    override: str = "",
    fractions: str = "0,0.05,0.1,0.25,0.5,1",
    chips: str = "v100-16g-sxm,a100-80g-sxm,h100-80g-sxm,h200-sxm",
    prompts: Count = 1,
    prompt_tokens: Count = 512,
    max_tokens: Tokens = 200,
    beam: Count = 5,
    show: str = "all",
    json: bool = False,
) -> None:
    """Count what the program eval-lm costs a rank, and what-ifs.

    The what-ifs vary capacity, dispatch, grouped GEMM and ranks: memory, exchange, useful FLOP, time a pass.
    The programs eval-lm and generate are shown side by side.

    Args:
        config: A preset or file of transformer_lm_gpt fields.
        ranks: Ranks that share the experts.
        passes: Forward passes of a rank.
        dtype: Element type.
        tp: Tensor-parallel ranks of each of them.
        override: Fields to change: decoder_layers=2,moe_freq=1.
        fractions: Capacity fractions of the what-ifs; 0 is the rule of training.
        chips: Chips of the what-ifs.
        prompts: Texts that a rank generates at a time.
        prompt_tokens: Tokens of a prompt.
        max_tokens: Tokens generated after it.
        beam: Beams of a text (1: greedy).
        show: What to print: counts, what-ifs, programs, or all.
    """
    from dataclasses import asdict, replace

    from meshwise.cli.output import print_json
    from meshwise.machine.hardware import find_cluster
    from meshwise.model.gpt_config import find_gpt_config
    from meshwise.program.expert_parallel import check_tp, place
    from meshwise.program.expert_pass import new_pass
    from meshwise.program.generation import Generation, generation_events
    from meshwise.program.lifetime import peak_bytes
    from meshwise.published.moe_inference import has_rate, report, side_by_side, what_ifs

    for name, value, choices in (("dtype", dtype, DTYPES), ("show", show, SHOWN)):
        if value not in choices:
            raise WorkloadError(f"--{name} {value} is unknown; choose one of {', '.join(choices)}")
    found = find_gpt_config(config, override)
    if not found.num_moe_layers:
        raise WorkloadError(f"{config} has no mixture-of-experts layer; set moe_freq and moe_expert_count")
    if not found.vocab_size:
        raise WorkloadError(f"{config} does not say vocab_size; add --override vocab_size=N")
    placement = place(ranks * tp, found.moe_expert_count, tp=tp, ep=ranks)
    check_tp(found, tp)
    of = new_pass(found, ep=ranks, tp=tp, dtype=dtype)
    document = report(of, passes)
    shares = [_share(text) for text in fractions.split(",")]
    clusters = {chip: find_cluster(f"{chip}:{ranks * tp}") for chip in chips.split(",")}
    rows = what_ifs(_variants(of, shares), clusters)
    generation = Generation(
        config=replace(found, use_tutel_moe=True),
        placement=placement,
        num_prompts=prompts,
        first=prompt_tokens,
        columns=prompt_tokens + max_tokens,
        num_live=beam,
        search="beam" if beam > 1 else "greedy",
        dtype=dtype,
    )
    programs = side_by_side(of, generation, {chip: c for chip, c in clusters.items() if has_rate(c, of)})
    memory = {
        "cache_bytes": generation.cache_bytes,
        "peak_bytes": float(peak_bytes(generation_events(generation))),
    }
    if json:
        beside = {name: asdict(work) for name, work in programs.items()}
        beside["generate"] |= memory
        print_json(document | {"what_ifs": [asdict(row) for row in rows], "programs": beside})
        return
    if show in ("counts", "all"):
        _show_counts(document)
    if show in ("what-ifs", "all"):
        _show_what_ifs(rows)
    if show in ("programs", "all"):
        _show_programs(programs, memory)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise WorkloadError(f"--fractions: {text!r} is not a share from 0 to 1")
    return share


def _variants(of: Pass, shares: list[float]) -> dict[str, Pass]:
    """The config as it is and with one thing changed at a time."""
    from dataclasses import replace

    from meshwise.program.expert_pass import new_pass

    config = of.config
    same: dict[str, Any] = {"tp": of.tp, "dtype": of.dtype}
    variants = {"as configured": of}
    for share in shares:
        name = f"fraction {share:g}" if share else "capacity as in training"
        variants[name] = new_pass(config, ep=of.ep, token_fraction=share, **same)
    sparse = replace(config, use_tutel_moe=True)
    variants["sparse dispatch"] = replace(of, config=sparse)
    variants["grouped GEMM"] = replace(of, grouped=True)
    variants["sparse, grouped, as in training"] = new_pass(
        sparse, ep=of.ep, token_fraction=0.0, grouped=True, **same
    )
    ranks = int(of.ep)
    for other in (2 * ranks, 4 * ranks, 16 * ranks):
        if config.moe_expert_count % other == 0:
            variants[f"{other} ranks"] = replace(of, ep=other)
    return variants


def _show_counts(document: dict[str, Any]) -> None:
    from rich.table import Table

    from meshwise.cli.output import console

    out = console()
    for name, group in document.items():
        table = Table(title=name.replace("_", " "), title_justify="left", show_header=False, box=None)
        for key, value in group.items():
            shown = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
            table.add_row(key, shown)
        out.print(table, "")


def _show_what_ifs(rows: list[WhatIf]) -> None:
    from meshwise.cli.output import console
    from meshwise.core.units import duration, with_prefix
    from meshwise.report.table import Table

    def time_on(row: WhatIf, chip: str) -> str:
        if not row.fits[chip]:
            return "out of memory"
        return duration(row.total_s[chip]) if chip in row.total_s else "no rate"

    work = [
        (
            row.name,
            f"{row.capacity:,.0f}",
            f"{row.exchange_bytes / 2**20:,.4g} MiB",
            with_prefix(row.flop, "FLOP"),
            f"{row.useful_frac:.0%}",
            with_prefix(row.peak_bytes, "B"),
            f"{row.launches:,.0f}",
        )
        for row in rows
    ]
    heads = ("", "slots", "exchange", "FLOP", "useful", "peak", "launches")
    console().print(Table("what if (one pass, one rank)", heads, work))
    chips = tuple(rows[0].fits) if rows else ()
    times = [(row.name, *(time_on(row, chip) for chip in chips)) for row in rows]
    console().print(Table("what if: the time on other chips", ("", *chips), times))


def _show_programs(programs: dict[str, PassesCost], memory: dict[str, float]) -> None:
    from meshwise.cli.output import console
    from meshwise.core.units import duration, with_prefix
    from meshwise.report.table import Table

    heads = {
        "eval_lm": "eval-lm, a pass",
        "generate_prefill": "generate, prompt",
        "generate_decode": "its tokens",
        "generate": "all of it",
    }
    works = list(programs.values())
    rows = [
        ("passes", *(f"{work.passes:,}" for work in works)),
        ("tokens scored or generated", *(f"{work.tokens:,}" for work in works)),
        *(
            (f"aten::{call}", *(f"{work.calls.get(call, 0):,.0f}" for work in works))
            for call in sorted({call for work in works for call in work.calls})
        ),
        ("all-to-alls", *(f"{work.exchanges:,.0f}" for work in works)),
        ("their bytes", *(with_prefix(work.exchange_bytes, "B") for work in works)),
        ("their bytes a token", *(_a_token(work, work.exchange_bytes, "B") for work in works)),
        ("FLOP", *(with_prefix(work.flop, "FLOP") for work in works)),
        ("FLOP a token", *(_a_token(work, work.flop, "FLOP") for work in works)),
        ("launches", *(f"{work.launches:,.0f}" for work in works)),
        ("keys and values", "", "", "", with_prefix(memory["cache_bytes"], "B")),
        ("peak", "", "", "", with_prefix(memory["peak_bytes"], "B")),
    ]
    for chip in works[0].seconds:
        rows.append((chip, *(duration(work.seconds[chip]) for work in works)))
        each = (duration(work.seconds[chip] / work.tokens) if work.tokens else "" for work in works)
        rows.append((f"{chip}, a token", *each))
    title = "the programs eval-lm and generate (one rank)"
    console().print(Table(title, ("", *(heads[name] for name in programs)), rows))


def _a_token(work: PassesCost, amount: float, unit: str) -> str:
    from meshwise.core.units import with_prefix

    return with_prefix(amount / work.tokens, unit) if work.tokens else ""
