"""One linear layer, one microbatch, forward and backward: what binds it.

Notation: a map of d_in x d_out is cut tp_in x tp_out ways and replicated dp ways. A device holds
x = d_in / tp_in by y = d_out / tp_out, so n = x y weights, and sees t = batch / dp tokens. Words are
counted first and turned into seconds last.

- Work: 6 n t FLOP (forward, weight gradient, input gradient: 2 n t each).
- Network: the forward pass all-reduces y t words over tp_in ranks, the backward pass x t over tp_out.
- Memory: 2 n words of weights (forward, backward), 2 n of gradients (read, write), x t of inputs
  reloaded in the backward pass, and once more every word that the network moves.

Movement and arithmetic overlap, so the layer takes the longest of the three. Attention, pointwise
operations and divisibility are left out. At the end of a batch the gradients are all-reduced over
dp ranks, which nothing overlaps.

An all-reduce of v words over p ranks puts `pattern` words through a rank's port, sent plus received:

- `multicast`: 3 v (p-1)/p. Send p-1 parts, receive p-1 copies of one's own part, multicast the sum
  for free, receive the p-1 other parts.
- `ring`: 4 v (p-1)/p, twice (p-1)/p in each direction (bandwidth-optimal without a multicast).
- `in-network`: 2 v, the switches add.

When the group spans domains, the sum is formed inside each domain, then between them, then spread:
`inner` ranks of the group share a domain, and each carries 1/inner of the words outward.

Source: the notebook of Erdil and Schneider-Joseph, "Data movement limits to frontier model
training", arXiv 2411.01137, for one level and `multicast`; the second level is ours.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.units import Num, require_positive
from meshwise.published.frontier.device import Device, finite_or_none

PATTERNS = {"multicast": 3.0, "ring": 4.0, "in-network": 2.0}
"""Words through a port per word all-reduced over many ranks."""


def all_reduce_words(words: Num, ranks: Num, pattern: str = "multicast") -> Num:
    """Words sent plus received by one rank in an all-reduce of `words` over `ranks` ranks."""
    if pattern == "in-network":
        return np.where(np.asarray(ranks) > 1, PATTERNS[pattern] * words, 0.0)
    return PATTERNS[pattern] * (ranks - 1) * words / ranks


def all_reduce_words_by_level(
    words: Num, ranks: Num, inner: Num, pattern: str = "multicast"
) -> tuple[Num, Num]:
    """Words of an all-reduce inside a domain and between domains; `inner` of the ranks share one."""
    return all_reduce_words(words, inner, pattern), all_reduce_words(words / inner, ranks / inner, pattern)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearLayer:
    """A map of `d_in` x `d_out`, cut `tp_in` x `tp_out` ways and replicated `dp` ways.

    Any field may be an array. Sizes need not divide. Raises `WorkloadError` unless all are above zero.
    """

    d_in: Num
    d_out: Num
    tp_in: Num = 1.0
    tp_out: Num = 1.0
    dp: Num = 1.0
    elem_bytes: Num = 2.0

    def __post_init__(self) -> None:
        for what in ("d_in", "d_out", "tp_in", "tp_out", "dp", "elem_bytes"):
            require_positive(getattr(self, what), f"layer: {what}")

    @property
    def local_in(self) -> Num:
        """The inputs x that one device has."""
        return self.d_in / self.tp_in

    @property
    def local_out(self) -> Num:
        """The outputs y that one device has."""
        return self.d_out / self.tp_out

    @property
    def local_weights(self) -> Num:
        """The weights n that one device has."""
        return self.local_in * self.local_out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Seconds of one microbatch, forward and backward, for each resource alone."""

    flop_s: Num
    memory_s: Num
    inner_s: Num
    outer_s: Num

    @property
    def network_s(self) -> Num:
        """The longer of the two levels: different wires, kept busy by different microbatches."""
        return np.maximum(self.inner_s, self.outer_s)

    @property
    def fwd_bwd_s(self) -> Num:
        """The longest of arithmetic, memory and network: they overlap."""
        return np.maximum(self.flop_s, np.maximum(self.memory_s, self.network_s))

    @property
    def binds(self) -> np.ndarray:
        """Which of `flop`, `memory`, `network` takes longest."""
        times = np.stack(np.broadcast_arrays(self.flop_s, self.memory_s, self.network_s))
        return np.array(["flop", "memory", "network"])[times.argmax(axis=0)]


