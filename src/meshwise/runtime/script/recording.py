"""What a user's program does, under the names of its modules: rows, steps, and the moment of the peak.

Modules name themselves when they are called, optimizers open the phase `optimizer`, and a module that is
called inside the backward is a recomputation. A step ends with its last optimizer: one that steps again is of
the next.
"""

import re
from collections import Counter
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwise.program.tape import Tape
from meshwise.runtime.recorder import OpRecorder, own_part
from meshwise.runtime.script.tensors import attend
from meshwise.runtime.torch_private import TorchDispatchMode, current_graph_task_id, tree_leaves

_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


class ScriptTape(Tape):
    """A tape that knows who made each tensor, when the peak was, and where steps end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.peak_row: dict[str, Any] = {}
        self.step_ends: list[int] = []
        self._stepped: set[int] = set()  # the optimizers of this step, which the last of them ends
        self._last_end = 0
        self.states_bytes: dict[str, float] = {}
        self._alive: dict[object, dict[str, Any]] = {}
        self._log: list[tuple[bool, dict[str, Any]]] = []  # comes (or goes), tensor
        self.unnamed: list[dict[str, Any]] = []
        self._peak_seen, self._peak_at, self.recent_peak_bytes = 0.0, 0, 0.0

    def allocate(self, name: object, size_bytes: float) -> None:
        super().allocate(name, size_bytes)
        tensor = self._alive[name] = {"bytes": size_bytes, "what": "", "is_empty": True}
        self._log.append((True, tensor))
        self.unnamed.append(tensor)
        self._look()

    def release(self, name: object) -> None:
        super().release(name)
        self._log.append((False, self._alive.pop(name)))

    def _look(self) -> None:
        """Note a new peak, of the program and since the program reset its own."""
        self.recent_peak_bytes = max(self.recent_peak_bytes, self.current_booked_bytes)
        if self.peak_booked_bytes > self._peak_seen:
            self._peak_seen, self._peak_at, self.peak_row = self.peak_booked_bytes, len(self._log), {}

    def reset_peak(self, *_: Any) -> None:
        """In place of `torch.cuda.reset_peak_memory_stats`."""
        self.recent_peak_bytes = self.current_booked_bytes

    def name(self, place: dict[str, Any], written: Any = ()) -> None:
        """New tensors, and empty ones that it writes, are the op's that is at `place`; so is a new peak."""
        self._look()  # the workspace of the first matmul
        what = "/".join(filter(None, (folded(place["module"]), place["op"]))) + f" ({place['phase']})"
        for tensor in [*self.unnamed, *filter(None, map(self._alive.get, written))]:
            if tensor["is_empty"]:
                tensor |= {"what": what, "is_empty": "empty" in place["op"]}
        self.unnamed.clear()
        self.peak_row = self.peak_row or place

    def label(self, what: str, tensors: Any) -> None:
        """The storages of these tensors are `what`: parameters, gradients, optimizer states."""
        storages = (own_part(tensor).untyped_storage()._cdata for tensor in tensors)
        for entry in filter(None, map(self._alive.get, storages)):
            entry |= {"what": what, "is_empty": False}
        held = sum(entry["bytes"] for entry in self._alive.values() if entry["what"] == what)
        self.states_bytes[what] = max(held, self.states_bytes.get(what, 0.0))

    def end_step(self, optimizer: int) -> None:
        """An optimizer has stepped: the step before ended with the last one, if this one was in it."""
        if optimizer in self._stepped:
            self.step_ends.append(self._last_end)
            self._stepped.clear()
        self._stepped.add(optimizer)
        self._last_end = len(self._rows)

    def report(self) -> dict[str, Any]:
        """What is told of the program: its peak, what was alive then, its ledger, that of its last step."""
        alive: Counter[str] = Counter()
        for comes, tensor in self._log[: self._peak_at]:
            alive[tensor["what"]] += tensor["bytes"] if comes else -tensor["bytes"]
        self.step_ends += [self._last_end] * bool(self._stepped)
        start, end = ([0, *self.step_ends] if self.step_ends else [0, len(self._rows)])[-2:]
        last_step = Tape(self.origin, self.rank, self.world_size, _rows=self._rows[start:end])
        return {
            "peak_bytes": self.peak_booked_bytes,
            **self.verdict(),
            "tensors_peak_bytes": self.peak_bytes,
            "peak_row": self.peak_row,
            "alive_at_peak": {what: size for what, size in alive.most_common() if size},
            "states_bytes": self.states_bytes,
            "num_steps": len(self.step_ends),
            "ledger": self.ledger().to_json(),
            "step_ledger": last_step.ledger().to_json(),
            "launches": self.launched(start, end),
        }


