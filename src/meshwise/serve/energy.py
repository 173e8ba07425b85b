"""Power and energy of GPUs that serve.

A GPU that works on passes draws a share of its power limit, one that waits a tenth of it; the mean power is
between them by the share of the time that is busy. Of 258 points of vLLM on H100 (21 models, batches of 8 to
512; ml-energy/leaderboard 0cd52da, mean board power) the median is 0.74 of the limit, the 10th and 90th
percentiles 0.57 and 0.90: more in dense models and larger batches. `nvidia-smi` shows about 70 W of 700 W on
an idle H100. Only GPUs are counted: a node's processors, memory, network and fans come on top.
"""

from __future__ import annotations

from typing import Any

from meshwise.serve.load import LoadResult

BUSY_FRAC = {"p10": 0.57, "p50": 0.74, "p90": 0.90}
"""Mean power of a GPU in passes over its limit."""
IDLE_FRAC = 0.1


def energy(load: LoadResult) -> dict[str, Any]:
    """Watts of all GPUs, joules an output token and kWh a million; None where no power limit is published."""
    fleet, run = load.fleet, load.simulated
    pools = [(fleet.serving, load.mean_workers)]
    pools += [(fleet.prefill, float(fleet.prefill_workers))] if fleet.prefill else []
    limit_watts = sum(num * of.num_chips * of.cluster.chip.power_watts for of, num in pools)
    if not all(of.cluster.chip.power_watts for of, _ in pools):
        return {"power_watts": None, "power_watts_interval": None, "joule_per_output_token": None}
    busy = min(run.busy_s / run.span_s, 1.0)
    watts = {name: limit_watts * (IDLE_FRAC + (frac - IDLE_FRAC) * busy) for name, frac in BUSY_FRAC.items()}
    return {
        "power_watts": watts["p50"],
        "power_watts_interval": {"p10": watts["p10"], "p90": watts["p90"]},
        "joule_per_output_token": watts["p50"] / load.output_tokens_per_s,
        "kwh_per_million_output_tokens": watts["p50"] / load.output_tokens_per_s / 3.6,
    }
