"""Where tokens go in a mixture of experts: distinct experts, the busiest rank, slots dropped and left empty.

The router's *skew* a gives the expert of rank r the weight r^-a; a token draws k of E experts without
replacement. Expert e is then among them with the inclusion probability q_e = 1 - exp(-w_e t), with t such
that the q_e sum to k: the draw as exponential clocks (Rosén 1972; asymptotic, within 2 % for k = 8). Tokens
draw independently: batches whose tokens resemble each other touch fewer experts.
"""

import numpy as np
from numpy.typing import NDArray

from meshwise.core.units import Num
from meshwise.model.architecture import MoE

Shares = NDArray[np.float64]
PLACEMENTS = 400
"""Orders of the experts that are averaged: to 1 % of the busiest rank's load."""


def inclusion(experts: int, top_k: int, skew: float = 0.0) -> Shares:
    """Probability q_e [experts] that a token chooses each, the likeliest first; they sum to `top_k`."""
    if top_k >= experts:
        return np.ones(experts)
    weights = np.arange(1.0, experts + 1.0) ** -skew
    low, high = 0.0, 2.0 * experts / weights[-1]
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if -np.expm1(-weights * middle).sum() < top_k else (low, middle)
    shares: Shares = -np.expm1(-weights * low)
    return shares * (top_k / shares.sum())


def distinct_experts(shares: Shares, tokens: Num) -> Num:
    """Expected number of experts that some of `tokens` tokens chooses: sum of 1 - (1 - q_e)^tokens."""
    left = np.log1p(-np.minimum(shares, 1.0 - 1e-12))
    return -np.expm1(np.multiply.outer(np.asarray(tokens, dtype=np.float64), left)).sum(axis=-1)


def slots_filled(shares: Shares, tokens: int, capacity: int) -> float:
    """Expected number of slots that hold a token, where each expert has `capacity` of them.

    The tokens of an expert are binomial: E[min(X, C)] is the sum of P(X > n) over n < C.
    """
    counts = np.arange(min(capacity, tokens) + 1.0)
    ways = np.concatenate([[0.0], np.cumsum(np.log((tokens - counts[1:] + 1.0) / counts[1:]))])
    odds = np.clip(shares, 1e-300, 1.0 - 1e-12)[:, None]
    log_frac = ways + counts * np.log(odds) + (tokens - counts) * np.log1p(-odds)
    at_most = np.cumsum(np.exp(log_frac), axis=1)[:, :-1]
    return float(np.clip(1.0 - at_most, 0.0, 1.0).sum())


def summary(moe: MoE, tokens: int, shares: Shares | None = None) -> dict[str, float | None]:
    """What `tokens` tokens routed together meet in one layer; `capacity` None: no expert is ever full.

    `shares`: the chance of each expert that a token chooses it (None: all the same).
    """
    shares = inclusion(moe.num_experts, moe.top_k) if shares is None else shares
    pairs = tokens * moe.top_k
    capacity = int(np.ceil(moe.capacity_factor * pairs / moe.num_experts)) or None
    num_slots = float(pairs) if capacity is None else float(capacity * moe.num_experts)
    filled = float(pairs) if capacity is None else slots_filled(shares, tokens, capacity)
    filled = min(filled, pairs, num_slots)  # sums of odds are rounded
    return {
        "num_experts": moe.num_experts, "top_k": moe.top_k, "tokens": tokens,
        "distinct_experts": float(distinct_experts(shares, tokens)), "capacity": capacity,
        "slots": num_slots, "dropped_frac": 1.0 - filled / pairs, "padded_frac": 1.0 - filled / num_slots,
    }  # fmt: skip


def busiest_rank(shares: Shares, ranks: int, redundant: int = 0) -> float:
    """Load of the busiest of `ranks` over the mean, experts in the order of their numbers.

    That is at random for their loads: the mean of PLACEMENTS. `redundant` more slots hold copies, each of the
    expert that has the most load a copy; then each lies where least is, the heaviest first (DeepSeek's EPLB).
    """
    if not redundant:
        placed = np.random.default_rng(0).permuted(np.tile(shares, (PLACEMENTS, 1)), axis=1)
        loads = placed.reshape(PLACEMENTS, ranks, -1).sum(axis=-1)
        return float((loads.max(axis=-1) / loads.mean(axis=-1)).mean())
    copies = np.ones(len(shares))
    for _ in range(redundant):
        copies[(shares / copies).argmax()] += 1.0
    slots = np.repeat(shares / copies, copies.astype(int))
    room = np.full(ranks, -(-len(slots) // ranks))
    load = np.zeros(ranks)
    for share in sorted(slots, reverse=True):
        rank = int(np.where(room > 0, load, np.inf).argmin())
        load[rank] += share
        room[rank] -= 1
    return float(load.max() / load.mean())
