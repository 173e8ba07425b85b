"""The best plan for a model on a cluster, proven best by pricing all that could be better.

A key that the caller states has the stated values only, all others those of `search.space`. Every
combination that divides what it cuts is priced by the same path as one plan (`estimate.grid`), or ruled out
by a time or memory that it does not stay below (`search.best_first`): the first of `best` is the fastest plan
of the space that fits. Plans that are the same in other words count once. Where nothing fits, the smallest
changes are looked for that would do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from meshwise.core.errors import MeshwiseError, PlanError
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse
from meshwise.estimate.adverse import Adversity, together
from meshwise.estimate.grid import NUMBER_KEYS, Grid, Refusals, grids
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.estimate.token_budget import TokenBudget
from meshwise.launch.runs import refusal, refused, running, runs, says_model
from meshwise.launch.settings import SEARCHED, training_on
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import software_on
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh, mesh_of
from meshwise.plan.plan import ANY, Plan, number_of, numbers_of, plan_text
from meshwise.plan.rules import resolve
from meshwise.plan.workload import Workload
from meshwise.search.basis import Basis, basis, complexity, simplest
from meshwise.search.best_first import best_first
from meshwise.search.best_plans import NEAR, NEAR_FRAC, BestPlans, Found, found_at, listed, num_listed
from meshwise.search.difference import Reason, reasons
from meshwise.search.space import CAPS, Stated, Values, free_values, is_switched, untried

MEMORY_FRAC = 0.92
"""Share of the memory that a plan may need; the rest is for what the estimate does not know."""

MAX_FRONT = 30
"""Plans of the Pareto front that are kept for the answer."""

MAX_GROWTH = 64
"""How many times more chips are tried where nothing fits."""

STOPPED = "the search was stopped before a plan that fits was priced"

ANY_FRAMEWORK = "any"
"""`to` where a plan need not run anywhere."""

OFFLOADED = ({"offload_optimizer": (ANY,)}, {"offload_optimizer": (ANY,), "offload_activations": (ANY,)})
"""What is freed where nothing fits, one after the other: a plan that does without is the simpler one, and
activations can take more of a host's memory than it has."""


_FSDP2 = "implementation", {"implementation": ("fsdp2",)}
_OF_ALL = "optimizer", {"optimizer": ("adam-bf16",), "grad_dtype": ("bf16",)}
_IN_CHUNKS = "loss_chunks", {"loss_chunks": (8,)}
_BESIDE_ADAPTERS = "frozen_dtype", {"frozen_dtype": ("int4",)}
"""Fewer bits of the states of all weights, and of weights beside adapters, as people train on one card."""


FEW_FRAC, WORTH_FRAC = 0.05, 0.9
"""Where no larger share of the priced plans fits, it is told what states of the optimizer on the host give,
if a step then takes no more than this share of the fastest."""


