"""Process groups of any size that move nothing, and what on top of them would need an answer of other ranks.

Collectives on tensors pass torch's own fake process group, and the recorder notes them. Collectives of Python
objects hand back this rank's own; a store is a dictionary.

A message of objects, by which pipeline stages agree on shapes, is a file in a folder that all ranks share,
read as data: plain values, tensors, and what pipeline stages say of tensors. A rank that waits for one starts
the same program as the rank that sends it, and so on. Only the rank asked for reports; the others end with
it.
"""

import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.parallel.distributed as ddp
from torch import load, save  # before stand-ins take their place
from torch.serialization import safe_globals

from meshwise.core.errors import PlanError
from meshwise.core.files import read_catalog
from meshwise.runtime import torch_private as private
from meshwise.runtime.profile import as_started
from meshwise.runtime.recorder import OpRecorder, tensors_in
from meshwise.runtime.script.start import rank_environment
from meshwise.runtime.script.values import Guesses

_WAIT_S, _POLL_S = 300.0, 0.05
FAILED = "failed-{}"


class Letters:
    """Objects by sender, receiver and number; `settings` are those of the hook."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings, self._rank = settings, settings["rank"]
        self._folder = Path(settings["folder"])
        self._counts: Counter[tuple[int, int]] = Counter()

    def send(self, given: list[Any], dst: int | None = None, group: Any = None, *_: Any, **how: Any) -> None:
        """In place of `send_object_list`."""
        path = self._next(self._rank, _peer(dst, group, how.get("group_dst")))
        partial = path.with_suffix(".partial")
        save(given, partial)
        partial.rename(path)

    def receive(self, into: list[Any], src: int | None = None, group: Any = None, *_: Any, **how: Any) -> int:
        """In place of `recv_object_list`."""
        sender = _peer(src, group, how.get("group_src"))
        path = self._next(sender, self._rank)
        self._start(sender)
        begin = time.monotonic()
        while not path.exists():
            if (self._folder / FAILED.format(sender)).exists():
                raise RuntimeError(f"rank {sender}, whose objects this rank waits for, failed")
            if time.monotonic() - begin > _WAIT_S:
                raise RuntimeError(f"rank {sender} has sent no object within {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)
        into[:] = _read(path, sender)
        return sender

    def _next(self, sender: int, receiver: int) -> Path:
        self._counts[sender, receiver] += 1
        return self._folder / f"{sender}-{receiver}-{self._counts[sender, receiver]}"

    def _start(self, rank: int) -> None:
        """Start the program as `rank`, unless some rank has done so."""
        try:
            (self._folder / f"started-{rank}").touch(exist_ok=False)
        except FileExistsError:
            return
        environment = rank_environment(self._settings | {"rank": rank})
        silent = subprocess.DEVNULL
        subprocess.Popen(as_started(self._settings["command"]), env=environment, stdout=silent, stderr=silent)


def _read(path: Path, sender: int) -> list[Any]:
    """The objects of a file, none of which can run code."""
    stages = [found for found in vars(private.pipelining_utils).values() if is_dataclass(found)]
    try:
        with safe_globals([*stages, private.MeshLayout]):
            return load(path, weights_only=True)
    except UnpicklingError as error:
        kind = next(iter(re.findall(r"GLOBAL (\S+)", str(error))), "some class")
        raise RuntimeError(f"rank {sender} sends an object of {kind}; send plain values or tensors") from None


def _peer(rank: int | None, group: Any, group_rank: int | None) -> int:
    """The global rank of a peer, which may be named by its place in `group`."""
    if group_rank is not None:
        return dist.get_global_rank(group or dist.group.WORLD, group_rank)
    return int(rank or 0)


BACKEND = "cpu:fake,cuda:fake"
_library = torch.library.Library("c10d", "IMPL")


class _Store(dist.Store):
    """Keys and values of this process; a key that another rank would have set is empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._values.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        number = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(number).encode()
        return number

    def check(self, keys: list[str]) -> bool:
        return True

    def wait(self, *_: Any) -> None: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


