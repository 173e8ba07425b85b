"""Generating text on one rank, pass by pass: the closed form of `programs.generate`.

B prompts live as K sequences each (K = 1 but for beams). The first pass takes the tokens that all prompts
have, together; each pass after it takes one column, behind what the cache holds. Every pass makes the logits
of its last token alone, and a search decides on the next column from their log-softmax; beams then take their
part of the cache along (`index_select`, all keys and values). Texts are unknown here: none ends before
`max_tokens`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from msgspec import structs

from meshwise.core.errors import WorkloadError
from meshwise.core.refusals import refuse
from meshwise.core.units import Num
from meshwise.model.gpt_config import GptConfig
from meshwise.program.expert_pass import Pass, Placement, forward, logprobs_of, model_tensors, num_slots
from meshwise.program.lifetime import Script, ops_of
from meshwise.program.op import Op, Tensor


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a rank generates: `num_prompts` B of `num_live` K sequences, columns [first, columns) in turn."""

    config: GptConfig
    placement: Placement
    num_prompts: int
    first: int
    columns: int
    num_live: int = 1
    dtype: str = "fp16"
    tp_rank: int = 0

    def __post_init__(self) -> None:
        refuse("generation", WorkloadError, of=self)

    @property
    def sequences(self) -> int:
        """B K, rows of a pass."""
        return self.num_prompts * self.num_live

    @property
    def num_passes(self) -> int:
        """Passes of every rank."""
        return self.columns - self.first

    def at(self, column: int) -> Pass:
        """The pass that column `column` is decided from."""
        past = column - 1 if column > self.first else 0
        tokens = self.sequences * (column - past)
        return Pass(
            config=self.config,
            batch=self.sequences,
            length=column - past,
            past=past,
            last_only=True,
            capacity=float(num_slots(self.config, tokens)) if self.config.num_moe_layers else 0.0,
            ep=self.placement.ep,
            tp=self.placement.tp,
            dtype=self.dtype,
            tp_rank=self.tp_rank,
        )

    @cached_property
    def passes(self) -> list[Pass]:
        """Every pass, in order."""
        return [self.at(column) for column in range(self.first, self.columns)]

    @property
    def store_shape(self) -> tuple[int, int, int, int]:
        """Shape of the keys (or the values) of one layer in the cache."""
        heads = self.config.decoder_attention_heads // self.placement.tp
        return self.sequences, heads, self.columns, self.config.head_dim

    @property
    def cache_bytes(self) -> float:
        """Bytes of the whole cache on one rank."""
        return 2 * self.config.decoder_layers * prod(self.store_shape) * self.passes[0].elem_bytes


def generation_events(of: Generation) -> list[Op]:
    """All passes, each with the decision after it."""
    s = Script(module="generate", dtype=of.dtype)
    held, cache = _held(of, s)
    origin: list[Tensor] = []
    for one in of.passes:
        before, origin = origin, _pass(of, one, s, held, cache)
        s.returns(*before)  # which beams live on is known until the next pass has decided
    s.returns(*held.values(), *origin, cache)
    return s.events


def pass_ops(of: Generation, one: Pass) -> list[Op]:
    """The stated ops of one pass, of the decision after it and of the order of the cache."""
    s = Script(module="generate", dtype=of.dtype)
    _pass(of, one, s, *_held(of, s))
    return ops_of(s.events)


def merged(ops: Iterable[Op]) -> list[Op]:
    """`ops` with alike ones as one, their counts added."""
    found: dict[tuple[object, ...], Op] = {}
    for op in ops:
        key = (op.part, op.module, op.name, op.shape, op.dtype, op.axis, op.num_params, op.cost.read_bytes)
        found[key] = structs.replace(op, count=op.count + (found[key].count if key in found else 0.0))
    return list(found.values())


def _held(of: Generation, s: Script) -> tuple[dict[str, Tensor], Tensor]:
    """What is alive throughout: the model and the state of the search; and the cache."""
    prompts, rows, columns = of.num_prompts, of.sequences, of.columns
    held = model_tensors(of.passes[0], s, columns)
    state: dict[str, tuple[tuple[Num, ...], str]] = {
        "lengths": ((prompts,), "int64"),
        "done": ((prompts,), "bool"),
        "tokens": ((rows, columns), "int64"),
        "logprob": ((rows,), "fp32"),
        "ended": ((rows, columns), "int64"),
        "num_ended": ((prompts,), "int64"),
        "ended_logprob": ((rows,), "fp32"),
        "ended_score": ((rows,), "fp32"),
    }
    held |= {name: s.new(name, *shape, dtype=dtype) for name, (shape, dtype) in state.items()}
    return held, s.new("cache", 2 * of.config.decoder_layers, *of.store_shape)


def _pass(of: Generation, one: Pass, s: Script, held: dict[str, Tensor], cache: Tensor) -> list[Tensor]:
    """One pass, the decision after it, and the cache in a new order; which beams live on."""
    logits, left = forward(one, s, held, cache)
    s.returns(*left)
    logprobs = logprobs_of(one, s, logits)
    origin = _chosen(of, s)
    s.returns(logprobs)
    if origin:
        store, count = cache.view("store", *of.store_shape), 2 * of.config.decoder_layers
        s.kernel("index_select", of.store_shape, (store, *origin), count=count, part="reorder")
    num_open = s.new("open prompts", dtype="int64")
    placed: dict[str, Any] = {"stride": float(of.placement.tp), "dtype": "int64", "part": "agreement"}
    s.collective("all_reduce", "all_reduce", (), "dp", of.placement.dp, num_open, **placed)
    return origin


# --- the choice of a token, after `runtime.programs.search` -------------------------------------


def _chosen(of: Generation, s: Script) -> list[Tensor]:
    """All totals, the best 2 K with their tokens so far, and those joined to the ones that ended."""
    prompts, live, columns = of.num_prompts, of.num_live, of.columns
    num = min(2 * live, live * of.config.vocab_size)
    named = _local(s, prompts, int64=2, bool=1)
    totals = s.new("totals", of.sequences, of.config.vocab_size, dtype="fp32")
    candidates = _local(s, prompts * num, int64=3 + columns, bool=1, fp32=2)
    joined = _local(s, prompts * (live + num), int64=columns, fp32=2)
    s.returns(*named, totals, *candidates, *joined, *_local(s, prompts * live, int64=columns + 1))
    return [s.new("origin", of.sequences, dtype="int64")] if live > 1 else []


def _local(s: Script, size: Num, **counts: int) -> list[Tensor]:
    """So many numbers of each type, `size` times, that a function names."""
    return [s.new("local", count, size, dtype=dtype) for dtype, count in counts.items()]