@dataclass(frozen=True, slots=True)
class Change:
    """What would make a plan fit: `num_chips` chips, or another value of `key`.

    The plan takes `host_bytes` of the memory of each host.
    """

    found: Found
    num_chips: int
    host_bytes: float
    key: str = ""

    def to_json(self) -> dict[str, Any]:
        """The change, and the plan that fits then."""
        what = {"key": self.key or None, "num_chips": self.num_chips, "host_bytes": self.host_bytes}
        return what | self.found.to_json()


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """What a search looked at and found.

    `plans_considered`: all plans of the space; `plans_priced`: those that no bound ruled out, of which
    `plans_feasible` fit in `capacity_bytes`. `best`: the fastest plan of each family that fits, fastest
    first. `pareto`: plans that fit, take up to `best_plans.FRONT_FRAC` times as long as the fastest, and that
    no other beats in both step time and memory, fastest first. Where nothing fits, `nearest_miss` needs least
    memory, and each of `changes` would do. Where there is no plan, `reason` says why. `beside` is a plan that
    the caller wants to see beside the best. `complete` is false where the search was stopped: then the best
    are those so far. `stated`: the values that keys were given; `to`: the framework whose plans alone were
    looked at. `runnable`: the fastest plan that a framework runs; `simplest`: the simplest as fast as the
    first of `best`, as far as the interval tells; `offloaded`: the fastest with states of the optimizer on
    the host, where few plans fit without and it is much faster. `robust`: plans are ranked, and those of
    `pareto` priced, under all adversities. `not_tried`: the largest value tried of each size that has larger
    ones.
    """

    plans_considered: int
    plans_priced: int
    plans_feasible: int
    elapsed_s: float
    capacity_bytes: float
    best: tuple[Estimate, ...]
    pareto: tuple[Found, ...]
    nearest_miss: Found | None
    changes: tuple[Change, ...] = ()
    reason: str = ""
    beside: Estimate | None = None
    complete: bool = True
    stated: Stated = field(default_factory=dict)
    to: str = ""
    runnable: tuple[Estimate, Basis] | None = None
    simplest: tuple[Estimate, Basis] | None = None
    offloaded: tuple[Estimate, Basis] | None = None
    robust: bool = False
    not_tried: Mapping[str, int] = field(default_factory=dict)
    rows_in: ClassVar[str] = "best"

    @cached_property
    def bases(self) -> tuple[Basis, ...]:
        """What the plans of `best` rest on."""
        return tuple(map(basis, self.best))

    @property
    def reasons(self) -> list[Reason]:
        """What leads from the plan `beside` to the first of `best`, key by key."""
        return reasons(self.beside, self.best[0]) if self.beside and self.best else []

    @property
    def slower_frac(self) -> float | None:
        """How much longer than the first plan the first takes that a framework runs; None without one."""
        if self.runnable is None:
            return None
        return self.ranked_s(*self.runnable) / self.ranked_s(self.best[0], self.bases[0]) - 1.0

    def ranked_s(self, found: Estimate, of: Basis) -> float:
        """The step by which plans are ranked: under all adversities where `robust`."""
        return of.robust_s if self.robust else found.step_s

    def sample(self, most: int) -> list[Found]:
        """At most `most` plans, drawn evenly from all that are priced and priced like those of `pareto`.

        They are the same ones at every call.
        """
        job = self.best[0].model, self.best[0].cluster, self.best[0].workload
        return _Space(*job, self.stated, to=self.to, robust=self.robust).sample(most)

    @property
    def notes(self) -> list[str]:
        """Which collectives were measured, and whether the best plan has them."""
        return [note for found in self.best[:1] for note in found.measured_notes()]

    def to_json(self, budget: TokenBudget | None = None) -> dict[str, Any]:
        """The document that `meshwise search --json` prints; `budget`: also what its run takes."""
        miss, run = self.nearest_miss, (budget or TokenBudget()).run
        names = ("plans_considered", "plans_priced", "plans_feasible", "elapsed_s", "complete")
        return {name: getattr(self, name) for name in (*names, "capacity_bytes", "notes", "robust")} | {
            "plans_per_s": self.plans_considered / self.elapsed_s,
            "to": self.to or None,
            "best": [
                _best_json(found, of) | run(found) for found, of in zip(self.best, self.bases, strict=True)
            ],
            "runnable": self.runnable and _best_json(*self.runnable) | {"slower_frac": self.slower_frac},
            "simplest": self.simplest and _best_json(*self.simplest),
            "offloaded": self.offloaded and _best_json(*self.offloaded),
            "not_tried": [f"{key} above {most}" for key, most in self.not_tried.items()],
            "pareto": [found.to_json("robust_s" if self.robust else "step_s") for found in self.pareto],
            "nearest_miss": miss
            and miss.to_json()
            | {
                "short_bytes": miss.memory_bytes - self.capacity_bytes,
                "changes": [change.to_json() for change in self.changes],
            },
            "reason": self.reason or None,
            "beside": self.beside
            and _best_json(self.beside)
            | {"fits": self.beside.fits, "reasons": [reason.to_json() for reason in self.reasons]},
        }


def _best_json(found: Estimate, of: Basis | None = None) -> dict[str, Any]:
    names = ("step_s", "mfu", "tokens_per_s", "memory_bytes", "time_s", "hidden_s")
    return {name: getattr(found, name) for name in names} | {
        "plan": found.to_json(ledger=False)["plan"],
        "plan_text": plan_text(found.plan),
        "microbatch": found.workload.microbatch,
        "step_s_interval": found.step_s_interval.to_json(),
        **(of.to_json() if of else {}),
    }


