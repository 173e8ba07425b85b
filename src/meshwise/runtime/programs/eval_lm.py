"""Evaluate a mixture-of-experts GPT on text: loss, perplexity, speed, and how the router behaves.

The ranks form a mesh of dp x tp; each dp rank takes every dp-th batch of blocks, and the experts are spread
over `ep` ranks of dp, which exchange tokens twice in each MoE layer. All ranks take the same number of steps,
because of that exchange: who runs out of text repeats a batch that does not count. A batch is routed for
itself, so the loss does not depend on the number of ranks. What a pass computes stays on the device until
the end. The weights are random: what a trained model would do with more care costs the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import DataError, WorkloadError
from meshwise.program.expert_parallel import num_slots
from meshwise.program.expert_pass import evaluation, new_pass, num_passes
from meshwise.program.lifetime import write_ops
from meshwise.program.tape import Tape
from meshwise.runtime.programs import program_options
from meshwise.runtime.programs.lm_setting import LanguageModelSetting, setting
from meshwise.runtime.programs.text_data import Blocks, read_blocks, text_files

if TYPE_CHECKING:
    from torch import Tensor

    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.transformer_lm import TransformerDecoder

SAYS_RESULT = True


Options = program_options(__name__, "language-model", "eval-lm")


def check(options: Any, ranks: int) -> None:
    """A MeshwiseError for what does not fit, before anything starts."""
    setting(options, ranks)
    if not any(file.stat().st_size for file in text_files(options.text)):
        raise WorkloadError(f"{options.text} is empty; name a file or folder with text")


def estimate(options: Any, tape: Tape) -> None:
    """Write the passes of rank `tape.rank` on `tape`: what `program.expert_pass` states of them."""
    found = setting(options, tape.world_size)
    config, placement = found.config, found.placement
    num_batches = -(-len(_blocks(options, found)) // config.batch_size_valid)
    of = new_pass(config, ep=placement.ep, tp=placement.tp, dtype=found.dtype, grouped=options.grouped_gemm)
    of = replace(of, tp_rank=placement.tp_rank(tape.rank))
    write_ops(evaluation(of), tape, times=num_passes(num_batches, placement.dp, options.max_valid_steps))


def main(options: Any, context: Context) -> dict[str, Any] | None:
    """Evaluate on this rank; the figures of all ranks, equal on each (None: fake tensors have none)."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from meshwise.runtime.programs import transformer_lm as lm_model
    from meshwise.runtime.programs.tensor_parallel.exchange import all_max, all_sum

    begin_s = time.perf_counter()
    found = setting(options, context.world_size)
    shard, dp = lm_model.join(found.placement, context)
    model = lm_model.new_model(options, found, shard, context, grouped=options.grouped_gemm)
    blocks = _blocks(options, found)
    dist.barrier()
    load_s = time.perf_counter() - begin_s
    with shard.section("eval_lm"), torch.no_grad():
        totals = _evaluate(model, blocks, options, found, context)
    counted = np.array([totals.num_tokens, totals.num_blocks, totals.num_batches])
    counts = lm_model.on_device(counted, context).double()
    figures = all_sum(torch.cat([totals.nats.view(1), totals.metrics, counts]), dp)
    model_us = all_max(lm_model.on_device(np.array([round(totals.model_s * 1e6)]), context), dp)
    if context.is_fake:
        return None
    result = _result(found, figures.tolist(), model_us.item() / 1e6, load_s)
    for line in _lines(result):
        context.say(line)
    return result


@dataclass(slots=True, eq=False)
class Totals:
    """What this rank has counted so far; tensors stay on the device.

    `nats` and `metrics` (the routing metrics) are sums over its batches, the latter over layers too.
    """

    nats: Tensor
    metrics: Tensor
    num_tokens: int = 0
    num_blocks: int = 0
    num_batches: int = 0
    model_s: float = 0.0


def _blocks(options: Any, found: LanguageModelSetting) -> Blocks:
    """The blocks to evaluate."""
    return read_blocks(options.text, found.config.tokens_per_sample, options.max_blocks)


def _evaluate(
    model: TransformerDecoder, blocks: Blocks, options: Any, found: LanguageModelSetting,
    context: Context,
) -> Totals:  # fmt: skip
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
        number = step * dp + context.rank // found.placement.tp
        if number < num_batches:
            _pass(model, blocks.batch(number, size), totals, context)
        else:  # so that the other ranks can go on
            _pass(model, blocks.batch(0, size), None, context)
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    totals.model_s = time.perf_counter() - begin_s
    return totals


def _pass(model: TransformerDecoder, batch: Blocks, totals: Totals | None, context: Context) -> None:
    """One batch through the model, into `totals`; None: it does not count."""
    import torch

    from meshwise.runtime.programs import transformer_lm as lm_model

    targets = lm_model.on_device(batch.targets, context)
    inputs = lm_model.on_device(batch.inputs, context)
    output = model(inputs)
    logprobs, routing = model.embed_tokens.target_logprobs(output.logits, targets), output.metrics
    del inputs, output
    if totals is None:
        return
    totals.nats -= logprobs.sum(dtype=torch.float64)
    for layer_metrics in routing:
        totals.metrics += layer_metrics
    totals.num_tokens += sum(batch.lengths)
    totals.num_blocks += sum(length > 0 for length in batch.lengths)
    totals.num_batches += 1


def _result(
    found: LanguageModelSetting, figures: list[float], model_s: float, load_s: float
) -> dict[str, Any]:
    from meshwise.runtime.programs.moe import metric_names

    config, placement = found.config, found.placement
    names = metric_names(config.top_k) if config.num_moe_layers else []
    nats, num_tokens, num_blocks, num_batches = figures[0], *figures[-3:]
    loss = nats / max(num_tokens, 1) / math.log(2)
    if not math.isfinite(loss):
        raise DataError(f"the loss is {loss}; use another dtype")
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
    }


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"loss (base 2): {result['loss']:.4f}, perplexity: {result['perplexity']:.2f}"
    yield (
        f"{result['num_tokens']} tokens in {result['num_blocks']} blocks: {result['model_s']:.2f} s, "
        f"{result['tokens_per_s']:.0f} tokens/s"
    )
    for name, value in result["routing"].items():
        yield f"{name}: {value:.4g}"
