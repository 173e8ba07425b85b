"""Predicted times of measured ops: the formulas of `meshwise.cost`, by kind of op, over columns of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwise.calibrate.microdata import Measurement
from meshwise.core.units import Num
from meshwise.cost.attention_kernel import attention_s, decode_attention_s
from meshwise.cost.collective import collective_s, peer_all_reduce_s
from meshwise.cost.dispatch import (
    copies_by_expert,
    copies_by_rank,
    copies_spread,
    dispatch_s,
    low_latency_cores,
)
from meshwise.cost.experts import experts_s
from meshwise.cost.gemm import gemm_s
from meshwise.cost.memory_kernel import memory_kernel_s, scaled_cast_s
from meshwise.machine.efficiency import DispatchEfficiency, Efficiency, ExpertsEfficiency
from meshwise.machine.hardware import Chip, Level, find_cluster

Array = NDArray[np.float64]

ELEM_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5625, "w4a16": 0.53125}
"""Bytes of an operand's element; fp4 carries one fp8 scale for 16 elements, mxfp4 weights one for 32."""

EXPERT_MATMULS = {"fp8_block": "fp8", "w4a16": "bf16"}
"""Dtype of the matmuls of experts, where it is not that of their weights."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Measurements of one op, one variant, one software on one chip, their shapes as columns."""

    rows: list[Measurement]
    shape: dict[str, Array]
    seconds: Array

    @property
    def first(self) -> Measurement:
        """A row that says what all rows share."""
        return self.rows[0]


def batches(rows: Sequence[Measurement]) -> list[Batch]:
    """`rows` in batches that one call of `predict_s` takes, each in the order of `rows`."""
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        groups.setdefault((row.chip, row.op, row.variant, row.software), []).append(row)
    return [
        Batch(
            group,
            {name: np.array([row.shape[name] for row in group]) for name in group[0].shape},
            np.array([row.seconds for row in group]),
        )
        for group in groups.values()
    ]


def predict_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Array:
    """Predicted seconds of each row of `batch` on `chip`."""
    times = {
        "gemm": _gemm_s,
        "attention": _attention_s,
        "decode": _decode_s,
        "memory": _memory_s,
        "experts": _experts_s,
        "dispatch": _dispatch_s,
        "collective": _collective_s,
        "peer_all_reduce": _peer_all_reduce_s,
    }
    return np.asarray(times[batch.first.op](batch, chip, efficiency))


def _gemm_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, dtype, name = batch.shape, batch.first.variant, constants_name(batch.first)
    memory_bytes_per_s, cores = chip.memory_bytes_per_s, float(chip.num_cores)
    gemm = gemm_s(
        shape["m"],
        shape["n"],
        shape["k"],
        batch=shape["batch"],
        flop_per_s=chip.matrix_peak(dtype),
        memory_bytes_per_s=memory_bytes_per_s,
        num_cores=cores,
        elem_bytes=ELEM_BYTES[dtype],
        out_bytes=2.0,
        efficiency=efficiency.gemm(name),
    )
    if not shape["cast"].any():
        return gemm
    return gemm + shape["cast"] * scaled_cast_s(
        shape["m"],
        shape["k"],
        out_bytes=ELEM_BYTES[dtype],
        memory_bytes_per_s=memory_bytes_per_s,
        num_cores=cores,
        efficiency=efficiency.cast(name),
    )


def _attention_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape = batch.shape

    def kernel_s(causal: bool, backward: bool) -> Num:
        return attention_s(
            batch=shape["batch"],
            heads=shape["heads"],
            kv_heads=shape["kv_heads"],
            seq_q=shape["seq"],
            seq_k=shape["seq"],
            qk_dim=shape["qk_dim"],
            v_dim=shape["v_dim"],
            causal=causal,
            backward=backward,
            flop_per_s=chip.matrix_peak("bf16"),
            memory_bytes_per_s=chip.memory_bytes_per_s,
            num_cores=float(chip.num_cores),
            efficiency=efficiency.attention,
        )

    causal, passes = shape["causal"] > 0, shape["passes"]  # passes: 1 forward, 2 backward, 3 both
    forward_s = np.where(causal, kernel_s(True, False), kernel_s(False, False))
    backward_s = np.where(causal, kernel_s(True, True), kernel_s(False, True))
    return np.where(passes != 2, forward_s, 0.0) + np.where(passes >= 2, backward_s, 0.0)


