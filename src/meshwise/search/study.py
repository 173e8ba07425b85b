"""The best plan of each of many machines: scaling over numbers of GPUs, and co-design.

Each point of a study is a whole search. *Strong* scaling keeps the batch; *weak* scaling grows it with the
GPUs. A point is on the front of a measure where no other has both a shorter time per token and less of it.

A machine is a cluster with something changed: more GPUs, another chip, faster memory, wider domains; or its
batch. Rates and sizes are factors of the cluster's own: `memory=2` doubles what a chip holds.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from meshwise.core.columns import pareto_front
from meshwise.core.each import Lost, each
from meshwise.core.errors import ClusterError, WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse, told
from meshwise.core.units import values_by_key
from meshwise.estimate.one_plan import Estimate
from meshwise.estimate.token_budget import NeverEnds, TokenBudget
from meshwise.machine.hardware import Chip, Cluster, find_chip
from meshwise.model.architecture import Model
from meshwise.plan.fields import Field, catalog_fields, read_field
from meshwise.plan.plan import plan_text
from meshwise.search.search import MEMORY_FRAC, Result, search
from meshwise.search.space import Stated

MEASURES = ("num_chips", "gpu_s_per_token", "usd_per_token", "joules_per_token", "memory_bytes")
"""What a point takes beside its time: each has a front."""

_CATALOG = read_catalog("study.toml")
KEYS = {"chip": Field("a name of the catalog", str, _CATALOG["chip"])} | catalog_fields(_CATALOG["keys"], {})
"""What can change, in the order in which changes are made."""

Changes = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class StudyPoint:
    """What a search `found` on one machine, which differs from the study's by `changes`."""

    changes: Changes
    cluster: Cluster
    batch: int
    found: Result

    @property
    def best(self) -> Estimate | None:
        """The best plan; None where nothing fits, or where there is no plan at all."""
        return next(iter(self.found.best), None)

    @property
    def name(self) -> str:
        """What differs."""
        return ", ".join(f"{key}={value}" for key, value in self.changes.items())

    def measures(self, budget: TokenBudget | None = None) -> dict[str, float]:
        """Time per token, and `MEASURES` under the watts of `budget`; empty where nothing fits or ever ends.

        Of a budget with tokens, the time is that of its run, failures included. Energy is left out where the
        chip's watts are neither stated nor known, dollars without a price.
        """
        budget, num_chips = budget or TokenBudget(), self.cluster.num_chips
        run = self.run(budget)
        if self.best is None or "reason" in run:
            return {}
        goodput = run["with_failures"]["goodput_frac"] if "with_failures" in run else 1.0
        token_s = 1.0 / self.best.tokens_per_s / goodput
        usd, joules = (of(self.best) for of in (budget.usd_per_token, budget.joules_per_token))
        measured = {
            "s_per_token": token_s,
            "num_chips": num_chips,
            "gpu_s_per_token": token_s * num_chips,
            "usd_per_token": usd and usd / goodput,
            "joules_per_token": joules and joules / goodput,
            "memory_bytes": self.best.memory_bytes["total"],
        }
        return {name: value for name, value in measured.items() if value is not None}

    def run(self, budget: TokenBudget) -> dict[str, Any]:
        """The run of `budget` with the best plan, if there is one; the `reason` of one that never ends."""
        try:
            return budget.run(self.best) if self.best else {}
        except NeverEnds as error:
            return {"reason": str(error)}

    def to_json(self, budget: TokenBudget) -> dict[str, Any]:
        """The machine, its best plan, and the run of `budget` with it."""
        machine = {**self.changes, "num_chips": self.cluster.num_chips, "batch": self.batch}
        if self.best is None:
            return machine | {"plan_text": None, "reason": self.found.reason or None}
        plan = {"plan_text": plan_text(self.best.plan), "microbatch": self.best.workload.microbatch}
        plan |= {"runs_in": [*self.found.bases[0].runs_in], "slower_frac": self.found.slower_frac}
        figures = {name: getattr(self.best, name) for name in ("step_s", "mfu", "tokens_per_s")}
        return machine | plan | figures | self.measures(budget) | self.run(budget)


