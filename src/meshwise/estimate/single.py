"""The estimate of one plan, as a person or a program reads it: totals, shares, stages, and the ledger.

FLOP. `flop_per_step` is the model's own work: the matmuls of the forward (head included; attention over
the pairs a causal mask leaves) three times, for forward and backward; it knows no recomputation and no
plan. MFU is that work over time x peak x ranks. HFU counts the FLOP that the ranks really do:
recomputation and the scores that fused attention computes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.ledger import Ledger
from meshwise.core.units import Num
from meshwise.cost.schedule import check as check_schedule
from meshwise.estimate.block_time import BlockTime, exposed_s
from meshwise.estimate.degrees import Degrees, degrees
from meshwise.estimate.memory import Memory
from meshwise.estimate.pipeline import play
from meshwise.estimate.stage import plan_stages
from meshwise.estimate.step import StageCost, StepCost, step_cost
from meshwise.estimate.timing import Machine, machine, op_times
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import Overheads, find_overheads
from meshwise.model.architecture import Layer, Model, num_moe_layers
from meshwise.plan.plan import Plan
from meshwise.plan.workload import Workload
from meshwise.program.block import block
from meshwise.program.context import CORE
from meshwise.program.cut import Cut
from meshwise.program.grid import check_layout
from meshwise.program.op import Op
from meshwise.program.row import op_row
from meshwise.program.vocabulary import embed, head

TIME_PARTS = (
    *("compute", "memory", "host", "comm_tp", "comm_cp", "comm_ep"),
    *("comm_dp", "comm_pp", "bubble", "optimizer", "stragglers"),
)
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "overhead")


@dataclass(frozen=True)
class Estimate:
    """What one plan costs; made by `estimate`."""

    model: Model
    cluster: Cluster
    plan: Plan
    workload: Workload
    degrees: Degrees
    machine: Machine
    step: StepCost

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return float(self.step.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the whole world per second."""
        return self.workload.num_tokens / self.step_s

    @property
    def time_s(self) -> dict[str, float]:
        """The step's seconds by what they are spent on; they add up to `step_s`."""
        step = self.step
        values = {
            "compute": step.time.compute,
            "memory": step.time.memory,
            "host": step.time.host,
            "comm_tp": step.time.comm_tp,
            "comm_cp": step.time.comm_cp,
            "comm_ep": step.time.comm_ep,
            "comm_dp": step.comm_dp_s,
            "comm_pp": step.comm_pp_s,
            "bubble": step.bubble_s,
            "optimizer": step.optimizer_s,
            "stragglers": step.straggler_s,
        }
        return {name: float(value) for name, value in values.items()}

    @property
    def memory_bytes(self) -> dict[str, float]:
        """Bytes of a rank of the fullest stage at its peak, by what they hold, and their `total`."""
        return _memory(self.step.memory)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory is within the chip's."""
        return self.memory_bytes["total"] <= self.cluster.chip.memory_bytes

    @cached_property
    def flop_per_step(self) -> float:
        """Model FLOP of one step in the whole world (see the top of this file)."""
        sequence = model_flop(self.model, self.workload.seq)
        return sequence * self.workload.batch * (3.0 if self.trains else 1.0)

    @property
    def trains(self) -> bool:
        """Whether the step has a backward."""
        return self.workload.kind == "train"

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: `flop_per_step` over what the ranks' peaks allow in a step."""
        return self.flop_per_step / self._peak_flop

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization: the FLOP that the ranks do, recomputation included."""
        return self.ledger_flop / self._peak_flop

    @property
    def _peak_flop(self) -> float:
        return self.cluster.num_chips * self.cluster.chip.matrix_peak(self.plan.dtype) * self.step_s

    @cached_property
    def ledger_flop(self) -> float:
        """Matrix FLOP of all ranks in a step, as the ledger has them."""
        ledger, total = self.ledger, 0.0
        matrix = np.array([shape.count("x") >= 3 for shape in ledger["shape"]])
        for stage in self.step.stages:
            mine = matrix & (ledger["rank"] == self._rank(stage))
            per_rank = float(np.nansum((ledger["count"] * ledger["flop"])[mine]))
            total += per_rank * float(stage.stage.ranks) * self.cluster.num_chips / self.plan.pp
        return total

    def _rank(self, stage: StageCost) -> float:
        return float(stage.stage.index) * float(self.degrees.stride("pp"))

    @cached_property
    def ledger(self) -> Ledger:
        """Every op of a step on the first rank of each kind of stage, with counts and times."""
        return Ledger.concat(
            Ledger.from_rows(_stage_rows(self, stage, self._rank(stage))) for stage in self.step.stages
        )

    def layer(self) -> Ledger:
        """The ops of one layer (and, where there are such, one MoE layer), one microbatch, on one rank."""
        moe = num_moe_layers(self.model)
        kinds = [("layer", False)] * (moe < self.model.num_layers) + [("moe_layer", True)] * (moe > 0)
        return Ledger.from_rows(
            row | {"origin": "estimate"}
            for name, is_moe in kinds
            for row in op_rows(
                block(self.model, self.degrees.cut(), Layer(moe=is_moe)), self.machine, prefix=name
            )
        )

    def notes(self) -> list[str]:
        """What a reader should know: what does not fit, what binds, what the constants rest on."""
        notes = [
            "MFU counts the forward's matmuls three times, causal attention by the pairs the mask leaves; "
            "HFU adds recomputation",
        ]
        total, capacity = self.memory_bytes["total"], self.cluster.chip.memory_bytes
        if not self.fits:
            notes.append(
                f"out of memory: a rank needs {total / 1e9:.2f} GB but {self.cluster.chip.name} has "
                f"{capacity / 1e9:.2f} GB, {(total - capacity) / 1e9:.2f} GB short; the largest part is "
                + max(MEMORY_PARTS, key=lambda name: self.memory_bytes[name])
            )
        used = {f"gemm.{self.plan.dtype}", "attention.flash", "memory.kernel", "inner.link", "outer.link"}
        inherited = self.machine.efficiency.inherited_from
        for what in sorted(used & set(inherited)):
            notes.append(f"{self.cluster.chip.name}: efficiency of {what} inherited from {inherited[what]}")
        return notes

    def to_json(self, *, ledger: bool = True) -> dict[str, Any]:
        """The document that `meshwise estimate --json` prints."""
        from dataclasses import asdict

        from meshwise.model.weights import num_params

        document: dict[str, Any] = {
            "model": {"name": self.model.name, "num_params": num_params(self.model)},
            "cluster": {
                "name": self.cluster.name,
                "chip": self.cluster.chip.name,
                "num_chips": self.cluster.num_chips,
            },
            "plan": asdict(self.plan) | {"dp": int(self.degrees.dp), "sp": self.plan.sequence_parallel},
            "workload": asdict(self.workload),
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / self.cluster.num_chips,
            "flop_per_step": self.flop_per_step,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "time_s": self.time_s,
            "stages": [_stage_json(stage) for stage in self.step.stages],
            "notes": self.notes(),
        }
        if ledger:
            document["ledger"] = self.ledger.to_json()
        return document


def estimate(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    workload: Workload,
    *,
    ideal: bool = False,
    overheads: Overheads | None = None,
) -> Estimate:
    """Price one plan. PlanError or WorkloadError where it does not fit the model or the cluster.

    A plan that needs more memory than the chip has is an answer (`fits` False), not an error.
    `ideal`: kernels and links keep every promise of the data sheet. `overheads`: what a step pays
    beside its kernels (`meshwise.machine.overheads`; None: the chip's, under the plan's software).
    """
    for key, priced in (("implementation", "megatron"), ("frozen_dtype", None), ("kv_dtype", "bf16")):
        if (value := getattr(plan, key)) != priced:
            raise PlanError(f"{key}={value} is not priced yet; leave it out")
    if model.positions == "learned" and workload.seq > model.max_seq:
        raise WorkloadError(
            f"seq={workload.seq} exceeds the {model.max_seq} learned positions of {model.name}"
        )
    check_plan(model, plan, workload.seq)
    on = degrees(plan, workload, cluster.num_chips)
    if plan.recompute_layers is not None:
        on = replace(on, recompute_frac=min(1.0, plan.recompute_layers * plan.pp / model.num_layers))
    check_schedule(plan.schedule, plan.pp, int(on.num_microbatches), plan.vpp)
    stages = plan_stages(model, on)
    pays = overheads or find_overheads(cluster.chip, plan.software)
    runs_on = machine(cluster, plan.dtype, ideal=ideal, overheads=pays)
    step = step_cost(model, on, runs_on, stages, trains=workload.kind == "train")
    if plan.stages is not None and on.pp > 1 and workload.kind == "train":
        step = _played(model, on, step)
    return Estimate(model, cluster, plan, workload, on, runs_on, step)


def _played(model: Model, on: Degrees, step: StepCost) -> StepCost:
    """`step` with the bubble that its uneven stages really have: played, not the closed form's."""
    alone_s, with_hops_s = (
        play(model, on, step.blocks, hop_s=hop_s).makespan_s for hop_s in (0.0, float(step.hop_s))
    )
    bubble_s = max(alone_s - float(step.time.total_s), 0.0)
    comm_pp_s = with_hops_s - alone_s
    changed_s = bubble_s + comm_pp_s - step.bubble_s - step.comm_pp_s
    return replace(step, bubble_s=bubble_s, comm_pp_s=comm_pp_s, step_s=step.step_s + changed_s)


