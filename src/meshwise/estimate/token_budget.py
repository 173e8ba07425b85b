"""What training on a number of tokens takes at the pace of an estimate: days, GPU-hours, cost, energy.

Energy is what the nodes take from the wall (`cost.power`), times the power usage effectiveness of their
building. With failures (`cost.failures`) the same run takes longer: checkpoints, restarts, and the work lost
since the last checkpoint. A checkpoint holds the weights that train and their optimizer states, whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import WorkloadError
from meshwise.core.refusals import refuse
from meshwise.core.units import MOST_STATED
from meshwise.cost.failures import Failures, checkpoint_interval_s
from meshwise.estimate.memory import OPTIMIZERS, checkpoint_param_bytes
from meshwise.estimate.one_plan import Estimate
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model, layer_counts
from meshwise.model.weights import block_weights, num_params
from meshwise.plan.plan import Plan

JOULES_PER_KWH = 3.6e6


class NeverEnds(WorkloadError):
    """A run that fails faster than it makes progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """A run of `tokens` tokens, the `price` of a GPU-hour by chip (`""`: of any), and the `watts` at the wall
    for each GPU (None: as predicted).

    `pue` is the power of the building over that of its nodes, `carbon` the grams of CO2 of a kWh. `mtbf`
    [GPU-hours between failures], `storage` [bytes/s of the whole cluster] and `restart` [s] replace the
    numbers of the Llama 3 report. Making one raises WorkloadError for a number that is not above zero, and
    for any other number without tokens.
    """

    tokens: float | None = None
    price: Mapping[str, float] | None = None
    watts: float | None = None
    pue: float | None = None
    carbon: float | None = None
    mtbf: float | None = None
    storage: float | None = None
    restart: float | None = None

    def __post_init__(self) -> None:
        names = {"tokens": self.tokens, "most": MOST_STATED}
        for name in self.__slots__:
            if name != "price" and (value := getattr(self, name)) is not None:
                refuse("budget", WorkloadError, option=name, value=value, **names)

    def watts_per_gpu(self, estimate: Estimate) -> float | None:
        """Mean watts of the building for each GPU; None where they are neither stated nor known."""
        watts = self.watts or (estimate.power_watts or {}).get("node")
        return watts and watts * (self.pue or 1.0)

    def usd_per_token(self, estimate: Estimate) -> float | None:
        """Dollars of a token at the pace of an estimate; None without a price."""
        if self.price is None:
            return None
        usd_per_s = usd_per_gpu_hour(estimate.cluster, self.price) * estimate.cluster.num_chips / 3600
        return usd_per_s / estimate.tokens_per_s

    def joules_per_token(self, estimate: Estimate) -> float | None:
        """Energy of a token at the pace of an estimate; None where the watts are not known."""
        watts = self.watts_per_gpu(estimate)
        return watts and watts * estimate.cluster.num_chips / estimate.tokens_per_s

    def run(self, estimate: Estimate) -> dict[str, Any]:
        """Seconds, days, GPU-hours, cost and joules of the run, and `with_failures`; empty without tokens.

        With a price, also the dollars of a million tokens, whatever the length of the run.
        """
        if self.tokens is None:
            usd = self.usd_per_token(estimate)
            return {} if usd is None else {"usd_per_million_tokens": 1e6 * usd}
        refuse("run of tokens", WorkloadError, of=estimate, budget=self, watts=self.watts_per_gpu(estimate))
        seconds = self.tokens / estimate.tokens_per_s
        taken = {"tokens": self.tokens, **self._taking(seconds, estimate, 1.0)}
        return taken | {"with_failures": self._with_failures(seconds, estimate)}

    def _taking(self, seconds: float, estimate: Estimate, goodput: float) -> dict[str, float]:
        num_chips = estimate.cluster.num_chips
        seconds /= goodput
        taken = {"run_s": seconds, "days": seconds / 86400, "gpu_hours": seconds * num_chips / 3600}
        if usd := self.usd_per_token(estimate):
            taken["cost"] = usd * seconds * estimate.tokens_per_s
            taken["usd_per_million_tokens"] = 1e6 * usd / goodput
        if watts := self.watts_per_gpu(estimate):
            taken |= {"watts_per_gpu": watts, "energy_joules": seconds * num_chips * watts}
            if self.carbon is not None:
                taken["co2_kg"] = taken["energy_joules"] / JOULES_PER_KWH * self.carbon / 1000
        return taken

    def _with_failures(self, seconds: float, estimate: Estimate) -> dict[str, float]:
        num_chips = estimate.cluster.num_chips
        stated = {
            "device_s_between_interruptions": self.mtbf and 3600.0 * self.mtbf,
            "storage_bytes_per_s": self.storage and self.storage / num_chips,
            "restart_s": self.restart,
        }
        changed: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
        failures = replace(Failures.llama3(), **changed)
        in_matrices = _num_in_matrices(estimate.model, estimate.plan)
        trained = in_matrices if estimate.plan.lora_rank else num_params(estimate.model)
        num_bytes = checkpoint_param_bytes(estimate.step.of) * trained
        num_bytes -= OPTIMIZERS[estimate.plan.optimizer].spared_bytes * in_matrices
        between_s = failures.interruption_s(num_chips)
        checkpoint_s = failures.checkpoint_s(num_bytes, num_chips)
        goodput = float(failures.goodput(num_bytes, num_chips))
        refuse("run that fails", NeverEnds, goodput=goodput, between_s=between_s)
        return {
            "goodput_frac": goodput,
            "num_failures": float(seconds / goodput / between_s),
            "checkpoint_bytes": num_bytes,
            "checkpoint_s": float(checkpoint_s),
            "checkpoint_every_s": float(checkpoint_interval_s(between_s, checkpoint_s)),
        } | self._taking(seconds, estimate, goodput)


def usd_per_gpu_hour(cluster: Cluster, price: Mapping[str, float]) -> float:
    """The price of a cluster's chip, or of any (`""`); WorkloadError where only others have one."""
    chip = cluster.chip.name
    if not {"", chip} & set(price):
        raise WorkloadError(f"price names no {chip}; add {chip}=DOLLARS, or give one price for all")
    return price.get(chip, price.get("", 0.0))


def _num_in_matrices(model: Model, plan: Plan) -> int:
    """Parameters that train in matrices of blocks, or the adapters there."""
    return sum(
        number * weight.size
        for layer, number in layer_counts(model).items()
        for weight in block_weights(model, layer, plan.lora_rank, plan.lora_targets)
        if weight.trains and weight.is_matrix
    )