@dataclass(frozen=True, slots=True, repr=False)
class Study(Shown):
    """The points of a study in the order of its values; `complete` is false where it was stopped."""

    points: tuple[StudyPoint, ...]
    complete: bool = True
    rows_in: ClassVar[str] = "points"

    def front(self, measure: str, budget: TokenBudget | None = None) -> list[int]:
        """The points that none beats in both time per token and `measure`, fastest first."""
        every = [(at.measures(budget), i) for i, at in enumerate(self.points)]
        found = [(one, i) for one, i in every if measure in one]
        ordered = sorted(found, key=lambda one: (one[0]["s_per_token"], one[0][measure]))
        return [i for _, i in pareto_front(ordered, lambda one: one[0][measure])]

    def speedup(self, i: int) -> float | None:
        """Tokens a second of point `i` over those of the first, per GPU: 1 is ideal; None where none fits."""
        pair = self.points[0], self.points[i]
        first, here = (of.best and of.best.tokens_per_s / of.cluster.num_chips for of in pair)
        return here / first if first and here else None

    @property
    def notes(self) -> list[str]:
        """Plans that no framework runs, keys with larger values, and the links of chips that are varied."""
        unrun = [note for of in self.points for note in told("plan of a machine", of=of)]
        larger = ", ".join(dict.fromkeys(key for of in self.points for key in of.found.not_tried))
        unrun += told("sizes of a study", larger=larger)
        varied = (of.cluster for of in self.points if "chip" in of.changes)
        on = dict.fromkeys(f"{of.chip.name} on {', '.join(one.name for one in of.levels)}" for of in varied)
        return unrun + [f"links: {'; '.join(on)}"] * bool(on)

    def to_json(self, budget: TokenBudget | None = None) -> dict[str, Any]:
        """The document that `meshwise search --vary --json` prints; fronts are indices of points."""
        budget = budget or TokenBudget()
        return {
            "points": [
                point.to_json(budget) | {"efficiency": self.speedup(i)} for i, point in enumerate(self.points)
            ],
            "fronts": {measure: self.front(measure, budget) for measure in MEASURES},
            "notes": self.notes,
            "complete": self.complete,
        }


def study(
    model: Model,
    cluster: Cluster,
    vary: Mapping[str, Sequence[Any]],
    *,
    batch: int,
    seq: int,
    stated: Stated | None = None,
    to: str = "",
    memory_frac: float = MEMORY_FRAC,
    capped: bool = True,
    weak: bool = False,
    on_point: Callable[[StudyPoint], None] = lambda point: None,
) -> Study:
    """Search each machine that `vary` makes of `cluster` (`KEYS`), every combination.

    `weak`: `batch` is that of `cluster`, and grows with the GPUs. Ctrl-C ends the study with the
    points so far. ClusterError for an unknown key, WorkloadError where a batch does
    not grow to a whole number.
    """
    machines = []
    for values in itertools.product(*vary.values()):
        changes = dict(zip(vary, values, strict=True))
        machine = changed(cluster, changes)
        alike = int(changes.get("batch", batch))
        grown, rest = divmod(alike * machine.num_chips, cluster.num_chips) if weak else (alike, 0)
        names = {"batch": batch, "cluster": cluster, "machine": machine}
        refuse("weak scaling", WorkloadError, is_whole=grown > 0 and not rest, **names)
        machines.append((changes, machine, grown))
    asked = {"seq": seq, "stated": stated, "to": to, "memory_frac": memory_frac, "capped": capped}
    points: dict[int, StudyPoint] = {}
    with suppress(KeyboardInterrupt):
        for place, found in each(
            partial(_search, model, asked), [(machine, grown) for _, machine, grown in machines], jobs=1
        ):
            if isinstance(found, Lost):
                raise WorkloadError(f"the search of a machine was lost: {found.reason}")
            points[place] = StudyPoint(*machines[place], found)
            on_point(points[place])
    in_order = tuple(points[place] for place in sorted(points))
    return Study(in_order, complete=len(points) == len(machines))


