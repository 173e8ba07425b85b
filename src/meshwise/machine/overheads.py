"""What real steps pay beyond their kernels: power, the host, unfused kernels, neighbours, stragglers.

Kernels are measured alone and briefly; a training step runs for weeks. Nine things come on top, each with
one constant per generation of chip or of software, in `catalog/overheads.toml`, which `meshwise fit`
redoes from published runs:

- *Power.* A busy matrix unit reaches the power limit and the clock falls: the chip of its generation that
  may use most, W watts, sustains W / `joule_per_flop` FLOP/s, whatever its peak. Power grows with the clock
  times the square of a voltage that grows with the clock, so a chip held to w watts sustains (w/W)^(1/3) of
  that. A die that gets so few watts that its voltage is at its floor (Blackwell's, two in a package, at 16
  bits; CDNA3's, eight in a package) has power in proportion to the clock instead: it sustains
  (w - `static_watts`) / `joule_per_flop`.
  Short or thin kernels stay below it anyway. Matmul constants are of serving's kernels; in fp4 those of
  training's library (cuBLAS) are `fp4_speedup` times as fast, up to the peak.
- *Host.* Every op costs the CPU `host_s` before the GPU gets it, so a phase of n ops never takes less than
  n x `host_s`: small models run at the speed of Python. For each microbatch a stage waits `microbatch_s`
  for tokens, labels, masks and positions; that of the head counts. Where each launch waits for its kernel
  (`launches_block`: CUDA_LAUNCH_BLOCKING=1) the two times add up, and `blocked_s` an op until the GPU
  begins and the CPU knows that it ended. Routing tokens to experts is many small ops more: `moe_host_s` a
  block and phase. Of Megatron Core's some 48 a kernel that sends tokens once to a rank spares half, as it
  needs no sizes and permutes by itself, and so does a CUDA graph of the router and the sizes
  (`routing_in_graph`). Where the library is called for one expert after the other (Transformer Engine's
  GroupedLinear), each call takes the CPU `expert_call_s`, as does each cast, and one expert's tiles do not
  fill what another's leave.
- *Fusion.* Older software moves each tensor more often: element-wise kernels take `kernel_passes` times
  their bytes, casts to fp8 and fp4 (which look for the scale first) `cast_passes` times, and biases of
  experts, which Megatron-LM adds expert by expert in fp32, with what can then no longer be fused,
  `expert_bias_passes` times. Adding a
  microbatch's gradients to an fp32 sum moves `accumulate_bytes` per parameter, beyond the gradient that the
  matmul writes anyway; a narrower sum is read and written in fewer bytes. Where the scale of fp8 is known
  beforehand (delayed scaling), the kernel before writes fp8 itself: casts then take `delayed_cast_passes`.
- *Recomputation.* Where software `stops_early`, recomputation of a block or a module ends with the last
  tensor that the backward reads, so not with its last matmul (checkpoints of PyTorch since 2.1 that are not
  reentrant, compiled or not; XLA removes dead code).
- *Gradients.* Software that `frees_gradients` has none while nothing has been computed since the last step
  (PyTorch's `zero_grad` since 2.0; XLA's are temporaries); Megatron keeps a buffer for them.
- *Alignment.* Matrix units are fed 16 bytes at a time. A weight whose rows start at multiples of only 8, 4
  or 2 bytes (a vocabulary of 50257 that nobody padded) makes its matmuls `unaligned_frac` longer each time
  the 16 are halved. Unfused attention with heads that are no multiple of 8 wide misses the fast kernels
  altogether: its matmuls take `misaligned_slowdown` times as long.
- *Interference.* Communication that hides behind compute takes cores and memory bandwidth from it:
  `interference_frac` of its time is not won; kernels that send tokens once to a rank hold `dispatch_cores`
  cores as long as they run. Of the tensor-parallel exchanges that a schedule could hide
  behind a matmul, software leaves `tp_exposed_frac` open. Where `sums_exposed`, all-reduces of gradients (of
  replicas, or of their groups under ZeRO-3) hide behind nothing: XLA makes one a block, at its end.
- *Network.* The collectives of training reach `network_frac` of what the links between nodes give a
  benchmark, by the kind of network (`roce-400g`: of 400 Gb/s and more); messages from one rank to another
  reach all of it.
- *Messages.* Gradients travel in buckets of `least_bucket_params`, or of `bucket_params_per_rank` for each
  replica where that is more (Megatron Core, so that latency does not bind); under ZeRO-3 a block's weights
  come in `messages_per_block`. On many ranks the hops of each message count. Before PyTorch gathered into one
  tensor (`_all_gather_base`, 2021), each rank's shard of such a message was copied by itself: `shard_copy_s`.
- *Memory.* The process takes `context_bytes` before it holds a tensor (CUDA context, NCCL's buffers,
  library workspaces); the allocator keeps `fragment_frac` more than the tensors fill; software that sums
  gradients in a wider type than it computes them in keeps both, `second_grad_bytes` a parameter. Where
  `weight_copies` is 0 the fp32 weights of the optimizer are cast where they are read, and no narrower copy
  of them is held; `sharded_copies` is the same of the shards of ZeRO-3, of which FSDP keeps the ends of the
  model whole through the step where they are its root (`root_bytes` a parameter: 2; 4 where their gradients,
  reduced in fp32 and at once when all else is, find no place in the cache and take a new one). In its step
  Adam makes `moment_copies` of the second moments; `inputs_stay` where FSDP1 keeps the inputs of reentrant
  checkpoints beside frozen weights until the backward ends, `logits_stay` where the caller of a loss holds
  its logits. FSDP1 gathers on a stream of its own, which is still to run when the host gives the weights
  back, so their places wait: the allocator keeps `stream_frac` more.
- *Stragglers.* All wait for the slowest: `straggler_frac` of the step for each doubling of the ranks, and
  `skew_s` before each exchange within a block. Experts are not equally liked: the logs of ranks' loads
  spread by `expert_spread` unless a run forces its tokens to be spread evenly, so the busiest of R ranks has
  1 + spread sqrt(2 ln R) times the mean (`imbalance`), with however many experts: like tokens choose alike.

Software is named by its core and the year of its first release like it: `SOFTWARE`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.core.files import read_catalog
from meshwise.core.units import Num
from meshwise.machine.efficiency import AS_MEASURED, CLOCK_POWER
from meshwise.machine.hardware import Chip

_CATALOG = read_catalog("software.toml")
FULL_WATTS: dict[str, float] = _CATALOG["full_watts"]
"""The most that a chip of the generation may use."""

_STATIC = "_static_watts"
"""What the static watts of a dtype are called in the catalog (`bf16_static_watts`)."""

DEFAULT_SOFTWARE = "megatron-2024"
"""What a plan runs on that does not say: the generation that most sources of published runs measured."""


class Software(NamedTuple):
    """What a generation of software does that others do not.

    Whose loss it runs (`program.loss`), and what is fused of it by default. `sums_wide`: DTensor sums the
    gradients that every rank of tp has a part of in the type in which FSDP2 reduces them, not in that of the
    matmuls. `measured_as`: the generation whose overheads it has, where nobody measured its own. `makers`:
    those whose chips run no other, and the kinds that it has there of some keys of a plan.
    `native_attention`: generations of chips whose own fused attention it runs. `is_eager`: it fuses no
    element-wise kernels of a block. `stops_early`: see *Recomputation*. `weighs_last`: as in a
    `program.cut.Cut`, `casts_weights`: as in a `program.op.Precision`.
    """

    losses: str
    loss_fusion: str
    sums_wide: bool = False
    measured_as: str = ""
    makers: Mapping[str, Mapping[str, Sequence[str]]] = {}
    native_attention: Sequence[str] = ()
    is_eager: bool = False
    weighs_last: bool = False
    casts_weights: bool = False
    stops_early: bool = False


SOFTWARE = {name: Software(**entry) for name, entry in _CATALOG["software"].items()}
"""Training software by its core and first year, oldest first."""


def software_on(chip: Chip) -> str:
    """The software that alone runs on `chip`; nothing where there is a choice."""
    return next((name for name, one in SOFTWARE.items() if chip.vendor in one.makers), "")


def own_kinds(chip: Chip) -> dict[str, Sequence[str]]:
    """The kinds that software of a chip's own has of some keys of a plan; nothing where it runs any other."""
    return dict(SOFTWARE[name].makers[chip.vendor]) if (name := software_on(chip)) else {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overheads:
    """The constants of one chip and one generation of software; the defaults cost nothing.

    `joule_per_flop` and `static_watts` by dtype of the matmul; `attention_slowdown` is of the fused kernel of
    the time over today's.
    """

    joule_per_flop: Mapping[str, float] = field(default_factory=dict)
    full_watts: float = 1.0
    static_watts: Mapping[str, float] = field(default_factory=dict)
    fp4_speedup: float = 1.0
    host_s: float = 0.0
    moe_host_s: float = 0.0
    expert_call_s: float = 0.0
    routing_in_graph: bool = False
    launches_block: bool = False
    blocked_s: float = 0.0
    microbatch_s: float = 0.0
    kernel_passes: float = 1.0
    cast_passes: float = 1.0
    delayed_cast_passes: float = 1.0
    expert_bias_passes: float = 1.0
    accumulate_bytes: float = 0.0
    stops_early: float = 0.0
    frees_gradients: float = 0.0
    misaligned_slowdown: float = 1.0
    unaligned_frac: float = 0.0
    attention_slowdown: float = 1.0
    interference_frac: float = 0.0
    tp_exposed_frac: float = 0.0
    sums_exposed: float = 0.0
    dispatch_cores: float = 0.0
    straggler_frac: float = 0.0
    skew_s: float = 0.0
    expert_spread: float = 0.0
    least_bucket_params: float = float("inf")
    bucket_params_per_rank: float = 0.0
    messages_per_block: float = 0.0
    shard_copy_s: float = 0.0
    network_frac: Mapping[str, float] = field(default_factory=dict)
    context_bytes: float = 0.0
    fragment_frac: float = 0.0
    second_grad_bytes: float = 0.0
    weight_copies: float = 1.0
    sharded_copies: float = 1.0
    moment_copies: float = 0.0
    inputs_stay: float = 0.0
    logits_stay: float = 0.0
    root_bytes: float = 0.0
    stream_frac: float = 0.0

    def not_hidden_frac(self, axis: str) -> float:
        """Share of hidden communication's time that is paid all the same, by its mesh axis."""
        if self.launches_block:
            return 1.0
        return self.tp_exposed_frac if axis.startswith("tp") else self.interference_frac

    def bucket_params(self, replicas: Num) -> Num:
        """Parameters whose gradients travel in one message."""
        return np.maximum(self.least_bucket_params, self.bucket_params_per_rank * replicas)

    def adding_bytes(self, sum_bytes: float) -> float:
        """Bytes moved per parameter to add a microbatch's gradient to a sum of elements of `sum_bytes`."""
        return max(self.accumulate_bytes - 2.0 * (4.0 - sum_bytes), 0.0)

    def imbalance(self, ranks: Num) -> Num:
        """Tokens of the busiest of `ranks` over the mean: the largest of normal samples (Gumbel 1958)."""
        return 1.0 + self.expert_spread * np.sqrt(2.0 * np.log(ranks))

    def reached_frac(self, link: str, bytes_per_s: float) -> float:
        """Share of a link's bandwidth that training reaches, by the name of its level and its rate.

        From 25 GB/s on, where older adapters end, it nears that of 400 Gb/s.
        """
        kind = next((kind for kind in self.network_frac if link.lower().startswith(kind)), "")
        older = self.network_frac.get(kind, 1.0)
        newer = self.network_frac.get(f"{kind}-400g", older)
        return older + (newer - older) * min(max(math.log2(bytes_per_s / 25e9), 0.0), 1.0)

    def sustained_flop_per_s(self, dtype: str, power_watts: float) -> float:
        """What the power limit leaves of the matrix units' rate; infinite where nothing is known."""
        measured = AS_MEASURED.get(dtype, dtype)
        joule = self.joule_per_flop.get(measured)
        if not joule or not power_watts:
            return float("inf")
        if static := self.static_watts.get(measured):
            return max(power_watts - static, 0.1 * power_watts) / joule
        return self.full_watts / joule * (power_watts / self.full_watts) ** CLOCK_POWER


NONE = Overheads()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """All constants: `power` and `older_attention` by generation of chip, `software` by its own, `network` by
    kind, and what is `common`.

    `older_attention` is the time of the fused attention before the one written for that generation, over
    that one's; software with an `attention_slowdown` runs it.
    """

    power: Mapping[str, Mapping[str, float]]
    older_attention: Mapping[str, float]
    software: Mapping[str, Mapping[str, float]]
    network: Mapping[str, float]
    common: Mapping[str, float]


@cache
def tables() -> Tables:
    """The catalog."""
    raw = read_catalog("overheads.toml")
    raw.pop("about", None)
    return Tables(**raw)


@lru_cache(maxsize=256)
def serving_overheads(chip: Chip) -> Overheads:
    """Those of a serving engine: the process's memory alone. A CUDA graph replays the kernels of a pass."""
    return Overheads(context_bytes=find_overheads(chip).context_bytes)


def find_overheads(chip: Chip, software: str = DEFAULT_SOFTWARE, *, among: Tables | None = None) -> Overheads:
    """The overheads of `chip` under a generation of software, from the catalog (or `among` other tables).

    A chip whose generation has no power figures is not limited by power. PlanError for an unknown
    generation of software.
    """
    return _find(chip.generation, chip.flop_per_joule, software, tables() if among is None else among)


def measured_as(software: str) -> str:
    """The generation of software whose measurements speak for `software`."""
    return (software in SOFTWARE and SOFTWARE[software].measured_as) or software


@lru_cache(maxsize=256)
def _find(generation: str, flop_per_joule: float, software: str, among: Tables) -> Overheads:
    measured = measured_as(software)
    if measured not in among.software:
        raise PlanError(f"software {software!r} is unknown; choose one of {', '.join(SOFTWARE)}")
    constants: dict[str, Any] = {**among.software[measured], **among.common}
    power = dict(among.power.get(generation, {}))
    constants["stops_early"] = 1.0 * (software in SOFTWARE and SOFTWARE[software].stops_early)
    if software in SOFTWARE and generation in SOFTWARE[software].native_attention:
        constants["attention_slowdown"] = 1.0
    elif "attention_slowdown" in constants:
        constants["attention_slowdown"] *= among.older_attention.get(generation, 1.0)
    static = {name.removesuffix(_STATIC): power.pop(name) for name in [*power] if name.endswith(_STATIC)}
    return Overheads(
        static_watts=static,
        joule_per_flop={dtype: joule / flop_per_joule for dtype, joule in power.items()},
        full_watts=FULL_WATTS.get(generation, 1.0),
        network_frac=among.network,
        **constants,
    )
