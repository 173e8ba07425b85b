"""What is done with the model in one step: how many sequences, how long, in what pieces."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.model.architecture import Model
from meshwise.plan.fields import catalog_fields, check_fields
from meshwise.plan.plan import NARROW_DTYPES, Plan, plan_keys

FIELDS = catalog_fields(read_catalog("workload_fields.toml"), {})
"""What each field of a `Workload` may hold."""
KINDS = FIELDS["kind"].names


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step: `batch` sequences of `seq` tokens in the whole world, `microbatch` of them at a time.

    `kind` is train, evaluate (forward only), prefill, decode (one new token against `seq` cached), or
    sampling: `steps` forwards of each image or video, twice as many with `guidance`.
    Making one raises WorkloadError where a number makes no sense or the microbatch does not divide the batch.
    """

    batch: int
    seq: int
    microbatch: int = 1
    kind: str = "train"
    steps: int = 1
    guidance: bool = False

    def __post_init__(self) -> None:
        check_fields(self, FIELDS, WorkloadError)
        refuse("workload", WorkloadError, work=self)

    @property
    def num_at_once(self) -> int:
        """Sequences that do not wait for each other: with guidance, two for each of the batch."""
        return self.batch * (1 + self.guidance)

    @property
    def num_sequences(self) -> int:
        """Sequences that pass the model in one step (of training), or in a whole sampling."""
        return self.num_at_once * self.steps

    @property
    def num_tokens(self) -> int:
        """Tokens that one step processes in the whole world."""
        return self.batch * (1 if self.kind == "decode" else self.seq)


def usual_batch(plan: Plan, num_chips: int, microbatch: int = 1) -> int:
    """Sequences of a step where nobody says how many: for each replica as many microbatches as stages."""
    return plan.data_parallel(num_chips) * microbatch * plan.pp


FORMATS = "dtype", "weight_dtype", "expert_dtype"
"""Plan keys that say in how many bits weights are kept."""


def as_released(model: Model, stated: Collection[str]) -> dict[str, Any]:
    """Plan keys that keep the weights of a server as they are released, if none of `FORMATS` is stated."""
    if "=" not in model.quantized or any(key in stated for key in FORMATS):
        return {}
    return {key: value for key, value in plan_keys(model.quantized).items() if key not in stated}


def quantized_note(model: Model, plan: Plan) -> list[str]:
    """That a config's weights are narrower than those of the plan that serves it, and what to write."""
    if not model.quantized or plan.dtype in NARROW_DTYPES or plan.weight_dtype or plan.expert_dtype:
        return []
    return [f"the weights of {model.name} are quantized and priced in {plan.dtype}; add {model.quantized}"]
