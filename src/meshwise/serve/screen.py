"""Every layout of an instance at every batch, in closed form: the screen before the simulation.

A layout is tp x dp ranks of one chip, its experts within each tp group (whole, or cut) or spread over all
ranks. With B sequences running on each dp rank, t(B) the seconds of a decode pass, p those of a prompt in a
full pass, and O tokens of output, an instance of one rank gives a token each `t' = t + B p / O` seconds (with
more, or where the host launches prompts' kernels: `pass_times.with_prompts_s`) and serves `B dp / (O t')`
requests a second. Separate pools serve `dp / p` and `B dp / (O t)`; a token takes t.

Of a prompt only the tokens count that no cache holds: those of a cache of infinite size, whose room the
simulation then checks. The first token comes after the front end, its prompt alone, and a queue: of an
engine that prompts keep busy for a share rho, `rho p / (2 (1 - rho))` (M/D/1), and, where prompts and decodes
share an engine, the pass under way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.units import Num
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.mesh import mesh_of
from meshwise.plan.plan import Plan, numbers_of, plan_text
from meshwise.plan.rules import rules
from meshwise.plan.workload import Workload
from meshwise.serve.engine import Engine
from meshwise.serve.pass_times import attending, prompt_launches_s, with_prompts_s
from meshwise.serve.serving import Serving, memory_bytes, prompt_alone_s, prompts_s, token_pass

MAX_RANKS = 256
"""Ranks of one instance at most."""
BATCHES = np.unique(np.geomspace(1, 4096, 256).round())
"""Running sequences of a dp rank that are tried."""
PREFILL_UTILIZATION = 0.9
"""Share of their time that prefill workers are busy at most (aiconfigurator's derate of a prefill pool)."""

Instance = Callable[[Cluster, Plan], Serving]
"""What makes an instance of one model for one kind of requests."""
Layout = tuple[int, int, int]
"""Ranks, tp and ep of an instance."""
Grid = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Screen:
    """The layouts of one chip: arrays [layouts, 1], or [layouts, batches] where the batch matters.

    `pass_s` are seconds between two tokens of a sequence, `token_s` where prompts share the instance.
    """

    instances: tuple[Serving, ...]
    num_chips: Grid
    dp: Grid
    most: Grid
    prompt_s: Grid
    alone_s: Grid
    pass_s: Grid
    token_s: Grid

    @property
    def vendor(self) -> str:
        """Who makes the chip; caches are handed over between chips of one vendor."""
        return self.instances[0].cluster.chip.vendor

    @property
    def output(self) -> int:
        """Tokens that each request generates."""
        return self.instances[0].output

    @property
    def fits(self) -> Mask:
        """Whether the caches of so many sequences have room."""
        return self.most >= BATCHES

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
    instance: Instance, cluster: Cluster, fixed: Mapping[str, Sequence[Any]], engine: Engine,
    missing_frac: float = 1.0,
) -> Screen | None:  # fmt: skip
    """All layouts on chips of `cluster` with the `fixed` values of plan keys; None if no such plan works.

    `missing_frac`: the share of the prompts' tokens that no cache holds.
    """
    formats = formats_of(fixed)
    screens = []
    for values in product(*formats.values()):
        base = instance(replace(cluster, num_chips=1), Plan(**dict(zip(formats, values, strict=True))))
        layouts = [one for one in _layouts(base.model, cluster, fixed) if _is_plan(base, cluster, one)]
        if layouts:
            screens.append(_priced(instance, base, cluster, layouts, engine, missing_frac))
    if not screens:
        return None
    columns = ("num_chips", "dp", "most", "prompt_s", "alone_s", "pass_s", "token_s")
    joined = {name: np.concatenate([getattr(one, name) for one in screens]) for name in columns}
    return Screen(instances=tuple(one for group in screens for one in group.instances), **joined)


