"""Evaluate a mixture-of-experts GPT on text: loss, perplexity, speed, and how the router behaves.

The ranks form a mesh of dp x tp; each dp rank takes every dp-th batch of blocks, and the experts are spread
over `ep` ranks of dp, which exchange tokens twice in each MoE layer. All ranks take the same number of steps,
because of that exchange: who runs out of text repeats a batch that does not count. A batch is routed for
itself, so the loss does not depend on the number of ranks.

What a pass computes stays on the device until the end. `--token-loop` brings it to the host one number at a
time instead, as fairseq's eval_lm does for its word statistics: 4 T - 1 reads a block of T tokens.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from meshwise.core.errors import DataError, WorkloadError
from meshwise.core.files import check_writable, write_text
from meshwise.program.expert_parallel import num_slots
from meshwise.program.expert_pass import evaluation
from meshwise.program.lifetime import write_ops
from meshwise.program.tape import Tape
from meshwise.published.moe_inference import new_pass, num_passes
from meshwise.runtime.programs.lm_setting import ModelOptions, Setting, setting
from meshwise.runtime.programs.text_data import Blocks, read_blocks, text_files
from meshwise.runtime.programs.word_probs import WordProbs, word_document, word_probs

if TYPE_CHECKING:
    from torch import Tensor

    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.transformer_lm import TransformerDecoder

MOST_LOSS = 1000.0
"""Bits a token, far above that of any guess; two to its power is still a number."""
SAYS_RESULT = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ModelOptions):
    """What the command line may choose."""

    max_blocks: Annotated[int, Meta(ge=0, description="blocks of the text to take (0: all)")] = 64
    max_valid_steps: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="last step of a rank, from 0 as fairseq counts: 4 is five steps"),
    ] = None
    grouped_gemm: Annotated[bool, Meta(description="all experts of a rank in one batched GEMM")] = False
    save_checkpoint: Annotated[str, Meta(description="folder to write the weights to")] = ""
    train_steps: Annotated[int, Meta(ge=0, description="training steps first, on the text that follows")] = 0
    train_batches: Annotated[int, Meta(ge=1, description="batches of one training step, of all ranks")] = 8
    learning_rate: Annotated[float, Meta(gt=0, description="of Adam, in training")] = 1e-3
    gate_loss_weight: Annotated[float, Meta(ge=0, description="of load balancing, in training")] = 0.01
    word_probs: Annotated[str, Meta(description="file for log-probabilities and word statistics")] = ""
    token_loop: Annotated[bool, Meta(description="read the tokens one by one, as fairseq does")] = False


def check(options: Options, ranks: int) -> None:
    """A MeshwiseError for what does not fit, before anything starts."""
    found = setting(options, ranks)
    if not any(file.stat().st_size for file in text_files(options.text)):
        raise WorkloadError(f"{options.text} is empty; name a file or folder with text")
    if options.train_steps and found.dtype == "fp16":
        raise WorkloadError("training in fp16 needs loss scaling; use --dtype bf16 or fp32")
    if options.train_steps and options.train_batches % found.placement.dp:
        raise WorkloadError(
            f"{options.train_batches} training batches do not divide by {found.placement.dp} data-parallel "
            "ranks; change --train-batches"
        )
    if options.word_probs:
        check_writable(Path(options.word_probs))
    if options.save_checkpoint and Path(options.save_checkpoint).exists():
        raise DataError(f"checkpoint {options.save_checkpoint} exists; name another folder or remove it")
    if options.token_loop and not options.word_probs:
        raise WorkloadError("--token-loop reads what --word-probs writes; give --word-probs FILE too")


def estimate(options: Options, tape: Tape) -> None:
    """Write the passes of rank `tape.rank` on `tape`: what `program.expert_pass` states of them."""
    found = setting(options, tape.world_size)
    config, placement = found.config, found.placement
    num_batches = -(-len(_blocks(options, found)[0]) // config.batch_size_valid)
    of = new_pass(config, ep=placement.ep, tp=placement.tp, dtype=found.dtype, grouped=options.grouped_gemm)
    of = replace(of, tp_rank=placement.tp_rank(tape.rank))
    write_ops(evaluation(of), tape, times=num_passes(num_batches, placement.dp, options.max_valid_steps))


def main(options: Options, context: Context) -> dict[str, Any] | None:
    """Evaluate on this rank; the figures of all ranks, equal on each (None: fake tensors have none)."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from meshwise.runtime.programs import lm_model

    begin_s = time.perf_counter()
    found = setting(options, context.world_size)
    shard, groups = lm_model.join(found.placement, context)
    evaluated, behind = _blocks(options, found)
    model = lm_model.new_model(
        found, shard, context, folder=options.checkpoint, seed=options.seed, grouped=options.grouped_gemm
    )
    train_losses: list[float] = []
    if options.train_steps:
        train_losses = lm_model.train(
            model,
            behind if len(behind) else evaluated,
            groups,
            found.placement,
            context,
            steps=options.train_steps,
            batches=options.train_batches,
            learning_rate=options.learning_rate,
            gate_loss_weight=options.gate_loss_weight,
            seed=options.seed,
        )
    model.eval()
    if options.save_checkpoint:
        lm_model.save_checkpoint(model, found.placement, context, options.save_checkpoint)
    dist.barrier()
    load_s = time.perf_counter() - begin_s
    with shard.section("eval_lm"), torch.no_grad():
        totals = _evaluate(model, evaluated, options, found, context)
    counted = np.array([totals.num_tokens, totals.num_blocks, totals.num_batches])
    counts = lm_model.on_device(counted, context).double()
    figures = torch.cat([totals.nats.view(1), totals.metrics, counts])
    model_us = lm_model.on_device(np.array([totals.model_s * 1e6], dtype=np.int64), context)
    if groups.dp is not None:
        dist.all_reduce(figures, group=groups.dp)
        dist.all_reduce(model_us, op=dist.ReduceOp.MAX, group=groups.dp)
    if context.is_fake:
        return None
    words = _gather_words(totals.words, context) if options.word_probs else []
    result = _result(options, found, figures.tolist(), model_us.item() / 1e6, load_s, train_losses)
    for line in _lines(result):
        context.say(line)
    if options.word_probs and context.rank == context.root:
        write_text(Path(options.word_probs), json.dumps(word_document(words, found.tokenizer)))
    return result