def check_plan(model: Model, plan: Plan, seq: int = 0) -> None:
    """Raise PlanError where the degrees do not divide what they cut; `seq` 0: any sequence."""
    if plan.layout != "1d":
        check_layout(model, plan, seq)
        return
    v_dims = {"heads": (model.num_heads, plan.tp), "hidden width": (model.hidden, plan.tp)}
    if model.vocab:
        v_dims["ffn width"] = (model.ffn_hidden, plan.tp)
    for what, (size, degree) in v_dims.items():
        if size % degree:
            raise PlanError(f"tp={degree} does not divide the {size} {what} of {model.name}; use a divisor")
    if model.num_kv_heads % plan.tp and plan.tp % model.num_kv_heads:
        raise PlanError(
            f"tp={plan.tp} neither divides nor is divided by the {model.num_kv_heads} key-value heads of "
            f"{model.name}; use a divisor or a multiple"
        )
    ulysses = {"ulysses": plan.cp, "two_level": plan.ulysses}.get(plan.cp_kind, 1)
    if model.num_heads % (plan.tp * ulysses):
        raise PlanError(
            f"tp={plan.tp} x ulysses={ulysses} does not divide the {model.num_heads} heads of {model.name}; "
            "use degrees that do, or cp_kind=ring"
        )
    _check_experts(model, plan)