def _search(model: Model, asked: Mapping[str, Any], of: tuple[Cluster, int]) -> Result:
    """The search of one machine for a batch; KeyboardInterrupt where it was stopped."""
    machine, batch = of
    found = search(model, machine, batch=batch, top=1, with_changes=False, **asked)
    if not found.complete:
        raise KeyboardInterrupt
    return found


# --- machines -------------------------------------------------------------------------------------


def parse_changes(text: str) -> dict[str, tuple[str | int | float, ...]]:
    """`gpus=64|128,memory=1|2` as the values of each key; ClusterError where it cannot be read."""
    found: dict[str, tuple[str | int | float, ...]] = {}
    for key, values in values_by_key(text, "vary", ClusterError).items():
        if key not in KEYS or not values:
            known = ", ".join(KEYS)
            raise ClusterError(f"cannot vary {key!r}; write KEY=VALUE|VALUE with a key among {known}")
        read = (read_field(key, value, KEYS, ClusterError) for value in values.split("|"))
        found[key] = tuple(dict.fromkeys(read))
    return found


def changed(cluster: Cluster, changes: Changes) -> Cluster:
    """The cluster after all `changes` but that of the batch; ClusterError for an unknown key or chip."""
    unknown = sorted(set(changes) - set(KEYS))
    if unknown:
        raise ClusterError(f"a cluster cannot vary in {unknown[0]!r}; known keys: {', '.join(KEYS)}")
    for key in (key for key in KEYS if key in changes and key != "batch"):
        cluster = _changed(cluster, key, read_field(key, changes[key], KEYS, ClusterError))
    return cluster


def _changed(cluster: Cluster, key: str, value: Any) -> Cluster:
    inner, *others = cluster.levels
    if key == "chip":
        return _on_chip(cluster, find_chip(value))
    if key == "gpus":
        return replace(cluster, num_chips=value)
    wider = [level for level in others if level.ranks > value]
    refuse("varied links", ClusterError, key=key, value=value, inner=inner, wider=wider, others=others)
    if key == "domain":
        return replace(cluster, levels=(replace(inner, ranks=float(value)), *wider))
    if key in _CATALOG["of_chip"]:
        scaled = {name: _times(getattr(cluster.chip, name), value) for name in _CATALOG["of_chip"][key]}
        return replace(cluster, chip=replace(cluster.chip, **scaled))
    faster = [replace(level, bytes_per_s=value * level.bytes_per_s) for level in cluster.levels]
    return replace(cluster, levels=(faster[0], *others) if key == "inner" else (inner, *faster[1:]))


def _on_chip(cluster: Cluster, chip: Chip) -> Cluster:
    """The cluster with another chip in its usual nodes, between which the network of a file stays.

    Of its levels those do that join several nodes.
    """
    if chip.name == cluster.chip.name:
        return cluster
    node = [level for place, level in enumerate(chip.levels) if not place or level.box_link]
    network = [level for level in cluster.levels[1:] if level.ranks > node[-1].ranks and not level.box_link]
    is_stated = network and cluster.levels != cluster.chip.levels
    levels = (*node, *network) if is_stated else chip.levels
    return replace(cluster, name=f"{chip.name}:{cluster.num_chips}", chip=chip, levels=levels, collectives=())


def _times(rates: Any, factor: float) -> Any:
    """A rate, or the rates of each dtype, times a factor."""
    return (
        {name: factor * rate for name, rate in rates.items()} if isinstance(rates, dict) else factor * rates
    )
