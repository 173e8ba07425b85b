"""From a measured run to what the estimate takes: model, cluster, plans, workload, overheads.

The columns of the row count and nothing else; blank ones are filled from the first entry of
`catalog/frameworks.toml` that names its framework and is not older than its release. Only what changes a
prediction has a default; facts of the model and the hardware have none. Where meshwise has no word for a
stated fact, the nearest is taken and `approximations` says so. Beyond that:

- what tp does not divide of the vocabulary is cut off where the row states the padded width or its framework
  does not pad (vTrain's own model has `vocab_size // world_size` rows a rank, of 50257);
- matmuls with one scale per row (fp8_recipe rowwise) ran no faster than bf16, as the tables that name them
  show (torchtitan, benchmarks of 2025);
- layers that do not divide by the stages are placed as Megatron-LM and DeepSpeed do, which count the
  embedding and the head as one layer each.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from meshwise.calibrate.runs import Run
from meshwise.core.errors import ClusterError, PlanError
from meshwise.core.expressions import formulas
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.estimate.timing import overheads_of
from meshwise.machine.hardware import Chip, Cluster, Level, find_chip
from meshwise.machine.overheads import Overheads, Tables, software_on
from meshwise.model.architecture import MLA, Model, MoE, checked_model
from meshwise.model.find import find_model, models
from meshwise.model.weights import num_params
from meshwise.plan.layouts import parts_beyond
from meshwise.plan.plan import EVEN, NARROW_DTYPES, Plan, plan_keys
from meshwise.plan.workload import Workload

_NAMES = read_catalog("measured_names.toml")


_CATALOG = read_catalog("frameworks.toml")
_USUAL = _CATALOG["usual"] | {"recompute_kind": None}
_TEXTS = {"source": str, "software": str, "names": list[str], "recompute_kind": str | None}
_TYPES: dict[str, Any] = {name: type(value) for name, value in _USUAL.items()} | _TEXTS
_Entry: Any = msgspec.defstruct("_Entry", _TYPES.items(), forbid_unknown_fields=True)


class Defaults(_Entry):
    """One entry of the catalog. Fields with the name of a column of `Run` fill its blank cells."""


HOST_RANKS = 16
"""The most chips of one host."""


ENTRIES = tuple(msgspec.convert(_USUAL | entry, Defaults) for entry in _CATALOG["frameworks"])
"""The catalog, in its order."""


def defaults_of(run: Run) -> Defaults:
    """The entry for the framework and release of `run`; where there is none, that without a name."""
    month = released(run)
    fitting = [entry for entry in ENTRIES if month <= entry.until]
    return next(entry for known in (_framework(run), "") for entry in fitting if known in entry.names)


def _framework(run: Run) -> str:
    return (run.framework or "").lower().replace("_", "-").replace(" ", "-")


def released(run: Run) -> str:
    """Year and month of a release like 26.04.01 or 2024-12, or of one that the catalog dates.

    Without one, January of the run's year.
    """
    dated = _CATALOG["releases"].get((run.framework or "").lower(), {})
    release = run.framework_release or ""
    found = re.fullmatch(r"(?:20)?(\d\d)[.-](0[1-9]|1[0-2])(?:[.-]\d\d)?", dated.get(release, release))
    return f"20{found[1]}-{found[2]}" if found else f"{run.year}-01"


def filled(run: Run) -> Run:
    """`run` with its blank cells filled by the defaults of its framework."""
    defaults = defaults_of(run)
    blank = [name for name in Defaults.__struct_fields__ if getattr(run, name, "") is None]
    values = {name: getattr(defaults, name) for name in blank}
    if "dispatcher" in values and (run.scale_up_ranks or 0) > HOST_RANKS:
        values["dispatcher"] = defaults.dispatcher_in_racks or defaults.dispatcher
    return msgspec.structs.replace(run, **values)


@dataclass(frozen=True, slots=True)
class Expressed:
    """A run in meshwise's words. `plans` differ only in what the row leaves open."""

    run: Run
    model: Model
    cluster: Cluster
    plans: tuple[Plan, ...]
    workload: Workload
    approximations: tuple[str, ...]

    def overheads(self, among: Tables | None = None) -> Overheads:
        """The overheads of the run's chip and software, of the catalog or `among` other tables."""
        found = overheads_of(self.cluster.chip, self.plans[0], among)
        if self.run.fp8_recipe == "delayed":
            found = replace(found, cast_passes=found.delayed_cast_passes)
        if self.run.attention_kernel in ("flash3", "flash4", "cudnn"):
            found = replace(found, attention_slowdown=1.0)
        found = replace(found, **defaults_of(self.run).overheads)
        in_graph, blocks = self.run.cuda_graph == "partial", bool(self.run.launch_blocking)
        return replace(found, launches_block=blocks, routing_in_graph=in_graph)

    def imbalance(self, overheads: Overheads) -> float:
        """Tokens of the busiest expert-parallel rank over the mean."""
        if self.model.moe is None or self.run.routing != "learned":
            return 1.0
        return float(overheads.imbalance(self.plans[0].ep))