def layer_times(
    device: Device, layer: LinearLayer, batch: Num, *, inner_in: Num | None = None,
    inner_out: Num | None = None, experts_per_rank: Num = 1.0, pattern: str = "multicast",
) -> LayerTimes:  # fmt: skip
    """Times of a microbatch of `batch` tokens (over all dp ranks) through `layer` on `device`.

    `inner_in` of the tp_in ranks of a group share a domain, likewise `inner_out`; by default all do.
    A device with `experts_per_rank` experts holds that many copies of the map and moves all their
    weights, but its tokens pass through one each.
    """
    tokens, weights = batch / layer.dp, layer.local_weights
    inner_in = layer.tp_in if inner_in is None else inner_in
    inner_out = layer.tp_out if inner_out is None else inner_out
    forward = all_reduce_words_by_level(layer.local_out * tokens, layer.tp_in, inner_in, pattern)
    backward = all_reduce_words_by_level(layer.local_in * tokens, layer.tp_out, inner_out, pattern)
    inner, outer = (fwd + bwd for fwd, bwd in zip(forward, backward, strict=True))
    flop = 6 * weights * tokens
    memory = 4 * weights * experts_per_rank + layer.local_in * tokens + inner + outer
    return LayerTimes(
        flop_s=flop * layer.elem_bytes / (device.utilization * device.flop_per_s_8bit),
        memory_s=memory * layer.elem_bytes / (device.utilization * device.memory_bytes_per_s),
        inner_s=inner * layer.elem_bytes / device.inner_bytes_per_s,
        outer_s=outer * layer.elem_bytes / device.outer_bytes_per_s,
    )


def share_domain(
    device: Device, d_in: Num, d_out: Num, tp_in: Num, tp_out: Num, pattern: str = "multicast"
) -> tuple[Num, Num]:
    """How many of the tp_in and of the tp_out ranks of a group share a domain: all, or a power of two.

    Of all ways to share a domain between the two groups, the one whose all-reduces take least time.
    """
    if math.isinf(device.domain_ranks):
        return tp_in, tp_out
    shape = np.broadcast_shapes(np.shape(tp_in), np.shape(tp_out))
    rooms = 2.0 ** np.arange(math.floor(math.log2(device.domain_ranks)) + 1)
    rooms = np.append(rooms, device.domain_ranks).reshape(-1, *[1] * len(shape))
    inner_in = _sharing(tp_in, rooms)
    inner_out = _sharing(tp_out, device.domain_ranks / inner_in)
    layer = LinearLayer(d_in=d_in, d_out=d_out, tp_in=tp_in, tp_out=tp_out)
    times = layer_times(device, layer, 1.0, inner_in=inner_in, inner_out=inner_out, pattern=pattern)
    best = np.argmin(times.inner_s + times.outer_s, axis=0, keepdims=True)

    def pick(array: Num) -> Num:
        return np.take_along_axis(np.broadcast_to(array, (len(rooms), *shape)), best, axis=0)[0]

    return pick(inner_in), pick(inner_out)


def _sharing(ranks: Num, room: Num) -> Num:
    """How many of `ranks` share a domain that has `room` for so many."""
    return np.where(ranks <= room, ranks, 2.0 ** np.floor(np.log2(room)))


def gradient_reduction_s(
    device: Device, weights: Num, ranks: Num, inner: Num, elem_bytes: Num, pattern: str = "multicast"
) -> Num:
    """Seconds to all-reduce the gradients of `weights` over `ranks`: the longer of memory and network."""
    inner_words, outer_words = all_reduce_words_by_level(weights, ranks, inner, pattern)
    memory_s = (inner_words + outer_words) * elem_bytes / (device.utilization * device.memory_bytes_per_s)
    inner_s = inner_words * elem_bytes / device.inner_bytes_per_s
    return np.maximum(memory_s, inner_s + (outer_words * elem_bytes / device.outer_bytes_per_s))


