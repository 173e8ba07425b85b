"""A fake mode that calls torch's shape kernels of common ops itself.

A `FakeTensorMode` looks each op up in a cache whose key takes longer to make than the shapes of a view or of
a matmul take to infer. Where all tensors of an op are fake ones on one device, whose values nobody knows, its
kernel for meta tensors gives the result, and nothing else has to be asked.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwise.runtime.torch_private import FakeTensor, FakeTensorMode, in_kernel_invocation

aten = torch.ops.aten

DIRECT = frozenset((
    aten.view.default, aten.detach.default, aten.t.default, aten.transpose.int, aten.select.int,
    aten.slice.Tensor, aten.as_strided.default, aten.split.Tensor, aten._unsafe_view.default,
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.sum.dim_IntList, aten.cat.default,
    aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sqrt.default, aten.gelu.default,
    aten.gelu_backward.default, aten.silu.default, aten.silu_backward.default, aten.add_.Tensor,
    aten.mul_.Tensor, aten.lerp_.Scalar, aten.addcmul_.default, aten.addcdiv_.default, aten.copy_.default,
    aten.clone.default, aten.empty_like.default, aten.zeros_like.default, aten._to_copy.default,
    aten.embedding_dense_backward.default, aten.sub.Tensor, aten.new_zeros.default, aten.neg.default,
    aten.split_with_sizes.default, aten.unsqueeze.default, aten.permute.default, aten.unbind.int,
    aten.squeeze.dim, aten.sum.default, aten.gather.default, aten._softmax.default, aten.where.self,
    aten.index_select.default,
))  # fmt: skip
"""Ops whose result lies where their tensors do, and whose meta kernel torch itself calls for fake ones."""

_LIKE_FIRST = frozenset((
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.gelu_backward.default,
    aten.gelu.default, aten.neg.default,
))  # fmt: skip
"""Ops of one or two tensors, or of one and a number, whose shapes torch infers in Python, dim by dim."""

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_library = torch.library.Library("aten", "IMPL")


def leave_whole(key: str) -> None:
    """Ops that devices have a kernel for stay one op where this machine has none for the dispatch key `key`.

    Torch would put several ops in their place, whose results no device ever holds.
    """
    for name in ("silu_backward", "mish_backward", "native_channel_shuffle"):
        _library.impl(name, _missing, key)


def _missing(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a kernel of a device was called on a machine without one")


class QuickFakes(FakeTensorMode):
    """A `FakeTensorMode` with a short way for the ops of `DIRECT`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under a dry run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _WAIT:
            return args[0]  # as on devices; torch's shape kernel makes a second tensor
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func in DIRECT and "device" not in kwargs:
            device = _common_device(args)
            if device is not None:
                with in_kernel_invocation(self):
                    result = _shaped(func, args, kwargs)
                if isinstance(result, list | tuple):
                    return type(result)(FakeTensor(self, each, device) for each in result)
                return result if isinstance(result, FakeTensor) else FakeTensor(self, result, device)
        return self.dispatch(func, types, args, kwargs)


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """What a kernel for meta tensors makes of fake ones; of some ops a quicker one gives the same shape."""
    if func is aten.addmm.default:
        return aten.mm.default(*args[1:3])
    if func in _LIKE_FIRST and args[0].is_floating_point():
        first, *second = args[:2]
        if _is_like_first(first, *second):
            return aten.empty_like.default(first)
        if second:
            return aten.mul.Tensor(first, *second)
    return func(*args, **kwargs)


def _is_like_first(first: torch.Tensor, second: Any = None) -> bool:
    """Whether what an op makes of both lies as the first of them does."""
    if not first.is_contiguous():
        return False
    if not isinstance(second, torch.Tensor):
        return True
    if first.dtype != second.dtype or second.dim() > first.dim():
        return False
    both = zip(reversed(second.shape), reversed(first.shape), strict=False)
    return all(size in (1, whole) for size, whole in both)


def _common_device(args: Any) -> torch.device | None:
    """Where all tensors of `args` lie; None where they lie apart, or torch knows the value of one."""
    device = None
    for arg in args:
        for leaf in arg if isinstance(arg, list) else (arg,):
            if isinstance(leaf, torch.Tensor):
                if type(leaf) is not FakeTensor or leaf.constant is not None:
                    return None
                if device is not None and leaf.fake_device != device:
                    return None
                device = leaf.fake_device
    return device
