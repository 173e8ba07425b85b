"""Every layout of an instance at every batch, in closed form: the screen before the simulation.

A layout is tp x dp ranks of one chip, its experts within each tp group (whole, or cut) or spread over all
ranks. With B sequences running on each dp rank, t(B) the seconds of a decode pass, p those of a prompt in a
full pass, and O tokens of output, an instance alone gives a token each `t + B p / O` seconds and serves
`r = B dp / (O t + B p)` requests a second. Separate pools serve `dp / p` and `B dp / (O t)`; a token takes t.

The first token comes after the front end, its prompt alone, and a queue: of an engine that prompts keep busy
for a share rho, `rho p / (2 (1 - rho))` (M/D/1), and, where prompts and decodes share an engine, the pass
under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.units import Num
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.mesh import mesh_of, rules
from meshwise.plan.plan import Plan, numbers_of, plan_text
from meshwise.plan.workload import Workload
from meshwise.serve.engine import Engine
from meshwise.serve.engine_pass import attending
from meshwise.serve.serving import (
    PREFILL_TOKENS,
    Serving,
    memory_bytes,
    prompt_alone_s,
    prompts_s,
    serving,
    token_pass,
)

MAX_RANKS = 256
"""Ranks of one instance at most."""
BATCHES = np.unique(np.geomspace(1, 4096, 256).round())
"""Running sequences of a dp rank that are tried."""
PREFILL_UTILIZATION = 0.9
"""Share of their time that prefill workers are busy at most (aiconfigurator's derate of a prefill pool)."""

Grid = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Screen:
    """The layouts of one chip: arrays [layouts, 1], or [layouts, batches] where the batch matters."""

    chip: str
    instances: tuple[Serving, ...]
    num_chips: Grid
    dp: Grid
    most: Grid
    prompt_s: Grid
    alone_s: Grid
    pass_s: Grid

    @property
    def output(self) -> int:
        """Tokens that each request generates."""
        return self.instances[0].output

    @property
    def fits(self) -> Mask:
        """Whether the caches of so many sequences have room."""
        return self.most >= BATCHES

    @property
    def token_s(self) -> Grid:
        """Seconds between two tokens of a sequence where prompts share the instance."""
        return self.pass_s + BATCHES * self.prompt_s / self.output

    @property
    def rate(self) -> Grid:
        """Requests a second of an instance that takes prompts too."""
        return BATCHES * self.dp / (self.output * self.token_s)

    @property
    def first_s(self) -> Grid:
        """Mean seconds to the first token at that rate."""
        busy = np.minimum(self.rate * self.prompt_s / self.dp, 0.99)
        return self.alone_s + busy * self.prompt_s / (2.0 * (1.0 - busy)) + 1.5 * self.token_s

    @property
    def decode_rate(self) -> Grid:
        """Requests a second of an instance that only decodes."""
        return BATCHES * self.dp / (self.output * self.pass_s)


def screen(
    model: Model, cluster: Cluster, fixed: Mapping[str, Sequence[Any]], engine: Engine, *, prompt: int,
    output: int, memory_frac: float = 0.9, engine_s: float = 0.0,
) -> Screen | None:  # fmt: skip
    """All layouts on chips of `cluster` with the `fixed` values of plan keys; None if no such plan works."""
    found = []
    for plan, sizes in _grids(model, cluster, fixed):
        found.append(_priced(model, cluster, plan, sizes, engine, prompt, output, memory_frac, engine_s))
    screens = [one for one in found if one is not None]
    if not screens:
        return None
    columns = ("num_chips", "dp", "most", "prompt_s", "alone_s", "pass_s")
    joined = {name: np.concatenate([getattr(one, name) for one in screens]) for name in columns}
    instances = tuple(one for group in screens for one in group.instances)
    return Screen(chip=cluster.chip.name, instances=instances, **joined)


def _grids(
    model: Model, cluster: Cluster, fixed: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[Plan, list[tuple[int, int, int]]]]:
    """A plan for each choice of formats, and its layouts: ranks, tp, ep."""
    formats = {key: values for key, values in fixed.items() if key not in ("tp", "dp", "ep", "etp")}
    counts = [2**i for i in range(20) if 2**i <= min(cluster.num_chips, MAX_RANKS)]
    layouts = [
        (ranks, tp, ep)
        for ranks, tp in product(counts, counts)
        for ep in ((1, tp, ranks) if model.moe else (1,))
        if ranks % tp == 0 and (ranks == tp or ep == ranks)
    ]
    kept = [
        one
        for one in dict.fromkeys(layouts)
        if one[1] in fixed.get("tp", (one[1],)) and one[2] in fixed.get("ep", (one[2],))
        and one[0] // one[1] in fixed.get("dp", (one[0] // one[1],))
    ]  # fmt: skip
    for values in product(*formats.values()):
        yield Plan(**dict(zip(formats, values, strict=True))), kept


def _priced(
    model: Model, cluster: Cluster, plan: Plan, layouts: list[tuple[int, int, int]], engine: Engine,
    prompt: int, output: int, memory_frac: float, engine_s: float,
) -> Screen | None:  # fmt: skip
    """Price the layouts that are plans, together."""
    base = serving(
        model, replace(cluster, num_chips=1), plan, prompt=prompt, output=output, memory_frac=memory_frac,
        engine_s=engine_s,
    )  # fmt: skip
    plan = base.mesh.plan
    layouts = [one for one in layouts if _is_plan(model, cluster, plan, one, prompt)]
    if not layouts:
        return None
    ranks, tp, ep = (np.array(column, dtype=np.float64)[:, None] for column in zip(*layouts, strict=True))
    sizes = numbers_of(plan) | {"tp": tp, "ep": ep}
    mesh = mesh_of(plan, Workload(batch=1, seq=prompt, kind="decode"), MAX_RANKS, sizes, 1.0)
    of = replace(base, mesh=replace(mesh, dp=ranks / tp), cluster=replace(cluster, num_chips=MAX_RANKS))
    memory = memory_bytes(of, 1.0)
    room = memory_frac * cluster.chip.memory_bytes - memory["weights"] - memory["working"]
    together = max(PREFILL_TOKENS // prompt, 1)

    def grid(values: Num) -> Grid:
        return np.broadcast_to(values, (len(layouts), np.shape(values)[-1] if np.ndim(values) else 1))

    return Screen(
        chip=cluster.chip.name,
        instances=tuple(
            serving(
                model, replace(cluster, num_chips=ranks, name=f"{cluster.chip.name}:{ranks}"),
                replace(plan, tp=tp, ep=ep), prompt=prompt, output=output, memory_frac=memory_frac,
                engine_s=engine_s,
            )
            for ranks, tp, ep in layouts
        ),
        num_chips=ranks,
        dp=ranks / tp,
        most=grid(np.maximum(np.floor(room / memory["cache"]), 0.0)),
        prompt_s=grid(prompts_s(of, of.prefill(float(together)))) / together,
        alone_s=grid(prompt_alone_s(of)) + engine.front_s + engine.front_token_s * prompt,
        pass_s=grid(token_pass(attending(of, engine), BATCHES).total_s),
    )  # fmt: skip


def _is_plan(model: Model, cluster: Cluster, plan: Plan, layout: tuple[int, int, int], prompt: int) -> bool:
    ranks, tp, ep = layout
    sizes = numbers_of(plan) | {"tp": float(tp), "ep": float(ep)}
    workload = Workload(batch=ranks // tp, seq=prompt, kind="decode")
    mesh = mesh_of(plan, workload, ranks, sizes, 1.0)
    return not any(rule.is_broken for rule in rules(model, mesh, sizes, cluster))


def layout_text(of: Serving) -> str:
    """The plan of an instance, as `--plan` takes it."""
    return plan_text(of.mesh.plan) or "tp=1"
