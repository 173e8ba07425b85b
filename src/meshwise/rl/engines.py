"""The engines of rollout at work: `serve`'s simulation, driven by samples instead of by clients.

A sample goes to one engine. With several turns it comes back after its environment's time; its cache is
kept, so only what tools returned is prefilled. In a synchronous step the batch is cut into as many pieces as
there are engines, in order, so that a group finds its prompt in the cache of its engine; in asynchronous ones
a sample goes to the engine that has fewest.

The layout of one engine: degrees that divide the model and hold its longest sample. Experts may lie on all
GPUs of an engine and attention on groups of few (`ep` with a smaller `tp`), each with the caches of its own
samples: tensor parallelism holds those of latent attention, and of few key heads, again on every rank.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwise.core.errors import MeshwiseError, WorkloadError
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.rl.rollouts import Rollouts
from meshwise.serve.engine import Engine
from meshwise.serve.instance import EngineSequence, Instance, ServingWorker
from meshwise.serve.load import cache_tokens
from meshwise.serve.pass_times import tabulate
from meshwise.serve.requests import Requests
from meshwise.serve.serving import Serving, serving

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""GPUs of an engine that are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutPool:
    """`num` engines of `serving`, each a `worker` of the simulation; None where one sample has no room."""

    serving: Serving
    num: int
    worker: ServingWorker | None


def rollout_pool(
    serving: Serving, num: int, engine: Engine, rollouts: Rollouts, batches: int = 1
) -> RolloutPool:
    """The pool, with the times of its passes, in which at most `batches` batches are under way.

    Its engines are called in process: no server is in between.
    """
    engine = engine.on(serving.cluster.chip, serving.dp // serving.engines)
    engine = replace(engine, front_s=0.0, front_token_s=0.0, reply_s=0.0)
    tokens = cache_tokens(serving)
    if tokens < rollouts.longest * serving.dp:
        return RolloutPool(serving, num, None)
    most = min(batches * rollouts.num_groups * rollouts.samples, engine.max_sequences * serving.groups)
    times = tabulate(serving, engine, rollouts.longest, -(-most // serving.groups))
    return RolloutPool(serving, num, ServingWorker(times, tokens))


class Engines:
    """The engines of a pool at work. `on_end(sample, second)` hears of each sample that is complete."""

    def __init__(self, pool: RolloutPool, rollouts: Rollouts, on_end: Callable[[int, float], None]) -> None:
        if pool.worker is None:
            raise WorkloadError("no sample has room beside the weights of the rollout engines")
        self.rollouts, self.on_end = rollouts, on_end
        self.group_of: dict[int, tuple[int, ...]] = {}  # the block that a prompt is, by sample
        shared = Requests((), (), block_tokens=rollouts.prompt)
        self.instances = [Instance(pool.worker, shared, self._left) for _ in range(pool.num)]
        for instance in self.instances:
            instance.blocks = self.group_of
        self.ends_s = [math.inf] * pool.num  # when, about, the next turn of each engine ends
        self.left: dict[int, list[int]] = {}  # tokens of the turns that a sample still has, by sample
        self.place: dict[int, int] = {}  # the engine of a sample
        self.returning: list[tuple[float, int, EngineSequence]] = []  # a heap by the second

    def start(self, sample: int, group: int, tokens: int, second: float, engine: int | None = None) -> None:
        """Send a sample with an answer of `tokens` to an engine, or to the one that has fewest."""
        if engine is None:
            engine = min(range(len(self.instances)), key=self._num_samples)
        num = min(self.rollouts.turns, tokens)
        ends = (round(turn * (tokens / num)) for turn in range(num))
        first, *others = (end - begin for begin, end in itertools.pairwise((*ends, tokens)))
        self.group_of[sample], self.place[sample], self.left[sample] = (group,), engine, others
        self._put(EngineSequence(sample, second, second, self.rollouts.prompt, first))

    def _num_samples(self, engine: int) -> int:
        one = self.instances[engine]
        return len(one.running) + len(one.prefilling) + len(one.queue)

    def _put(self, sequence: EngineSequence) -> None:
        engine = self.place[sequence.index]
        self.instances[engine].put(sequence)
        self.ends_s[engine] = self.instances[engine].next_end_s

    def _left(self, sequence: EngineSequence, second: float) -> None:
        """A turn is over: the sample goes to its environment, or is complete."""
        sample, turns = sequence.index, self.left[sequence.index]
        if not turns:
            del self.left[sample], self.place[sample], self.group_of[sample]
            self.on_end(sample, second)
            return
        back_s = second + self.rollouts.env_s
        cached = sequence.total + sequence.left
        again = EngineSequence(sample, back_s, back_s, cached + self.rollouts.tool_tokens, turns.pop(0))
        again.past = min(cached, again.total - 1)
        heapq.heappush(self.returning, (back_s, sample, again))

    @property
    def next_s(self) -> float:
        """About when the next sample or turn ends, or a sample returns; infinite without work."""
        return min(self.returning[0][0] if self.returning else math.inf, *self.ends_s)

    def go_on(self) -> None:
        """What happens next, in the engine in which it does; the others may be behind."""
        first_s = min(self.ends_s)
        if self.returning and self.returning[0][0] <= first_s:
            self._put(heapq.heappop(self.returning)[2])
        else:
            engine = self.ends_s.index(first_s)
            self.instances[engine].go_on(math.inf)
            self.ends_s[engine] = self.instances[engine].next_end_s

    def run_until(self, second: float) -> None:
        """All engines work up to `second`."""
        while self.next_s < second:
            self.go_on()
        for instance in self.instances:
            while instance.ready_s < second:
                instance.go_on(second)
        self.ends_s = [instance.next_end_s for instance in self.instances]

    def pause(self, until_s: float) -> None:
        """All engines stand still until `until_s`; what they have goes on then."""
        for instance in self.instances:
            instance.now = instance.seen = max(instance.now, until_s)
        self.ends_s = [instance.next_end_s for instance in self.instances]

    @property
    def busy_s(self) -> float:
        """Seconds in passes, the mean of all engines."""
        return sum(instance.busy_s for instance in self.instances) / len(self.instances)

    @property
    def num_preemptions(self) -> int:
        """How often a sample gave its cache back."""
        return sum(instance.num_preemptions for instance in self.instances)


@dataclass(frozen=True, slots=True)
class Drain:
    """A batch generated from an idle pool to its last answer.

    `half_s`: when half of the samples were complete; `tail_s`: what the last tenth of them took; `busy_s`:
    what engines worked.
    """

    seconds: float
    half_s: float
    tail_s: float
    busy_s: float
    num_preemptions: int


def drain(pool: RolloutPool, rollouts: Rollouts, rng: np.random.Generator, share: float = 1.0) -> Drain:
    """Generate one batch, all of its groups: frameworks that oversample filter them by their rewards then.

    So do verl's recipe of DAPO and NeMo-RL (`dynamic_sampling` in grpo.py). `share`: of the engines, those
    with most tokens, which alone are simulated: in large batches they take about as long as all.
    """
    answers = rollouts.draw(rollouts.num_groups, rng)
    last_s = np.zeros(answers.size)
    engines = Engines(pool, rollouts, lambda sample, second: last_s.__setitem__(sample, second))
    parts = np.array_split(np.arange(answers.size), pool.num)
    parts.sort(key=lambda samples: -answers.flat[samples].sum())
    for engine, samples in enumerate(parts[: math.ceil(share * pool.num)]):
        for sample in samples.tolist():
            engines.start(sample, sample // rollouts.samples, int(answers.flat[sample]), 0.0, engine)
    while engines.next_s < math.inf:
        engines.go_on()
    ends_s = np.sort(last_s)
    return Drain(
        seconds=float(ends_s[-1]),
        half_s=float(ends_s[len(ends_s) // 2]),
        tail_s=float(ends_s[-1] - np.quantile(ends_s, 0.9)),
        busy_s=engines.busy_s,
        num_preemptions=engines.num_preemptions,
    )


# --- layouts of one engine ------------------------------------------------------------------------


def engine_layouts(
    model: Model, cluster: Cluster, rollouts: Rollouts, memory_frac: float, dtype: str = "bf16"
) -> Iterator[Plan]:
    """Plans of one engine, of fewest GPUs first, on which the longest sample has room at `memory_frac`.

    Of so many GPUs the first cuts all by `tp`.
    """

    def has_room(plan: Plan, gpus: int) -> bool:
        try:
            found = serving(
                model, replace(cluster, num_chips=gpus), plan, prompt=rollouts.prompt,
                output=rollouts.longest - rollouts.prompt, memory_frac=memory_frac,
            )  # fmt: skip
        except MeshwiseError:  # heads or experts do not divide
            return False
        return cache_tokens(found) >= rollouts.longest * found.dp

    for gpus in (size for size in SIZES if size <= cluster.num_chips):
        whole = Plan(tp=gpus, dtype=dtype)
        in_groups = (replace(whole, tp=tp, ep=gpus) for tp in SIZES if tp < gpus and model.moe is not None)
        yield from (plan for plan in (whole, *in_groups) if has_room(plan, gpus))
