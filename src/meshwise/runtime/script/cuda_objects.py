"""Two C++ objects without which autograd aborts on fake `cuda` tensors where torch was built without CUDA.

The device guard of CUDA: torch has one that does nothing, made for fake tensors, but installs it only over a
guard that counts no devices; so one is put there first. The hooks of CUDA, by which autograd asks whether
there is an accelerator: torch's object gets a copy of its table of functions with some of them replaced.
Entries are numbered as in the headers of torch 2.13: two destructors, AcceleratorHooksInterface.h, then
CUDAHooksInterface.h.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from meshwise.runtime.torch_private import ensure_cuda_device_guard

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_CPU_GENERATOR = "_ZN2at6detail22getDefaultCPUGeneratorEv"
_NEW_GENERATOR = "_ZN2at6detail18createCPUGeneratorEm"
_GUARDS, _ENTRIES = 64, 60
_Function = ctypes.CFUNCTYPE(ctypes.c_int64)
_kept: list[object] = []  # what C++ points to stays alive


def supply_cuda_objects(devices: int, device: int) -> None:
    """Make autograd work on fake tensors of `devices` CUDA devices, of which this rank's is `device`."""
    if torch.backends.cuda.is_built():
        ensure_cuda_device_guard()
        return
    folder = Path(torch.__file__).parent / "lib"
    core, cpu = (ctypes.CDLL(str(folder / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    registry = (ctypes.c_void_p * 2).in_dll(core, _REGISTRY)
    registry[1] = _object([_constant(0)] * _GUARDS)
    ensure_cuda_device_guard()
    getattr(cpu, _HOOKS).restype = ctypes.c_void_p
    hooks = getattr(cpu, _HOOKS)()
    table = ctypes.c_void_p.from_address(hooks).value or 0
    entries = list((ctypes.c_void_p * _ENTRIES).from_address(table))
    yes, this = _constant(1), _constant(device)
    entries[2:7] = [yes, yes, yes, _constant(0), _constant(devices)]  # built, available, context, init, count
    entries[7:11] = [_constant(0), this, this, this]  # set, get, exchange, maybe exchange the current device
    entries[14], entries[15] = (_address(cpu, name) for name in (_CPU_GENERATOR, _NEW_GENERATOR))
    entries[16] = yes
    ctypes.c_void_p.from_address(hooks).value = _table(entries)


def _constant(value: int) -> int | None:
    function = _Function(lambda: value)
    _kept.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value


def _address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _table(entries: list[int | None]) -> int:
    table = (ctypes.c_void_p * len(entries))(*entries)
    _kept.append(table)
    return ctypes.addressof(table)


def _object(entries: list[int | None]) -> int:
    pointer = ctypes.c_void_p(_table(entries))
    _kept.append(pointer)
    return ctypes.addressof(pointer)
