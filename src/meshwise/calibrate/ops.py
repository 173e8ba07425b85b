"""Predicted times of measured ops: the formulas of `meshwise.cost`, by kind of op, over columns of shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.calibrate.microdata import BEST, NAMES, Measurement
from meshwise.core.columns import grouped
from meshwise.core.units import Num
from meshwise.cost.attention_kernel import attention_s, decode_attention_s
from meshwise.cost.collective import collective_s, peer_all_reduce_s
from meshwise.cost.dispatch import copies_spread, deepep_copies, dispatch_s
from meshwise.cost.experts import experts_s
from meshwise.cost.gemm import gemm_s
from meshwise.cost.memory_kernel import memory_kernel_s, scaled_cast_s
from meshwise.machine.efficiency import DispatchEfficiency, Efficiency, ExpertsEfficiency
from meshwise.machine.hardware import WITHOUT_PEERS, Chip, Level, find_cluster, links_of

Array = NDArray[np.float64]

ELEM_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5625, "w4a16": 0.53125}
"""Bytes of an operand's element; fp4 carries one fp8 scale for 16 elements, mxfp4 weights one for 32."""

_WITHOUT_PEERS = NAMES["without_peer_access"]
"""Chips whose collectives were measured in a box without peer access."""

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
    groups = grouped(rows, lambda row: (row.chip, row.op, row.variant, row.software))
    found = []
    for group in groups.values():
        shape = {name: np.array([row.shape[name] for row in group]) for name in group[0].shape}
        found.append(Batch(group, shape, np.array([row.seconds for row in group])))
    return found


