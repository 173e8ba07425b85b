"""Generation: the cache changes nothing, and each search finds what it should."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from closed_form import check_estimate_is_the_dry_run
from data_tables import table
from meshwise.model.gpt_config import GptConfig
from meshwise.program.generation import generation_events
from meshwise.program.lifetime import peak_bytes
from meshwise.runtime.programs import find_program
from meshwise.runtime.programs.generate import Options, check, generation
from meshwise.runtime.programs.search import BeamSearch, advance_all, next_logprobs
from meshwise.runtime.programs.text_data import EOS, NUM_SPECIAL, PAD
from meshwise.runtime.programs.transformer_lm import TransformerDecoder, init_parameters
from meshwise.runtime.start import run_rank
from ranks import Ranks, compared, run_bare

pytestmark = pytest.mark.slow
NUM_RANKS = 2


@cache
def model(vocab: int = 9, seed: int = 0) -> TransformerDecoder:
    """A small model in which no expert is ever full."""
    config = GptConfig(
        decoder_layers=2, decoder_embed_dim=8, decoder_ffn_embed_dim=16, decoder_attention_heads=2,
        tokens_per_sample=16, moe_freq=2, moe_expert_count=4, vocab_size=vocab, use_tutel_moe=True,
        moe_eval_capacity_token_fraction=1.0,
    )  # fmt: skip
    made = TransformerDecoder(config, max_positions=32).eval()
    init_parameters(made, seed)
    return made


def search_of(prompts: list[list[int]], max_tokens: int, **options: Any) -> BeamSearch:
    width = max(map(len, prompts)) + max_tokens
    tokens = torch.tensor([[*prompt, *[PAD] * (width - len(prompt))] for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return BeamSearch(tokens, lengths, max_tokens=max_tokens, **options)


def run(made: TransformerDecoder, search: BeamSearch, first: int, *, cached: bool = True) -> BeamSearch:
    """With a cache as the program does it, or all tokens anew for each column."""
    with torch.no_grad():
        if cached:
            advance_all(made, search, first=first)
        for column in range(first, search.tokens.shape[2]):
            if not search.done.all():
                logprobs = next_logprobs(made, search.tokens[:, :, :column].flatten(0, 1), None)
                search.advance(column, logprobs.unflatten(0, search.tokens.shape[:2]))
    return search


prompts_of = st.lists(
    st.lists(st.integers(NUM_SPECIAL, 8), min_size=0, max_size=3).map(lambda words: [EOS, *words]),
    min_size=1,
    max_size=3,
)


@given(prompts=prompts_of, seed=st.integers(0, 3), beam=st.sampled_from([1, 2]))
@settings(max_examples=8)
def test_texts_do_not_depend_on_the_cache_or_on_neighbours(
    prompts: list[list[int]], seed: int, beam: int
) -> None:
    made = model(seed=seed)
    together = run(made, search_of(prompts, 4, beam=beam), min(map(len, prompts))).hypotheses()
    for prompt, found in zip(prompts, together, strict=True):
        alone = run(made, search_of([prompt], 4, beam=beam), len(prompt), cached=False).hypotheses()[0]
        assert [entry.tokens for entry in found] == [entry.tokens for entry in alone]
        assert [entry.score for entry in found] == pytest.approx([entry.score for entry in alone], abs=1e-4)


def every_text(vocab: int, max_tokens: int) -> Iterator[list[int]]:
    """All texts of at most `max_tokens` tokens that end, or are that long."""
    words = range(NUM_SPECIAL, vocab)
    for length in range(max_tokens):
        for text in product(words, repeat=length):
            yield [*text, EOS]
    for text in product(words, repeat=max_tokens):
        yield list(text)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_wide_beam_search_is_exhaustive(penalty: float) -> None:
    """With as many beams as there are texts, beam search finds the best of all, in order."""
    vocab, max_tokens, prompt = 7, 3, [EOS, 5]
    made, texts = model(vocab, seed=4), list(every_text(7, 3))
    scored = []
    with torch.no_grad():
        for text in texts:
            logits = made(torch.tensor([prompt + text])).logits[0].log_softmax(dim=-1)
            logprob = sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(text))
            scored.append((logprob / len(text) ** penalty, text))
    scored.sort(reverse=True)
    search = search_of([prompt], max_tokens, beam=len(texts), length_penalty=penalty)
    found = run(made, search, len(prompt)).hypotheses()[0]
    assert len(found) == len(texts)
    assert [entry.tokens for entry in found[:10]] == [text for _, text in scored[:10]]
    assert [entry.score for entry in found] == pytest.approx([score for score, _ in scored], abs=1e-4)


# --- the closed form is the program --------------------------------------------------------------

TINY = "decoder_layers=4,moe_expert_count=8,decoder_embed_dim=32,decoder_ffn_embed_dim=64"


@pytest.mark.parametrize(("ranks", "override", "options"), table("tables")["generate"]["dry_runs"])
def test_estimate_is_the_dry_run(ranks: int, override: str, options: dict[str, Any]) -> None:
    """Every stated row, every FLOP and collective, and the peak, to the last byte."""
    sizes: dict[str, Any] = {"prompt_tokens": 7, "max_tokens": 5} | options
    chosen = Options(override=f"{TINY},{override}".rstrip(","), **sizes)
    check_estimate_is_the_dry_run("generate", chosen, ranks)


# --- over ranks ------------------------------------------------------------------------------------


@pytest.fixture
def generate(pool: Ranks) -> Callable[..., dict[str, Any]]:
    """Run the program on two ranks; the document of rank 0, once both gave the same texts."""
    small = "decoder_layers=2,moe_expert_count=4,decoder_embed_dim=16,decoder_ffn_embed_dim=32"
    base = Options(override=small, num_prompts=3, prompt_tokens=5, max_tokens=4)

    def call(**options: Any) -> dict[str, Any]:
        chosen = replace(base, **options)
        check(chosen, 2)
        first, second = pool.call(run_bare, "generate", chosen)
        assert first.result["texts"] == second.result["texts"]
        return dict(first.result)

    return call


@pytest.mark.parametrize("beam", [1, 2])
def test_texts_do_not_depend_on_the_world(generate: Callable[..., dict[str, Any]], beam: int) -> None:
    spread = generate(beam=beam)
    for other in ({"tp": 2}, {"ep": 1}):
        found = generate(beam=beam, **other)
        for mine, theirs in zip(spread["texts"], found["texts"], strict=True):
            assert mine["prompt"] == theirs["prompt"]
            for one, same in zip(mine["hypotheses"], theirs["hypotheses"], strict=True):
                assert one["tokens"] == same["tokens"]
                assert one["score"] == pytest.approx(same["score"], rel=1e-4)
    assert spread["num_tokens"] == sum(len(text["hypotheses"][0]["tokens"]) for text in spread["texts"])


@pytest.mark.parametrize("options", [{"beam": 2}, {"tp": 2, "override": f"{TINY},vocab_size=302"}])
def test_real_run_holds_what_the_closed_form_says(options: dict[str, Any], pool: Ranks) -> None:
    """The three instruments agree on every number, and the run on the peak."""
    sizes: dict[str, Any] = {"override": TINY, "prompt_tokens": 5, "max_tokens": 3, "min_tokens": 3} | options
    chosen = Options(**sizes)
    found = compared(pool, find_program("generate"), chosen, ranks=2)
    outcome = pool.call(run_rank, "generate", chosen, 0, True)[0]
    assert found.agree, found.differences()[:3]
    assert found.rows[-1].values["estimate"] == outcome.peak_bytes
    assert outcome.peak_bytes == peak_bytes(generation_events(generation(chosen, ranks=2)))


def test_a_prompt_of_ones_own(generate: Callable[..., dict[str, Any]]) -> None:
    found = generate(prompt="def main(", max_tokens=2)
    assert [entry["prompt"] for entry in found["texts"]] == ["def main("]