def search(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    stated: Stated | None = None,
    to: str = "",
    top: int = 5,
    memory_frac: float = MEMORY_FRAC,
    robust: bool = False,
    capped: bool = True,
    with_changes: bool = True,
    unwanted: Refusals = lambda mesh: (),
    on_plans: Callable[[BestPlans], None] = lambda kept: None,
) -> Result:
    """Price every plan of the space; keep the fastest of each of the `top` families that fit the memory.

    Where none fits, offloading is tried too (a plan that does without is the simpler one).
    `stated`: the values that keys of the plan (and `microbatch`) may have, in place of all of them. `to`: a
    framework, which must run the plan.
    `memory_frac`: share of a chip's memory that a plan may need. `robust`: rank plans by their step when
    adversities come together (`estimate.adverse`), and let them fit then. `capped`: try sizes up to the usual
    ones (`not_tried` says which are larger), but of keys that are `*`, and of those whose largest the best
    plan has: it is looked for again among all their values. `with_changes`: what would fit where nothing
    does, and what offloading gives where little does.
    `unwanted`: where plans are left out, one reason after another.
    `on_plans` hears of the plans kept so far; Ctrl-C ends the search with them. The result has no `best`
    where nothing fits.

    Raises:
        PlanError: A stated key is unknown, or cannot be `*`; a framework is unknown, or lacks what is stated.
    """
    started = time.perf_counter()
    workload, stated = Workload(batch=batch, seq=seq), _with_software(cluster, stated or {})
    to = _known_framework(to, model, cluster, seq)
    asked = _Space(model, cluster, workload, stated, memory_frac, top, to, robust, capped, unwanted)
    space, kept = asked.price_with_room(on_plans)
    while not kept.stopped and (larger := space.at_caps(kept)):
        asked = asked.freeing(larger)
        wider = asked.price_with_room(on_plans)
        kept.stopped = wider[1].stopped
        space, kept = (space, kept) if kept.stopped else wider
    best = (ranked := kept.ranked)[:top]
    no_fit = kept.considered > 0 and not best
    looks_on = no_fit and with_changes and not kept.stopped
    chosen = tuple(map(space.estimate, best))
    runnable = None if kept.runnable is None else space.estimate(kept.runnable)
    near = [
        space.estimate(one)
        for one in ranked[top:NEAR]
        if one.step_s < NEAR_FRAC * ranked[0].step_s and complexity(one.plan) < complexity(ranked[0].plan)
    ]
    candidates = [*chosen, *near, *filter(None, (runnable,))]
    spared = asked.freeing(OFFLOADED[0])
    offloaded = spared.faster_than(kept) if with_changes else None
    return Result(
        plans_considered=kept.considered,
        plans_priced=kept.priced,
        plans_feasible=kept.feasible,
        elapsed_s=time.perf_counter() - started,
        capacity_bytes=kept.capacity_bytes,
        best=chosen,
        pareto=tuple(kept.near_front[:MAX_FRONT]),
        nearest_miss=kept.miss if no_fit else None,
        changes=tuple(spared.changes(space.estimate(kept.miss))) if looks_on and kept.miss else (),
        reason=STOPPED if kept.stopped and not best else "" if kept.considered else space.reason(),
        complete=not kept.stopped,
        stated=space.stated,
        to=to,
        runnable=_with_basis(runnable) if runnable else None,
        simplest=_with_basis(simplest(candidates, runnable, space.step_s)) if chosen else None,
        offloaded=_with_basis(offloaded) if offloaded else None,
        robust=robust,
        not_tried=space.not_tried,
    )


def _with_software(cluster: Cluster, stated: Stated) -> Stated:
    """What was stated, under the chip's own software where it runs no other."""
    own = software_on(cluster.chip)
    for name in stated.get("software", ()):
        refuse("software of a chip", PlanError, software=name, own=own, chip=cluster.chip)
    return {"software": (own,), **stated} if own else stated


def _known_framework(to: str, model: Model, cluster: Cluster, seq: int) -> str:
    """The framework that must run the plan, "" for any; PlanError where it does not run such jobs."""
    if to in ("", ANY_FRAMEWORK):
        return ""
    names, says = ", ".join((*SEARCHED, ANY_FRAMEWORK)), to not in SEARCHED or says_model(to, model, seq)
    of = {"here": training_on(cluster.chip), "chip": cluster.chip, "model": model, "says_model": says}
    refuse("framework of a search", PlanError, to=to, known=SEARCHED, names=names, **of)
    return to


