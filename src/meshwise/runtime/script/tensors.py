"""Methods of tensors and modules that need more than a shape, and what replaces or switches off kernels.

A module that moves to `cuda` keeps its parameters: the fake takes the place of the real tensor. Attention
runs the fused kernel that CUDA would choose, and `torch.compile` is off.
"""

import copyreg
from itertools import product
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex_attention
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from meshwise.runtime import torch_private as private
from meshwise.runtime.fakes import leave_whole
from meshwise.runtime.recorder import OpRecorder
from meshwise.runtime.script.values import SHADOW_ELEMENTS, Guesses, forget, guess_of, shadow_of
from meshwise.runtime.when_imported import when_imported

aten, FakeTensor = torch.ops.aten, private.FakeTensor
_library = torch.library.Library("aten", "IMPL")
_MAX_FLASH_HEAD = 256
_FIRST_ADDRESS, _ALIGNMENT = 1 << 44, 512


def supply_tensors(guesses: Guesses, recorder: OpRecorder) -> None:
    """Replace methods that a fake tensor does not have."""
    tensor: Any = torch.Tensor
    data = tensor.data

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        if isinstance(new, FakeTensor) != isinstance(self, FakeTensor):
            with torch.no_grad():
                _swap(self, torch.nn.Parameter(new.detach(), requires_grad=self.requires_grad))
        else:
            data.__set__(self, new)

    def known(self: torch.Tensor) -> torch.Tensor:
        if shadow_of(self) is None:
            guesses.add("the values of a tensor", "1 (bools: 0; ends of documents: equally far apart)")
        return guess_of(self).expand(self.shape).clone()

    to_list, to_numpy = tensor.tolist, tensor.numpy
    tensor.data = property(data.__get__, set_data)
    tensor.tolist = lambda self: to_list(known(self) if isinstance(self, FakeTensor) else self)
    FakeTensor.tolist = tensor.tolist
    FakeTensor.__format__ = lambda self, spec: format(self.item() if spec else str(self), spec)
    tensor.numpy = lambda self, **how: to_numpy(known(self) if isinstance(self, FakeTensor) else self, **how)
    tensor.pin_memory = FakeTensor.wait = lambda self, *_: self  # so called of a functional collective
    torch.utils.swap_tensors = _swap
    torch.__future__.set_swap_module_params_on_conversion(True)
    # the latter would make an operator of the compiler of a kernel in a `triton_op`
    torch.compile = torch.library.wrap_triton = _uncompiled
    private.OptimizedModule.__call__ = torch.nn.Module.__call__  # its own warns of hooks, which are ours
    private.OptimizedModule._initialize = lambda self: self.__dict__.update(forward=self._orig_mod.__call__)
    for kinds in (private.optimizer_foreach_types, private.foreach_types):
        kinds.append(FakeTensor)  # `foreach` is the default on CUDA
    _supply_addresses()
    _supply_attention(guesses, recorder)
    _supply_triton(guesses)
    when_imported("transformers.utils.import_utils", _read_known_masks)
    for name, shapes in _BATCH_NORM.items():
        _library.impl(name, shapes, "Meta")


def _read_known_masks(module: Any) -> None:
    """Let transformers read a padding mask whose values are known, as it does on a GPU, which skips ones.

    It takes fake tensors for those of a trace, whose mask it makes whatever is in them.
    """
    module.is_fake_tensor = lambda x: isinstance(x, FakeTensor) and shadow_of(x) is None


def _supply_addresses() -> None:
    """Each fake storage has an address of its own, by which programs tell whether tensors share memory."""
    storage: Any = torch.UntypedStorage
    real, ends = storage.data_ptr, [_FIRST_ADDRESS]

    def data_ptr(self: Any) -> int:
        if self.device.type != "meta":
            return int(real(self))
        if not hasattr(self, "address"):
            self.address = ends[0]
            ends[0] += self.nbytes() + _ALIGNMENT - self.nbytes() % _ALIGNMENT
        return int(self.address)

    storage.data_ptr = data_ptr
    FakeTensor.data_ptr = lambda self: (
        self.untyped_storage().data_ptr() + self.storage_offset() * self.element_size()
    )