@cache
def express(run: Run) -> Expressed:
    """`run` in meshwise's words; a MeshwiseError is the reason why it cannot be said."""
    refuse("measured run", PlanError, run=run, cp=run.cp or 1)
    defaults, stated, run = defaults_of(run), run, filled(run)
    model = model_of(run, defaults)
    unused = {
        of: [name for name in names if getattr(stated, name)] for of, names in _NAMES["only_of"].items()
    }
    known = {"filled": run, "model": model, "matmuls": _dtype_named(run.dtype), "unused": unused}
    refuse("facts of a run", PlanError, run=stated, **known)
    plans = plans_of(stated, run, model, defaults)
    return Expressed(
        run=run,
        model=model,
        cluster=cluster_of(run),
        plans=plans,
        workload=Workload(batch=run.global_batch, seq=run.seq_len, microbatch=run.micro_batch),
        approximations=tuple(approximations(run, plans[0].software)),
    )


def approximations(run: Run, software: str) -> Iterator[str]:
    """What the row states and the plan can only say nearly."""
    for column, said in _NAMES["approximations"].items():
        if (value := getattr(run, column)) in said:
            yield f"{column} {value} is priced as {said[value]}"
    if run.capacity_factor and run.dispatcher not in (None, "alltoall"):
        yield f"dispatcher {run.dispatcher} beside a capacity is priced as alltoall of padded places"
    if None is not run.param_gather_overlap != run.grad_reduce_overlap:
        yield "param_gather_overlap is priced like grad_reduce_overlap"
    if run.compiled is not None and not software.startswith("torch-2024"):
        yield f"compiled changes nothing of software {software}"
    if not any(_framework(run) in entry.names for entry in ENTRIES):
        yield f"framework {run.framework} is priced as megatron-lm"


# --- hardware ----------------------------------------------------------------------------------


def cluster_of(run: Run) -> Cluster:
    """The run's chips, NVLink domains and network; what the row does not say is usual for the chip."""
    chip = _chip(run.chip, run.power_watts)
    domain = run.scale_up_ranks or run.gpus_per_node
    levels = _levels(chip, domain, run.network, run.network_gbit_per_s_per_gpu)
    refuse("network of a run", ClusterError, run=run, ranks=levels[0].ranks)
    return Cluster(name=run.chip, chip=chip, num_chips=run.gpus, levels=levels)


@cache
def _chip(name: str, power_watts: float | None) -> Chip:
    chip = find_chip(name)
    return chip if power_watts is None else replace(chip, power_watts=power_watts)


@cache
def _levels(
    chip: Chip, domain: int | None, network: str | None, gbit_per_s: float | None
) -> tuple[Level, ...]:
    """One domain of direct links, and the network between domains; cached: equal levels are one object."""
    inner, *_, outer = chip.levels
    ranks = float(domain or inner.ranks)
    latencies = _NAMES["network_latency_s"]
    name = network if network in latencies else None
    if name is None and gbit_per_s is None and ranks == inner.ranks:
        return chip.levels
    if name is not None:
        outer = replace(outer, name=name, latency_s=latencies[name])
    if gbit_per_s is not None:
        outer = replace(outer, bytes_per_s=gbit_per_s * 1e9 / 8)
    return replace(inner, ranks=ranks), outer


# --- model -------------------------------------------------------------------------------------


