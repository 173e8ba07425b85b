"""A whole training run: the best parallelism at each training compute, and where the curve ends.

The degrees tp_in, tp_out, pp, v and ep lie on powers of two, the tokens of a microbatch on those and
1.5 times those, each a numpy axis. dp is not searched: for any choice of the rest, the smallest dp
that ends in time wastes the least, and is known in closed form. So every plan of the grid is considered,
but each with one way to share a domain (`layer.share_domain`).

docs/frontier.md derives each term, with its source and what it leaves out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np

import meshwise.published.frontier.assumptions as given
import meshwise.published.frontier.step as step
from meshwise.core.each import HEARS
from meshwise.core.errors import WorkloadError
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse
from meshwise.core.units import MOST_STATED, Num, require_positive, to_number
from meshwise.cost.failures import CHECKPOINT_BYTES_PER_PARAM, FAILURE_NUMBERS, Failures
from meshwise.published.frontier.assumptions import Assumptions, Sizes, sizes
from meshwise.published.frontier.device import Device
from meshwise.published.frontier.layer import share_domain
from meshwise.published.frontier.step import LayerStreams, Split, StepParts, utilization

RUN_UTILIZATION = 0.7
"""Base utilization of a whole run: the plateau of the published curve is 69.7 %."""
LIMIT_FRAC = 0.8
"""A run is limited where its utilization falls below this share of the plateau (the source's definition)."""
PLAN_FIELDS = ("tp_in", "tp_out", "pp", "interleave", "ep", "inner_in", "inner_out")
"""Fields of a plan besides dp, microbatches, and the tokens of a microbatch on one device."""
RESOURCES = ("compute", "memory", "network inside", "network between")
"""Resources used in a step; the two levels of the network are inside a domain and between domains."""
SHARES = (*RESOURCES, "latency", "bubble", "gradients")
"""Parts of the time of a step."""
LEAST_GOODPUT = 1e-3
"""Runs that keep a smaller share of their time are not looked for."""
CURVE_FLOP = 10 ** np.linspace(22, 33, 111)
"""Training computes of a curve: 1e22 to 1e33 FLOP, ten to a decade."""

# --- the search ---------------------------------------------------------------------------------------


def search_grid(device: Device, run: Assumptions) -> Split:
    """The splits searched, one numpy axis per degree; domains are shared out to move the fewest bytes."""
    powers = 2.0 ** np.arange(18)
    tp_in, tp_out, pp, interleave, ep, tokens = np.ix_(
        powers[:13],
        powers[:15],
        powers[:12],
        powers[:7] if run.schedule == "interleaved" else powers[:1],
        powers[: math.floor(math.log2(run.num_experts)) + 1],
        np.outer(powers[1:17], [1.0, 1.5]).ravel(),
    )
    inner_in, inner_out = share_domain(device, 1.0, given.WIDENING, tp_in, tp_out, run.all_reduce)
    return Split(tp_in, tp_out, pp, interleave, ep, tokens, inner_in, inner_out)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """One plan of the grid, all of whose fields are scalars."""

    split: Split
    dp: float
    microbatches: float

    @property
    def devices(self) -> float:
        return float(self.split.tp_in * self.split.tp_out * self.split.pp * self.dp)


def _best(
    device: Device, run: Assumptions, model: Sizes, split: Split, parts: StepParts, budget_s: float
) -> _Choice | None:
    """The plan with the highest utilization among those whose step takes at most `budget_s`."""
    room = (budget_s - parts.bubble_s - parts.gradient_s) / parts.microbatch_s
    in_time = (room >= 1) & (parts.critical_s + parts.gradient_s <= budget_s)
    fits = in_time & (split.pp * split.interleave <= model.layers)
    # The fewest replicas: as many microbatches on each as there is room for.
    tokens = model.batch_tokens / split.tokens
    dp = split.ep * np.ceil(tokens / (np.floor(np.where(fits, room, 1.0)) * split.ep))
    microbatches = np.ceil(tokens / dp)
    if run.capacity == "checked":
        fits = fits & (step.held_bytes(run, parts, split, dp, microbatches) <= device.memory_bytes)
    devices = split.tp_in * split.tp_out * split.pp * dp
    value = np.where(fits, utilization(device, run, model, devices, step.step_s(parts, microbatches)), 0.0)
    index = np.unravel_index(int(np.argmax(value)), value.shape)
    if value[index] == 0:
        return None

    def pick(array: Num) -> float:
        return float(np.broadcast_to(array, value.shape)[index])

    chosen = Split(*(pick(getattr(split, item.name)) for item in fields(Split)))
    return _Choice(split=chosen, dp=pick(dp), microbatches=pick(microbatches))


# --- answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Point:
    """The best run of one training compute; without `plan` there is none, and utilization is zero.

    `time_frac` are the `SHARES` of a step: the stream that binds is busy with arithmetic, memory or one
    level of the network, and idle for its latencies; bubble and gradients come on top. `binds` is the
    largest share, `lost_to` the largest that is not compute. `busy_frac` are the shares of a step that each
    resource moves or computes, overlapped or not. With failures, `utilization` includes the goodput, and
    `training_s` the time lost.
    """

    training_flop: float
    utilization: float = 0.0
    plan: dict[str, float] | None = None
    binds: str | None = None
    lost_to: str | None = None
    time_frac: dict[str, float] = field(default_factory=dict)
    busy_frac: dict[str, float] = field(default_factory=dict)
    params: float = 0.0
    devices: float = 0.0
    step_s: float = 0.0
    training_s: float = 0.0
    goodput: float = 1.0


def _time_frac(streams: LayerStreams, model: Sizes, choice: _Choice, parts: StepParts) -> dict[str, float]:
    flop_s, memory_s = float(streams.flop_s), float(streams.memory_s)
    inner_s, outer_s = float(streams.inner_s), float(streams.outer_s)
    pipeline_s = choice.microbatches * float(parts.microbatch_s) + float(parts.bubble_s)
    arithmetic = "compute" if flop_s >= memory_s else "memory"
    busy_s = max(flop_s, memory_s)
    layers = float(model.layers)
    times = dict.fromkeys(SHARES, 0.0)
    if pipeline_s < parts.critical_s:
        times[arithmetic] = layers * busy_s
        times["network inside"] = layers * inner_s
        times["network between"] = layers * outer_s
        times["latency"] = float(parts.critical_s) - layers * (busy_s + inner_s + outer_s)
    else:
        passes = choice.microbatches * layers / float(choice.split.pp)
        if busy_s + streams.kernel_latency_s >= streams.steady_s:
            times[arithmetic] = passes * busy_s
            times["latency"] = passes * float(streams.kernel_latency_s)
        else:
            level = "network inside" if inner_s >= outer_s else "network between"
            times[level] = passes * max(inner_s, outer_s)
            times["latency"] = passes * float(streams.collective_latency_s)
        times["bubble"] = float(parts.bubble_s)
    times["gradients"] = float(parts.gradient_s)
    total = sum(times.values())
    return {name: seconds / total for name, seconds in times.items()}


def _point(device: Device, run: Assumptions, model: Sizes, choice: _Choice, goodput: float) -> Point:
    split, devices = choice.split, choice.devices
    parts = step.step_parts(device, run, model, split, choice.dp)
    seconds = float(step.step_s(parts, choice.microbatches))
    streams = step.layer_streams(device, run, model, split)
    shares = _time_frac(streams, model, choice, parts)
    passes = choice.microbatches * float(model.layers) / float(split.pp)
    busy_s = (streams.flop_s, streams.memory_s, streams.inner_s, streams.outer_s)
    plan = {name: float(getattr(split, name)) for name in PLAN_FIELDS} | {"dp": choice.dp}
    plan |= {"microbatches": choice.microbatches, "microbatch_tokens": float(split.tokens)}
    return Point(
        training_flop=float(model.training_flop),
        utilization=goodput * float(utilization(device, run, model, devices, seconds)),
        plan=plan,
        binds=max(shares, key=lambda name: shares[name]),
        lost_to=max((name for name in shares if name != "compute"), key=lambda name: shares[name]),
        time_frac=shares,
        busy_frac={name: passes * float(one) / seconds for name, one in zip(RESOURCES, busy_s, strict=True)},
        params=float(model.params),
        devices=devices,
        step_s=seconds,
        training_s=float(model.tokens / model.batch_tokens) * seconds / goodput,
        goodput=goodput,
    )


def best_runs(
    device: Device, run: Assumptions, training_flop: Num, failures: Failures | None = None
) -> list[Point]:
    """The best run at each `training_flop`, one `Point` each.

    With `failures` the time lost must fit in the duration too: the search is repeated with the time
    that the goodput of its own answer leaves, until both agree. Goodput falls with the devices, and a
    shorter time needs more of them, so the repetition ends at the best agreement, or at none.
    """
    return [points[-1] for points in _best_runs(device, run, training_flop, (failures,))]


def _best_runs(
    device: Device, run: Assumptions, training_flop: Num, scenarios: Sequence[Failures | None]
) -> Iterator[list[Point]]:
    """For each `training_flop` the best run under each of `scenarios`; the parts of a step are shared."""
    device = device.flat() if run.network == "flat" else device
    grid = search_grid(device, run)
    table, names = sizes(run, np.ravel(training_flop)), [item.name for item in fields(Sizes)]
    for row in zip(*(getattr(table, name) for name in names), strict=True):
        HEARS.get()("")
        model = Sizes(**dict(zip(names, row, strict=True)))
        usable = max(int(np.count_nonzero(np.asarray(grid.pp) <= model.layers)), 1)
        split = replace(grid, pp=np.asarray(grid.pp)[:, :, :usable])
        # dp is not known before the search: price the gradient reduction of very many replicas.
        parts = step.step_parts(device, run, model, split, model.batch_tokens)
        yield [_best_run(device, run, model, split, parts, failures) for failures in scenarios]


def _best_run(
    device: Device, run: Assumptions, model: Sizes, split: Split, parts: StepParts, failures: Failures | None
) -> Point:
    goodput = 1.0
    while goodput >= LEAST_GOODPUT:
        choice = _best(device, run, model, split, parts, float(model.step_s) * goodput)
        if choice is None:
            break
        if failures is None:
            return _point(device, run, model, choice, 1.0)
        reached = float(failures.goodput(CHECKPOINT_BYTES_PER_PARAM * model.total_params, choice.devices))
        if reached >= goodput * (1 - 1e-6):
            return _point(device, run, model, choice, reached)
        goodput = reached
    return Point(training_flop=float(model.training_flop))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """A curve and the runs where it ends, each None if the curve does not reach its end.

    `limit`: the largest run at 80 % of the plateau or more; `wall`: the largest at all.
    """

    curve: tuple[Point, ...]
    plateau: float
    limit: Point | None
    wall: Point | None

    @property
    def limit_80pct_flop(self) -> float | None:
        return self.limit.training_flop if self.limit else None

    @property
    def wall_flop(self) -> float | None:
        return self.wall.training_flop if self.wall else None

    def to_json(self, watts: float | None, price: float) -> dict[str, Any]:
        """The curve, and where it ends; `watts` and `price` (an hour) are of one device."""

        def shown(point: Point | None) -> dict[str, Any] | None:
            return None if point is None else asdict(point) | power_and_cost(point, watts, price)

        names = ("plateau", "limit_80pct_flop", "wall_flop")
        ends = {"limit": shown(self.limit), "wall": shown(self.wall)}
        curve = [shown(point) for point in self.curve]
        return {name: getattr(self, name) for name in names} | ends | {"curve": curve}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Frontier(Shown):
    """The limits of `device` under `run`, without failures and with them."""

    device: Device
    run: Assumptions
    failures: Failures
    ideal: Limits
    with_failures: Limits
    rows_in: ClassVar[str] = "curve"

    def to_json(
        self, *, watts: float | None = None, price_per_device_hour: float | None = None
    ) -> dict[str, Any]:
        """The limits without failures, and under `with_failures` the same with them."""
        watts = self.device.power_watts or None if watts is None else watts
        price = price_per_device_hour or 0.0
        failures, laws = self.failures, {kind: getattr(self.run, kind) for kind in given.KINDS}
        return {
            "device": self.device.to_json(),
            "assumptions": {
                **{kind: {"name": law.name, "source": law.source} for kind, law in laws.items()},
                **{name: getattr(self.run, name) for name in given.FIELDS},
            },
            "failures": {
                "device_hours_between_interruptions": failures.device_s_between_interruptions / 3600,
                **{name: getattr(failures, name) for name in ("storage_bytes_per_s", "restart_s", "source")},
            },
            "power_and_cost": {"watts_per_device": watts, "price_per_device_hour": price},
            **self.ideal.to_json(watts, price),
            "with_failures": self.with_failures.to_json(watts, price),
        }


def settings_of(months: float | None, settings: Mapping[str, str | float]) -> tuple[Assumptions, Failures]:
    """The assumptions and the failures of a run of at most `months` [3], with `settings` by name replaced."""
    refuse("months of a run", WorkloadError, months=months, settings=settings)
    stated = {"duration_s": (3.0 if months is None else months) * given.MONTH_S} | dict(settings)
    of_failures: dict[str, Any] = {
        key: to_number(stated.pop(key), f"failures: {key}") for key in FAILURE_NUMBERS if key in stated
    }
    return given.assumptions(**stated), replace(Failures.llama3(), **of_failures)


def frontier(
    device: Device, run: Assumptions | None = None, failures: Failures | None = None,
    training_flop: Num = CURVE_FLOP,
) -> Frontier:  # fmt: skip
    """Utilization against training compute for `device`, where it ends, and the same with failures.

    `training_flop` are the computes of the curve; a limit is found to a tenth of their spacing.
    """
    run, failures = run or Assumptions(), failures or Failures.llama3()
    flop = np.sort(np.ravel(np.asarray(training_flop, dtype=np.float64)))
    require_positive(flop, "training_flop")
    ideal, failing = zip(*_best_runs(device, run, flop, (None, failures)), strict=True)
    without, under = _limits(device, run, ideal, None), _limits(device, run, failing, failures)
    return Frontier(device=device, run=run, failures=failures, ideal=without, with_failures=under)


def _limits(device: Device, run: Assumptions, curve: tuple[Point, ...], failures: Failures | None) -> Limits:
    plateau = max(point.utilization for point in curve)

    def last(least: float) -> Point | None:
        reached = [i for i, point in enumerate(curve) if point.plan and point.utilization >= least]
        if not reached or reached[-1] == len(curve) - 1:
            return None
        low, high = curve[reached[-1]], curve[reached[-1] + 1]
        between = np.geomspace(low.training_flop, high.training_flop, 11)[1:-1]
        finer = [low, *best_runs(device, run, between, failures)]
        return [point for point in finer if point.plan and point.utilization >= least][-1]

    return Limits(curve=curve, plateau=plateau, limit=last(LIMIT_FRAC * plateau), wall=last(0.0))


def power_and_cost(point: Point, watts: float | None, price_per_hour: float) -> dict[str, float | None]:
    """Power [W], energy [J] (None without watts), device-hours and price of a run; both rates per device."""
    refuse("power and cost", WorkloadError, watts=watts or 0.0, price=price_per_hour, most=MOST_STATED)
    device_hours = point.devices * point.training_s / 3600
    return {
        "power_watts": point.devices * watts if watts else None,
        "energy_j": point.devices * watts * point.training_s if watts else None,
        "device_hours": device_hours,
        "price": device_hours * price_per_hour,
    }
