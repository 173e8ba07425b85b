"""The estimate of one plan, as a person or a program reads it: totals, shares, stages, and the ledger.

FLOP. `flop_per_step` is the model's own work: the matmuls of the forward (head included; attention counts
only unmasked query-key pairs) three times, for forward and backward; it knows no recomputation and no plan.
Frozen weights have no gradient, so their matmuls count twice. MFU is that work over time x peak x ranks. HFU
counts the FLOP that the ranks really do: recomputation and the scores that fused attention computes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.expressions import value_of
from meshwise.core.ledger import Ledger
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse, told
from meshwise.core.units import with_prefix
from meshwise.cost.power import chip_watts, node_watts
from meshwise.cost.routing import summary
from meshwise.estimate.balance import step_cost
from meshwise.estimate.intervals import Interval, interval_of
from meshwise.estimate.memory import Memory
from meshwise.estimate.priced_model import priced_model
from meshwise.estimate.priced_part import AGAIN, CORE_PHASE, FORWARD, MATRIX_KINDS, Part
from meshwise.estimate.rows import part_rows, runs_of_parts, spent_on, step_rows
from meshwise.estimate.stage_cost import StageCost
from meshwise.estimate.step import StepCost, price_step
from meshwise.estimate.timing import Machine, machine_for
from meshwise.estimate.tower import is_frozen, num_positions
from meshwise.machine.efficiency import LINK_CONSTANTS, Efficiency, inherited_notes
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import Overheads
from meshwise.model.architecture import Model, Tower, layer_counts, layer_kinds
from meshwise.model.weights import num_active_params, num_params
from meshwise.plan.mesh import SERVING, Mesh
from meshwise.plan.plan import IDLE, Plan, plan_text
from meshwise.plan.rules import resolve
from meshwise.plan.stages import held_by_ranks, layers_of_chunks, stage_of_rank, stages_of
from meshwise.plan.workload import Workload, quantized_note
from meshwise.program.cut import Cut
from meshwise.program.op import Op
from meshwise.program.parts import EMBEDDING, HEAD, layer_names, parts

TIME_PARTS = (
    *("compute", "memory", "host", "comm_tp", "comm_cp", "comm_ep", "comm_dp", "comm_pp"),
    *("offload", "bubble", "optimizer", "stragglers"),
)
WORKING_PARTS = ("compute", "memory", "optimizer")
"""Parts of a step in which a chip does not wait."""
MEMORY_PARTS = tuple(field.name for field in fields(Memory))


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """What one plan costs: made by `meshwise.estimate`, printed as `meshwise estimate` prints it.

    Times are in seconds, memory in bytes, rates a second, shares from 0 to 1. The step is that of the rank
    that sets the pace, the memory that of the fullest rank.

        priced = mw.estimate("llama3-70b", "h100-80g-sxm:64", "tp=8,pp=4,vpp=5", batch=128, seq=8192)
        priced.step_s, priced.mfu, priced.tokens_per_s     # of a step; of the peak; of all GPUs
        low, high = priced.step_s_interval                 # 8 of 10 measured steps lie between
        priced.fits, priced.memory_bytes["activations"]    # and weights, gradients, ..., total
        priced.time_s["comm_tp"], priced.hidden_s          # what takes the time; what hides behind compute
        priced.ledger.to_pandas()                          # every op of a rank: shapes, FLOP, bytes, seconds
        priced.layer(), priced.rank_ledger(9)              # the ops of one layer; of another rank
        priced.to_json(), priced.to_html("step.html")      # all numbers; a page that needs no network

    `notes()` says what does not fit, what was not priced and what the interval rests on.
    """

    model: Model
    cluster: Cluster
    plan: Plan
    workload: Workload
    mesh: Mesh
    machine: Machine
    step: StepCost
    rows_in: ClassVar[str] = "ledger"

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return float(self.step.step_s)

    @property
    def step_s_interval(self) -> Interval:
        """10th and 90th percentile of what a measured step would take (`estimate.intervals`)."""
        return self.interval("step_s", self.step_s)

    @property
    def memory_bytes_interval(self) -> Interval:
        """The same for the memory of the fullest rank."""
        return self.interval("memory_bytes", self.memory_bytes["total"])

    def interval(self, quantity: str, value: float) -> Interval:
        """The interval around `value`, a prediction of `quantity` (step_s or memory_bytes)."""
        of, on_links_frac = (self.model, self.cluster, self.plan), 0.0
        kinds = tuple(self.machine.overheads.network_frac)
        is_new = any("outer.link" in names for names in self.inherited.values())
        is_new = is_new and not self.cluster.levels[-1].name.lower().startswith(kinds)
        if quantity == "step_s" and self.machine.leaves_node(self.mesh.world, 1.0):
            exposed_s = (s for part, s in self.time_s.items() if part.startswith("comm_"))
            on_links_frac = sum(exposed_s) / self.step_s
        return interval_of(
            quantity, value, *of, is_training=self.trains, on_links_frac=on_links_frac, on_new_links=is_new
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the whole world per second."""
        return self.workload.num_tokens / self.step_s

    @cached_property
    def time_s(self) -> dict[str, float]:
        """Seconds of the rank that sets the pace by what they are spent on; their sum is `step_s`."""
        seconds = dict.fromkeys(TIME_PARTS, 0.0)
        usual = {"memory_s": None, "compute_s": None, "collective": ""}
        for row in step_rows(self.step, self.pace):
            if "time_s" in row:
                seconds[spent_on(usual | row)] += row.get("count", 1.0) * row["time_s"]
        return seconds

    @cached_property
    def hidden_s(self) -> dict[str, float]:
        """Seconds of communication of the same rank that hide behind its compute, by axis."""
        found = {name: 0.0 for name in TIME_PARTS if name.startswith("comm_")}
        for row in step_rows(self.step, self.pace):
            if "exposed_s" in row:
                found[f"comm_{row['axis'][:2]}"] += row["count"] * (row["comm_s"] - row["exposed_s"])
        return {name: max(seconds, 0.0) for name, seconds in found.items()}

    @property
    def pace(self) -> StageCost:
        """The slowest stage, which sets the pace."""
        return max(self.step.stages, key=lambda cost: float(cost.time.total_s))

    @property
    def pace_rank(self) -> int:
        """The first rank of the stage that sets the pace."""
        return int(self.pace.stage.index * self.mesh.stride("pp"))

    def rank_like(self, rank: int) -> int:
        """The first rank of a stage that holds what the stage of `rank` does: its rows are in the ledger."""
        stride, held = int(self.mesh.stride("pp")), held_by_ranks(self.model, self.mesh)
        return stride * held.index(held[rank // stride % len(held)])

    @property
    def memory_bytes(self) -> dict[str, float]:
        """Bytes of a rank of the fullest stage at its peak, by what they hold, and their `total`."""
        return memory_parts(max(self.step.stages, key=lambda cost: float(cost.memory.total)))

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory is within the chip's."""
        return self.memory_bytes["total"] <= self.cluster.chip.memory_bytes

    @cached_property
    def flop_per_step(self) -> float:
        """Model FLOP of one step in the whole world (see the top of this file)."""
        return self.workload.num_sequences * model_flop(
            self.model,
            self.workload.seq,
            kind=self.workload.kind,
            lora_rank=self.plan.lora_rank,
            lora_targets=self.plan.lora_targets,
            has_frozen_towers=is_frozen(self.mesh),
        )

    @property
    def trains(self) -> bool:
        """Whether the step has a backward."""
        return self.mesh.trains

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: `flop_per_step` over what the ranks' peaks allow in a step."""
        return self.flop_per_step / self._peak_flop

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization: the FLOP that the ranks do, recomputation included."""
        return self.hardware_flop / self._peak_flop

    @cached_property
    def power_watts(self) -> dict[str, float] | None:
        """Mean watts of a `chip`, and of its `node` at the wall for each chip; None without a power limit."""
        chip, dtype = self.cluster.chip, self.plan.dtype
        if not (limit := chip.power_watts):
            return None
        waiting_s = sum(seconds for part, seconds in self.time_s.items() if part not in WORKING_PARTS)
        waiting_frac = min(waiting_s / self.step_s, 0.999)
        flop_per_s = self.hardware_flop / (self.cluster.num_chips * self.step_s * (1.0 - waiting_frac))
        sustained = min(self.machine.overheads.sustained_flop_per_s(dtype, limit), chip.matrix_peak(dtype))
        watts = float(chip_watts(limit, waiting_frac=waiting_frac, matrix_frac=flop_per_s / sustained))
        return {"chip": watts, "node": float(node_watts(watts))}

    @property
    def _peak_flop(self) -> float:
        return self.cluster.num_chips * self.cluster.chip.matrix_peak(self.plan.dtype) * self.step_s

    @cached_property
    def hardware_flop(self) -> float:
        """Matrix FLOP of all ranks in a step."""
        total = sum(
            float(cost.stage.num_stages) * times * part_flop(part, phase)
            for cost in self.step.stages
            for _, part, phase, times in runs_of_parts(self.step, cost)
        )
        return total * float(self.mesh.num_microbatches) * (self.cluster.num_chips / self.plan.pp)

    @cached_property
    def ledger(self) -> Ledger:
        """Every op of a step on the first rank of each kind of stage; each rank's rows add up to the step."""
        return Ledger.from_rows(row for cost in self.step.stages for row in step_rows(self.step, cost))

    def rank_ledger(self, rank: int) -> Ledger:
        """The same of one rank, with its own shards of weights and its own place in a ring.

        A rank whose shards are smaller waits for the others: its step ends no sooner than theirs.

        Ranks of a ring under implementation=fsdp2 do the same FLOP in rounds of other shapes, which may take
        a little longer; the rows then add up to the step of a world whose ranks are all like this one.
        """
        refuse("rank of a ledger", WorkloadError, rank=rank, last=self.cluster.num_chips - 1)
        own, waited_for = self.rank_step(rank), ("comm_dp_s", "optimizer_s", "straggler_s")
        least = {name: np.maximum(getattr(own, name), getattr(self.step, name)) for name in waited_for}
        rows = step_rows(replace(own, **least), own.stages[-1])
        return Ledger.from_rows(row | {"rank": float(rank)} for row in rows)

    def rank_step(self, rank: int) -> StepCost:
        """The step with the shards and the place in a ring of one rank, whose stage is the last of them."""
        mesh, axes = self.mesh, ("cp", "dp", "pp")
        cp, dp, stage = (rank // int(mesh.stride(axis)) % int(getattr(mesh, axis)) for axis in axes)
        mesh = replace(mesh, ring_rank=float(cp // mesh.ulysses), shard=dp * mesh.cp + cp)
        stages = [*stages_of(self.model, mesh), stage_of_rank(self.model, mesh, stage)]
        return price_step(priced_model(self.model, mesh, self.machine), stages)

    def layer(self) -> Ledger:
        """The ops of one layer of each kind, one microbatch, on one rank."""
        again = {"selective": (CORE_PHASE,), "full": (AGAIN,)}.get(self.plan.recompute, ())
        phases = ("forward", *again, "backward") if self.trains else ("forward",)
        return Ledger.from_rows(
            row | {"origin": "estimate"}
            for name in layer_names(self.model)
            for row in part_rows(name, self.step.of.parts[name], phases, waits=False)
        )

    def changed(self, microbatch: int | None = None, **keys: Any) -> Estimate:
        """The same job under a plan with other values of some keys."""
        work = self.workload if microbatch is None else replace(self.workload, microbatch=microbatch)
        return estimate(self.model, self.cluster, replace(self.plan, **keys), work)

    def host_bytes(self) -> float:
        """Bytes that the ranks of a host, at most, keep in its memory: each as much as the fullest."""
        at_home = replace(self.plan, offload_optimizer=0.0, offload_activations=0.0)
        if at_home == self.plan:
            return 0.0
        same = self.machine.overheads
        kept = estimate(self.model, self.cluster, at_home, self.workload, overheads=same).memory_bytes
        parts = ("weights", "gradients", "optimizer", "activations")
        of_rank = sum(kept[name] - self.memory_bytes[name] for name in parts)
        return of_rank * min(self.cluster.chips_per_host, self.cluster.num_chips)

    @property
    def idle_keys(self) -> str:
        """What the plan states that changes nothing here."""
        names = asdict(self.plan) | {"has_experts": bool(self.model.moe), "replicas": self.mesh.replicas}
        idle = {key for key, where in IDLE.items() if value_of(where, names)}
        if self.plan.done_by.shards_each_weight:  # weights are gathered and given back alone, too
            idle -= {"zero"}
        return ", ".join(word for word in plan_text(self.plan).split(",") if word.partition("=")[0] in idle)

    def notes(self) -> list[str]:
        """What a reader should know: what does not fit, what binds, what the constants rest on."""
        notes = [
            f"MFU counts the forward's matmuls {'three times' if self.trains else 'once'}, "
            f"causal attention by unmasked query-key pairs{'; HFU adds recomputation' * self.trains}",
        ]
        towers = {tower.name: tower for tower in self.model.towers}
        for tower in towers.values():
            positions = num_positions(tower.encoder)
            notes += told(
                "tower notes", model=self.model, tower=tower, positions=positions, work=self.workload
            )
        chip, needed, host_bytes = self.cluster.chip, self.memory_bytes, self.host_bytes()
        notes += told(
            "estimate notes", of=self, model=self.model, plan=self.plan, work=self.workload, chip=chip,
            num_tokens=sum(tower.num_tokens for tower in towers.values()),
            left_out=", ".join(f"{name} ({number:,} parameters)" for name, number in self.model.left_out),
            quantized=quantized_note(self.model, self.plan) if self.mesh.serves else (),
            num_params=num_params(self.model), num_active=num_active_params(self.model),
            needed_gb=needed["total"] / 1e9, chip_gb=chip.memory_bytes / 1e9,
            short_gb=(needed["total"] - chip.memory_bytes) / 1e9, host_gb=host_bytes / 1e9,
            largest=max(MEMORY_PARTS, key=lambda name: needed[name]),
            measured={known.kind for known in self.cluster.collectives},
            is_placed=any(self.mesh.ends) and self.plan.stages is None,
            stages="-".join(map(str, layers_of_chunks(self.model, self.mesh))),
        )  # fmt: skip
        notes += self.measured_notes()
        notes.append(f"interval: {self.step_s_interval.reason}")
        if "; wider" in (of_memory := self.memory_bytes_interval).reason:
            low, high = (with_prefix(end, "B") for end in of_memory)
            notes.append(f"interval of memory, {low} to {high}: {of_memory.reason}")
        return notes + inherited_notes(chip, self.inherited)

    def measured_notes(self) -> Iterator[str]:
        """Which collectives were measured, and the largest of them that the step has."""
        for known in self.cluster.collectives:
            kind = known.kind.replace("custom_allreduce", "all_reduce" * self.mesh.serves)
            sizes = self.ledger.where(collective=kind, group_size=known.ranks)["payload_bytes"]
            most = f"up to {max(sizes):,.0f} bytes" if len(sizes) else "none"
            yield f"{known}; this step has {most}"

    @property
    def inherited(self) -> dict[str, list[str]]:
        """Chips whose efficiencies stand for those of this one, and which."""
        used = {f"gemm.{self.plan.dtype}", "attention.flash", "memory.kernel", *LINK_CONSTANTS}
        return self.machine.efficiency.inherited(used)

    @property
    def experts(self) -> dict[str, float | None] | None:
        """Slots and distinct experts of one layer, for the tokens of a microbatch that a rank routes."""
        if self.model.moe is None:
            return None
        tokens = self.workload.microbatch * (1 if self.workload.kind == "decode" else self.workload.seq)
        return summary(self.model.moe, max(int(tokens / float(self.mesh.cp)), 1))

    def to_json(self, *, ledger: bool = True) -> dict[str, Any]:
        """The document that `meshwise estimate --json` prints."""
        document = {name: getattr(self, name) for name in _SHOWN} | {
            "model": {"name": self.model.name, "num_params": num_params(self.model)},
            "towers": [_tower_json(tower) for tower in self.model.towers if tower.num_tokens],
            "cluster": self.cluster.to_json(),
            "plan": asdict(self.plan) | {"dp": int(self.mesh.dp), "sp": self.plan.sequence_parallel},
            "workload": asdict(self.workload),
            "step_s_interval": self.step_s_interval.to_json(),
            "tokens_per_s_per_gpu": self.tokens_per_s / self.cluster.num_chips,
            "memory_bytes_interval": self.memory_bytes_interval.to_json(),
            "stages": [_stage_json(self.model, cost) for cost in self.step.stages],
            "notes": self.notes(),
        }
        return document | ({"ledger": self.ledger.to_json()} if ledger else {})


_SHOWN = (
    *("step_s", "tokens_per_s", "flop_per_step", "mfu", "hfu", "power_watts", "memory_bytes", "fits"),
    *("time_s", "hidden_s", "pace_rank", "experts"),
)
"""What the document of an estimate says as it is."""


def estimate(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    workload: Workload,
    *,
    ideal: bool = False,
    overheads: Overheads | None = None,
    efficiency: Efficiency | None = None,
) -> Estimate:
    """Price one plan. PlanError or WorkloadError where it does not fit the model or the cluster.

    A plan that needs more memory than the chip has is an answer (`fits` False), not an error.
    `ideal`: kernels and links keep every promise of the data sheet. `overheads`: what a step pays
    beside its kernels (`machine.overheads`; None: the chip's, under the plan's software). `efficiency`: what
    share of their peaks its kernels and links reach (None: the chip's).
    """
    mesh = resolve(model, plan, workload, cluster)
    runs_on = machine_for(cluster, plan, workload.kind, ideal=ideal, overheads=overheads)
    if efficiency is not None:
        runs_on = replace(runs_on, efficiency=efficiency)
    step = step_cost(model, mesh, runs_on)
    return Estimate(model, cluster, plan, workload, step.of.mesh, runs_on, step)


@lru_cache(256)
def model_flop(
    model: Model, seq: float, *, kind: str = "evaluate", lora_rank: int = 0,
    lora_targets: tuple[str, ...] = (), has_frozen_towers: bool = False,
) -> float:  # fmt: skip
    """Matrix FLOP of one sequence of `seq` tokens through the whole model, multi-token prediction apart.

    Training is the forward three times, where weights are frozen twice, and once before all that trains;
    decoding is one token behind `seq` cached ones. Experts with a capacity compute just that, unrounded.
    """
    trains, decodes = kind == "train", kind == "decode"
    moe, capacity = model.moe, 1.0
    if moe is not None and moe.capacity_factor and kind not in SERVING:
        model, capacity = replace(model, moe=replace(moe, capacity_factor=0.0)), moe.capacity_factor
    cut = Cut(
        microbatch=1.0,
        seq=1.0 if decodes else float(seq),
        past=float(seq) if decodes else 0.0,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        imbalance=capacity,
        kind="evaluate" if trains else kind,
    )
    ops = parts(model, cut)
    blocks = zip(layer_names(model), layer_counts(model).values(), strict=True)
    counts = {EMBEDDING: 1, HEAD: 1, **dict(blocks)}
    of_towers = sum(
        tower.num_inputs
        * model_flop(
            tower.encoder, float(num_positions(tower.encoder)),
            kind="evaluate" if has_frozen_towers or not trains else kind,
        )
        for tower in model.towers * (not decodes)
        if tower.num_tokens
    )  # fmt: skip
    return of_towers + float(
        sum(
            counts[name] * op.count * op.cost.flop * (_num_passes(name, op, lora_rank) if trains else 1)
            for name, of_part in ops.items()
            for op in of_part
            if op.phase == "forward" and op.kind in MATRIX_KINDS
        )
    )


def _num_passes(part: str, op: Op, lora_rank: int) -> int:
    """How often training does a matmul of the forward: itself, the gradient of its input, of its weights."""
    if lora_rank and part == EMBEDDING:
        return 1
    return 2 if op.num_frozen or (lora_rank and part == HEAD) else 3


def part_flop(part: Part, phase: str) -> float:
    """Matrix FLOP of a part in a phase of the ledger, whose backward has the gradients of weights too."""
    found = 0.0
    for row in part.rows:
        if row.op.kind in MATRIX_KINDS:
            share = {
                CORE_PHASE: row.op.redone_frac,
                AGAIN: row.phase == FORWARD and row.is_redone,
            }.get(phase, row.op.phase == phase)
            found += float(share * row.op.count * row.op.cost.flop)
    return found


def memory_parts(cost: StageCost) -> dict[str, float]:
    """Bytes of a stage's rank at its peak by what they hold, and their `total`."""
    held = {name: float(getattr(cost.memory, name)) for name in MEMORY_PARTS}
    return held | {"total": sum(held.values())}


def _tower_json(tower: Tower) -> dict[str, Any]:
    return {
        "name": tower.name,
        "num_params": num_params(tower.encoder),
        "inputs_per_sequence": tower.num_inputs,
        "positions_per_input": num_positions(tower.encoder),
        "tokens_per_sequence": tower.num_tokens,
    }


def _stage_json(model: Model, cost: StageCost) -> dict[str, Any]:
    stage, time = cost.stage, cost.time
    layers = dict(zip(layer_kinds(model), stage.layers, strict=True))
    return {
        "index": int(stage.index),
        "num_like_it": int(stage.num_stages),
        "dense_layers": int(sum(float(count) for kind, count in layers.items() if not kind.moe)),
        "moe_layers": int(sum(float(count) for kind, count in layers.items() if kind.moe)),
        "embedding": bool(stage.embeddings),
        "head": bool(stage.heads),
        "forward_s": float(time.forward_s),
        "backward_s": float(time.backward_s + time.weight_s),
        "weight_grad_s": float(time.weight_s),
        "memory_bytes": memory_parts(cost),
    }
