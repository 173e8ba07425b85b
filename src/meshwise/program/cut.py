"""How a plan cuts one block: the degrees and strides that local shapes are made of.

`Cut` is what a layout reads. Its numbers may be arrays over a grid of plans; its switches say which
ops exist, so a grid holds one value of each. A group's stride is the distance between its
neighbouring members in ranks; it decides which links the group lives on.
"""

from dataclasses import dataclass, field
from typing import Any

from meshwise.core.units import Num
from meshwise.program.loss import LOSSES, Loss
from meshwise.program.op import Precision

GRID_AXES = ("tp_col", "tp_row", "tp_depth")
"""Names of a grid's axes, by what varies along them: the ranks of one row are a group along tp_col."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One microbatch of `microbatch` sequences of `seq` tokens, cut by tp, cp, ep and etp.

    Context parallelism is `ulysses` (heads) x `ring` (sequence) = cp; `gather_keys` all-gathers keys and
    values instead of passing them round the ring, in which the rank that is looked at is number `ring_rank`.

    A `layout` of several dimensions lays the tp ranks out as a `grid`, its first axis on neighbouring ranks:
    columns x rows (2d, 2d-cp), columns x rows x depth (2.5d, 3d). `panels`: in how many pieces SUMMA sends
    each block that both cuts share.

    `imbalance` is the load of the busiest expert rank over the mean. `dispatch_per_rank` sends a token once
    to each rank that holds some of its experts, with `dispatch_bytes` an element (results come back in the
    activations' type).

    `recompute_modules`: what selective recomputation covers (`program.segments`). `narrow_act_input`: inputs
    of activation functions are kept in fp8 (Megatron-LM's activation_func_fp8_input_store). The head computes
    in `head_dtype` where other matmuls are narrower than bf16, its logits and their `loss` in `loss_chunks`.

    `lora_rank` above 0 freezes all weights and trains adapters of that rank beside the linear layers
    `lora_targets` (none named: all), which drop the share `lora_dropout` of their input; the frozen matrices
    of blocks have `frozen_bytes` a parameter (None: like other weights).

    `narrow_matmuls`: fp8 or fp4, in which linear layers of blocks compute, and nothing else (PyTorch's way).

    `implementation` says whose software does the ops (`program.implementation`); it `is_eager` where no
    element-wise kernels are fused but `fused_kernels`. `weighs_last`: it puts the answers of experts back
    in the order of tokens before it weighs and adds them.

    `kind` is that of the workload: train, evaluate, prefill or decode. The last has `past` cached tokens of
    each sequence, and one new one (`seq`); the cache has `kv_bytes` an element. In both an expert computes
    `expert_tile` - 1 rows more than it has tokens, by the `expert_library` ("": the chip's).
    """

    microbatch: Num
    seq: Num
    tp: Num = 1.0
    ulysses: Num = 1.0
    ring: Num = 1.0
    ring_rank: Num = 0.0
    ep: Num = 1.0
    etp: Num = 1.0
    tp_stride: Num = 1.0
    cp_stride: Num = 1.0
    ep_stride: Num = 1.0
    imbalance: Num = 1.0
    dispatch_per_rank: Any = False
    dispatch_bytes: float = 2.0
    recompute_modules: tuple[str, ...] = ("core_attn",)
    narrow_act_input: bool = False
    head_dtype: str = "bf16"
    loss_chunks: int = 1
    loss: Loss = LOSSES["megatron"]["none"]
    sequence_parallel: bool = False
    gather_keys: Any = False
    layout: str = "1d"
    grid: tuple[Num, ...] = ()
    panels: Num = 1.0
    flash: bool = True
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    frozen_bytes: float | None = None
    narrow_matmuls: str = ""
    implementation: str = "megatron"
    is_eager: bool = False
    fused_kernels: tuple[str, ...] = ()
    weighs_last: bool = False
    precision: Precision = field(default_factory=Precision)
    kind: str = "train"
    past: Num = 0.0
    kv_bytes: float = 2.0
    wide_modules: tuple[str, ...] = ()
    expert_tile: float = 1.0
    expert_library: str = ""
    fuses_casts: bool = False
    gathers_by_sums: bool = False
    codes_sums: bool = False

    @property
    def tokens(self) -> Num:
        """Tokens of a microbatch that one tensor-parallel group works on."""
        return self.microbatch * self.seq / (self.ulysses * self.ring)

    @property
    def split_tokens(self) -> Num:
        """Tokens of one rank where the ops between matmuls run: cut by tp under sequence parallelism."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens

    def axis(self, dim: int) -> dict[str, Any]:
        """Axis `dim` of the grid as the arguments of a collective: its name, group and stride."""
        stride = self.tp_stride
        for inner in self.grid[:dim]:
            stride = stride * inner
        return {"axis": GRID_AXES[dim], "group_size": self.grid[dim], "stride": stride}
