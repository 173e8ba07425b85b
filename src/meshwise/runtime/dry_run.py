"""`dry_run`: any rank of any world of a real program, in one process, without its devices.

The program runs on fake tensors (shapes without memory) of a made-up device kind and a fake process group
that moves nothing. It does everything else: autograd, DTensor, FSDP. What it would hold is fed to a replay
of the caching allocator of the named chip, so that the peak is the one the real device would report.

The backward runs in the calling thread. Autograd would start one thread a device, once in a process: too
early if that is before the fake device exists, and with caches of DTensor (they are a thread's own) that
outlive the world they describe.
"""

import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from meshwise.core.errors import PlanError
from meshwise.core.refusals import refuse
from meshwise.machine.hardware import find_device
from meshwise.program.tape import Tape, booked_by
from meshwise.runtime.fakes import DeviceFakes, Stream, leave_whole
from meshwise.runtime.programs import find_program
from meshwise.runtime.programs.context import Context
from meshwise.runtime.recorder import OpRecorder
from meshwise.runtime.start import Outcome
from meshwise.runtime.torch_private import FakeStore, set_default_backend, setup_private_device

FAKE_DEVICE = "fakegpu"


def new_tape(origin: str, ranks: int, rank: int, device: str) -> Tape:
    """A tape for a rank on `device`: a chip of the catalog with its allocator, or `cpu`, which has none."""
    refuse("rank", PlanError, rank=rank, ranks=ranks, last=ranks - 1)
    return Tape(origin, rank, ranks, **({} if device == "cpu" else booked_by(find_device(device))))


def dry_run(
    name: str, options: Any, *, ranks: int, rank: int = 0, device: str, quiet: bool = True
) -> Outcome:
    """What rank `rank` of `ranks` does in program `name` on `device` (a chip's name, or `cpu`)."""
    program = find_program(name)
    program.check(options, ranks)
    tape = new_tape("dry_run", ranks, rank, device)
    if dist.is_initialized():
        raise PlanError("a process group is initialised already; a dry run needs a process of its own")
    _register_fake_device()
    recorder = OpRecorder(tape, device_type=FAKE_DEVICE)
    device_of_rank = torch.device(FAKE_DEVICE, 0)
    context = Context(rank, ranks, device_of_rank, recorder, root=rank, is_fake=True, quiet=quiet)
    dist.init_process_group(f"cpu:fake,{FAKE_DEVICE}:fake", rank=rank, world_size=ranks, store=FakeStore())
    set_default_backend(dist.group.WORLD, dist.ProcessGroup.BackendType.CUSTOM)  # else torch warns at the end
    try:
        with torch.autograd.set_multithreading_enabled(False), DeviceFakes(), recorder:
            result = program.main(options, context)
        return Outcome.from_tape(tape, name, device, options, result)
    except MemoryError:
        raise PlanError(f"{name}: this machine's memory does not hold lists of these sizes") from None
    except (OverflowError, RuntimeError) as error:
        if "overflow" in str(error) or "too big to convert" in str(error):
            raise PlanError(f"{name}: a tensor of these sizes has more bytes than can be addressed") from None
        raise
    finally:
        dist.destroy_process_group()


@cache
def _register_fake_device() -> None:
    """Give torch's spare device slot a name and stand-ins for streams. Private API of torch 2.13."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setup_private_device(FAKE_DEVICE)
        leave_whole("PrivateUse1")
    module = getattr(torch, FAKE_DEVICE)
    module.Stream = module.Event = Stream
    module.stream = lambda stream: stream if stream is not None else Stream.current()
    module.current_stream = Stream.current
    module.synchronize = lambda *_: None
    module.get_rng_state = module.set_rng_state = lambda *_: None  # so do pipelines
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # checkpointing asks