def formats_of(stated: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """The `stated` values of plan keys that are no degrees of a layout."""
    return {key: values for key, values in stated.items() if key not in ("tp", "dp", "ep", "etp")}


def _layouts(model: Model, cluster: Cluster, fixed: Mapping[str, Sequence[Any]]) -> Iterator[Layout]:
    """Layouts of powers of two with the `fixed` degrees, each once."""
    counts = [2**i for i in range(20) if 2**i <= min(cluster.num_chips, MAX_RANKS)]
    for ranks, tp in product(counts, counts):
        for ep in dict.fromkeys((1, tp, ranks) if model.moe else (1,)):
            degrees = {"tp": tp, "ep": ep, "dp": ranks // tp}
            is_fixed = all(degree in fixed.get(key, (degree,)) for key, degree in degrees.items())
            if is_fixed and ranks % tp == 0 and (ranks == tp or ep == ranks):
                yield ranks, tp, ep


def _priced(
    instance: Instance, base: Serving, cluster: Cluster, layouts: Sequence[Layout], engine: Engine,
    missing_frac: float,
) -> Screen:  # fmt: skip
    """Price `layouts`, all of which are plans, together; `base` is one rank of them."""
    plan, prompt = base.mesh.plan, base.prompt
    ranks, tp, ep = (np.array(column, dtype=np.float64)[:, None] for column in zip(*layouts, strict=True))
    sizes = numbers_of(plan) | {"tp": tp, "ep": ep}
    mesh = mesh_of(plan, Workload(batch=1, seq=prompt, kind="decode"), MAX_RANKS, sizes)
    of = replace(base, mesh=replace(mesh, dp=ranks / tp), cluster=replace(cluster, num_chips=MAX_RANKS))
    memory = memory_bytes(of, 1.0)
    room = of.usable_bytes - memory["weights"] - memory["working"]
    computed = max(missing_frac * prompt, 1.0)
    runs = engine.on(cluster.chip, np.where(ep > tp, ranks / tp, 1.0))
    together = np.maximum(runs.max_tokens // computed, 1.0)
    launched_s = prompt_launches_s(of, engine, computed)
    front_s = engine.front_s + engine.front_token_s * prompt

    def grid(values: Num) -> Grid:
        return np.broadcast_to(values, (len(layouts), np.shape(values)[-1] if np.ndim(values) else 1))

    dp, prompt_s = ranks / tp, prompts_s(of, of.prefill(together, computed)) / together
    pass_s, per_pass = token_pass(attending(of, engine), BATCHES).total_s, BATCHES * dp / base.output
    prompts = prompt_s, prompt_alone_s(of, computed), per_pass, dp, launched_s

    def alone(ranks: int, tp: int, ep: int) -> Serving:
        on = replace(cluster, num_chips=ranks, name=f"{cluster.chip.name}:{ranks}")
        return instance(on, replace(plan, tp=tp, ep=ep))

    return Screen(
        instances=tuple(alone(*layout) for layout in layouts),
        num_chips=ranks,
        dp=dp,
        most=grid(np.maximum(np.floor(room / memory["cache"]), 0.0)),
        prompt_s=grid(prompt_s),
        alone_s=grid(np.maximum(prompts[1], launched_s)) + front_s,
        pass_s=grid(pass_s),
        token_s=grid(with_prompts_s(pass_s, *prompts, mixes=engine.mixes)),
    )


def _is_plan(base: Serving, cluster: Cluster, layout: Layout) -> bool:
    ranks, tp, ep = layout
    plan = base.mesh.plan
    sizes = numbers_of(plan) | {"tp": float(tp), "ep": float(ep)}
    mesh = mesh_of(plan, Workload(batch=ranks // tp, seq=base.prompt, kind="decode"), ranks, sizes)
    return not any(rule.is_broken for rule in rules(base.model, mesh, sizes, cluster))


def layout_text(of: Serving) -> str:
    """The plan of an instance, as `--plan` takes it."""
    return plan_text(of.mesh.plan) or "tp=1"