def folded(module: str) -> str:
    """A module's path with the numbers of its layers left out."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


class ScriptRecorder(OpRecorder):
    """A recorder of what happens on `cuda`, wherever a fake tensor says that its storage lies."""

    tape: ScriptTape

    def __init__(self, tape: ScriptTape) -> None:
        super().__init__(tape, device_type="cuda")
        self._names: dict[int, str] = {}
        self._roots: list[torch.nn.Module] = []  # alive, so that no other module gets their ids

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an op, unless all of it is on the CPU."""
        leaves = tree_leaves((args, kwargs))
        devices = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if not any(isinstance(one, torch.device) and one.type == "cuda" for one in devices):
            return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled() and func.namespace == "aten" and func._can_decompose():
            return self._in_parts(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.tape.unnamed and "empty" in func._opname:  # which writes no row
            self.tape.name(self._place(func._opname))
        return result

    def _write(self, row: dict[str, Any], written: list[torch.Tensor]) -> dict[str, Any]:
        full = super()._write(row, written)
        self.tape.name(full, [tensor.untyped_storage()._cdata for tensor in written])
        return full

    def _in_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op that torch takes apart for autograd, which `inference_mode` leaves out."""
        is_attention = func is torch.ops.aten.scaled_dot_product_attention.default
        TorchDispatchMode.__enter__(self)
        try:
            return (attend if is_attention else func.decompose)(*args, **kwargs)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def watch_modules(self) -> None:
        """Name rows by the modules of the program, and phases by its optimizers."""

        def enter(module: torch.nn.Module, _: Any) -> None:
            self.weights(*module.parameters(recurse=False))
            self._modules.append(f"/{self._name(module)}")
            self._phases += ["recompute"] if current_graph_task_id() != -1 else []

        def leave(module: torch.nn.Module, *_: Any) -> None:
            if self._modules and self._modules[-1] == f"/{self._name(module)}":
                self._modules.pop()
                if self._phases[-1:] == ["recompute"]:
                    self._phases.pop()

        def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            frozen = [p for root in self._roots for p in root.parameters() if not p.requires_grad]
            self.tape.label("parameters", [*parameters, *frozen])
            self.tape.label("gradients", [p.grad for p in parameters if p.grad is not None])
            self._phases.append("optimizer")
            self._modules.append("/optimizer")

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._phases.pop()
            self._modules.pop()
            states = (state.values() for state in optimizer.state.values())
            held = [one for each in states for one in each if isinstance(one, torch.Tensor)]
            self.tape.label("optimizer states", held)
            self.tape.end_step(id(optimizer))

        register_module_forward_pre_hook(enter)
        register_module_forward_hook(leave, always_call=True)
        register_optimizer_step_pre_hook(begin)
        register_optimizer_step_post_hook(end)

    def _name(self, module: torch.nn.Module) -> str:
        if id(module) not in self._names:
            parent = self._modules[-1][1:] + "." if self._modules else ""
            self._roots.append(module)
            for name, each in module.named_modules():
                words = [word for word in name.split(".") if word not in _WRAPPERS]
                path = ".".join(words[1:] if words[:1] == ["module"] else words)
                self._names[id(each)] = parent + path or type(getattr(module, "_orig_mod", module)).__name__
        return self._names[id(module)]