def _check_experts(model: Model, plan: Plan) -> None:
    if model.moe is None:
        if plan.ep > 1:
            raise PlanError(f"ep={plan.ep} but {model.name} has no experts; leave ep out")
        return
    if model.moe.num_experts % plan.ep:
        raise PlanError(
            f"ep={plan.ep} does not divide the {model.moe.num_experts} experts of {model.name}; use a divisor"
        )
    etp = plan.etp or plan.tp
    if model.moe.ffn_hidden % etp:
        raise PlanError(
            f"etp={etp} does not divide the expert width {model.moe.ffn_hidden} of {model.name}; "
            "use a divisor"
        )


def model_flop(model: Model, seq: float) -> float:
    """Matrix FLOP of the forward of one sequence of `seq` tokens, multi-token prediction apart."""
    cut = Cut(microbatch=1.0, seq=float(seq), kind="evaluate")
    num_moe = num_moe_layers(model)
    parts = [(model.num_layers - num_moe, block(model, cut)), (1, embed(model, cut)), (1, head(model, cut))]
    if num_moe:
        parts.append((num_moe, block(model, cut, Layer(moe=True))))
    return float(
        sum(
            count * op.count * op.cost.flop
            for count, ops in parts
            for op in ops
            if op.phase == "forward" and op.kind in ("matmul", "attention")
        )
    )


def _memory(memory: Memory) -> dict[str, float]:
    parts = {name: float(getattr(memory, name)) for name in MEMORY_PARTS}
    return parts | {"total": float(memory.total)}


def _stage_json(cost: StageCost) -> dict[str, Any]:
    stage, time = cost.stage, cost.time
    return {
        "index": int(stage.index),
        "num_like_it": int(stage.ranks),
        "dense_layers": _count(stage.dense_layers),
        "moe_layers": _count(stage.moe_layers),
        "embedding": bool(stage.embeddings),
        "head": bool(stage.heads),
        "forward_s": float(time.forward.total_s),
        "backward_s": float((time.backward + time.weight).total_s),
        "weight_grad_s": float(time.weight.total_s),
        "memory_bytes": _memory(cost.memory),
    }


def _count(value: Num) -> float:
    """A number of layers, whole except where DualPipe shares them between two directions."""
    return int(value) if float(value).is_integer() else float(value)