def predict_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Array:
    """Predicted seconds of each row of `batch` on `chip`."""
    times: dict[str, Callable[[Batch, Chip, Efficiency], Num]] = {
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


def _rates(chip: Chip, dtype: str = "bf16") -> dict[str, Any]:
    return {"flop_per_s": chip.matrix_peak(dtype), "memory_bytes_per_s": chip.memory_bytes_per_s}


def _columns(batch: Batch, *names: str) -> dict[str, Any]:
    return {name: batch.shape[name] for name in names}


def _gemm_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, dtype, name = batch.shape, batch.first.variant, constants_name(batch.first)
    gemm = gemm_s(
        **_columns(batch, "m", "n", "k", "batch"), **_rates(chip, dtype), num_cores=float(chip.num_cores),
        elem_bytes=ELEM_BYTES[dtype], out_bytes=2.0, efficiency=efficiency.gemm(name),
    )  # fmt: skip
    if not shape["cast"].any():
        return gemm
    return gemm + shape["cast"] * scaled_cast_s(
        shape["m"], shape["k"], out_bytes=ELEM_BYTES[dtype], memory_bytes_per_s=chip.memory_bytes_per_s,
        num_cores=float(chip.num_cores), efficiency=efficiency.cast(name),
    )  # fmt: skip


def _attention_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shared = _columns(batch, "batch", "heads", "kv_heads", "qk_dim", "v_dim") | _rates(chip)
    seq, causal, passes = (batch.shape[name] for name in ("seq", "causal", "passes"))
    shared |= {"seq_q": seq, "seq_k": seq, "num_cores": float(chip.num_cores)}

    def kernel_s(backward: bool) -> Num:
        of: dict[str, Any] = {"backward": backward, "efficiency": efficiency.attention}
        masked_s, whole_s = (attention_s(**shared, causal=masked, **of) for masked in (True, False))
        return np.where(causal > 0, masked_s, whole_s)

    # passes: 1 forward, 2 backward, 3 both
    return np.where(passes != 2, kernel_s(False), 0.0) + np.where(passes >= 2, kernel_s(True), 0.0)


def _decode_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    return decode_attention_s(
        **_columns(batch, "batch", "heads", "kv_bytes_per_token", "qk_dim", "v_dim"),
        **_rates(chip),
        seq_k=batch.shape["kv_len"],
        efficiency=efficiency.latent_decode if batch.first.variant == "mla" else efficiency.decode,
    )


def _memory_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    rate = chip.memory_bytes_per_s
    return memory_kernel_s(batch.shape["bytes"], memory_bytes_per_s=rate, efficiency=efficiency.memory)


def _experts_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, variant, library = batch.shape, batch.first.variant, constants_name(batch.first)
    dtype = EXPERT_MATMULS.get(variant, variant)
    return experts_s(
        **_columns(batch, "tokens", "hidden", "active", "uneven", "moved_topk"),
        **_rates(chip, dtype),
        topk=shape["local_topk"], chosen=shape["topk"], experts=shape["experts"] / shape["ep"],
        inter=shape["inter"] / shape["tp"], num_cores=float(chip.num_cores), elem_bytes=ELEM_BYTES[dtype],
        weight_bytes=ELEM_BYTES[variant], gemm=efficiency.gemm(dtype), memory=efficiency.memory,
        library=library, efficiency=efficiency.experts.get(library, ExpertsEfficiency()),
    )  # fmt: skip


def _dispatch_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, variant = batch.shape, batch.first.variant
    places = (shape["topk"], shape["ranks"], shape["ranks_per_node"])
    num_cores: Num = float(chip.num_cores)
    if variant.startswith("deepep"):
        cores: dict[str, Num] = {"num_cores": num_cores, "cores": shape["cores"]}
        copies, num_cores = deepep_copies(variant, *places, experts=shape["experts"], **cores)
    else:
        copies = copies_spread(*places[:2])
    return dispatch_s(
        **_columns(batch, "tokens", "token_bytes", "ranks", "ranks_per_node", "experts"), copies=copies,
        inner_bytes_per_s=chip.levels[0].bytes_per_s, outer_bytes_per_s=chip.levels[1].bytes_per_s,
        num_cores=num_cores, efficiency=efficiency.dispatches.get(variant, DispatchEfficiency()),
    )  # fmt: skip


def _peer_all_reduce_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    size, ranks, between = batch.shape["bytes"], batch.shape["ranks"], links_of(chip.levels)
    return peer_all_reduce_s(
        size, ranks, link_bytes_per_s=between[0].among(ranks),
        memory_bytes_per_s=chip.memory_bytes_per_s, graph=batch.shape["graph"], efficiency=efficiency.peer,
        library_s=collective_s("all_reduce", size, ranks, links=between, efficiency=efficiency),
    )  # fmt: skip


def _collective_s(batch: Batch, chip: Chip, efficiency: Efficiency) -> Num:
    shape, levels = batch.shape, links(batch, chip)
    if batch.first.software == "ring":
        efficiency = replace(efficiency, inner=replace(efficiency.inner, switch_frac=None))
    several_nodes = shape["ranks"] > shape["ranks_per_node"]
    of_node = np.minimum(levels[0].ranks, shape["ranks_per_node"])
    node_ranks = np.where(several_nodes, of_node, levels[0].ranks)
    first, *others = links_of(levels)
    between = (first._replace(ranks=node_ranks), *others)
    kind: Any = batch.first.variant
    return collective_s(kind, shape["bytes"], shape["ranks"], links=between, efficiency=efficiency)


def links(batch: Batch, chip: Chip) -> tuple[Level, ...]:
    """The links that `batch` ran on: those of `chip`, with the network between nodes that the rows name."""
    network = batch.first.software
    if network == "slingshot":
        return find_cluster("perlmutter").levels
    if network == "efa":
        return (chip.levels[0], replace(chip.levels[1], name=network))
    if chip.name in _WITHOUT_PEERS:
        return (replace(chip.levels[0], name=chip.levels[0].name + WITHOUT_PEERS), *chip.levels[1:])
    return chip.levels


def constants_name(row: Measurement) -> str:
    """The variant whose constants time this row: its dtype, and its software where that matters."""
    dtype = "bf16" if row.variant == "fp16" else row.variant
    return dtype if row.software in ("", BEST) else f"{dtype}-{row.software}"
