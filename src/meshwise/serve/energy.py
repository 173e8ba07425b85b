"""Power and energy of a fleet under load, by the model of `cost.power`.

A GPU waits while its engine has no pass, and in a pass for the kernels of communication; in the rest it does
the matrix FLOP of the tokens that it computes: two for each active parameter, of prompts what no cache held.
The kernels' share is that of a decode pass of the mean batch.
"""

from __future__ import annotations

from typing import Any

from meshwise.cost.power import chip_watts, node_watts
from meshwise.model.weights import num_active_params
from meshwise.serve.load import LoadResult
from meshwise.serve.pass_times import mean_pass
from meshwise.serve.serving import Serving


def energy(load: LoadResult) -> dict[str, Any]:
    """Watts of all GPUs, and of their nodes at the wall; by the latter joules an output token, kWh a million.

    None where no power limit is published.
    """
    fleet, run = load.fleet, load.simulated
    output_frac = run.num_tokens / (run.num_tokens + sum(load.requests.prompt) - run.num_found)
    pools = [(fleet.serving, load.mean_workers, output_frac if fleet.prefill else 1.0)]
    if fleet.prefill:
        pools.append((fleet.prefill, float(fleet.prefill_workers), 1.0 - output_frac))
    if not all(of.cluster.chip.power_watts for of, _, _ in pools):
        return {"power_watts": None, "joule_per_output_token": None, "kwh_per_million_output_tokens": None}
    watts = [(num * of.num_chips, _chip_watts(load, of, num, share)) for of, num, share in pools]
    wall_watts = sum(chips * float(node_watts(each)) for chips, each in watts)
    joule = wall_watts / load.output_tokens_per_s
    return {
        "power_watts": {"gpus": sum(chips * each for chips, each in watts), "wall": wall_watts},
        "joule_per_output_token": joule,
        "kwh_per_million_output_tokens": joule / 3.6,
    }


def _chip_watts(load: LoadResult, of: Serving, workers: float, token_share: float) -> float:
    """Mean watts of a GPU of one pool, which computes `token_share` of all tokens."""
    run, chip, dtype = load.simulated, of.cluster.chip, of.mesh.plan.dtype
    busy_frac = min(max(run.busy_s / run.span_s, 1e-6), 1.0)
    running = float((run.last_s - run.first_s).sum()) / run.span_s / workers / of.groups
    time_s = mean_pass(of, max(running, 1.0), load.engine).time_s
    spent = {name: float(part) for name, part in time_s.items()}
    exchanged = sum(part for name, part in spent.items() if name.startswith("comm"))
    working_frac = busy_frac * (1.0 - exchanged / sum(spent.values()))
    tokens = run.num_tokens + sum(load.requests.prompt) - run.num_found
    flop = 2.0 * num_active_params(of.model) * tokens * token_share
    flop_per_s = flop / (workers * of.num_chips * run.span_s * working_frac)
    sustained_flop_per_s = of.machine.overheads.sustained_flop_per_s(dtype, chip.power_watts)
    matrix_frac = flop_per_s / min(sustained_flop_per_s, chip.matrix_peak(dtype))
    return float(chip_watts(chip.power_watts, waiting_frac=1.0 - working_frac, matrix_frac=matrix_frac))
