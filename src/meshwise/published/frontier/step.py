"""One training step: how long, on how many devices, and whether it fits.

On tp_in x tp_out x pp x dp devices, per layer and microbatch, arithmetic, memory, and the two levels of
the network overlap, with a latency per kernel and per collective on the stream it runs on:

    steady = max(max(flop, memory) + kernels, max(inner, outer) + collectives)
    alone  = max(flop, memory) + inner + outer + the latencies that wait for each other

A stage holds L / pp layers. m microbatches keep it busy for m L/pp steady; filling and draining the
pipeline costs (pp - 1) L / (pp v) alone, v the interleaving (nothing in a zero-bubble schedule). No
step is shorter than one microbatch through all layers, L alone. The gradient reduction follows:

    step = max(m L/pp steady + (pp - 1) L/(pp v) alone, L alone + hops) + gradients

Utilization is 6 N B FLOP over what all devices could do at their peak in that time.
"""

from dataclasses import dataclass

import numpy as np

from meshwise.core.units import Num
from meshwise.published.frontier.assumptions import MAPS, WIDENING, Assumptions, Sizes
from meshwise.published.frontier.device import Device
from meshwise.published.frontier.layer import LinearLayer, gradient_reduction_s, layer_times

OPTIMIZER_BYTES = 12.0
"""fp32 weight and two Adam states per parameter, spread over the replicas."""


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """How devices share the work, but for dp; fields broadcast against each other.

    `tokens` are those of one microbatch on one device; `inner_in` and `inner_out` the ranks of the
    two tensor-parallel groups that share a domain.
    """

    tp_in: Num
    tp_out: Num
    pp: Num
    interleave: Num
    ep: Num
    tokens: Num
    inner_in: Num
    inner_out: Num


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepParts:
    """Parts of a step, and what a device has to hold: `weights` and activations per microbatch in flight."""

    microbatch_s: Num
    bubble_s: Num
    critical_s: Num
    gradient_s: Num
    weights: Num
    activation_bytes: Num


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerStreams:
    """Seconds per layer and microbatch on each stream."""

    flop_s: Num
    memory_s: Num
    inner_s: Num
    outer_s: Num
    kernel_latency_s: Num
    collective_latency_s: Num
    waiting_latency_s: Num

    @property
    def steady_s(self) -> Num:
        return np.maximum(
            np.maximum(self.flop_s, self.memory_s) + self.kernel_latency_s,
            np.maximum(self.inner_s, self.outer_s) + self.collective_latency_s,
        )

    @property
    def alone_s(self) -> Num:
        return np.maximum(self.flop_s, self.memory_s) + self.inner_s + self.outer_s + self.waiting_latency_s


def all_reduce_latency_s(run: Assumptions, ranks: Num, inner: Num) -> Num:
    """Latency [s] of an all-reduce over `ranks`, `inner` of them in each domain.

    base + 2 (inner steps + outer steps); NCCL's tree needs log2 of the ranks of a domain, one less in
    a group within one domain: 9.2 us for 8 ranks on NVLink.
    """
    domains = ranks / inner
    inner_steps = np.maximum(np.log2(inner) - (domains <= 1), 0.0)
    outer_steps = np.log2(domains) if run.hops == "tree" else 1.0 * (domains > 1)
    latency = run.base_s + 2 * (run.inner_step_s * inner_steps + run.outer_step_s * outer_steps)
    return np.where(ranks > 1, latency, 0.0)


def _local_layer(run: Assumptions, model: Sizes, split: Split) -> LinearLayer:
    sizes = {"d_in": model.width, "d_out": WIDENING * model.width}
    return LinearLayer(**sizes, tp_in=split.tp_in, tp_out=split.tp_out, elem_bytes=run.elem_bytes)


