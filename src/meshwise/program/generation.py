"""Generating text on one rank, pass by pass: the closed form of `programs.generate`.

B prompts live as K sequences each (K = 1 but for beams). The first pass takes the tokens that all prompts
have, together; each pass after it takes one column, behind what the cache holds, and a pass without a cache
takes all columns so far. Every pass makes the logits of its last token alone, and a search decides on the
next column from their log-softmax; beams then take their part of the cache along (`index_select`, all keys
and values). Texts are unknown here: none ends before `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from meshwise.cost.op import Cost
from meshwise.model.gpt_config import GptConfig
from meshwise.program.expert_parallel import Placement, num_slots
from meshwise.program.expert_pass import (
    Pass,
    Row,
    kernel,
    model_rows,
    occurring,
    reduced_numbers,
    shifted_logits,
)
from meshwise.program.op import Op

SECTION = "generate"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a rank generates: `num_prompts` B of `num_live` K sequences, columns [first, columns) one by one.

    `search` is greedy, sampling or beam; `cached`: with a cache of keys and values. `max_tokens` come after
    each prompt.
    """

    config: GptConfig
    placement: Placement
    num_prompts: int
    first: int
    columns: int
    max_tokens: int
    num_live: int = 1
    search: str = "greedy"
    cached: bool = True
    dtype: str = "fp16"
    tp_rank: int = 0

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
        past = column - 1 if self.cached and column > self.first else 0
        tokens = self.sequences * (column - past)
        experts = self.config.num_moe_layers
        return Pass(
            config=self.config,
            batch=self.sequences,
            length=column - past,
            past=past,
            cached=self.columns if self.cached else 0,
            last_only=True,
            capacity=float(num_slots(self.config, tokens)) if experts else 0.0,
            ep=self.placement.ep,
            tp=self.placement.tp,
            dtype=self.dtype,
            tp_rank=self.tp_rank,
            section=SECTION,
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
    def store_bytes(self) -> float:
        """Bytes of the keys (or the values) of one layer."""
        return prod(self.store_shape) * self.passes[0].elem_bytes if self.cached else 0.0

    @property
    def cache_bytes(self) -> float:
        """Bytes of the whole cache on one rank."""
        return 2 * self.config.decoder_layers * self.store_bytes


def pass_rows(of: Generation, one: Pass) -> list[Row]:
    """The stated ops of one pass, of the decision after it and of the order of the cache."""
    return occurring([*model_rows(one), *_logprobs(one), *_reordered(of, one), _agreed(of)])


def generation_rows(of: Generation) -> list[Row]:
    """The stated ops of all passes."""
    return merged(row for one in of.passes for row in pass_rows(of, one))


def merged(rows: Iterable[Row]) -> list[Row]:
    """`rows` with alike ones as one, their counts added."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        op = row.op
        key = (row.role, op.module, op.name, op.shape, op.dtype, op.axis, op.num_params)
        before = found.get(key)
        count = op.count + (0 if before is None else before.op.count)
        found[key] = Row(row.role, replace(op, count=count))
    return list(found.values())


def _logprobs(one: Pass) -> Iterator[Row]:
    """The log-softmax of the last token; over tp from two numbers a row, then whole rows on each rank."""
    shape = (one.batch, one.local_words)
    casts = 0 if one.dtype == "fp32" else 1
    yield kernel(SECTION, "loss", "_to_copy", shape, "fp32", one.elem_bytes, 4.0, casts)
    if one.tp == 1:
        yield kernel(SECTION, "loss", "_log_softmax", shape, "fp32", 4.0, 4.0)
        return
    yield from shifted_logits(one, shape, times=2)
    yield reduced_numbers(one, (one.batch, 1), 2)
    gathered = (one.tp, *shape)
    op = Op(module=SECTION, name="all_gather", phase="forward", kind="collective", collective="all_gather",
            shape=gathered, axis="tp", group_size=one.tp, dtype="fp32",
            payload_bytes=4.0 * prod(gathered))  # fmt: skip
    yield Row("tensor_parallel", op)


def _reordered(of: Generation, one: Pass) -> Iterator[Row]:
    """Keys and values of all layers, copied in the order of the beams that live on."""
    if of.search != "beam" or not of.cached:
        return
    cost = Cost(0.0, of.store_bytes + 8.0 * of.sequences, of.store_bytes)
    op = Op(module=SECTION, name="index_select", phase="forward", kind="kernel", shape=of.store_shape,
            dtype=one.dtype, cost=cost, count=2 * of.config.decoder_layers)  # fmt: skip
    yield Row("reorder", op)


def _agreed(of: Generation) -> Row:
    """The ranks of dp agree on how many prompts are open."""
    op = Op(module=SECTION, name="all_reduce", phase="forward", kind="collective", collective="all_reduce",
            axis="dp", group_size=of.placement.dp, stride=float(of.placement.tp), dtype="int64",
            payload_bytes=8.0)  # fmt: skip
    return Row("agreement", op)