def end_of_batch_s(device: Device, layer: LinearLayer) -> Num:
    """Seconds of the gradient all-reduce of `layer` over dp, once per batch; the optimizer is free."""
    return gradient_reduction_s(device, layer.local_weights, layer.dp, layer.dp, layer.elem_bytes)


def layer_what_ifs(device: Device, layer: LinearLayer, batch: Num) -> dict[str, Num]:
    """Where another resource would take over, all else equal, on a flat network with `multicast`.

    - `network_binds_below_bytes_per_s`, `memory_binds_below_bytes_per_s`: the rates at which network
      and memory take as long as the longer of the other two;
    - `max_balanced_split`: the largest tp_in x tp_out with x = y before the network takes longer than
      arithmetic, d_in d_out (W / (u F))^2, many ranks in each direction;
    - `max_1d_split`: the same for tp_in = 1, 2 d_out W / (u F);
    - `memory_flop_crossing_tokens`: tokens per device below which memory takes longer than arithmetic
      (infinite if it always does).
    """
    times = layer_times(device.flat(), layer, batch)
    flop_s, memory_s, network_s = times.flop_s, times.memory_s, times.network_s
    network_per_flop = device.inner_bytes_per_s / (device.utilization * device.flop_per_s_8bit)
    fixed_s = layer_times(device.flat(), layer, 0.0 * batch).memory_s
    slope_s = flop_s - (memory_s - fixed_s)
    crossing = np.where(slope_s > 0, fixed_s / np.where(slope_s > 0, slope_s, 1.0), np.inf)
    network_bytes = network_s * device.inner_bytes_per_s
    memory_bytes = memory_s * device.memory_bytes_per_s
    return {
        "network_binds_below_bytes_per_s": network_bytes / np.maximum(flop_s, memory_s),
        "memory_binds_below_bytes_per_s": memory_bytes / np.maximum(flop_s, network_s),
        "max_balanced_split": layer.d_in * layer.d_out * network_per_flop**2,
        "max_1d_split": 2 * layer.d_out * network_per_flop,
        "memory_flop_crossing_tokens": crossing * batch / layer.dp,
    }


def layer_document(device: Device, layer: LinearLayer, batch: float) -> dict[str, Any]:
    """One layer on one microbatch: on a flat network, what-ifs, and on the device's two levels if any."""
    for name, value in {"batch": batch, "batch / dp": batch / layer.dp, **asdict(layer)}.items():
        least, most = (1 / 8, 1e3) if name == "elem_bytes" else (1, 1e15)
        if not least <= value <= most:
            raise WorkloadError(f"layer: {name} is {value:g}; it must be from {least:g} to {most:g}")
    flat = device.flat()
    times = layer_times(flat, layer, batch)
    what_ifs = layer_what_ifs(flat, layer, batch).items()
    document: dict[str, Any] = {
        "device": device.to_json(),
        **{name: float(getattr(times, name)) for name in ("fwd_bwd_s", "flop_s", "memory_s", "network_s")},
        "binds": str(times.binds),
        "end_of_batch_s": float(end_of_batch_s(flat, layer)),
        "what_ifs": {name: finite_or_none(float(value)) for name, value in what_ifs},
    }
    if not math.isinf(device.domain_ranks):
        inner_in, inner_out = share_domain(device, layer.d_in, layer.d_out, layer.tp_in, layer.tp_out)
        two = layer_times(device, layer, batch, inner_in=inner_in, inner_out=inner_out)
        seconds = {name: float(getattr(two, name)) for name in ("fwd_bwd_s", "inner_s", "outer_s")}
        shared = {"inner_in": float(inner_in), "inner_out": float(inner_out)}
        document["two_level"] = seconds | shared | {"binds": str(two.binds)}
    return document
