"""`meshwise eval-lm`: what the program eval-lm costs a rank in closed form, and its what-ifs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal

from meshwise.cli.output import print_answer
from meshwise.core.errors import WorkloadError
from meshwise.core.refusals import refuse
from meshwise.core.units import duration, to_number, with_prefix
from meshwise.report.table import TABLES, Table, records_table

TOKENS = "tokens scored or generated"
Count = Annotated[int, range(1, 10**6 + 1)]
Tokens = Annotated[int, range(1, 4096 + 1)]
"""Each token is priced by itself, so more of them take minutes."""
bytes_text = partial(with_prefix, unit="B")


def eval_lm(
    config: str = "en-moe-lm-15b",
    *,
    ranks: Count = 4,
    passes: Count = 5,
    dtype: Literal["fp16", "bf16", "fp32", "fp64"] = "fp16",
    tp: Count = 1,
    override: str = "",
    fractions: str = "0,0.05,0.1,0.25,0.5,1",
    chips: str = "v100-16g-sxm,a100-80g-sxm,h100-80g-sxm,h200-sxm",
    prompts: Count = 1,
    prompt_tokens: Count = 512,
    max_tokens: Tokens = 200,
    beam: Count = 5,
    show: Literal["counts", "what-ifs", "programs", "all"] = "all",
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
        show: What to print.
    """
    from meshwise.machine.hardware import find_cluster
    from meshwise.model.gpt_config import find_gpt_config
    from meshwise.program.expert_pass import check_tp, new_pass, place
    from meshwise.program.generation import Generation
    from meshwise.published.moe_inference import report, side_by_side, variants, what_if

    found = find_gpt_config(config, override)
    shares = [to_number(text, "--fractions") for text in fractions.split(",")]
    no_shares = [share for share in shares if not 0 <= share <= 1]
    refuse("eval-lm", WorkloadError, of=found, name=config, no_shares=no_shares)
    placement = place(ranks * tp, found.moe_expert_count, tp=tp, ep=ranks)
    check_tp(found, tp)
    of = new_pass(found, ep=ranks, tp=tp, dtype=dtype)
    counts = report(of, passes)
    clusters = {chip: find_cluster(f"{chip}:{ranks * tp}") for chip in chips.split(",")}
    what_ifs = [what_if(name, one, clusters) for name, one in variants(of, shares).items()]
    generation = Generation(
        config=replace(found, use_tutel_moe=True),
        placement=placement,
        num_prompts=prompts,
        first=prompt_tokens,
        columns=prompt_tokens + max_tokens,
        num_live=beam,
        dtype=dtype,
    )
    programs = side_by_side(of, generation, clusters)
    programs["generate"]["cache_bytes"] = generation.cache_bytes
    parts = {"counts": _counts(counts), "what-ifs": _what_ifs(what_ifs), "programs": _programs(programs)}
    shown = chain.from_iterable(tables for name, tables in parts.items() if show in (name, "all"))
    print_answer(counts | {"what_ifs": what_ifs, "programs": programs}, shown, json=json)


def _counts(document: dict[str, Any]) -> Iterator[Table]:
    for name, group in document.items():
        texts = ((key, f"{x:,.0f}" if float(x).is_integer() else f"{x:,.4g}") for key, x in group.items())
        yield Table(name.replace("_", " "), ("", ""), list(texts))


def _time(chip: str, key: str, row: dict[str, Any], tokens: float = 1) -> str:
    if not row["fits"][chip]:
        return "out of memory"
    return duration(row[key][chip] / tokens) if chip in row[key] else "no rate"


def _what_ifs(rows: list[dict[str, Any]]) -> Iterator[Table]:
    yield records_table("what if (one pass, one rank)", rows, TABLES["what-ifs"])
    times = {"": "name", **{chip: f"time_on({chip!r}, 'total_s', row)" for chip in rows[0]["fits"]}}
    yield records_table("what if: the time on other chips", rows, times, time_on=_time)


def _programs(programs: dict[str, dict[str, Any]]) -> Iterator[Table]:
    """A row for each figure; amounts of a token too."""
    works = list(programs.values())
    counts = {"passes": "passes", TOKENS: "tokens", "all-to-alls": "exchanges", "launches": "launches"}
    rows = [(name, *(f"{work[key]:,.0f}" for work in works)) for name, key in counts.items()]
    for call in sorted({call for work in works for call in work["calls"]}):
        rows.append((f"aten::{call}", *(f"{work['calls'].get(call, 0):,.0f}" for work in works)))
    amounts: dict[str, Callable[[dict[str, Any], float], str]] = {
        "bytes of all-to-alls": lambda work, tokens: bytes_text(work["exchange_bytes"] / tokens),
        "FLOP": lambda work, tokens: with_prefix(work["flop"] / tokens, "FLOP"),
        **{chip: partial(_time, chip, "seconds") for chip in works[0]["fits"]},
    }
    for name, text in amounts.items():
        each = (text(work, work["tokens"]) if work["tokens"] else "" for work in works)
        rows += [(name, *(text(work, 1) for work in works)), (f"{name}, a token", *each)]
    for name, key in (("keys and values", "cache_bytes"), ("peak of the program", "peak_bytes")):
        rows.append((name, *(bytes_text(work.get(key)) for work in works)))
    heads = ("", "eval-lm, a pass", "generate, prompt", "its tokens", "all of it")
    yield Table("the programs eval-lm and generate (one rank)", heads, rows)
