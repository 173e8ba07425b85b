"""Serving engines: how each forms its passes, and what a request pays before its first pass.

Every engine batches continuously: before each pass it decides which sequences take part. They differ in
if prompts and decodes share a pass (`mixes`), if a prompt may be cut (`chunks`), how many tokens and
sequences a pass takes, and how much of the cache a sequence reserves when it is admitted. What was not
reserved may run out: then the sequence admitted last gives its cache back and starts again, its generated
tokens now part of the prompt.

Defaults of the servers by version, as read in their sources: `catalog/engines.toml`. What is fitted to
measured serving points, constants of all engines and how far predictions lie off, `meshwise fit --only
serving` writes to `catalog/serving.toml`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.core.toml import read_toml
from meshwise.core.units import Num
from meshwise.estimate.intervals import Interval, Spread, far_chip
from meshwise.machine.hardware import Chip
from meshwise.plan.fields import catalog_fields, read_words


class Constants(msgspec.Struct, frozen=True):
    """Overheads that kernels do not have, the same for all engines, models and chips.

    `front_s` + `front_token_s` x prompt: HTTP, tokenizer and network before the scheduler sees a request;
    `reply_s`: an instance's one server answers running requests in turn, each of which takes it so long;
    `prompt_slowdown`: time of passes with prompts over the sum of their kernels; `expert_slowdown`: time that
    the choices of a token add to experts over that of their kernels, unless the token is sent to them: it is
    sorted and brought back into order;
    `launched_op_s`: the host's time to launch a kernel of such a pass, in models with latent attention or
    recurrences, as no graph replays it;
    `guess_host_s`: its time for each sequence of a pass that checks guesses, where none is planned meanwhile.
    """

    front_s: float
    front_token_s: float
    reply_s: float
    prompt_slowdown: float
    expert_slowdown: float
    launched_op_s: float
    guess_host_s: float


class Fitted(msgspec.Struct, frozen=True):
    """The catalog: the chips that were measured, the constants, and percentiles of measured over predicted,
    by quantity and regime."""

    measured: Mapping[str, list[str]]
    constants: Constants
    spreads: Mapping[str, Mapping[str, Spread]]


@cache
def fitted() -> Fitted:
    """The constants and spreads of `catalog/serving.toml`, read once."""
    return msgspec.convert(read_catalog("serving.toml"), Fitted)


ELSEWHERE = {"ttft_s": 0.7, "tpot_s": 0.4, "output_tokens_per_s_per_gpu": 0.3}
"""Distance of servers outside the benchmark that all points are of: what comes upon its spreads for 8 of 10
of 343 points of 8 other publications to lie inside, each of which counts once (docs/log.md, 2026-11-30)."""
BENCHMARK = "aiconfigurator"
"""How the sources of its points begin."""


def interval_of(quantity: str, value: float, regime: str, chip: Chip, source: str = "") -> Interval:
    """Between which values a measurement of the prediction `value` by `source` lies, 8 times of 10."""
    found = fitted()
    far = far_chip(chip, found.measured["chips"])
    if not source.startswith(BENCHMARK):
        far[""] = ELSEWHERE[quantity]
    return found.spreads[quantity][regime].around(value, f"points of {BENCHMARK}", "model", far)


_CONSTANTS = fitted().constants


class ChipSettings(msgspec.Struct, frozen=True):
    """What a server starts with on a chip of less than `below_gib`, or whose name begins with `chips`."""

    below_gib: float
    set: dict[str, int]
    chips: str = ""

    def hold(self, chip: Chip) -> bool:
        """Whether they are those of `chip`."""
        named = bool(self.chips) and chip.name.startswith(self.chips)
        return named or chip.memory_bytes < self.below_gib * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The scheduler of an engine; tokens and sequences are those of one attention group (dp rank).

    `max_sequences` generate at once. A pool of prompts alone takes `prompt_tokens` of `prompt_sequences` in a
    pass (0: `max_tokens`, of as many as the version starts with); such a pool has `only_prompts`.
    `reserve_frac`: share of a request's output that must have room in the cache when it is admitted;
    `foresees_ends`: less what others that end before it leave (SGLang, add_one_req_ignore_eos).
    `graph_sizes`: decode batches for which a CUDA graph was captured; others are padded up to the next of
    these where the engine `pads_batches`, or launched kernel by kernel. Without any, all are captured.
    `graph_batch`: the largest of them, if the server is started with another (by the last step up to it).
    `shares_tokens`: dp ranks that share experts divide the `max_tokens` that it starts with (SGLang's
    --chunked-prefill-size under DP attention); those that are stated are of one rank all the same.
    `lag_passes`: passes that are under way or planned when a request arrives, before one can take it;
    `poll_passes`: decode passes from one look at what has arrived to the next; `align_passes`: passes that
    prompts wait at most until every dp rank has one and they fill `fill_frac` of a pass (TensorRT-LLM's
    attention_dp_config and batch_wait_timeout_iters).
    `widens_hopper_cache`: decoding on Hopper takes as long with keys and values in 8 bits as in 16
    (FlashAttention-3 transposes the values of fp8 in the kernel, arXiv 2407.08608, section 3.3).
    `expert_tile`: rows of a tile of the experts' grouped matmuls in fp8 on Hopper. DeepGEMM has 128 and fills
    every expert up to a tile, and where the host does not know how many tokens each gets, by 127 rows.
    `shared_expert_tile`: the same beyond Hopper, of experts that dp ranks share.
    `triton_experts`: those in 8 and 16 bits run in Triton on Blackwell too, not in trtllm-gen, but for models
    with latent attention (SGLang's --moe-runner-backend auto).
    `fuses_casts`: kernels write fp8 and fp4 as the next matmul reads it, unless its scales are of blocks.
    `gathers_by_sums`: dp ranks gather prompts for their experts by an all-reduce, and what experts give too.
    `codes_sums`: large all-reduces on AMD's GPUs travel in 8 bits (ROCM_QUICK_REDUCE_QUANTIZATION=INT8, which
    SGLang's images for ROCm set).
    `graphs_prompts`: passes with prompts are replayed too (TensorRT-LLM's enable_piecewise_cuda_graph), or
    those of at most `prompt_graph_tokens` (vLLM's cudagraph_mode PIECEWISE and FULL_AND_PIECEWISE).
    `launch_frac`: its time to launch a kernel over that of layers that are not compiled.
    `plans_while_guessing`: the host works ahead while a pass checks guesses; SGLang does not unless told
    (SGLANG_ENABLE_SPEC_V2, its documentation of speculative decoding).
    `front_s` to `prompt_slowdown` are those of all engines (`serve.engine.Constants`) unless they were fitted
    to a server of one's own, as are `decode_slowdown`, the time of passes without prompts over that of their
    kernels, and `pass_s`, the host's time before each pass. `on_chips`: what else the server starts with on
    chips of less memory, but for what is `stated`. `settings_of`: the version that settings are of, if it is
    another; `fitted_to`: what the constants were fitted to.
    """

    name: str
    version: str
    max_tokens: int = 8192
    max_sequences: int = 1024
    prompt_tokens: int = 0
    prompt_sequences: int = 0
    only_prompts: bool = False
    mixes: bool = True
    chunks: bool = True
    reserve_frac: float = 0.0
    foresees_ends: bool = False
    graph_sizes: tuple[int, ...] = ()
    graph_batch: int = 0
    pads_batches: bool = True
    shares_tokens: bool = False
    lag_passes: int = 1
    poll_passes: int = 1
    align_passes: int = 0
    fill_frac: float = 0.0
    widens_hopper_cache: bool = False
    expert_tile: int = 1
    shared_expert_tile: int = 1
    triton_experts: bool = False
    fuses_casts: bool = False
    gathers_by_sums: bool = False
    codes_sums: bool = False
    graphs_prompts: bool = False
    prompt_graph_tokens: int = 0
    launch_frac: float = 1.0
    plans_while_guessing: bool = True
    front_s: float = _CONSTANTS.front_s
    front_token_s: float = _CONSTANTS.front_token_s
    reply_s: float = _CONSTANTS.reply_s
    prompt_slowdown: float = _CONSTANTS.prompt_slowdown
    decode_slowdown: float = 1.0
    pass_s: float = 0.0
    on_chips: tuple[ChipSettings, ...] = ()
    stated: frozenset[str] = frozenset()
    settings_of: str = ""
    fitted_to: str = ""

    def having(self, **settings: Any) -> Engine:
        """The engine started with `settings`, on whichever chip."""
        return replace(self, stated=self.stated | settings.keys(), **settings)

    def on(self, chip: Chip, ranks: Num = 1) -> Engine:
        """The engine with what it starts with on `chip`, where nothing else was stated.

        `ranks`: dp ranks that share experts.
        """
        usual: dict[str, Any] = next((of.set for of in self.on_chips if of.hold(chip)), {})
        if self.shares_tokens:
            usual = usual | {"max_tokens": usual.get("max_tokens", self.max_tokens) // ranks}
        return self.having(**{key: value for key, value in usual.items() if key not in self.stated})

    @property
    def captured(self) -> tuple[int, ...]:
        """Decode batches that have a CUDA graph; () if all do."""
        first, last = (0, 0, *self.graph_sizes)[-2:]
        sizes = *self.graph_sizes, *range(2 * last - first or 1, self.graph_batch + 1, last - first or 1)
        return tuple(size for size in sizes if size <= self.graph_batch) or self.graph_sizes

    @property
    def of_prompts(self) -> Engine:
        """The engine of a pool that only takes prompts."""
        stated = {"max_tokens": self.prompt_tokens, "max_sequences": self.prompt_sequences}
        sequences = of_version(self.name, self.version).max_sequences
        usual = replace(self, max_sequences=sequences, only_prompts=True)
        return usual.having(**{name: value for name, value in stated.items() if value})

    @property
    def title(self) -> str:
        """Its name and version, and whose settings or constants it has if these are not its own."""
        inherits = f", settings of {self.settings_of}" if self.settings_of else ""
        fitted = f", fitted to {self.fitted_to}" if self.fitted_to else ""
        return f"{self.name} {self.version}{inherits}{fitted}"


FITTED = {"front_s": 0.7, "reply_s": 0.7, "prompt_slowdown": 0.3, "decode_slowdown": 0.2, "pass_s": 1e-3}
"""Constants that can be fitted to a server of one's own, and by how much they differ between servers:
deviation of their logs, of `pass_s` seconds."""


def _versions(name: str) -> dict[str, Engine]:
    """Every listed version of an engine, the oldest first, with what it has of those before it."""
    found: dict[str, Engine] = {}
    stated: dict[str, Any] = {}
    for table in read_catalog("engines.toml")[name]:
        stated |= {key: value for key, value in table.items() if key != "source"}
        spans = stated.get("graph_sizes", ())
        sizes = tuple(size for first, last, step in spans for size in range(first, last + 1, step))
        on_chips = msgspec.convert(stated.get("on_chips", []), tuple[ChipSettings, ...])
        found[table["version"]] = Engine(name=name, **stated | {"graph_sizes": sizes, "on_chips": on_chips})
    return found


VERSIONS = {name: _versions(name) for name in ("vllm", "sglang", "trtllm")}
ENGINES = {name: list(versions.values())[-1] for name, versions in VERSIONS.items()}
"""Engines by name: the last version that is listed."""

SETTINGS = catalog_fields(read_catalog("serve_settings.toml")["engine"], {})
"""What a user may set of an engine."""


def of_version(name: str, version: str) -> Engine:
    """The engine in a version; as the last one listed before it, which its `settings_of` then names."""
    versions = VERSIONS[name]
    before = [each for each in versions if _order(each) <= _order(version)]
    of = before[-1] if before else next(iter(versions))
    return replace(versions[of], version=version, settings_of="" if of == version else of)


def _order(version: str) -> tuple[int, ...]:
    """Numbers to sort versions by: 0.5.10.post1 comes after 0.5.9, 1.2.0rc6 counts as 1.2."""
    plain = re.match(r"v?\d+(\.\d+)*", version)
    numbers = [int(part) for part in plain[0].removeprefix("v").split(".")] if plain else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def parse_engine(text: str) -> Engine:
    """`vllm`, `vllm@0.12.0`, or a file of `calibrate --serving`; with settings: `vllm,max_tokens=2048`."""
    name, _, settings = text.partition(",")
    if name.endswith(".toml"):
        engine = read_engine(Path(name))
    else:
        name, _, version = name.partition("@")
        refuse("engine", WorkloadError, name=name, engines=ENGINES, known=", ".join(ENGINES))
        if version and not _order(version):
            raise WorkloadError(f"engine: {version!r} is no version; write {name}@{ENGINES[name].version}")
        engine = of_version(name, version) if version else ENGINES[name]
    return engine.having(**read_words(settings, SETTINGS, WorkloadError, "engine"))


class EngineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine as `calibrate --serving` writes it: which one, and constants of a server of its own."""

    engine: str
    version: str
    constants: dict[str, float]
    fitted_to: str = ""


def read_engine(path: Path) -> Engine:
    """The engine of a file; WorkloadError for what it does not know."""
    try:
        found = msgspec.convert(read_toml(path, WorkloadError), EngineFile)
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{path}: {error}; write it with `calibrate --serving`") from None
    if found.engine not in ENGINES or set(found.constants) - set(FITTED):
        raise WorkloadError(f"{path}: engine and constants must be among {', '.join((*ENGINES, *FITTED))}")
    if not all(0 <= value < math.inf for value in found.constants.values()):
        raise WorkloadError(f"{path}: constants must be numbers of 0 or more")
    constants: dict[str, Any] = dict(found.constants)
    engine = of_version(found.engine, found.version)
    return replace(engine, fitted_to=found.fitted_to or str(path), **constants)
