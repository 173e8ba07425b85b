"""C++ objects without which autograd aborts on fake `cuda` tensors where there is no GPU.

The device guard of CUDA: torch has one that does nothing, made for fake tensors, but installs it only over a
guard that counts no devices; a torch built without CUDA has none, so one is put there first. The hooks of
CUDA, by which autograd asks whether there is an accelerator: torch's object gets a copy of its table of
functions with some of them replaced. Their numbers are those of the headers that come with torch
(`HOOK_NAMES`; the same from 2.10 to 2.15). The timer of CUDA, which DDP's reducer makes: it is struck off the
list of timers, so that the reducer has none, as where torch was built without CUDA.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from meshwise.core.files import read_catalog
from meshwise.runtime.torch_private import ensure_cuda_device_guard

_GUARDS, _ENTRIES, _NUM_DESTRUCTORS = 64, 60, 2
_CUDA = read_catalog("scripts.toml")["cuda"]
HOOK_NAMES, _SYMBOLS = tuple(_CUDA["hooks"]), _CUDA["symbols"]
"""The functions of CUDA's hooks in their order, and the symbols of what is replaced."""
_Function = ctypes.CFUNCTYPE(ctypes.c_int64)
_kept: list[object] = []  # what C++ points to stays alive


def supply_cuda_objects(devices: int, device: int) -> None:
    """Make autograd work on fake tensors of `devices` CUDA devices, of which this rank's is `device`."""
    folder = Path(torch.__file__).parent / "lib"
    core, cpu = (ctypes.CDLL(str(folder / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    if not torch.backends.cuda.is_built():
        registry = (ctypes.c_void_p * 2).in_dll(core, _SYMBOLS["guards"])
        registry[1] = _object([_constant(0)] * _GUARDS)
    ensure_cuda_device_guard()
    yes, no, this = _constant(1), _constant(0), _constant(device)
    replaced = {
        **dict.fromkeys(("isBuilt", "isAvailable", "hasPrimaryContext", "isPinnedPtr", "hasCUDA"), yes),
        **dict.fromkeys(("init", "setCurrentDevice"), no),
        **dict.fromkeys(("getCurrentDevice", "exchangeDevice", "maybeExchangeDevice"), this),
        "deviceCount": _constant(devices),
        "getDefaultGenerator": _address(cpu, _SYMBOLS["cpu_generator"]),
        "getNewGenerator": _address(cpu, _SYMBOLS["new_generator"]),
        "getPinnedMemoryAllocator": _address(core, _SYMBOLS["cpu_allocator"]),
    }
    hooks = _result(cpu, _SYMBOLS["hooks"])
    entries = list((ctypes.c_void_p * _ENTRIES).from_address(ctypes.c_void_p.from_address(hooks).value or 0))
    for name, function in replaced.items():
        entries[_NUM_DESTRUCTORS + HOOK_NAMES.index(name)] = function
    ctypes.c_void_p.from_address(hooks).value = _table(entries)
    _strike_timers(_result(cpu, _SYMBOLS["timers"]))


def _strike_timers(registry: int) -> None:
    """Empty the list of timers, which begins as a hash map: buckets, their number, first entry, size."""
    buckets, num_buckets, _, size = (ctypes.c_size_t * 4).from_address(registry)
    if size:
        ctypes.memset(buckets, 0, num_buckets * ctypes.sizeof(ctypes.c_void_p))
        (ctypes.c_size_t * 2).from_address(registry + 2 * ctypes.sizeof(ctypes.c_void_p))[:] = [0, 0]


def _result(library: ctypes.CDLL, name: str) -> int:
    """What the C++ function `name`, which takes nothing, points to."""
    function = getattr(library, name)
    function.restype = ctypes.c_void_p
    return int(function())


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
