"""Which models one card fine-tunes, by which method, and how long that takes.

Each method is a plan as hobbyists run it (the modules of `transformers`, one card). Of microbatches and of
recomputation the fastest that fits is taken; where none fits, the one that needs least memory says how much
is missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from meshwise.core.errors import MeshwiseError, WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.estimate.token_budget import TokenBudget
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.model.find import models
from meshwise.model.weights import num_params
from meshwise.plan.plan import parse_plan, plan_text
from meshwise.plan.workload import Workload

METHODS: dict[str, str] = read_catalog("fine_tuning.toml")["plans"]
"""The plans of each method, of which the first that fits is taken: all weights, with gradients and Adam's
states in bf16, the states in 8 bits, or all in fp32 (no bf16); adapters of rank 16 in all linear layers,
kept in fp32, beside weights in 16 bits; the same beside weights of 4 bits."""
_OF_ALL = "implementation=huggingface,dtype=%s,loss_chunks=%d,recompute=%s"
"""What all have in common. trl makes logits in tiles: chunks of an eighth of the tokens stand for them."""
MOST_PARAMS = 150e9
"""Models of the catalog above this are not tried unless they are named: no card has that memory."""


@dataclass(frozen=True, slots=True)
class CardRun:
    """One model by one method: the fastest run that `fits`, or the one that needs least memory."""

    method: str
    run: Estimate
    fits: bool

    def to_json(self, tokens: float | None, price: float | None) -> dict[str, Any]:
        """The run in numbers; `tokens` of it take hours, and dollars at `price` a GPU-hour."""
        run, hours = self.run, tokens and tokens / self.run.tokens_per_s / 3600
        ends = (run.workload.num_tokens / s if self.fits else None for s in reversed([*run.step_s_interval]))
        between = dict(zip(("p10", "p90"), ends, strict=True))
        cost = hours * price if hours and price is not None else None
        timed = {"tokens_per_s": run.tokens_per_s, "step_s": run.step_s, "hours": hours, "cost": cost}
        timed = {name: one for name, one in timed.items() if one is not None}
        return {
            "model": run.model.name,
            "num_params": num_params(run.model),
            "method": self.method,
            "fits": self.fits,
            "memory_bytes": run.memory_bytes["total"],
            "microbatch": run.workload.microbatch,
            "plan_text": plan_text(run.plan),
            "tokens_per_s_interval": between,
        } | (timed if self.fits else dict.fromkeys(timed))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CardFit(Shown):
    """What `card` (a cluster of one GPU) fine-tunes: `runs` by size of the model, methods from full to QLoRA.

    `refused`: models that cannot be priced so, and why.
    """

    card: Cluster
    memory_frac: float
    batch: int
    seq: int
    runs: tuple[CardRun, ...]
    refused: dict[str, str]
    tokens: float | None = None
    price: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise fit-card --json` prints."""
        chip = self.card.chip
        asked = {name: getattr(self, name) for name in ("memory_frac", "batch", "seq", "tokens", "refused")}
        rows = [one.to_json(self.tokens, self.price) for one in self.runs]
        return {"card": chip.name, "memory_bytes": chip.memory_bytes, "rows": rows} | asked


def fit_card(
    card: Cluster, candidates: Sequence[Model] = (), methods: Sequence[str] = (), *, batch: int, seq: int,
    memory_frac: float = 0.92, tokens: float | None = None, price: float | None = None,
) -> CardFit:  # fmt: skip
    """Price fine-tuning of `candidates` (none: the open ones of the catalog) by `methods` (none: all).

    Raises WorkloadError for an unknown method, or a number that makes no sense.
    """
    unknown = next((name for name in methods if name not in METHODS), None)
    refuse("card runs", WorkloadError, unknown=unknown, known=", ".join(METHODS), price=price, tokens=tokens)
    Workload(batch=batch, seq=seq)  # which no model makes right
    TokenBudget(tokens=tokens)
    runs: list[CardRun] = []
    refused: dict[str, str] = {}
    for model in sorted(candidates or _open_models(seq), key=num_params):
        for name in methods or METHODS:
            try:
                runs.append(_best(model, card, name, batch, seq, memory_frac))
            except MeshwiseError as error:  # whose advice is for who states the plan
                refused.setdefault(model.name, str(error).partition(";")[0])
    return CardFit(
        card=card, memory_frac=memory_frac, batch=batch, seq=seq, runs=tuple(runs), refused=refused,
        tokens=tokens, price=price,
    )  # fmt: skip


def _open_models(seq: int) -> Iterator[Model]:
    """Those of the catalog whose weights are on the hub (an alias names the place) and that take `seq`."""
    for model in models().values():
        is_open = any("/" in alias for alias in model.aliases)
        if is_open and num_params(model) <= MOST_PARAMS and seq <= model.max_seq:
            yield model


def _best(model: Model, card: Cluster, method: str, batch: int, seq: int, memory_frac: float) -> CardRun:
    """The fastest run that fits into the share of the card's memory; else the smallest."""
    most, tried = memory_frac * card.chip.memory_bytes, []
    dtype = card.chip.training_dtype
    for plan in (one for one in METHODS[method].split() if dtype == "bf16" or "bf16" not in one):
        runs = [
            estimate(model, card, parse_plan(f"{plan},{_OF_ALL}" % (dtype, gcd(seq, 8), again)), work)
            for again in ("none", "full")
            for size in (1, 2, 4, 8, 16, 32)
            if batch % size == 0 and (work := Workload(batch=batch, seq=seq, microbatch=size))
        ]
        if fitting := [run for run in runs if run.memory_bytes["total"] <= most]:
            return CardRun(method, min(fitting, key=lambda run: run.step_s), fits=True)
        tried += runs
    return CardRun(method, min(tried, key=lambda run: run.memory_bytes["total"]), fits=False)