def model_of(run: Run, defaults: Defaults) -> Model:
    """The catalog's model of that name and width with the row's numbers, or one of these numbers alone.

    The latter is like GPT, or like Llama if a gate explains its parameters (or, unstated, its width) better.
    """
    if known := _known_model(run):
        is_whole = run.layers == known.num_layers and "w/o MTP" not in run.model
        mtp_layers = known.mtp_layers if is_whole else 0  # a truncated model does not predict further tokens
        cut = replace(known, layers=known.layers[: run.layers], mtp_layers=mtp_layers)
        return _with_sizes(run, cut, defaults)
    mla = _latent(run, None)
    own = {"hidden": run.hidden, "num_heads": run.heads, "sliding_window": 0}
    own["head_dim"] = mla.head_dim if mla else run.hidden // run.heads
    gpt = replace(find_model("gpt3-175b"), name=run.model, dropout_frac=defaults.dropout_frac, **own)
    llama = replace(find_model("llama2-7b"), name=run.model, **own)
    gated, plain = (_with_sizes(run, base, defaults) for base in (llama, gpt))
    if run.params_b is None:
        return plain if run.ffn_hidden >= 4 * run.hidden else gated
    stated = run.params_b * 1e9
    return min((gated, plain), key=lambda model: abs(math.log(num_params(model) / stated)))


def _with_sizes(run: Run, base: Model, defaults: Defaults) -> Model:
    mla = _latent(run, base.mla)
    heads = {"num_kv_heads": run.heads} if mla else {"num_kv_heads": run.kv_heads}
    if run.head_dim and not mla:
        heads["head_dim"] = run.head_dim
    sizes = {"num_layers": run.layers, "ffn_hidden": run.ffn_hidden, "max_seq": run.seq_len} | heads
    sizes |= {} if run.dropout is None else {"dropout_frac": run.dropout}
    sizes |= {"sliding_window": run.window or base.sliding_window, "vocab": vocab_of(run, defaults)}
    return checked_model(replace(base, **sizes, mla=mla, moe=_experts(run, base.moe)), run.model)


