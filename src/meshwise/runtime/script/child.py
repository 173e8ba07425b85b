"""Inside the user's process: make torch a rank of a job on GPUs, and write down what the program did.

The hook calls `install` as soon as torch is imported. The order matters: modules that look for CUDA when they
are imported come first, then the C++ objects, `torch.cuda`, process groups, tensors, and last the modes.
"""

import atexit
import gc
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo
import torch._inductor
import torch.distributed.launcher.api
import torch.multiprocessing

from meshwise.core.errors import PlanError
from meshwise.core.files import read_catalog
from meshwise.machine.hardware import Chip
from meshwise.program.tape import booked_by
from meshwise.runtime.capture import before
from meshwise.runtime.fakes import Parts
from meshwise.runtime.launch import die_with_parent
from meshwise.runtime.script.cuda import supply_cuda_module, supply_cuda_objects
from meshwise.runtime.script.files import Files
from meshwise.runtime.script.process_group import FAILED, Letters, supply_process_groups
from meshwise.runtime.script.recording import ScriptRecorder, ScriptTape
from meshwise.runtime.script.start import BEGUN, OWNER, REPORT, rank_environment
from meshwise.runtime.script.tensors import supply_tensors
from meshwise.runtime.script.values import Guesses, ScriptMode, place_of
from meshwise.runtime.torch_private import fsdp_param

_SENTENCES = r".{,300}$|.{,300}\.(?= )|.{,300}"
"""A line, or those of its sentences that end within 300 characters."""


def install(settings: dict[str, Any]) -> None:
    """Become rank `settings["rank"]`; the report is written when the process ends."""
    os.environ[OWNER] = str(os.getpid())
    rank, ranks, devices = settings["rank"], settings["ranks"], settings["devices"]
    device, chip = rank % devices, msgspec.convert(settings["chip"], Chip)
    if rank != settings["asked"]:
        die_with_parent(os.getppid())
    tape = ScriptTape("dry_run", rank, ranks, **booked_by(chip))
    Path(settings["folder"], BEGUN).touch()
    guesses, recorder = Guesses(), ScriptRecorder(tape)
    mode = ScriptMode(torch.device("cuda", device), guesses)
    supply_cuda_objects(devices, device)
    supply_cuda_module(tape, chip, devices, mode)
    mode.set_device(mode.device)
    supply_process_groups(rank, ranks, guesses, recorder, Letters(settings))
    supply_tensors(guesses, recorder)
    Files(rank, guesses).supply()
    _supply_launchers(settings, device)
    fsdp_param._chunk_with_empty = Parts
    torch.autograd.set_multithreading_enabled(False)
    recorder.watch_modules()
    mode.__enter__()
    recorder.__enter__()
    report = _Report(settings, tape, guesses, [recorder, mode])
    if "triton" not in sys.modules:  # which complains of what is left over at the end
        atexit.register(gc.freeze)  # nothing more is freed: all that torch holds takes Python almost a second
    atexit.register(report.write)
    sys.excepthook = report.failed(sys.excepthook)
    before(os, "_exit", report.write)


class _Report:
    """Writes what was found, once, from the process that is the rank."""

    def __init__(self, settings: dict[str, Any], tape: ScriptTape, guesses: Guesses, modes: Any) -> None:
        self._folder, self._is_asked = Path(settings["folder"]), settings["rank"] == settings["asked"]
        self._tape, self._guesses, self._modes = tape, guesses, modes
        self._failure: dict[str, str] | None = None

    def failed(self, hook: Any) -> Any:
        """An excepthook that remembers the error that ends the program."""

        def remember(kind: Any, error: BaseException, trace: Any) -> None:
            is_refused = isinstance(error, PlanError)  # by us
            text = f"{error}" if is_refused else f"{kind.__name__}: {error}"
            known = read_catalog("scripts.toml")["remedies"].items()
            with_remedy = (remedy for pattern, remedy in known if re.search(pattern, text))
            frames = [*traceback.walk_tb(trace)][::-1]
            place, is_own = place_of(frames), place_of(frames) == place_of(frames[:1])
            self._failure = {
                "error": re.findall(_SENTENCES, text.splitlines()[0])[0].removesuffix("."),
                "place": "" if is_refused else place,
                "remedy": next(with_remedy, self._guesses.led_to(place) if is_own else ""),
            }
            if not is_refused:
                hook(kind, error, trace)

        return remember

    def write(self) -> None:
        """Leave the modes and write the report."""
        if os.environ.get(OWNER) != str(os.getpid()) or not self._modes:
            return
        for mode in self._modes:
            mode.__exit__(None, None, None)
        self._modes = []
        if not self._is_asked:
            if self._failure is not None:
                (self._folder / FAILED.format(self._tape.rank)).touch()
            signal.pause()  # the ranks that this one has started end with it
        report = self._tape.report() | {"guesses": self._guesses.to_json(), "failure": self._failure}
        fp32 = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        report |= {"fp32": fp32}
        (self._folder / REPORT).write_text(json.dumps(report))


def _supply_launchers(settings: dict[str, Any], device: int) -> None:
    """torchrun and mp.spawn start this one rank only."""

    def launch(config: Any, entrypoint: str) -> Callable[..., None]:
        started, ranks = config.max_nodes * config.nproc_per_node, settings["ranks"]
        if started != ranks:
            raise PlanError(f"the launcher starts {started} ranks, the dry run has {ranks}; make them equal")

        def start(*words: str) -> None:
            sys.stdout.flush()
            environment = rank_environment(settings, launched=True)
            code = subprocess.call([str(entrypoint), *words], env=environment)
            os.environ[OWNER] = ""
            os._exit(code)

        return start

    torch.distributed.launcher.api.elastic_launch = launch
    processes: Any = torch.multiprocessing
    processes.spawn = processes.spawn.spawn = lambda fn, args=(), *_, **__: fn(device, *args)
