"""Generate text with a mixture-of-experts GPT: token after token, with a cache of keys and values.

The prompts are dealt out to the dp ranks. All sequences of all ranks advance in step, because the experts
are spread over ranks: every step exchanges equal batches. A step takes one token of each sequence, the
prompt's as long as there is one, so prompts may differ in length; the part that all have is taken at
once. Who is done, or has no prompt, goes on beside the others with padding.

`search` decides on the next token: greedy, sampling (temperature, then the `top_k` likeliest, then the
fewest that hold `top_p` of the probability), or beams (`programs.search`). A batch of a step is small,
and an expert's capacity is a share of it: by default that share is 1 here, so that no token is dropped
and a text does not depend on its neighbours. That also makes decoding with the cache equal to decoding
without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from meshwise.core.errors import WorkloadError
from meshwise.program.generation import Generation, generation_events
from meshwise.program.lifetime import write_ops
from meshwise.program.tape import Tape
from meshwise.runtime.programs.lm_setting import ModelOptions, Setting, setting
from meshwise.runtime.programs.text_data import EOS, read_blocks

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.search import Hypothesis, Search

SAYS_RESULT = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ModelOptions):
    """What the command line may choose."""

    prompt: Annotated[str, Meta(description="text to go on from (default: pieces of --text)")] = ""
    num_prompts: Annotated[int, Meta(ge=1, description="prompts to cut from the text")] = 4
    prompt_tokens: Annotated[int, Meta(ge=1, description="tokens of each of them")] = 32
    max_tokens: Annotated[int, Meta(ge=1, description="tokens to generate at most, the end included")] = 32
    min_tokens: Annotated[int, Meta(ge=0, description="tokens before the end may come")] = 0
    search: Annotated[Literal["greedy", "sampling", "beam"], Meta(description="how to choose")] = "greedy"
    beam: Annotated[int, Meta(ge=1, description="sequences that live side by side in beam search")] = 5
    length_penalty: Annotated[
        float, Meta(ge=0, description="a beam's score is its log-probability / length^this")
    ] = 1.0
    temperature: Annotated[float, Meta(gt=0, description="of sampling")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="sample among so many tokens (0: all)")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, description="sample among the likeliest of this share")] = 1.0
    cache: Annotated[bool, Meta(description="keep keys and values, or compute all tokens anew")] = True
    capacity_fraction: Annotated[
        float, Meta(ge=0, le=1, description="slots of an expert, as a share of a step's tokens (0: config's)")
    ] = 1.0
    checkpoint: Annotated[str, Meta(description="folder to read the weights from (default: random)")] = ""


def check(options: Options, ranks: int) -> None:
    """A MeshwiseError for what does not fit, before anything starts."""
    if options.min_tokens > options.max_tokens:
        raise WorkloadError(
            f"--min-tokens {options.min_tokens} is more than --max-tokens {options.max_tokens}; lower it"
        )
    _prompts(options, _setting(options, ranks))


def estimate(options: Options, tape: Tape) -> None:
    """Write the closed form of rank `tape.rank` on `tape`: what `program.generation` states of every pass."""
    write_ops(generation_events(generation(options, tape.world_size, tape.rank)), tape)


def generation(options: Options, ranks: int, rank: int = 0) -> Generation:
    """What `options` mean for rank `rank` of `ranks`, in the words of the closed form."""
    found = _setting(options, ranks)
    prompts = _prompts(options, found)
    lengths = [len(prompt) for prompt in prompts]
    return Generation(
        config=found.config,
        placement=found.placement,
        num_prompts=-(-len(prompts) // found.placement.dp),
        first=min(lengths),
        columns=max(lengths) + options.max_tokens,
        max_tokens=options.max_tokens,
        num_live=options.beam if options.search == "beam" else 1,
        search=options.search,
        cached=options.cache,
        dtype=found.dtype,
        tp_rank=found.placement.tp_rank(rank),
    )


def main(options: Options, context: Context) -> dict[str, Any] | None:
    """Generate on this rank; all texts, equal on each rank (None: fake tensors have none)."""
    import torch
    import torch.distributed as dist

    from meshwise.runtime.programs import lm_model
    from meshwise.runtime.programs.search import decode

    begin_s = time.perf_counter()
    found = _setting(options, context.world_size)
    shard, groups = lm_model.join(found.placement, context)
    prompts = _prompts(options, found)
    columns = max(map(len, prompts)) + options.max_tokens
    model = lm_model.new_model(
        found, shard, context, folder=options.checkpoint, seed=options.seed, max_positions=columns
    ).eval()
    dp = found.placement.dp
    mine = list(range(found.placement.dp_rank(context.rank), len(prompts), dp))
    num_rows = -(-len(prompts) // dp)
    numbers = mine + [0] * (num_rows - len(mine))  # who has fewer prompts repeats the first
    with context.recorder.setup():
        search = _search(options, [prompts[number] for number in numbers], numbers, columns, context)
    dist.barrier()
    load_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    with shard.section("generate"), torch.no_grad():
        decode(
            model,
            search,
            first=min(map(len, prompts)),
            cached=options.cache,
            group=groups.dp,
            is_fake=context.is_fake,
        )
    if context.is_fake:
        return None
    texts = search.hypotheses()[: len(mine)]
    parts: list[Any] = [None] * context.world_size
    with context.recorder.setup():
        dist.all_gather_object(parts, (dict(zip(mine, texts, strict=True)), time.perf_counter() - begin_s))
    hypotheses = {number: found for part, _ in parts for number, found in part.items()}
    model_s = max(seconds for _, seconds in parts)
    result = _result(options, found, prompts, hypotheses, model_s, load_s)
    for line in _lines(result):
        context.say(line)
    return result


def _setting(options: Options, ranks: int) -> Setting:
    """The setting, with the capacity of generation, and its dispatch: small batches are copied."""
    found = setting(options, ranks)
    config = replace(found.config, use_tutel_moe=True)
    if options.capacity_fraction:
        config = replace(config, moe_eval_capacity_token_fraction=options.capacity_fraction)
    return replace(found, config=config)


def _prompts(options: Options, found: Setting) -> list[list[int]]:
    """The prompts as tokens, each behind an end of sentence, as texts are in training."""
    if options.prompt:
        return [[EOS, *found.tokenizer.encode(options.prompt.encode()).tolist()]]
    blocks = read_blocks(options.text, found.tokenizer, options.prompt_tokens, options.num_prompts)
    if len(blocks) < options.num_prompts:
        raise WorkloadError(
            f"the text is too short for {options.num_prompts} prompts of {options.prompt_tokens} tokens; "
            "lower --num-prompts or --prompt-tokens"
        )
    return [[EOS, *block[:n]] for block, n in zip(blocks.targets.tolist(), blocks.lengths, strict=True)]


def _search(
    options: Options, rows: list[list[int]], numbers: list[int], width: int, context: Context
) -> Search:
    from meshwise.runtime.programs.search import BeamSearch, Sampler, Search

    where: dict[str, Any] = {
        "device": context.device,
        "width": width,
        "min_tokens": options.min_tokens,
        "is_fake": context.is_fake,
    }
    if options.search == "beam":
        return BeamSearch(
            rows, options.max_tokens, **where, beam=options.beam, length_penalty=options.length_penalty
        )
    sampler = None
    if options.search == "sampling":
        keys = [(options.seed, number) for number in numbers]
        sampler = Sampler(
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, keys=keys
        )
    return Search(rows, options.max_tokens, **where, sampler=sampler)


def _result(
    options: Options, found: Setting, prompts: list[list[int]], hypotheses: dict[int, list[Hypothesis]],
    model_s: float, load_s: float,
) -> dict[str, Any]:  # fmt: skip
    decoded = found.tokenizer.decode
    texts = [
        {
            "prompt": decoded(prompts[number]),
            "hypotheses": [
                {"text": decoded(h.tokens), "tokens": h.tokens, "logprob": h.logprob, "score": h.score}
                for h in hypotheses[number]
            ],
        }
        for number in sorted(hypotheses)
    ]
    num_tokens = sum(len(found[0].tokens) for found in hypotheses.values())
    return {
        "texts": texts,
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / model_s,
        "model_s": model_s,
        "load_s": load_s,
        "search": options.search,
        "dtype": found.dtype,
        "tp": found.placement.tp,
        "dp": found.placement.dp,
        "ep": found.placement.ep,
    }


def _lines(result: dict[str, Any]) -> Iterator[str]:
    for entry in result["texts"]:
        yield f"{entry['prompt']!r} -> {entry['hypotheses'][0]['text']!r}"
    yield f"{result['num_tokens']} tokens: {result['model_s']:.2f} s, {result['tokens_per_s']:.0f} tokens/s"