def layer_streams(device: Device, run: Assumptions, model: Sizes, split: Split) -> LayerStreams:
    # The second map is the first one turned around, so both cost the same.
    times = layer_times(
        device, _local_layer(run, model, split), split.tokens, inner_in=split.inner_in,
        inner_out=split.inner_out, experts_per_rank=run.num_experts / split.ep, pattern=run.all_reduce,
    )  # fmt: skip
    # Activations between layers: sent on to the next stage and received from it, in both directions
    # of the pass (4 times); exchanged between experts and back, likewise (8 times).
    activations = model.width * split.tokens / (split.tp_in * split.tp_out)
    stage_words = np.where(split.pp > 1, 4 * split.interleave * split.pp / model.layers, 0.0) * activations
    expert_words = 8 * (split.ep - 1) / split.ep * activations
    collectives = all_reduce_latency_s(run, split.tp_in, split.inner_in)
    collectives = collectives + all_reduce_latency_s(run, split.tp_out, split.inner_out)
    exchanged = (stage_words + expert_words) * run.elem_bytes / device.outer_bytes_per_s
    on_stream = run.sequential_maps * (run.latency == "on-stream")
    return LayerStreams(
        flop_s=MAPS * times.flop_s,
        memory_s=MAPS * times.memory_s,
        inner_s=MAPS * times.inner_s,
        outer_s=MAPS * times.outer_s + exchanged,
        kernel_latency_s=on_stream * 3 * run.kernel_s,
        collective_latency_s=on_stream * collectives,
        waiting_latency_s=run.sequential_maps * (2 * run.kernel_s + collectives),
    )


def step_parts(device: Device, run: Assumptions, model: Sizes, split: Split, dp: Num) -> StepParts:
    """The parts of a step on `dp` replicas; `dp` matters to the gradient reduction only."""
    streams = layer_streams(device, run, model, split)
    layer = _local_layer(run, model, split)
    stage_layers = model.layers / split.pp
    fill_stages = 0.0 if run.schedule == "zero-bubble" else (split.pp - 1) / split.interleave
    weights = MAPS * layer.local_weights * stage_layers * run.num_experts / split.ep
    ranks = np.maximum(dp / split.ep, 1.0)
    free_ranks = np.maximum(device.domain_ranks / (split.inner_in * split.inner_out), 1.0)
    inner = np.minimum(free_ranks, ranks)
    return StepParts(
        microbatch_s=stage_layers * streams.steady_s,
        bubble_s=fill_stages * stage_layers * streams.alone_s,
        critical_s=model.layers * streams.alone_s + 2 * (split.pp * split.interleave - 1) * run.outer_step_s,
        gradient_s=gradient_reduction_s(device, weights, ranks, inner, run.elem_bytes, run.all_reduce),
        weights=weights,
        activation_bytes=(layer.local_in + layer.local_out) * stage_layers * split.tokens * run.elem_bytes,
    )


def step_s(parts: StepParts, microbatches: Num) -> Num:
    """Seconds of a step of `microbatches`."""
    pipeline_s = microbatches * parts.microbatch_s + parts.bubble_s
    return np.maximum(pipeline_s, parts.critical_s) + parts.gradient_s


def held_bytes(run: Assumptions, parts: StepParts, split: Split, dp: Num, microbatches: Num) -> Num:
    """Bytes on a device: weights, gradients, a share of the optimizer, up to pp microbatches' activations."""
    optimizer = OPTIMIZER_BYTES / np.maximum(dp / split.ep, 1.0)
    in_flight = np.minimum(microbatches, split.pp)
    return (2 * run.elem_bytes + optimizer) * parts.weights + in_flight * parts.activation_bytes


def utilization(device: Device, run: Assumptions, model: Sizes, devices: Num, seconds: Num) -> Num:
    """6 N B over what `devices` could do at their undiminished peak in `seconds`."""
    useful_flop = 6 * model.params * model.batch_tokens
    return useful_flop * run.elem_bytes / (device.flop_per_s_8bit * devices * seconds)