def _with_basis(one: Estimate) -> tuple[Estimate, Basis]:
    return one, basis(one)


@dataclass(frozen=True, slots=True)
class _Space:
    """What a search looks through, and at which share of the memory."""

    model: Model
    cluster: Cluster
    workload: Workload
    stated: Stated
    memory_frac: float = MEMORY_FRAC
    top: int = 1
    to: str = ""
    robust: bool = False
    capped: bool = True
    unwanted: Refusals = lambda mesh: ()

    def under(self, plan: Plan) -> Adversity:
        """What the plans are priced under."""
        return together(self.model, self.cluster, plan) if self.robust else Adversity()

    def estimate(self, found: Found) -> Estimate:
        """The estimate of a plan of the space."""
        workload = replace(self.workload, microbatch=found.microbatch)
        return estimate(self.model, self.cluster, found.plan, workload)

    def step_s(self, one: Estimate) -> float:
        """The step by which plans are ranked."""
        return self.under(one.plan).step_s(one) if self.robust else one.step_s

    def refused(self, mesh: Mesh) -> Iterable[Any]:
        """Where plans are unwanted, or no framework runs them that must."""
        yield from (*self.unwanted(mesh), untried(mesh, self.cluster.chip, self.stated))
        if self.to or is_switched(mesh.plan, self.stated):
            yield from refused([self.to] if self.to else self.able, self.model, mesh)

    def values(self) -> Values:
        """The values of each key that varies."""
        return free_values(self.model, self.cluster, self.workload, self.stated, self.to, capped=self.capped)

    def grids(self, values: Values, **how: Any) -> Iterator[Grid]:
        """The plans of `values` as grids."""
        job = self.model, self.cluster, self.workload
        return grids(*job, values, distinct=True, refused=self.refused, **how)

    def sample(self, most: int) -> list[Found]:
        """As `Result.sample`."""
        draw, opened = np.random.default_rng(0), list(self.grids(self.values(), under=self.under))
        share = most / max(sum(map(num_listed, opened)), most)
        return [one for grid in opened for one in _drawn(grid, round(share * num_listed(grid)), draw)]

    @property
    def able(self) -> list[str]:
        """The frameworks that run such jobs."""
        return running(self.model, self.cluster.chip, self.workload.seq)

    def price(
        self, on_plans: Callable[[BestPlans], None] = lambda kept: None, *, with_miss: bool = False
    ) -> BestPlans:
        """The plans worth keeping, of all; of those priced so far where Ctrl-C ends the search.

        `with_miss`: where none fits, the plan that needs least memory, too.
        """
        capacity_bytes = self.memory_frac * self.cluster.chip.memory_bytes
        can_run, some_run = not self.to and bool(self.able), partial(runs, self.able, self.model)
        kept = BestPlans(capacity_bytes, some_run, can_run, self.top, with_miss)
        try:
            best_first(partial(self.grids, under=self.under), self.values(), kept, on_plans)
        except KeyboardInterrupt:
            kept.stopped = True
            kept.considered = max(kept.considered, kept.priced)
        return kept

    def price_with_room(self, on_plans: Callable[[BestPlans], None]) -> tuple[_Space, BestPlans]:
        """The plans worth keeping and their space: with more and more offloaded while nothing fits."""
        spaces = [self, *map(self.freeing, OFFLOADED)]
        for space in spaces:
            kept = space.price(on_plans, with_miss=space is spaces[-1])
            if kept.feasible or kept.stopped or not kept.considered:
                break
        return space, kept

    @property
    def not_tried(self) -> dict[str, int]:
        """The largest value that is tried of each key that has larger ones."""
        some, every = self.values(), replace(self, capped=False).values()
        sizes = (key for key in (*CAPS, "cp", "microbatch") if key in some)
        return {key: max(some[key]) for key in sizes if len(some[key]) < len(every[key])}

    def at_caps(self, kept: BestPlans) -> Stated:
        """All values of the keys of which the best plan has the largest tried, or there is no plan."""
        best = [one.values for one in kept.ranked[:1]]
        most = self.not_tried.items() if best or not kept.considered else ()
        return {key: (ANY,) for key, value in most if not best or best[0][key] == value > 1}

    def freeing(self, freed: Stated) -> _Space:
        """The same space where the keys of `freed` may be tried, if they are not stated."""
        return replace(self, stated={**freed, **self.stated})

    def faster_than(self, kept: BestPlans) -> Estimate | None:
        """The first plan, where few of those of another space fit, if it is much faster than the best."""
        if not kept.ranked or kept.stopped or kept.feasible > FEW_FRAC * kept.priced:
            return None
        first = self.price().first
        return self.estimate(first) if first and first.step_s < WORTH_FRAC * kept.ranked[0].step_s else None

    def changes(self, nearest: Estimate) -> Iterator[Change]:
        """What would make a plan fit: one stated key less, FSDP2, narrower types, or more chips.

        Where most of the memory of the `nearest` plan is buffers, a loss in chunks too.
        """
        fixed = [key for key, kept in self.stated.items() if ANY not in kept]
        tried = {key: {one: of for one, of in self.stated.items() if one != key} for key in fixed}
        narrower = _BESIDE_ADAPTERS if "lora_rank" in self.stated else _OF_ALL
        others: list[tuple[str, Stated]] = [_FSDP2, narrower]
        others += [_IN_CHUNKS] * (2.0 * nearest.memory_bytes["buffers"] > nearest.memory_bytes["total"])
        tried |= {key: {**self.stated, **one} for key, one in others if self.stated.keys().isdisjoint(one)}
        for key, stated in tried.items():
            with suppress(PlanError):  # the framework does not have it
                if found := replace(self, stated=stated).price().first:
                    yield Change(found, self.cluster.num_chips, self.estimate(found).host_bytes(), key)
        yield from self._more_chips()

    def _more_chips(self) -> Iterator[Change]:
        """The fewest nodes on which a plan fits, between two doublings of the chips."""
        most, node = MAX_GROWTH * self.cluster.num_chips, max(int(min(self.cluster.levels[0].ranks, 1e9)), 1)
        enough, too_few = self.cluster.num_chips, self.cluster.num_chips
        found: Found | None = None
        while found is None and enough < most:
            too_few, enough = enough, 2 * enough
            found = self._on(enough).price().first
        while found is not None and (between := (too_few + enough) // 2 // node * node) > too_few:
            fits = self._on(between).price().first
            found, enough, too_few = (fits, between, too_few) if fits else (found, enough, between)
        if found is not None:
            yield Change(found, enough, self._on(enough).estimate(found).host_bytes())

    def _on(self, num_chips: int) -> _Space:
        """The same space on so many chips."""
        return replace(self, cluster=replace(self.cluster, num_chips=num_chips))

    def reason(self) -> str:
        """Why no combination is a plan: what the first stated one breaks whatever the other keys are."""
        first, chips = {key: of[0] for key, of in self.values().items()}, self.cluster.num_chips
        workload = replace(self.workload, microbatch=first.pop("microbatch", 1))
        values = {key: some for key, some in self.values().items() if key in NUMBER_KEYS}
        axes = np.ix_(*([number_of(key, one) for one in some] for key, some in values.items()))
        try:
            self.cluster.chip.matrix_peak((plan := Plan(**first)).dtype)
            resolve(
                self.model, plan, workload, self.cluster, **(free := dict(zip(values, axes, strict=True)))
            )
        except MeshwiseError as error:
            return str(error)
        every = mesh_of(plan, workload, chips, numbers_of(plan) | free)
        if self.to and (why := refusal(self.to, self.model, every, first)):
            return why
        for_it = f" for {self.to}" if self.to else ""
        return f"no combination of degrees divides {chips} ranks and a batch of {workload.batch}{for_it}"


def _drawn(grid: Grid, number: int, draw: np.random.Generator) -> Iterator[Found]:
    """About so many plans of one grid."""
    rows = draw.permutation(len(grid.rows[0]))[:number]
    for cells in grid.price(rows):
        places = np.flatnonzero(np.broadcast_to(listed(grid, cells.mesh, cells.broken), cells.shape))
        for place in draw.permutation(places)[: number * cells.shape[-1] // len(rows)]:
            yield found_at(cells, int(place))
