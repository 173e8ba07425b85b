"""What a program on a machine with GPUs finds: `torch.cuda`, and C++ objects without which autograd aborts.

Queries of `torch.cuda` answer for the named chip, streams and events do nothing. Memory statistics come from
the replay of the allocator, so that a program which logs its memory logs the figures of the fake rank.

The device guard of CUDA: torch has one that does nothing, made for fake tensors, but installs it only over a
guard that counts no devices; a torch built without CUDA has none, so one is put there first. The hooks of
CUDA, by which autograd asks whether there is an accelerator: torch's object gets a copy of its table of
functions with some of them replaced. Their numbers are those of the headers that come with torch
(`HOOK_NAMES`; a test holds them against the torch at hand). The timer of CUDA, which DDP's reducer makes: it
is struck off the list of timers, so that the reducer has none, as where torch was built without CUDA.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.amp.common
import torch.cuda.memory
import torch.cuda.nvtx
import torch.cuda.random

from meshwise.core.files import read_catalog
from meshwise.cost.allocator import CachingAllocator
from meshwise.machine.hardware import Chip
from meshwise.runtime.fakes import DeviceEvent, Silent, Stream
from meshwise.runtime.script.recording import ScriptTape
from meshwise.runtime.script.values import ScriptMode
from meshwise.runtime.torch_private import ensure_cuda_device_guard

_GUARDS, _ENTRIES, _NUM_DESTRUCTORS = 64, 60, 2
_CUDA = read_catalog("scripts.toml")["cuda"]
HOOK_NAMES, _SYMBOLS = tuple(_CUDA["hooks"]), _CUDA["symbols"]
"""The functions of CUDA's hooks in their order, and the symbols of what is replaced."""
_REPLAY = "the replay of a CUDA graph", "no work: what was captured is counted once"
_Function = ctypes.CFUNCTYPE(ctypes.c_int64)
_kept: list[object] = []  # what C++ points to stays alive


def supply_cuda_objects(devices: int, device: int) -> None:
    """Make autograd work on fake tensors of `devices` CUDA devices, of which this rank's is `device`."""
    folder = Path(torch.__file__).parent / "lib"
    core, cpu = (ctypes.CDLL(str(folder / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    if not torch.backends.cuda.is_built():
        registry = (ctypes.c_void_p * 2).in_dll(core, _SYMBOLS["guards"])
        guard = ctypes.c_void_p(_table([_constant(0)] * _GUARDS))
        _kept.append(guard)
        registry[1] = ctypes.addressof(guard)
    ensure_cuda_device_guard()
    yes, no, this = _constant(1), _constant(0), _constant(device)
    replaced = {
        **dict.fromkeys(("isBuilt", "isAvailable", "hasPrimaryContext", "isPinnedPtr", "hasCUDA"), yes),
        **dict.fromkeys(("init", "setCurrentDevice"), no),
        **dict.fromkeys(("getCurrentDevice", "exchangeDevice", "maybeExchangeDevice"), this),
        **dict.fromkeys(HOOK_NAMES[-2:], yes),  # by which cuDNN would ask the device at hand
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


def supply_cuda_module(tape: ScriptTape, chip: Chip, devices: int, mode: ScriptMode) -> None:
    """Make `torch.cuda` answer for `devices` chips; this rank's is that of `mode`."""
    name, memory_bytes = f"{chip.vendor} {chip.name}".upper(), int(chip.memory_bytes)
    known = read_catalog("scripts.toml")
    capability = tuple(known["capabilities"].get(chip.generation, (9, 0)))
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=memory_bytes,
        multi_processor_count=chip.num_cores, L2_cache_size=int(chip.cache_bytes), **known["properties"],
    )  # fmt: skip
    memory, state = _memory(tape, memory_bytes), torch.zeros(16, dtype=torch.uint8)
    states = {"get_rng_state": _always(state), "get_rng_state_all": _always([state] * devices)}
    queries = {
        **known["queries"],
        "get_device_name": name,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_arch_list": [f"sm_{capability[0]}{capability[1]}"],
        "cudart": Silent(),
    }
    stand_ins = {
        "no_ops": _nothing,
        "true": _always(True),
        "device_counts": _always(devices),
        "current_devices": lambda *_: mode.device.index,
        "set_devices": mode.set_device,
        "synchronizing": Stream.synchronize_all,
        "streams": Stream,
        "current_streams": Stream.current,
        "default_streams": Stream.default,
        "set_streams": Stream.set_current,
        "contexts": lambda *_, **__: nullcontext(),
        "given": lambda given, *_, **__: given or Stream.current(),
        "events": DeviceEvent,
        "graphs": type("CUDAGraph", (Silent,), {"replay": lambda _: mode.guesses.add(*_REPLAY)}),
    }
    for table, stand_in in stand_ins.items():
        for place, names in known[table].items():
            for each in names:
                setattr(resolve_name(place), each, stand_in)
    vars(torch.cuda).update({each: _always(value) for each, value in queries.items()} | states)
    vars(torch.cuda.random).update(states)
    torch.cuda.default_generators = (torch.default_generator,) * devices
    torch.cuda.nccl.version, torch.backends.cudnn.version = _always((2, 28, 9)), _always(91300)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.autograd.ProfilerState.KINETO_GPU_FALLBACK = torch.autograd.ProfilerState.KINETO
    torch.cuda.amp.common.amp_definitely_not_available = _always(False)
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
        vars(module).update(memory)


def _memory(tape: ScriptTape, memory_bytes: int) -> dict[str, Callable[..., Any]]:
    """What a program may ask about its memory, as the replayed allocator has it."""

    def figure(bytes_now: Callable[[], float]) -> Callable[..., int]:
        return lambda *_, **__: int(bytes_now())

    free_bytes = memory_bytes - tape.context_bytes
    current, peak = figure(lambda: tape.current_booked_bytes), figure(lambda: tape.recent_peak_bytes)
    cache = tape.allocator or CachingAllocator()
    reserved = figure(lambda: max(cache.reserved_bytes, tape.current_booked_bytes))
    most_reserved = figure(lambda: max(cache.peak_reserved_bytes, tape.peak_booked_bytes))
    kinds = {"allocated": (current, peak), "active": (current, peak), "reserved": (reserved, most_reserved)}

    def statistics(*_: Any, **__: Any) -> dict[str, int]:
        now = {"num_ooms": int(bool(cache.out_of_memory)), "num_alloc_retries": 0}
        for kind, (one, most) in kinds.items():
            now |= {f"{kind}_bytes.all.current": one(), f"{kind}_bytes.all.peak": most()}
        return defaultdict(int, now)

    return {
        "memory_allocated": current,
        "max_memory_allocated": peak,
        "memory_reserved": reserved,
        "max_memory_reserved": most_reserved,
        "empty_cache": cache.empty_cache,
        "memory_stats": statistics,
        "reset_peak_memory_stats": tape.reset_peak,
        "memory_snapshot": lambda *_, **__: [],
        "mem_get_info": lambda *_: (max(int(free_bytes) - reserved(), 0), memory_bytes),
    }


def _nothing(*_: Any, **__: Any) -> None: ...


def _always(value: Any) -> Any:
    return lambda *_, **__: value