def _letters(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


@cache
def _by_letters() -> dict[str, Model]:
    return {_letters(name): model for model in models().values() for name in (model.name, *model.aliases)}


def _known_model(run: Run) -> Model | None:
    """The catalog's model whose name begins the row's (`llama3_405b truncated to 4 layers`), if as wide."""
    if run.model.endswith(".json"):
        return find_model(run.model)
    name = _letters(run.model)
    begins = [letters for letters in _by_letters() if name.startswith(letters)]
    known = _by_letters()[max(begins, key=len)] if begins else None
    return known if known and (known.hidden, known.num_heads) == (run.hidden, run.heads) else None


def _experts(run: Run, known: MoE | None) -> MoE | None:
    if known is None and run.experts is None:
        return None
    base = known or MoE(num_experts=run.experts, top_k=1, ffn_hidden=run.ffn_hidden)
    columns = {field: getattr(run, column) for field, column in _NAMES["expert_columns"].items()}
    moe = replace(base, **{field: value for field, value in columns.items() if value is not None})
    return replace(moe, num_shared_experts=(base.num_shared_experts or 1) if moe.shared_ffn_hidden else 0)


def _latent(run: Run, known: MLA | None) -> MLA | None:
    """Latent attention: of DeepSeek-V3's dimensions where the row says no more than that there is one."""
    if run.mla is None:
        return known
    return (known or find_model("deepseek-v3").mla) if run.mla else None


def vocab_of(run: Run, defaults: Defaults) -> int:
    """Rows of the embedding: as padded where stated, else as the framework pads; a multiple of tp."""
    if run.vocab_padded_to is not None or defaults.vocab_multiple == 1:
        width = run.vocab_padded_to or run.vocab
        return width - width % run.tp
    multiple = defaults.vocab_multiple * run.tp
    return -(-run.vocab // multiple) * multiple


# --- plan --------------------------------------------------------------------------------------


def plans_of(stated: Run, run: Run, model: Model, defaults: Defaults) -> tuple[Plan, ...]:
    """The plan of the row `stated`, filled as `run`, and with each change of it that the row leaves open."""
    dtype = dtype_of(run)
    names = {"run": run, "stated": stated, "of": defaults, "model": model}
    names |= {"dtype": dtype, "narrow": NARROW_DTYPES, "chip": find_chip(run.chip), "stages_of": _stages}
    names |= {"bool": bool, "gcd": math.gcd, "software_on": software_on, "optimizers": _NAMES["optimizers"]}
    names["states"] = _NAMES["optimizer_states"]
    columns = {key: getattr(run, column) for key, column in _NAMES["plan_columns"].items()}
    keys = {key: value for key, value in columns.items() if value not in (None, "")}
    plan = Plan(**keys, **formulas(_NAMES["plan"], names), **_adapters(run, dtype), dtype=dtype)
    unknown = parts_beyond("transformers", model, plan=plan)  # of which it is not known what it keeps
    if plan.done_by.parts == "transformers" and any(is_there for is_there, _ in unknown):
        plan = replace(plan, implementation=_USUAL["implementation"])
    said = stated.recompute_kind
    if said in ("selective", "per_op") or (run.recompute_modules and not said):
        kind = "mla" if model.mla else "moe" if model.moe else "dense"
        modules = "per_op" if run.recompute_kind == "per_op" else defaults.selective.get(kind, "core_attn")
        modules = run.recompute_modules or modules
        plan = replace(plan, recompute="selective", recompute_modules=_words(modules))
    elif run.recompute_kind == "full":
        plan = replace(plan, recompute="full", recompute_layers=run.recompute_layers)
    lacks = {"mla_up_proj"} if model.mla is None else set()
    lacks |= {"moe", "moe_act", "shared_experts"} if model.moe is None else set()
    changes = [plan_keys(text) for text in defaults.tried]
    changes = [change for change in changes if lacks.isdisjoint(change.get("recompute_modules", ()))]
    return (plan, *(_changed(plan, change) for change in changes if _leaves_open(stated, plan, change)))


def _words(text: str) -> tuple[str, ...]:
    """The words of a cell that names several."""
    return tuple(word for word in re.split(r"[+,;\s]+", text) if word)


def _adapters(run: Run, dtype: str) -> dict[str, Any]:
    """The keys of a plan about adapters and the frozen weights beside them."""
    if not run.lora_rank:
        return {}
    adapted, stated = _NAMES["adapted"], _words((run.lora_targets or "").lower())
    named = (adapted.get(word, word.removesuffix("_proj")) for word in stated)
    names = {"run": run, "dtype": dtype, "narrow": NARROW_DTYPES, "targets": _words("+".join(named))}
    return formulas(_NAMES["adapters"], names)


def _changed(plan: Plan, change: dict[str, Any]) -> Plan:
    return replace(plan, **({"recompute": "selective"} if "recompute_modules" in change else {}) | change)


def _leaves_open(stated: Run, plan: Plan, change: dict[str, Any]) -> bool:
    """Whether a run leaves open what a change of its plan says; offloading replaces partial recomputation."""
    kind = stated.recompute_kind or ("selective" if stated.recompute_modules else None)
    of_recompute = {"recompute": (None,), "recompute_modules": (None, "selective")}
    columns = {"zero": stated.zero_stage, "grad_dtype": stated.grad_dtype}
    columns["optimizer"] = stated.optimizer or stated.optimizer_dtype
    return (
        all(kind in kinds for key, kinds in of_recompute.items() if key in change)
        and all(value is None for key, value in columns.items() if key in change)
        and ("offload_activations" not in change or (plan.pp == 1 and plan.recompute in ("none", "full")))
    )


def _stages(layers: int, chunks: int, mtp_layers: int = 0) -> tuple[int, ...]:
    """Even stages, as frameworks place layers; where these do not divide, the ends count as one each.

    With multi-token prediction the head and the module count as three, on the last stage, and the embedding
    as none (Megatron-Bridge's layouts of DeepSeek-V3).
    """
    if layers % chunks == 0:
        return EVEN
    ends, last = (3, chunks - 2) if mtp_layers else (2, chunks - 1)
    refuse("stages of a run", PlanError, layers=layers, ends=ends, chunks=chunks)
    most = -(-(layers + ends) // chunks)
    counts = [most] * chunks
    counts[-1 if mtp_layers else 0] -= min(most, ends) if mtp_layers else 1
    for i in range(sum(counts) - layers):  # what the last stages have less
        counts[last - i % max(last, 1)] -= 1
    return tuple(counts)


def dtype_of(run: Run) -> str:
    """The dtype in which the matmuls are priced."""
    return "bf16" if run.fp8_recipe == "rowwise" else _dtype_named(run.dtype)


def _dtype_named(text: str) -> str:
    """The narrowest dtype that a cell names (`mixed fp16`, `amp_bf16`, `fp8-mx`)."""
    for dtype, words in _NAMES["run_dtypes"].items():
        if any(word in text.lower() for word in words):
            return dtype
    raise PlanError(f"dtype {text!r} is unknown; write one of {', '.join(_NAMES['run_dtypes'])}")