@dataclass(slots=True, eq=False)
class Totals:
    """What this rank has counted so far; tensors stay on the device.

    `nats` and `metrics` (the routing metrics) are sums over its batches, the latter over layers too. `words`
    are those of each block; `scored` are batches whose log-probabilities wait to be fetched, by first block.
    """

    nats: Tensor
    metrics: Tensor
    num_tokens: int = 0
    num_blocks: int = 0
    num_batches: int = 0
    model_s: float = 0.0
    words: list[WordProbs] = field(default_factory=list)
    scored: list[tuple[int, Blocks, Tensor]] = field(default_factory=list)


def _blocks(options: Options, found: Setting) -> tuple[Blocks, Blocks]:
    """The blocks to evaluate, and those behind them, to train on."""
    size = found.config.batch_size_valid
    num_train = options.train_steps * options.train_batches * size
    most = options.max_blocks + num_train if options.max_blocks else 0
    blocks = read_blocks(options.text, found.tokenizer, found.config.tokens_per_sample, most)
    return blocks.split(options.max_blocks or len(blocks))


def _evaluate(
    model: TransformerDecoder, blocks: Blocks, options: Options, found: Setting, context: Context
) -> Totals:
    import torch

    from meshwise.runtime.programs.moe import metric_names

    size, dp = found.config.batch_size_valid, found.placement.dp
    num_batches = -(-len(blocks) // size)
    double = {"dtype": torch.float64, "device": context.device}
    num_metrics = len(metric_names(found.config.top_k))
    with context.recorder.setup():
        totals = Totals(torch.zeros((), **double), torch.zeros(num_metrics, **double))
    begin_s = time.perf_counter()
    for step in range(num_passes(num_batches, dp, options.max_valid_steps)):
        number = step * dp + found.placement.dp_rank(context.rank)
        if number < num_batches:
            totals.num_blocks += min(size, len(blocks) - number * size)
            _pass(model, number, blocks.batch(number, size), totals, options, context)
        else:
            _pass(model, 0, blocks.batch(0, size), None, options, context)
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    for first, batch, logprobs in totals.scored:
        totals.words += _words_at_once(first, batch, logprobs)
    totals.model_s = time.perf_counter() - begin_s
    return totals


def _pass(
    model: TransformerDecoder, number: int, batch: Blocks, totals: Totals | None, options: Options,
    context: Context,
) -> None:  # fmt: skip
    """One batch through the model, into `totals`; None: only so that the other ranks can go on."""
    import torch

    from meshwise.runtime.programs import lm_model

    targets = lm_model.on_device(batch.targets, context)
    generator = lm_model.draws(model.config, context, options.seed, number)
    logprobs, routing = _scored(model, lm_model.on_device(batch.inputs, context), targets, generator)
    if totals is None:
        return
    totals.nats -= logprobs.sum(dtype=torch.float64)
    for layer_metrics in routing:
        totals.metrics += layer_metrics
    totals.num_tokens += batch.num_tokens
    totals.num_batches += 1
    first = number * len(batch)
    if options.token_loop:
        totals.words += _words_one_by_one(first, batch, targets, logprobs)
    elif options.word_probs:
        totals.scored.append((first, batch, logprobs))


def _scored(
    model: TransformerDecoder, inputs: Tensor, targets: Tensor, generator: Any
) -> tuple[Tensor, list[Tensor]]:
    """One pass: the log-probability of each target, and each MoE layer's routing metrics."""
    output = model(inputs, generator=generator)
    return model.embed_tokens.target_logprobs(output.logits, targets), output.metrics


def _words_at_once(first: int, batch: Blocks, logprobs: Tensor) -> list[WordProbs]:
    """The words of a batch, its log-probabilities fetched in one copy."""
    rows = logprobs.tolist()
    lengths = batch.lengths
    return [
        word_probs(first + i, batch.targets[i, :n].tolist(), rows[i][:n], lambda number: number)
        for i, n in enumerate(lengths)
        if n
    ]


def _words_one_by_one(first: int, batch: Blocks, targets: Tensor, logprobs: Tensor) -> list[WordProbs]:
    """The same, with a copy from the device for every number."""
    return [
        word_probs(first + i, targets[i, :n], logprobs[i, :n], lambda scalar: scalar.item())
        for i, n in enumerate(batch.lengths)
        if n
    ]


def _gather_words(mine: list[WordProbs], context: Context) -> list[WordProbs]:
    """All ranks' words in the order of the text, on the root (of a tp group, one has them all)."""
    import torch.distributed as dist

    gathered: list[Any] | None = [None] * context.world_size if context.rank == context.root else None
    dist.gather_object(mine, gathered, dst=context.root)
    by_block = {entry.block: entry for part in gathered or [] for entry in part}
    return [by_block[block] for block in sorted(by_block)]


def _result(
    options: Options, found: Setting, figures: list[float], model_s: float, load_s: float, losses: list[float]
) -> dict[str, Any]:
    from meshwise.runtime.programs.moe import metric_names

    config, placement = found.config, found.placement
    names = metric_names(config.top_k) if config.num_moe_layers else []
    nats, num_tokens, num_blocks, num_batches = figures[0], *figures[-3:]
    loss = nats / max(num_tokens, 1) / math.log(2)
    if not loss < MOST_LOSS:
        raise DataError(f"the loss is {loss}; use another checkpoint or dtype, or a smaller --learning-rate")
    times = num_batches * config.num_moe_layers
    return {
        "loss": loss,
        "perplexity": 2.0**loss,
        "num_tokens": int(num_tokens),
        "num_blocks": int(num_blocks),
        "num_batches": int(num_batches),
        "tokens_per_s": num_tokens / model_s,
        "model_s": model_s,
        "load_s": load_s,
        "dtype": found.dtype,
        "tp": placement.tp,
        "dp": placement.dp,
        "ep": placement.ep,
        "dispatch": "sparse" if config.use_tutel_moe else "dense",
        "capacity": num_slots(config) if names else None,
        "routing": {name: total / times for name, total in zip(names, figures[1:-3], strict=False)},
        "train_loss": [nats / math.log(2) for nats in losses],
    }


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"loss (base 2): {result['loss']:.4f}, perplexity: {result['perplexity']:.2f}"
    yield (
        f"{result['num_tokens']} tokens in {result['num_blocks']} blocks: {result['model_s']:.2f} s, "
        f"{result['tokens_per_s']:.0f} tokens/s"
    )
    for name, value in result["routing"].items():
        yield f"{name}: {value:.4g}"
