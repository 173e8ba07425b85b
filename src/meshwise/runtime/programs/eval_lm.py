"""Evaluate a mixture-of-experts GPT on text: loss, perplexity, speed, and how the router behaves.

The ranks form a mesh of dp x tp; each dp rank takes every dp-th batch of blocks, and the experts are spread
over `ep` ranks of dp, which exchange tokens twice in each MoE layer. All ranks take the same number of steps,
because of that exchange: who runs out of text takes a batch of padding. A batch is routed for
itself, so the loss does not depend on the number of ranks. What a pass computes stays on the device until
the end. The weights are random: what a trained model would do with more care costs the same.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import DataError, WorkloadError
from meshwise.model.gpt_config import GptConfig, find_gpt_config, with_vocab
from meshwise.program.expert_pass import Placement, check_tp, evaluation, new_pass, num_passes, place
from meshwise.program.lifetime import write_ops
from meshwise.program.tape import Tape
from meshwise.runtime.programs import program_options
from meshwise.runtime.programs.text_data import NUM_TOKENS, Blocks, read_blocks, text_files

if TYPE_CHECKING:
    from torch import Tensor

    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.transformer_lm import TransformerDecoder


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModelSetting:
    """What the options mean: the model, where it lies, and its element type."""

    config: GptConfig
    placement: Placement
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """What a program's result says of it."""
        return {"dtype": self.dtype, **{name: getattr(self.placement, name) for name in ("tp", "dp", "ep")}}


def setting(options: Any, ranks: int) -> LanguageModelSetting:
    """The setting of `options` on `ranks`; a MeshwiseError if it has none."""
    config = with_vocab(find_gpt_config(options.config, options.override), NUM_TOKENS)
    num_experts = config.moe_expert_count if config.num_moe_layers else 0
    placement = place(ranks, num_experts, tp=options.tp, ep=options.ep or None)
    check_tp(config, options.tp)
    return LanguageModelSetting(config, placement, options.dtype or ("fp16" if config.fp16 else "fp32"))


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
    of = new_pass(
        config, ep=placement.ep, tp=placement.tp, tp_rank=tape.rank % placement.tp, dtype=found.dtype,
        grouped=options.grouped_gemm,
    )  # fmt: skip
    write_ops(evaluation(of), tape, times=num_passes(num_batches, placement.dp, options.max_valid_steps))


def main(options: Any, context: Context) -> dict[str, Any] | None:
    """Evaluate on this rank; the figures of all ranks, equal on each (None: fake tensors have none)."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from meshwise.runtime.programs import transformer_lm as lm_model
    from meshwise.runtime.programs.moe import metric_names
    from meshwise.runtime.programs.tensor_parallel.exchange import all_max, all_sum

    begin_s = time.perf_counter()
    found = setting(options, context.world_size)
    model, dp = lm_model.new_model(found, options.seed, context, grouped=options.grouped_gemm)
    blocks, size = _blocks(options, found), found.config.batch_size_valid
    num_batches = -(-len(blocks) // size)
    num_steps = num_passes(num_batches, dp.size, options.max_valid_steps)
    with context.recorder.setup():  # nats and routing metrics, in sum over batches and layers
        totals = context.empty(1 + len(metric_names(found.config.top_k)), dtype=torch.float64).zero_()
    dist.barrier()
    load_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    with context.recorder.section("eval_lm"), torch.no_grad():
        for number in range(dp.index, num_steps * dp.size, dp.size):
            counts = number < num_batches  # behind them is padding, so that the other ranks can go on
            _pass(model, blocks.batch(number, size), totals, context, counts=counts)
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    own_us = np.array([round((time.perf_counter() - begin_s) * 1e6)])
    model_us = all_max(lm_model.on_device(own_us, context), dp)
    all_sum(totals, dp)
    if context.is_fake:
        return None
    num_batches = min(num_batches, num_steps * dp.size)
    lengths, model_s = blocks.lengths[: num_batches * size], model_us.item() / 1e6
    result = _result(found, lengths, num_batches, totals.tolist(), model_s) | {"load_s": load_s}
    context.say(f"loss (base 2): {result['loss']:.4f}, perplexity: {result['perplexity']:.2f}")
    context.say(
        f"{result['num_tokens']} tokens in {result['num_blocks']} blocks: {result['model_s']:.2f} s, "
        f"{result['tokens_per_s']:.0f} tokens/s"
    )
    for name, value in result["routing"].items():
        context.say(f"{name}: {value:.4g}")
    return result


def _blocks(options: Any, found: LanguageModelSetting) -> Blocks:
    """The blocks to evaluate."""
    return read_blocks(options.text, found.config.tokens_per_sample, options.max_blocks)


def _pass(
    model: TransformerDecoder, batch: Blocks, totals: Tensor, context: Context, *, counts: bool
) -> None:
    """One batch through the model, into `totals` (padding has no loss; its routing `counts` as little)."""
    import torch

    from meshwise.runtime.programs import transformer_lm as lm_model

    targets = lm_model.on_device(batch.targets, context)
    inputs = lm_model.on_device(batch.inputs, context)
    output = model(inputs)
    logprobs, routing = model.embed_tokens.target_logprobs(output.logits, targets), output.metrics
    del inputs, output
    nats, metrics = totals[0], totals[1:]
    nats -= logprobs.sum(dtype=torch.float64)
    for layer_metrics in routing if counts else ():
        metrics += layer_metrics


def _result(
    found: LanguageModelSetting, lengths: list[int], num_batches: int, totals: list[float], model_s: float
) -> dict[str, Any]:
    """What is said of the `totals` of batches with blocks of these `lengths`."""
    from meshwise.runtime.programs.moe import metric_names

    config = found.config
    names = metric_names(config.top_k) if config.num_moe_layers else []
    nats, *metrics = totals
    loss = nats / max(sum(lengths), 1) / math.log(2)
    if not math.isfinite(loss):
        raise DataError(f"the loss is {loss}; use another dtype")
    times = num_batches * config.num_moe_layers
    return {
        "loss": loss,
        "perplexity": 2.0**loss,
        "num_tokens": sum(lengths),
        "num_blocks": len(lengths),
        "num_batches": num_batches,
        "tokens_per_s": sum(lengths) / model_s,
        "model_s": model_s,
        **found.to_json(),
        "dispatch": "sparse" if config.use_tutel_moe else "dense",
        "capacity": int(new_pass(config).capacity) if names else None,
        "routing": {name: total / times for name, total in zip(names, metrics, strict=False)},
    }