def _stage_rows(of: Estimate, cost: StageCost, rank: float) -> Iterator[dict[str, Any]]:
    """The rows of one rank of a stage: its parts, each as often as it runs in a step."""
    on, stage, cut, blocks = of.degrees, cost.stage, of.degrees.cut(), of.step.blocks
    moe = block(of.model, cut, Layer(moe=True)) if stage.moe_layers else []
    parts = [
        ("embedding", embed(of.model, cut), float(stage.embeddings), blocks.embed),
        ("layer", block(of.model, cut), float(stage.dense_layers), blocks.dense),
        ("moe_layer", moe, float(stage.moe_layers), blocks.moe),
        ("head", head(of.model, cut), float(stage.heads), blocks.head),
    ]
    policy = of.plan.recompute if of.trains else "none"
    for name, ops, count, timed in parts:
        if not count or timed is None:
            continue
        if not of.trains:
            ops = [op for op in ops if op.phase == "forward"]
        redone = policy if name.endswith("layer") else "none"
        rows = [
            *op_rows(ops, of.machine, prefix=name, recompute=redone),
            *_overhead_rows(name, timed, recompute=redone, trains=of.trains),
        ]
        for row in rows:
            share = float(on.recompute_frac) if row["phase"] == "recompute" and redone == "full" else 1.0
            yield row | {
                "rank": rank,
                "count": row.get("count", 1.0) * count * float(on.num_microbatches) * share,
                "origin": "estimate",
            }
    yield from _step_rows(of, cost, rank)


def _overhead_rows(
    module: str, timed: BlockTime, *, recompute: str, trains: bool
) -> Iterator[dict[str, Any]]:
    """What a block waits for beside its ops: the host, and adding up its gradients."""
    waits = {"forward": timed.forward.host}
    if recompute == "full":
        waits["recompute"] = timed.forward.host
    if trains:
        waits["backward"] = timed.backward.host
    for phase, seconds in waits.items():
        if float(seconds) > 0:
            yield {"module": module, "op": "host", "phase": phase, "time_s": float(seconds)}
    if trains and float(timed.adding_s) > 0:
        adding_s = float(timed.adding_s)
        row = {"module": module, "op": "add_gradients", "phase": "backward"}
        yield row | {"memory_s": adding_s, "time_s": adding_s}


def op_rows(
    ops: list[Op], on: Machine, *, prefix: str = "", recompute: str = "none"
) -> Iterator[dict[str, Any]]:
    """One ledger row per op; recomputed forward ops come once more, as phase `recompute`."""
    times = op_times(ops, on)
    again = {"none": (), "selective": CORE, "full": None}[recompute]
    for phase in ("forward", "recompute", "backward"):
        for op, time in zip(ops, times, strict=True):
            source = "forward" if phase == "recompute" else phase
            if op.phase != source or (phase == "recompute" and again is not None and op.name not in again):
                continue
            if op.kind == "collective" and float(op.group_size) == 1:
                continue
            module = ".".join(filter(None, (prefix, op.module if op.module != prefix else "")))
            row = op_row(op) | {"module": module, "phase": phase}
            if op.kind == "collective":
                exposed = float(exposed_s(op, time, ops, times, on.overheads))
                row |= {"comm_s": float(time.comm_s), "exposed_s": exposed, "time_s": exposed}
            else:
                row |= {"compute_s": float(time.compute_s), "memory_s": float(time.memory_s)}
                row |= {"time_s": float(time.busy_s)}
            yield row


def _step_rows(of: Estimate, cost: StageCost, rank: float) -> Iterator[dict[str, Any]]:
    """What happens once a step: the exchange over the replicas, and the optimizer."""
    if not of.trains:
        return
    common = {"origin": "estimate", "rank": rank, "module": "step", "count": 1.0}
    exchange_s = float(cost.comm_dp_s)
    if float(of.degrees.replicas) > 1:
        yield common | {
            "op": "gradients_and_weights",
            "phase": "step",
            "collective": "all_reduce" if of.plan.zero == 0 else "reduce_scatter",
            "axis": "dp",
            "group_size": float(of.degrees.replicas),
            "exposed_s": exchange_s,
            "time_s": exchange_s,
        }
    yield common | {"op": of.plan.optimizer, "phase": "optimizer", "time_s": float(cost.optimizer_s)}