def supply_process_groups(
    rank: int, ranks: int, guesses: Guesses, recorder: OpRecorder, letters: Letters
) -> None:
    """Replace what would look for other ranks."""
    named: dict[str, str] = {}
    make_group, fake_store = c10d._new_process_group_helper, private.FakeStore
    set_default_backend = private.set_default_backend

    def new_group(size: int, place: int, among: Any, backend: Any, store: Any, name: Any, **how: Any) -> Any:
        if not among and (size, place) != (ranks, rank):
            raise PlanError(f"the script is rank {place} of {size}, the dry run is of rank {rank} of {ranks}")
        named[name] = "nccl" if str(backend) == "undefined" else str(backend)
        how |= {"backend_options": None, "device_id": None}
        devices = "cuda:fake" if str(backend) == "nccl" else BACKEND
        group, store = make_group(size, place, among, devices, fake_store(), name, **how)
        if isinstance(group, dist.ProcessGroup):
            set_default_backend(group, dist.ProcessGroup.BackendType.CUSTOM)  # else torch warns at the end
            recorder.name_axis(group, _axis(how.get("group_desc"), among))
        return group, store

    c10d._new_process_group_helper = new_group
    vars(private.rendezvous).update(TCPStore=_Store, FileStore=_Store)
    c10d._get_default_timeout = lambda _: c10d.default_pg_timeout
    stand_ins = {
        "get_backend": lambda group=None: named[(group or c10d._get_default_group()).group_name],
        **_objects(rank, guesses),
        "send_object_list": letters.send,
        "recv_object_list": letters.receive,
        "ProcessGroupNCCL": SimpleNamespace(Options=SimpleNamespace),
        "TCPStore": _Store,
        "FileStore": _Store,
    }
    for module in (c10d, dist):
        vars(module).update(stand_ins)
    for name in read_catalog("scripts.toml")["coalesced"]:
        _library.impl(name, lambda *_: private.FakeWork().boxed(), "Meta", allow_override=True)
    private.dtensor_dispatch.run_dtensor_rng_op = lambda _, __, op, *args, **kwargs: op(*args, **kwargs)
    wait = dist.Work.wait

    def waited(work: dist.Work, *how: Any) -> Any:
        recorder.waiting(tensors_in(work.get_future().value()))
        return wait(work, *how)

    dist.Work.wait = waited
    _supply_ddp(recorder)
    _supply_fsdp1()


def _objects(rank: int, guesses: Guesses) -> dict[str, Callable[..., None]]:
    """The collectives of Python objects: what other ranks would send is guessed."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        guesses.add("objects of other ranks", "all like this rank's")
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            all_gather_object(object_gather_list, obj)

    def broadcast_object_list(object_list: list[Any], src: int | None = None, *_: Any, **how: Any) -> None:
        if src not in (None, rank) and any(one is None for one in object_list):
            guesses.add(f"objects of rank {src}", "what this rank has")

    def scatter_object_list(
        scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
        *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        if scatter_object_input_list:
            place = dist.get_rank() % len(scatter_object_input_list)
            scatter_object_output_list[0] = scatter_object_input_list[place]

    stand_ins = all_gather_object, gather_object, broadcast_object_list, scatter_object_list
    return {function.__name__: function for function in stand_ins}


def _supply_ddp(recorder: OpRecorder) -> None:
    """DDP's buckets have a name, and its hooks may send bf16."""
    module: Any = ddp.DistributedDataParallel
    named: Any = recorder.op("gradient buckets")
    module._ddp_init_helper = named(module._ddp_init_helper)
    dist.Reducer._rebuild_buckets = named(dist.Reducer._rebuild_buckets)

    def verify(group: Any, parameters: list[torch.Tensor], logger: Any = None) -> None:
        """The two collectives by which ranks compare the shapes of their parameters."""
        count = torch.empty(1, dtype=torch.int64, device=parameters[0].device)
        dist.all_gather_single(count.new_empty(group.size()), count, group=group)
        sizes = sum(2 * tensor.dim() for tensor in parameters)  # and strides
        dist.broadcast(count.new_zeros(sizes), group=group, group_src=0)

    ddp._verify_param_shape_across_processes = verify


def _supply_fsdp1() -> None:
    """A shard of FSDP1 may hold no element of some parameters, whose optimizer states other ranks have."""
    module = private.fsdp1_states
    names_of, states_of = module._map_param_key_to_optim_keys, module._allgather_state_info

    def names_of_all(states: Any, group: Any, params: Any, names: Any, units: Any, merge_keys: Any) -> Any:
        _, own = names_of(states, group, params, names, units, merge_keys=True)
        found = [tuple(names[param]) for param in params.values() if param.requires_grad]
        return sorted(module._OptimStateKey(each, each[0] in units) for each in found), own

    def states_of_all(unit: Any, states: Any) -> list[Any]:
        gathered = states_of(unit, states)
        like = next((state for state in gathered[unit.rank].values() if state.tensors), None)
        others = {name: state if state.tensors else like for name, state in gathered[unit.rank].items()}
        return [own if rank == unit.rank or not like else others for rank, own in enumerate(gathered)]

    module._map_param_key_to_optim_keys = names_of_all
    module._allgather_state_info = states_of_all


def _axis(described: str | None, members: Sequence[int]) -> str:
    """The mesh dim of a group; else which ranks it joins."""
    if described and described.startswith("mesh_"):
        return described.removeprefix("mesh_")
    if not members:
        return "world"
    members = sorted(members)
    return f"{members[0]}..{members[-1]} by {members[1] - members[0] if len(members) > 1 else 1}"
