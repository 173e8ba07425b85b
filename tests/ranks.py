"""Functions that tests run on every rank; in a module of their own, so that spawned ranks can import them."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from meshwise.core.compare import Comparison
from meshwise.core.errors import PlanError
from meshwise.program.tape import Tape
from meshwise.runtime.compare_program import compare_program
from meshwise.runtime.launch import RankPlace, _join, launch
from meshwise.runtime.programs import model_2d, ulysses
from meshwise.runtime.programs.context import Context, forget_groups
from meshwise.runtime.programs.tensor_parallel import Options
from meshwise.runtime.recorder import OpRecorder
from meshwise.runtime.start import Outcome, run_rank
from ports import own_port


def sum_of_ranks(place: RankPlace, folder: str) -> int:
    """The sum of all ranks' numbers; each leaves its process id in `folder`, and waits for `go` there."""
    Path(folder, str(place.rank)).write_text(str(os.getpid()))
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    total = torch.tensor([place.rank])
    dist.all_reduce(total)
    return int(total)


def fail_on(place: RankPlace, failing: int, how: str) -> None:
    """The rank `failing` does as `how` says; the others wait in a barrier."""
    if place.rank == failing:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(7)
        raise PlanError("these sizes do not divide") if how == "refuses" else ValueError("broken on purpose")
    dist.barrier()


def many_sums(place: RankPlace, num: int) -> int:
    """`num` all-reduces, one after the other; how many ranks had the right sum."""
    for _ in range(num):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == place.world_size
    return num


NUM_GROUPS = {"1d": 1, "2d": 2, "2d-cp": 2, "2.5d": 5, "3d": 3}


run_bare = functools.partial(run_rank, quiet=True, recorded=False)
"""A rank's outcome of a program of which nothing is recorded."""


def _gathered(x: torch.Tensor, group: Any = None, dim: int = 0) -> torch.Tensor:
    """The parts of all ranks as a leaf of float64."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim).double().requires_grad_()


def differences(place: RankPlace, name: str, options: Any) -> dict[str, float]:
    """Of ulysses or model-2d: how far output and gradients are, on any rank, from one process in float64."""
    module: Any = ulysses if name == "ulysses" else model_2d
    recorder, seen = OpRecorder(Tape("run")), []

    def watched(*args: Any) -> Any:
        seen.extend((args, forward(*args)))
        seen[1].register_hook(seen.append)  # its gradient
        return seen[1]

    forward = module.forward
    with mock.patch.object(module, "forward", watched):
        module.main(options, Context(place.rank, place.world_size, place.device, recorder, quiet=True))
    args, output, grad = seen
    if name == "ulysses":
        own = args[2]
        whole = {n: x.detach().double().requires_grad_() for n, x in own.items()}
        whole["input"] = _gathered(own["input"])
        q, k, v = (torch.einsum("nd,hde->hne", whole["input"], whole[n]) for n in "QKV")
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=options.causal)
        expected = torch.einsum("hne,hed->nd", mixed, whole["O"])
    else:
        own = {"input": args[1], **args[4]}
        whole = {"input": _gathered(args[1])}
        whole |= {n: _gathered(own[n], args[3].group, dim) for n, dim in (("W1", 2), ("W2", 1))}
        expected = whole["input"]
        for first, second in zip(whole["W1"], whole["W2"], strict=True):
            expected = expected + torch.relu(expected @ first) @ second
    expected.backward(_gathered(grad))
    pairs = {"output": (output, expected)} | {f"d {n}": (x.grad, whole[n].grad) for n, x in own.items()}
    for key, (one, other) in pairs.items():
        for dim, size in enumerate(one.shape):  # this rank's part
            parts = other.shape[dim] // size
            other = other.chunk(parts, dim)[place.rank % parts]
        worst = (one.detach().double() - other.detach()).abs().max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        pairs[key] = float(worst)
    return pairs


def on_first(place: RankPlace, ranks: int, function: Any, options: Options) -> Any:
    """`function(place, options=...)` in a tensor-parallel world of the first `ranks`; None on the others.

    torch names a group by how many the process has made before, so the idle ranks make as many.
    """
    if place.rank >= ranks:
        for _ in range(NUM_GROUPS[options.layout]):
            dist.new_group([place.rank], use_local_synchronization=True)
        return None
    return function(replace(place, world_size=ranks), options=options)


def train_checked(place: RankPlace, options: Any, recorded: bool) -> tuple[Outcome, dict[str, float]]:
    """This rank's outcome of one step of train, and how far loss and gradients are from one process."""
    from meshwise.runtime.programs.training import Trainer
    from one_process import differences

    found: dict[str, float] = {}
    step = Trainer.forward_backward

    def watched(trainer: Trainer) -> float | None:
        loss = step(trainer)
        assert loss is not None
        with trainer.context.recorder.setup():
            found.update(differences(trainer, loss))
        return loss

    with mock.patch.object(Trainer, "forward_backward", watched):
        return run_rank(place, "train", options, quiet=True, recorded=recorded), found


class Ranks:
    """Ranks of this machine that stay for many calls, each in a process group of its own.

    `with Ranks(4) as ranks: ranks.call(function, *args)`
    """

    def __init__(self, ranks: int) -> None:
        with Listener(("127.0.0.1", 0)) as listener:
            arguments = (serve, ranks, listener.address)
            self.launcher = threading.Thread(target=launch, args=arguments, daemon=True)
            self.launcher.start()
            lines = [listener.accept() for _ in range(ranks)]
        self.lines = [line for _, line in sorted((line.recv(), line) for line in lines)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks."""
        for line in self.lines:
            line.send(None)
            line.close()
        self.launcher.join()

    def call(self, function: Any, *args: Any) -> list[Any]:
        """The results of `function(place, *args)` by rank."""
        port = own_port()
        for line in self.lines:
            line.send((port, function, args))
        answers = [line.recv() for line in self.lines]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


def compared(pool: Ranks, *args: Any, **how: Any) -> Comparison:
    """`compare_program`, whose run is on the ranks of `pool`."""

    def call(function: Any, ranks: int, *given: Any, port: int) -> list[Any]:
        return pool.call(function, *given)

    with mock.patch("meshwise.runtime.compare_program.launch", call):
        return compare_program(*args, **how)


def serve(place: RankPlace, address: Any) -> None:
    """A rank of `Ranks`: answers calls until it is told to end."""
    gc.unfreeze()
    frozen = caches()
    gc.freeze()  # the collector looks through what is new alone
    line = Client(address)
    line.send(place.rank)
    while (call := line.recv()) is not None:
        port, function, args = call
        dist.destroy_process_group()  # each keeps a thread that wakes a hundred times a second
        for cache in frozen + caches():  # they hold groups that have ended
            cache.cache_clear()
        forget_groups()
        gc.collect()
        _join(place, init_method=f"tcp://127.0.0.1:{port}")
        try:
            answer = function(place, *args)
        except Exception as error:
            answer = error
        line.send(answer)


def caches() -> list[Any]:
    """The caches of torch.distributed, found among all objects that are not frozen."""
    return [
        held
        for held in gc.get_objects()
        if type(held) is functools._lru_cache_wrapper  # isinstance would wake lazy objects of torch
        and held.__module__.startswith("torch.distributed")
    ]
