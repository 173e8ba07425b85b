"""Files of tensors that a program writes and reads again: kept in memory by name, so none is overwritten.

`torch.save`, safetensors and `torch.distributed.checkpoint` keep shapes, and the values that are known;
a load of the same name makes new tensors of them, on the device that it names. A stream gets a few bytes
that name what was saved. What looks for a written file finds it, what renames or removes it does so in
memory. A file that is missing where this is not rank 0 is one that another rank writes: loading it changes
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwise.runtime.script.values import Guesses, shadow_of
from meshwise.runtime.torch_private import ShardedTensor, disable_current_modes, tree_map
from meshwise.runtime.when_imported import when_imported

_MARK = b"meshwise dry run "


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """A tensor in a file: its value, or one of its shape on `meta`, and the device that it was on."""

    value: torch.Tensor
    device: torch.device


class OthersFile(dict[Any, Any]):
    """What another rank has written, as far as this one knows: nothing, or 0 where a number is wanted."""

    def __missing__(self, key: Any) -> OthersFile:
        return OthersFile()

    def __index__(self) -> int:
        return 0

    def __add__(self, other: Any) -> Any:
        return other


class Files:
    """What the program has written, by absolute path or by the mark left in a stream."""

    def __init__(self, rank: int, guesses: Guesses) -> None:
        self._rank, self._guesses = rank, guesses
        self._written: dict[str, Any] = {}

    def save(self, how: str, obj: Any, file: Any) -> None:
        """Keep `obj`, which `how` would write."""
        self._guesses.add(how, "nothing is written")
        name = _name(file)
        if name is None:
            name = f"{_MARK.decode()}{len(self._written)}"
            file.write(name.encode())
        self._written[name] = tree_map(_stored, obj)

    def load(self, file: Any, device: Any, read: Callable[[], Any]) -> Any:
        """What was saved as `file`, on `device` (None: where it was); else what `read` reads."""
        name = _name(file)
        if name not in self._written:
            is_others = name is not None and self._rank > 0 and not Path(name).exists()
            name = _mark(file)
            if name not in self._written:
                if name is None and not is_others:
                    return read()
                self._guesses.add("a file that another rank writes", "nothing changes")
                return OthersFile()
        return tree_map(lambda leaf: _loaded(leaf, device), self._written[name])

    def supply(self) -> None:
        """Take the place of what writes, reads, finds, renames and removes files."""
        load = torch.load

        def load_here(f: Any, map_location: Any = None, *args: Any, **how: Any) -> Any:
            return self.load(f, map_location, lambda: _read(load, f, map_location, *args, **how))

        torch.save = lambda obj, f, *_, **__: self.save("torch.save", obj, f)
        torch.load = load_here
        for kind in (torch.nn.Module, torch.optim.Optimizer):
            _accept_others_files(kind)
        when_imported("safetensors.torch", self._supply_safetensors)
        checkpoint = "torch.distributed.checkpoint"
        when_imported(f"{checkpoint}.state_dict_saver", self._supply_saver)
        when_imported(f"{checkpoint}.state_dict_loader", self._supply_loader)
        when_imported(f"{checkpoint}._state_dict_stager", _leave_in_place)
        for name, wrapped in (
            ("stat", self._found), ("remove", self._removing), ("unlink", self._removing),
            ("rename", self._renaming), ("replace", self._renaming),
        ):  # fmt: skip
            function = wrapped(getattr(os, name))
            for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                able |= {function} if getattr(os, name) in able else set()
            setattr(os, name, function)

    def _supply_safetensors(self, module: Any) -> None:
        load = module.load_file

        def load_file(filename: Any, device: Any = "cpu", **how: Any) -> Any:
            return self.load(filename, device, lambda: load(filename, device, **how))

        module.save_file = lambda tensors, file, *_, **__: self.save("safetensors", dict(tensors), file)
        module.load_file = load_file

    def _supply_saver(self, module: Any) -> None:
        def save(state_dict: Any, storage_writer: Any, *_: Any, **__: Any) -> None:
            self.save("torch.distributed.checkpoint", state_dict, _folder(storage_writer))

        module._save_state_dict = save

    def _supply_loader(self, module: Any) -> None:
        load = module._load_state_dict

        def load_here(state_dict: Any, storage_reader: Any, *_: Any, planner: Any = None, **__: Any) -> None:
            kept = self._written.get(_name(_folder(storage_reader)) or "")
            if kept is None:
                load(state_dict, storage_reader, no_dist=True, planner=planner)
            else:
                _restore(state_dict, kept)

        module._load_state_dict = load_here

    def _found(self, stat: Any) -> Any:
        def found(path: Any, *args: Any, **how: Any) -> Any:
            try:
                return stat(path, *args, **how)
            except FileNotFoundError:
                if _name(path) not in self._written:
                    raise
                return stat(__file__)

        return found

    def _removing(self, remove: Any) -> Any:
        def removed(path: Any, **how: Any) -> None:
            if self._written.pop(_name(path) or "", None) is None or Path(path).exists():
                remove(path, **how)

        return removed

    def _renaming(self, rename: Any) -> Any:
        def renamed(src: Any, dst: Any, **how: Any) -> None:
            old, new = _name(src) or "", _name(dst) or ""
            inside = [name for name in self._written if name == old or name.startswith(old + os.sep)]
            if old not in inside or os.path.lexists(src):
                rename(src, dst, **how)
            self._written |= {new + name[len(old) :]: self._written.pop(name) for name in inside}

        return renamed


def _name(file: Any) -> str | None:
    """The absolute path of a file; None of a stream."""
    return os.path.realpath(os.fsdecode(file)) if isinstance(file, (str, bytes, os.PathLike)) else None


def _folder(storage: Any) -> Any:
    """Where a reader or writer of `torch.distributed.checkpoint` has its files."""
    return getattr(storage, "path", type(storage).__name__)


def _mark(file: Any) -> str | None:
    """The mark that a stream or a file on disk begins with."""
    name = _name(file)
    if name is not None:
        if not Path(name).is_file():
            return None
        with Path(name).open("rb") as stream:
            return _mark(stream)
    place = file.tell()
    begin = file.read(2 * len(_MARK))
    file.seek(place)
    return begin.decode() if begin.startswith(_MARK) else None


def _stored(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, ShardedTensor):
        return _SavedTensor(torch.empty(leaf.size(), dtype=leaf.dtype, device="meta"), leaf.device)
    value = shadow_of(leaf)
    with torch.no_grad():
        kept = torch.empty_like(leaf, device="meta") if value is None else value.clone()
    return _SavedTensor(kept, leaf.device)


def _read(load: Any, file: Any, device: Any, *args: Any, **how: Any) -> Any:
    """What torch loads, whose tensors are real while it does."""
    places: dict[int, str] = {}

    def stay(storage: Any, place: str) -> Any:
        places[storage._cdata] = place
        return storage

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place = places.get(leaf.untyped_storage()._cdata, "cpu")
        return _loaded(_SavedTensor(leaf, torch.device(place)), device)

    with disable_current_modes():
        found = load(file, stay, *args, **how)
    return tree_map(moved, found)


def _loaded(leaf: Any, device: Any) -> Any:
    if not isinstance(leaf, _SavedTensor):
        return leaf
    device = device if isinstance(device, (str, int, torch.device)) else leaf.device
    return torch.empty_like(leaf.value, device=device) if leaf.value.is_meta else leaf.value.to(device)


def _restore(state: MutableMapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Give `state` the plain values of `kept`; its tensors stay, with values that nobody knows."""
    for key, value in state.items():
        if isinstance(value, MutableMapping):
            _restore(value, kept.get(key, {}))
        elif key in kept and not isinstance(kept[key], _SavedTensor):
            state[key] = kept[key]


def _leave_in_place(module: Any) -> None:
    """A checkpoint that is saved in the background is copied to the host first, which nothing here needs."""
    module.StateDictStager.stage = lambda self, state_dict, *_, **__: state_dict


def _accept_others_files(kind: Any) -> None:
    load = kind.load_state_dict

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **how: Any) -> Any:
        known = self.state_dict() if isinstance(state_dict, OthersFile) else state_dict
        return load(self, known, *args, **how)

    kind.load_state_dict = load_state_dict