def _decode_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape = batch.shape
    return decode_attention_s(
        batch=shape["batch"],
        heads=shape["heads"],
        seq_k=shape["kv_len"],
        kv_bytes_per_token=shape["kv_bytes_per_token"],
        qk_dim=shape["qk_dim"],
        v_dim=shape["v_dim"],
        flop_per_s=chip.matrix_peak("bf16"),
        memory_bytes_per_s=chip.memory_bytes_per_s,
        efficiency=efficiency.latent_decode if batch.first.variant == "mla" else efficiency.decode,
    )


def _memory_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    return memory_kernel_s(
        batch.shape["bytes"], memory_bytes_per_s=chip.memory_bytes_per_s, efficiency=efficiency.memory
    )


def _experts_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, variant = batch.shape, batch.first.variant
    dtype = EXPERT_MATMULS.get(variant, variant)
    return experts_s(
        shape["tokens"],
        topk=shape["local_topk"],
        experts=shape["experts"] / shape["ep"],
        hidden=shape["hidden"],
        inter=shape["inter"] / shape["tp"],
        active=shape["active"],
        moved_topk=shape["moved_topk"],
        flop_per_s=chip.matrix_peak(dtype),
        memory_bytes_per_s=chip.memory_bytes_per_s,
        num_cores=float(chip.num_cores),
        elem_bytes=ELEM_BYTES[dtype],
        weight_bytes=ELEM_BYTES[variant],
        gemm=efficiency.gemm(dtype),
        memory=efficiency.memory,
        efficiency=efficiency.experts.get(constants_name(batch.first), ExpertsEfficiency()),
    )


DEEPEP_MOST_NODES = 4.0
"""Nodes that DeepEP's own benchmark routes a token to at most."""


def _dispatch_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, variant = batch.shape, batch.first.variant
    ranks, per_node = shape["ranks"], shape["ranks_per_node"]
    all_cores = float(chip.num_cores)
    if variant.startswith("deepep-normal"):
        copies = copies_by_rank(shape["topk"], ranks, per_node, most_nodes=DEEPEP_MOST_NODES)
        cores: Num = shape["cores"]
    elif variant.startswith("deepep-ll"):
        copies = copies_by_expert(shape["topk"], ranks, per_node)
        cores = low_latency_cores(shape["experts"], all_cores)
    else:
        copies, cores = copies_spread(shape["topk"], ranks), all_cores
    return dispatch_s(
        shape["tokens"],
        copies,
        token_bytes=shape["token_bytes"],
        ranks=ranks,
        ranks_per_node=per_node,
        experts=shape["experts"],
        num_cores=cores,
        inner_bytes_per_s=chip.levels[0].bytes_per_s,
        outer_bytes_per_s=chip.levels[1].bytes_per_s,
        efficiency=efficiency.dispatches.get(variant, DispatchEfficiency()),
    )


def _peer_all_reduce_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, links = batch.shape, chip.levels
    library_s = collective_s(
        "all_reduce",
        shape["bytes"],
        shape["ranks"],
        link_bytes_per_s=[level.bytes_per_s for level in links],
        link_latency_s=[level.latency_s for level in links],
        link_ranks=[level.ranks for level in links],
        efficiency=efficiency,
    )
    return peer_all_reduce_s(
        shape["bytes"],
        shape["ranks"],
        link_bytes_per_s=links[0].bytes_per_s,
        memory_bytes_per_s=chip.memory_bytes_per_s,
        library_s=library_s,
        graph=shape["graph"],
        efficiency=efficiency.peer,
    )


def _collective_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, levels = batch.shape, links(batch, chip)
    if batch.first.software == "ring":
        efficiency = replace(efficiency, inner=replace(efficiency.inner, switch_frac=None))
    node_ranks = np.minimum(levels[0].ranks, shape["ranks_per_node"])
    return collective_s(
        batch.first.variant,  # type: ignore[arg-type]
        shape["bytes"],
        shape["ranks"],
        link_bytes_per_s=[level.bytes_per_s for level in levels],
        link_latency_s=[level.latency_s for level in levels],
        link_ranks=[node_ranks, *(level.ranks for level in levels[1:])],
        efficiency=efficiency,
    )


def links(batch: Batch, chip: Chip) -> tuple[Level, ...]:
    """The links that `batch` ran on: those of `chip`, with the network between nodes that the rows name."""
    network = batch.first.software
    if network == "slingshot":
        return find_cluster("perlmutter").levels
    if network == "efa":
        return (chip.levels[0], replace(chip.levels[1], name=network))
    return chip.levels


def constants_name(row: Measurement) -> str:
    """The variant whose constants time this row: its dtype, and its software where that matters."""
    dtype = "bf16" if row.variant == "fp16" else row.variant
    return f"{dtype}-{row.software}" if row.software else dtype
