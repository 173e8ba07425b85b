"""Fake tensors where memory would be, real ones where values matter.

Whatever touches `cuda` is fake: a shape without memory. Small tensors of the CPU are real, because samplers,
seeds, token ids and device meshes need their values; large ones made by a factory are fake too, so that a
model built on the CPU costs nothing.

A small fake keeps the value that it would have (its *shadow*) as long as all that went into it is known: a
tensor copied to `cuda`, a mask made of positions. What depends on weights has no value. Where the program
asks for one it gets 1, and the question is noted. What it asks of such numbers (`isfinite`, `x < 10`, `all`)
is answered as if each were 1 (a *guess* beside the shadow); other bools are False.
"""

import math
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwise.runtime import torch_private as private
from meshwise.runtime.fakes import DeviceFakes
from meshwise.runtime.recorder import (
    DATA_DEPENDENT,
    collective_of,
    given_and_made,
    group_of,
    mutated,
    tensors_in,
)

_PACKAGES = tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_OURS = str(Path(__file__).parents[2])


class Guesses:
    """All guesses of a run, by what happened and where: what the program got, a way round, and how often."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, what: str, assumed: str, remedy: str = "") -> None:
        """The program, where it stands now, did `what` and got `assumed`."""
        place = place_of(traceback.walk_stack(sys._getframe(1)))
        guess = {"what": what, "place": place, "assumed": assumed, "remedy": remedy, "count": 0}
        self._found.setdefault((what, place), guess)["count"] += 1

    def led_to(self, line: str) -> str:
        """The newest guess made in the file of this `line`, in which the program raises an error."""
        near = [of for of in self._found.values() if of["place"].startswith(line.rpartition(":")[0] + ":")]
        return "{place} got {assumed} for {what}, a guess".format_map(near[-1]) if near else ""

    def to_json(self) -> list[dict[str, Any]]:
        """The guesses, in the order of their first."""
        return list(self._found.values())


def place_of(steps: Iterable[tuple[Any, int]]) -> str:
    """File and line of the innermost of these frames that is the user's own code; else of a package's."""
    frames = [(step.f_code.co_filename, line) for step, line in steps]
    outside = [frame for frame in frames if not frame[0].startswith((_OURS, "<"))]
    packaged = [frame for frame in outside if frame[0].startswith(_PACKAGES) or "site-packages" in frame[0]]
    own = [frame for frame in outside if frame not in packaged]
    torchless = [frame for frame in outside if "/torch/" not in frame[0]]
    found = next((f"{file}:{line}" for file, line in (*own, *torchless, *outside)), "?")
    return found.rpartition("site-packages/")[2]


LARGE_BYTES = 4 << 20
"""A factory on the CPU makes a fake tensor from here on."""
SHADOW_ELEMENTS = 1 << 16
aten = torch.ops.aten

_PLAIN = (torch.Tensor, torch.nn.Parameter, private.FakeTensor)


class ScriptMode(DeviceFakes):
    """The mode in which a user's program runs; `device` stands for every CUDA device that it names."""

    avoid_device_init = True

    def __init__(self, device: torch.device, guesses: Guesses) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.device = device
        self.guesses = guesses
        self._depth = 0

    def set_device(self, device: Any) -> None:
        """From now on the CUDA device of this rank has the number of `device`."""
        if torch.device(device).index is not None:
            self.device = torch.device(device)
            private.set_device_index(self.device.index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op of the program: really, or on shapes."""
        kwargs = dict(kwargs or {})
        if getattr(func, "_opname", "") in DATA_DEPENDENT and isinstance(args[0], private.FakeTensor):
            return self._chosen(func, args, kwargs)
        if self._depth:  # an op of torch's own rules
            return super().__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = private.tree_map(self._placed, (tuple(args), kwargs))
        leaves = private.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(type(tensor) not in _PLAIN for tensor in tensors):
            return super().__torch_dispatch__(func, types, args, kwargs)
        fakes = [tensor for tensor in tensors if isinstance(tensor, private.FakeTensor)]
        if not fakes and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
            if tensors or not _is_large(args, kwargs):
                return _completed(func, args, func(*args, **kwargs))
            kwargs.setdefault("device", torch.device("cpu"))
        if not fakes and func._can_decompose():  # below autograd: torch would run it as a whole on the device
            with self:
                return func.decompose(*args, **kwargs)
        return _completed(func, args, self._on_shapes(func, types, args, kwargs, tensors, fakes))

    def _on_shapes(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: Any, fakes: Any) -> Any:
        kind = collective_of(func, args)
        known = func.namespace == "aten" and all(shadow_of(tensor) is not None for tensor in tensors)
        value = self._value(func, args, kwargs) if known and not _is_large(args, kwargs) else None
        if torch.Tag.data_dependent_output in func.tags:
            return self._scalar(func, args, kwargs) if value is None else value
        if value is not None and torch.Tag.dynamic_output_shape in func.tags:
            return self._fake(value)
        leaves_device = kwargs.get("device") == torch.device("cpu")
        if func is aten._to_copy.default and leaves_device and value is not None:
            return value
        self._depth += 1
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if kind in ("all_gather", "all_to_all") or func._opname == "gather_":
            self._receive(func, args, result)
        if value is None and isinstance(result, private.FakeTensor):
            value = _absorbed(func, tensors, result)
            self._guess(func, args, kwargs, tensors, result)
        if value is None and func._schema.is_mutable and kind is None and "amp" not in func._opname:
            for tensor in mutated(func, args, kwargs):
                forget(tensor)
        for made, part in zip(tensors_in(result), tensors_in(value), strict=False):  # of no value none
            made.shadow = part
        return result

    def _guess(self, func: Any, args: Any, kwargs: Any, tensors: Any, result: Any) -> None:
        """Give a bool, and what is made of guesses, the value that it has if each unknown number is 1."""
        guesses = [one.guess for one in tensors if getattr(one, "guess", None) is not None]
        if func.namespace != "aten":  # a collective, in which all ranks say the same
            result.guess = next((guess for guess in guesses if guess.dim() == result.dim()), None)
        elif guesses or (result.dtype is torch.bool and tensors):
            is_small = result.numel() <= SHADOW_ELEMENTS or {guess_of(one).numel() for one in tensors} == {1}
            result.guess = self._value(func, args, kwargs, guess_of) if is_small else None

    def _receive(self, func: Any, args: Any, result: Any) -> None:
        """What this rank gets is known if what it sends is: the others are taken to send the same."""
        given, made = map(tensors_in, given_and_made(func.namespace, args, result))
        group, sizes, parts = group_of(args), [tensor.numel() for tensor in made], [None] * len(made)
        value: Any = shadow_of(given[group.rank() % len(given)])
        if value is not None and func._opname in ("alltoall_base_", "all_to_all_single"):
            splits = next(arg for arg in reversed(args) if isinstance(arg, list))
            value = value.split(splits or len(value) // group.size())[group.rank()]
        if value is not None and group.size() * value.numel() == sum(sizes) <= SHADOW_ELEMENTS:
            parts = value.flatten().repeat(group.size()).split(sizes)
            self.guesses.add("what other ranks send", "the same as this rank")
        for tensor, part in zip(made, parts, strict=True):
            forget(tensor)
            tensor.shadow = part if part is None else part.view(tensor.shape)

    def _placed(self, leaf: Any) -> Any:
        """Any CUDA device is this rank's."""
        return self.device if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf

    def _value(self, func: Any, args: Any, kwargs: Any, value_of: Any = None) -> Any:
        """The result of an op on known values (or on `value_of` each tensor).

        None if it does not follow from the arguments, and of a large one.
        """
        if "empty" in func._opname or torch.Tag.nondeterministic_seeded in func.tags:
            return None

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return (value_of or shadow_of)(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf

        args, kwargs = private.tree_map(real, (args, kwargs))
        if kwargs.get("device", 0) is None:
            kwargs["device"] = torch.device("cpu")
        try:
            with private.disable_current_modes():
                value = func(*args, **kwargs)
        except (RuntimeError, IndexError):
            return None
        return value if all(one.numel() <= SHADOW_ELEMENTS for one in tensors_in(value)) else None

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> float | int | bool:
        if any(frame.f_code.co_filename == torch.nn.init.__file__ for frame, _ in traceback.walk_stack(None)):
            return False  # nothing that they have drawn is to be drawn again
        assumed = self._value(func, args, kwargs, guess_of) or False
        self.guesses.add("the value of a tensor", f"{assumed}", "branches on it follow it, not the data")
        return assumed

    def _chosen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op whose shape depends on values; of unknown ones all are chosen, or differ."""
        known = all(shadow_of(tensor) is not None for tensor in tensors_in(args))
        value: Any = self._value(func, args, kwargs) if known else None
        if value is None and func._opname == "bincount":
            self.guesses.add("counts of unknown values", "the same of each")
            kinds = kwargs.get("minlength") or (*args, None, 0)[2] or 1
            each, more = divmod(args[0].numel(), kinds)  # as tokens among balanced experts
            with private.disable_current_modes():
                value = each + (torch.arange(kinds) < more).long()
        elif value is None:
            self.guesses.add(f"{func._opname} of unknown values", "every element")
            value = _every_element(func._opname, args)
        made = [self._fake(each) for each in private.tree_leaves(value)]
        return tuple(made) if isinstance(value, tuple) else made[0]

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor like `value` (on `meta`, or one whose values are known)."""
        fake = private.FakeTensor(self, torch.empty_like(value, device="meta"), self.device)
        if value.device.type == "cpu":
            fake.shadow = value
        return fake


def _every_element(op: str, args: Any) -> Any:
    """The largest result, as shapes, of an op that chooses among the elements of `args[0]`."""
    elements = args[0].numel()
    if op == "nonzero":
        return torch.empty((elements, args[0].dim()), dtype=torch.int64, device="meta")
    chosen = torch.empty(elements, dtype=args[0].dtype, device="meta")
    if op == "masked_select":
        return chosen
    places = torch.empty(args[0].shape, dtype=torch.int64, device="meta")
    return chosen, places, places.flatten()


def shadow_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of `tensor` on the CPU, where it is known; of small tensors only."""
    if not isinstance(tensor, private.FakeTensor):
        return tensor if tensor.device.type == "cpu" and tensor.numel() <= SHADOW_ELEMENTS else None
    shadow = getattr(tensor, "shadow", None)
    return None if shadow is None or getattr(shadow.untyped_storage(), "is_stale", False) else shadow


def guess_of(tensor: torch.Tensor) -> torch.Tensor:
    """The value of `tensor`, or 1 (a bool: False) where nothing is known of it; of large ones one element."""
    known = shadow_of(tensor)
    found = getattr(tensor, "guess", None) if known is None else known
    shape = tensor.shape if tensor.numel() <= SHADOW_ELEMENTS else [1] * tensor.dim()
    with private.disable_current_modes():
        unknown = torch.full(shape, tensor.dtype != torch.bool, dtype=tensor.dtype)
    return unknown if found is None else found


def _completed(func: Any, args: Any, result: Any) -> Any:
    """What an op leaves; the work of a collective is done, and DDP's hooks may ask it for the tensors."""
    if func.namespace != "c10d":
        return result
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(tensors_in(args[0]))
    work = private.create_work(done).boxed()
    return private.tree_map(lambda one: work if isinstance(one, torch.ScriptObject) else one, result)


def _absorbed(func: Any, tensors: Sequence[torch.Tensor], result: torch.Tensor) -> Any:
    """False and anything is False, True or anything is True."""
    kind = func._opname.removesuffix("_").removeprefix("bitwise_").removeprefix("logical_")
    decides = kind == "and" or (kind == "or" and result.dtype is torch.bool)
    if not decides or result.numel() > SHADOW_ELEMENTS:
        return None
    with private.disable_current_modes():
        known = [shadow.bool() for shadow in map(shadow_of, tensors) if shadow is not None]
        if any((shadow == (kind == "or")).all() for shadow in known):
            return torch.full(result.shape, kind == "or", dtype=result.dtype)
    return None


def forget(tensor: torch.Tensor) -> None:
    """Something unknown was written into `tensor`: nothing that shares its memory has a value any more."""
    shadow = getattr(tensor, "shadow", None)
    if shadow is not None:
        shadow.untyped_storage().is_stale = True


def _is_large(args: Any, kwargs: Any) -> bool:
    """Whether a factory of these arguments makes a large tensor (a meta tensor is never large)."""
    device = kwargs.get("device")
    size = next((arg for arg in args if isinstance(arg, (list, tuple, torch.Size))), ())
    if (device is not None and device.type == "meta") or not all(isinstance(n, int) for n in size):
        return False
    return bool(size) and 4 * math.prod(size) >= LARGE_BYTES
