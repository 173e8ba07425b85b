"""Generate text with a mixture-of-experts GPT: token after token, with a cache of keys and values.

The prompts are dealt out to the dp ranks. All sequences of all ranks advance in step, because the experts
are spread over ranks: every step exchanges equal batches. A step takes one token of each sequence, the
prompt's as long as there is one, so prompts may differ in length; the part that all have is taken at
once. Who is done, or has no prompt, goes on beside the others with padding.

Beams decide on the next token, one of them greedily (`programs.search`). A batch of a step is small, and an
expert's capacity is a share of it: by default that share is 1 here, so that no token is dropped and a text
does not depend on its neighbours. That also makes decoding with the cache equal to decoding without it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import WorkloadError
from meshwise.core.refusals import refuse
from meshwise.program.generation import Generation, generation_events
from meshwise.program.lifetime import write_ops
from meshwise.program.tape import Tape
from meshwise.runtime.programs import program_options
from meshwise.runtime.programs.eval_lm import LanguageModelSetting, setting
from meshwise.runtime.programs.text_data import EOS, PAD, decode, encode, read_blocks

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.search import Hypothesis

SAYS_RESULT = True


Options = program_options(__name__, "language-model", "generate")


def check(options: Any, ranks: int) -> None:
    """A MeshwiseError for what does not fit, before anything starts."""
    refuse("program generate", WorkloadError, of=options)
    _setting(options, ranks)
    _prompts(options)


def estimate(options: Any, tape: Tape) -> None:
    """Write the closed form of rank `tape.rank` on `tape`: what `program.generation` states of every pass."""
    write_ops(generation_events(generation(options, tape.world_size, tape.rank)), tape)


def generation(options: Any, ranks: int, rank: int = 0) -> Generation:
    """What `options` mean for rank `rank` of `ranks`, in the words of the closed form."""
    found = _setting(options, ranks)
    prompts = _prompts(options)
    lengths = [len(prompt) for prompt in prompts]
    return Generation(
        config=found.config,
        placement=found.placement,
        num_prompts=-(-len(prompts) // found.placement.dp),
        first=min(lengths),
        columns=max(lengths) + options.max_tokens,
        num_live=options.beam,
        dtype=found.dtype,
        tp_rank=rank % found.placement.tp,
    )


def main(options: Any, context: Context) -> dict[str, Any] | None:
    """Generate on this rank; all texts, equal on each rank (None: fake tensors have none)."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from meshwise.runtime.programs import transformer_lm as lm_model
    from meshwise.runtime.programs.search import BeamSearch, advance_all

    begin_s = time.perf_counter()
    found, prompts = _setting(options, context.world_size), _prompts(options)
    of = generation(options, context.world_size)
    model, dp = lm_model.new_model(found, options.seed, context, max_positions=of.columns)
    mine = list(range(dp.index, len(prompts), dp.size))
    repeated = [0] * (of.num_prompts - len(mine))  # by who has fewer
    rows = [prompts[number] for number in mine + repeated]
    padded, lengths = [[*row, *[PAD] * (of.columns - len(row))] for row in rows], [len(row) for row in rows]
    with context.recorder.setup():
        given = (lm_model.on_device(np.array(numbers), context) for numbers in (padded, lengths))
        names = "max_tokens", "min_tokens", "beam", "length_penalty"
        search = BeamSearch(*given, **{name: getattr(options, name) for name in names})
    dist.barrier()
    load_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    with context.recorder.section("generate"), torch.no_grad():
        advance_all(model, search, first=of.first, dp=dp, is_fake=context.is_fake)
    if context.is_fake:
        return None
    texts = search.hypotheses()[: len(mine)]
    parts: list[Any] = [None] * context.world_size
    with context.recorder.setup():
        dist.all_gather_object(parts, (dict(zip(mine, texts, strict=True)), time.perf_counter() - begin_s))
    hypotheses = {number: found for part, _ in parts for number, found in part.items()}
    model_s = max(seconds for _, seconds in parts)
    result = _result(options, found, prompts, hypotheses, model_s, load_s)
    for entry in result["texts"]:
        context.say(f"{entry['prompt']!r} -> {entry['hypotheses'][0]['text']!r}")
    context.say(f"{result['num_tokens']} tokens: {model_s:.2f} s, {result['tokens_per_s']:.0f} tokens/s")
    return result


def _setting(options: Any, ranks: int) -> LanguageModelSetting:
    """The setting, with the capacity of generation, and its dispatch: small batches are copied."""
    found = setting(options, ranks)
    config = replace(found.config, use_tutel_moe=True)
    if options.capacity_fraction:
        config = replace(config, moe_eval_capacity_token_fraction=options.capacity_fraction)
    return replace(found, config=config)


def _prompts(options: Any) -> list[list[int]]:
    """The prompts as tokens, each behind an end of sentence, as texts are in training."""
    if options.prompt:
        return [[EOS, *encode(options.prompt.encode()).tolist()]]
    blocks = read_blocks(options.text, options.prompt_tokens, options.num_prompts)
    refuse("prompts of generate", WorkloadError, of=options, num=len(blocks))
    return [[EOS, *block[:n]] for block, n in zip(blocks.targets.tolist(), blocks.lengths, strict=True)]


def _result(
    options: Any, found: LanguageModelSetting, prompts: list[list[int]],
    hypotheses: dict[int, list[Hypothesis]], model_s: float, load_s: float,
) -> dict[str, Any]:  # fmt: skip
    texts = [
        {
            "prompt": decode(prompts[number]),
            "hypotheses": [{"text": decode(one.tokens)} | asdict(one) for one in hypotheses[number]],
        }
        for number in sorted(hypotheses)
    ]
    num_tokens = sum(len(best.tokens) for best, *_ in hypotheses.values())
    return {
        "texts": texts,
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / model_s,
        "model_s": model_s,
        "load_s": load_s,
        "beam": options.beam,
        **found.to_json(),
    }