def _supply_triton(guesses: Guesses) -> None:
    """Kernels of Triton write what nobody knows into the tensors that they are given, and do no work."""

    def run(self: Any, *args: Any, **how: Any) -> None:
        kernel = self
        while not hasattr(kernel, "__name__"):
            kernel = kernel.fn
        what, got = f"the Triton kernel {kernel.__name__}", "no work, and results that nobody knows"
        guesses.add(what, got, "make it a torch.library.triton_op, its work by register_flop_formula")
        for leaf in private.tree_leaves((args, how)):
            if isinstance(leaf, FakeTensor):
                forget(leaf)

    def supply(module: Any) -> None:
        for kind in {"JITFunction", "Autotuner", "Heuristics"} & set(vars(module)):
            getattr(module, kind).run = run

    for name in ("jit", "autotuner"):
        when_imported(f"triton.runtime.{name}", supply)


def _per_channel(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))


_BATCH_NORM: dict[str, Any] = {
    "batch_norm_stats": lambda x, eps: (_per_channel(x), _per_channel(x)),
    "batch_norm_gather_stats_with_counts": lambda x, *_: (_per_channel(x), _per_channel(x)),
    "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
    "batch_norm_backward_reduce": lambda grad, *_: tuple(_per_channel(grad) for _ in range(4)),
    "batch_norm_backward_elemt": lambda grad, *_: torch.empty_like(grad),
}
"""Shapes of the kernels of SyncBatchNorm, which torch does not state."""


def _swap(one: Any, other: Any) -> None:
    """Each tensor takes the place of the other, whoever refers to it."""
    slots = {*copyreg._slotnames(type(one)), *copyreg._slotnames(type(other))}  # type: ignore[attr-defined]
    held = [{slot: getattr(of, slot) for slot in slots if hasattr(of, slot)} for of in (one, other)]
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    for tensor, values in ((other, held[0]), (one, held[1])):
        for slot, value in values.items():
            setattr(tensor, slot, value)
    private.swap_tensor_impl(one, other)


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """The function itself; a module in a wrapper, whose names begin with `_orig_mod`."""
    if isinstance(function, torch.nn.Module):
        return private.OptimizedModule(function, None)
    return function if function is not None else _uncompiled


def _supply_attention(guesses: Guesses, recorder: OpRecorder) -> None:
    """Attention as CUDA does it: flash, else memory-efficient, else cuDNN, else torch's ops one by one."""

    def flex(
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None,
        scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
        kernel_options: Any = None, *, return_aux: Any = None,
    ) -> Any:  # fmt: skip
        shown_frac = getattr(block_mask, "shown_frac", None)
        is_guessed = block_mask is not None and shown_frac is None
        if is_guessed or score_mod is not None:
            guesses.add("the mask of flex_attention", "causal" if is_guessed else "its block_mask alone")
        with recorder.showing(shown_frac):
            out, lse = _flash(query, key, value, 0.0, is_guessed, scale)
        if return_aux is not None:
            return out, flex_attention.AuxOutput(lse=lse if return_aux.lse else None)
        return (out, lse) if return_lse else out

    def block_mask_of(mask_mod: Any, *sizes: Any, **how: Any) -> Any:
        mask = _block_mask(mask_mod, *sizes, **how)
        with recorder.setup():
            mask.shown_frac = _shown_frac(guesses, mask_mod, *sizes, **how)
        return mask

    flex_attention.flex_attention = flex
    flex_attention.create_block_mask = block_mask_of
    _library.impl("scaled_dot_product_attention", attend, "AutogradCUDA")
    private.set_attention_order([1, 2, 3, 0, 4])  # flash, memory-efficient, cuDNN, math
    leave_whole("CUDA")


def attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The op `scaled_dot_product_attention` by the kernel that CUDA chooses."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"attention of unlike dtypes: {query.dtype}, {key.dtype} and {value.dtype}")
    kernel = _kernel(query, value, is_masked=attn_mask is not None)
    if kernel is SDPBackend.FLASH_ATTENTION:
        return _flash(query, key, value, dropout_p, is_causal, scale)[0]
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    given = query, key, value, attn_mask
    if kernel is SDPBackend.MATH:
        return aten._scaled_dot_product_attention_math(*given, dropout_p, is_causal, scale=scale)[0]
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    fused = getattr(aten, f"_scaled_dot_product_{kernel.name.lower()}")
    return fused(*given, needs_gradient, dropout_p, is_causal, scale=scale)[0]


def _kernel(query: Any, value: Any, *, is_masked: bool) -> SDPBackend:
    """The first kernel in torch's order that the program leaves enabled and that takes these tensors."""
    size, is_equal = query.element_size(), query.shape[-1] == value.shape[-1] <= _MAX_FLASH_HEAD
    is_aligned = not any(x.shape[-1] * size % 16 for x in (query, value))
    takes = {
        SDPBackend.FLASH_ATTENTION: size == 2 and is_equal and not is_masked,
        SDPBackend.EFFICIENT_ATTENTION: size in (2, 4) and is_aligned,
        SDPBackend.CUDNN_ATTENTION: size == 2 and is_aligned,
    }
    for kernel in private.enabled_attention(with_priority=True):
        if kernel is SDPBackend.MATH or (query.dim() == 4 and takes.get(kernel)):
            return kernel
    raise RuntimeError("no kernel of attention that is enabled takes these tensors")


def _flash(query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: Any) -> Any:
    """Output and log-sum-exp; flash wants equal heads of a multiple of 8."""
    head = query.shape[-1]
    if value.shape[-1] != head:
        fused = aten._scaled_dot_product_efficient_attention
        return fused(query, key, value, None, True, dropout_p, is_causal, scale=scale)[:2]
    pad = -head % 8
    padded = (F.pad(x, (0, pad)) if pad else x for x in (query, key, value))
    scale = head**-0.5 if scale is None else scale
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)
    return out[..., :head] if pad else out, lse


_EVALUATIONS, _MOST_KEYS = 16, 4096


def _shown_frac(
    guesses: Guesses, mask_mod: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, *_: Any, **__: Any
) -> float | None:
    """The share of query-key pairs that a mask shows, of many on even samples; None: nobody knows."""
    keys = _spread(KV_LEN, min(KV_LEN, _MOST_KEYS))
    heads = list(product(range(B or 1), range(H or 1)))
    rows = SHADOW_ELEMENTS // len(keys)
    queries = _spread(Q_LEN, min(Q_LEN, rows * max(_EVALUATIONS // len(heads), 1)))
    found = []
    for (batch, head), some in product(heads, queries.split(rows)):
        places = torch.tensor(batch, device="cuda"), torch.tensor(head, device="cuda")
        mask = mask_mod(*places, some[:, None], keys[None, :]).expand(len(some), len(keys))
        value = shadow_of(mask)
        if value is None:
            guesses.add("the mask of flex_attention", "as if what nobody knows in it were 1")
            value = getattr(mask, "guess", None)
        if value is None:
            return None
        with private.disable_current_modes():
            found += [float(value.sum())]
    return sum(found) / (len(heads) * len(queries) * len(keys))


def _spread(size: int, number: int) -> torch.Tensor:
    """So many places among `size`, evenly far apart."""
    return (torch.arange(number, device="cuda") * 2 + 1) * size // (2 * number)


def _block_mask(mask_mod: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, *_: Any, **__: Any) -> Any:
    """A mask that nobody looks into."""
    blocks = torch.ones((B or 1, H or 1, -(-Q_LEN // 128)), dtype=torch.int32)
    order = torch.zeros((*blocks.shape, -(-KV_LEN // 128)), dtype=torch.int32)
    sizes = (Q_LEN, KV_LEN)
    return flex_attention.BlockMask.from_kv_blocks(blocks, order, mask_mod=mask_mod, seq_lengths=sizes)
