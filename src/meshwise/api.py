"""The verbs of the library: each takes names or objects, and imports what it needs when it is called.

A verb's signature and the `Args:` of its docstring are the one statement of its options: the command line,
its help, the fields of the page and the reference are made from them (`core.options`).
Where a verb takes a model, a cluster or a plan, it takes a `Model`, `Cluster` or `Plan`, or what the command
line takes: a preset, a path, or the text of a plan. A problem that the user can act on is a `MeshwiseError`
of one sentence.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import ClusterError, DataError, MissingExtraError, PlanError, WorkloadError
from meshwise.core.options import Counts, Latency, Quantity, options_of, reads_texts, stated_in
from meshwise.core.refusals import refuse, told

if TYPE_CHECKING:
    from meshwise.calibrate.fit_server import ServerFit
    from meshwise.calibrate.validate import Validation
    from meshwise.core.compare import Comparison
    from meshwise.estimate.collective import CollectiveTimes
    from meshwise.estimate.one_plan import Estimate
    from meshwise.estimate.token_budget import TokenBudget
    from meshwise.launch.read import Job
    from meshwise.launch.write import Launch
    from meshwise.machine.hardware import Cluster
    from meshwise.model.architecture import Model
    from meshwise.plan.plan import Plan
    from meshwise.plan.workload import Workload
    from meshwise.published.convention import PublishedStep
    from meshwise.published.frontier import Frontier
    from meshwise.rl.best_split import RlAnswer
    from meshwise.rl.job import OpenJob
    from meshwise.rl.step_log import RlExplanation
    from meshwise.runtime.profile import Profiled
    from meshwise.runtime.script.start import ScriptOutcome
    from meshwise.runtime.start import Outcome
    from meshwise.search.best_plans import BestPlans
    from meshwise.search.fit_card import CardFit
    from meshwise.search.search import Result
    from meshwise.search.study import Study, StudyPoint
    from meshwise.serve.answer import ServingAnswer
    from meshwise.trace.explain import Explanation

OLDEST_TORCH = "2.13"
"""Of programs of meshwise; scripts and profiles run in environments of others, and ask there."""


RL_FRAMEWORKS = ("verl", "nemo-rl")
"""Frameworks of post-training, whose jobs have rollouts."""


@reads_texts
def estimate(
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    plan: str | Path | Plan = "",
    *,
    batch: int | None = None,
    seq: int | None = None,
    microbatch: int | None = None,
    kind: str = "train",
    images: int = 0,
    image_size: str = "",
    audio_s: float = 0.0,
    frames: int | None = None,
    steps: int | None = None,
    guidance: bool = False,
    ideal: bool = False,
    capacity_factor: float | None = None,
    collectives: Sequence[str | Path] = (),
) -> Estimate:
    """Price one training step, or one forward pass, of `model` on `cluster` under `plan`.

    Args:
        model: A preset (gpt3-175b) or the path of a config.json.
        cluster: A preset, chip:count (a100-80g-sxm:512), or a TOML file.
        plan: tp=8,pp=4,... (keys: meshwise list plan) or a TOML file.
        batch: Global batch in sequences [as many microbatches a replica as stages].
        seq: Tokens of a sequence [what the model allows, at most 4096].
        microbatch: Sequences of a microbatch [1; in decoding, all of a rank].
        kind: train, evaluate, prefill or decode; sampling, of diffusion transformers.
        images: Images in each sequence, whose tokens are among its own; the vision tower encodes them.
        image_size: Width and height in pixels: 1024x768 [1024x1024]; of diffusion transformers, what they
            make [the size that a preset is known for].
        audio_s: Seconds of sound in each sequence, which the model's audio tower encodes.
        frames: Frames of a video that a diffusion transformer makes.
        steps: Denoising steps of a sampling [50].
        guidance: Each step is done with the text and without it (classifier-free guidance).
        ideal: Kernels and links reach the peaks of the data sheet.
        capacity_factor: Most tokens of an expert over its even share; 0: all that choose it [the model's].
        collectives: Measured collectives, which replace predicted ones (nccl-tests' output, or CSV).

    Returns:
        Times in seconds, memory in bytes, and the ledger of all ops. A plan that needs more memory than
        the chip has is an answer too (`fits` is False).

    Raises:
        MeshwiseError: A name is unknown, or the plan does not divide model, batch or cluster.
    """
    from meshwise.estimate.one_plan import estimate as price
    from meshwise.model.architecture import with_capacity
    from meshwise.plan.mesh import SERVING

    machine = _cluster(cluster, collectives)
    cut = _plan(plan, None if kind in SERVING else machine)
    shape = with_capacity(_model(model), capacity_factor)
    shape = _with_inputs(shape, images, image_size, audio_s, frames)
    work = _workload(
        shape, machine, cut, batch=batch, seq=seq, microbatch=microbatch, kind=kind, steps=steps,
        guidance=guidance,
    )  # fmt: skip
    return price(shape, machine, cut, work, ideal=ideal)


@reads_texts
def reproduce(
    convention: str,
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    plan: str | Path | Plan = "",
    *,
    batch: int | None = None,
    seq: int | None = None,
    microbatch: int | None = None,
    kind: str = "train",
) -> PublishedStep:
    """Price a step as a published model does, to the digit; its tables have their own columns and units.

    Args:
        convention: `nersc-2024-02` or `nersc-2024-10`.
        model, cluster, plan: As in `estimate`.
        batch: As in `estimate`; the notebook of 2024-02 has one sequence by default.
        seq, microbatch, kind: As in `estimate`.

    Raises:
        MeshwiseError: As in `estimate`, or the published model does not know what is asked.
    """
    from meshwise.published.convention import find_convention

    known = find_convention(convention)
    batch = known.default_batch if batch is None else batch
    shape, machine, cut = _model(model), _cluster(cluster), _plan(plan)
    work = _workload(shape, machine, cut, batch=batch, seq=seq, microbatch=microbatch, kind=kind)
    return known.price(shape, machine, cut, work)


@reads_texts
def search(
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    plan: str | Path | Plan | Mapping[str, Any] = "",
    *,
    batch: int,
    seq: int | None = None,
    microbatch: Counts = (),
    images: int = 0,
    image_size: str = "",
    audio_s: float = 0.0,
    to: str = "",
    top: int = 5,
    memory_frac: float | None = None,
    beside: str | Path | Plan | None = None,
    robust: bool = False,
    capped: bool = True,
    collectives: Sequence[str | Path] = (),
    on_plans: Callable[[BestPlans], None] = lambda kept: None,
) -> Result:
    """Price every plan of `model` on `cluster` and keep the fastest that fit.

    `plan` may also be a mapping, each key to its value or to several; of a `Plan`, the keys without their
    default hold.

    Args:
        model, cluster, seq, images, image_size, audio_s: As in `estimate`.
        plan: Keys that are fixed, or the values that each may have: tp=4|8,layout=* (all), or a TOML file
            with lists.
        batch: Global batch in sequences.
        microbatch: Sequences of a microbatch that may be chosen: 1,2,4 [all that divide the batch].
        to: Only plans that this framework runs and that its settings say whole: megatron-lm, megatron-bridge,
            torchtitan, deepspeed, accelerate or peft [any; of a job that is read, its own].
        top: How many plans to show, the fastest of each family with the same degrees.
        memory_frac: Share of a GPU's memory that may be used [0.92 to train, 0.9 to serve, in rl the
            framework's].
        beside: A plan to show beside the best one, term by term, and why it takes longer, key by key.
        robust: Rank plans by their step when less overlap, experts out of balance and slower rates come
            together.
        capped: Whether sizes are tried up to the usual ones alone; the answer says which are larger.
        collectives: Measured collectives, which replace predicted ones (nccl-tests' output, or CSV).
        on_plans: Hears now and then of the plans kept so far; Ctrl-C ends the search with them.

    Returns:
        How many plans there are, and the fastest that fit (`best`), fastest first; none where none fits.

    Raises:
        MeshwiseError: A name is unknown or a number makes no sense.
    """
    from meshwise.estimate.one_plan import estimate as price
    from meshwise.plan.workload import Workload
    from meshwise.search.search import search as find

    refuse("number of plans", WorkloadError, top=top)
    on = _cluster(cluster, collectives)
    shape = _with_inputs(_model(model), images, image_size, audio_s)
    job = _search_job(shape, on, plan, batch=batch, seq=seq, microbatch=microbatch)
    share = _share(memory_frac)
    found = find(**job, to=to, top=top, memory_frac=share, robust=robust, capped=capped, on_plans=on_plans)
    if beside is None:
        return found
    work = Workload(batch=batch, seq=job["seq"], microbatch=next(iter(microbatch), 1))
    return replace(found, beside=price(job["model"], job["cluster"], _plan(beside, job["cluster"]), work))


@reads_texts
def study(
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    vary: str | Mapping[str, Sequence[Any]],
    plan: str | Path | Plan | Mapping[str, Any] = "",
    *,
    batch: int,
    seq: int | None = None,
    microbatch: Counts = (),
    to: str = "",
    memory_frac: float | None = None,
    capped: bool = True,
    weak: bool = False,
    on_point: Callable[[StudyPoint], None] = lambda point: None,
) -> Study:
    """Search the best plan on each of many machines: scaling over numbers of GPUs, and co-design.

    Args:
        model, cluster, plan, batch, seq, microbatch, to, memory_frac, capped: As in `search`.
        vary: Machines to compare, as gpus=64|128,chip=h100-80g-sxm|b200-sxm: gpus, chip, domain, batch and
            factors of memory, memory_rate, compute, inner and outer links; every combination.
        weak: With several numbers of GPUs, the batch grows with them.
        on_point: Hears of each point; Ctrl-C ends the study with those so far.

    Returns:
        The points with their best plans, and the fronts of time against GPUs, cost, energy and memory.

    Raises:
        MeshwiseError: A name is unknown or a number makes no sense.
    """
    from meshwise.search.study import parse_changes, study as look

    values = parse_changes(vary) if isinstance(vary, str) else vary
    job = _search_job(model, cluster, plan, batch=batch, seq=seq, microbatch=microbatch)
    share = _share(memory_frac)
    return look(vary=values, to=to, memory_frac=share, capped=capped, weak=weak, on_point=on_point, **job)


def _search_job(
    model: str | Path | Model, cluster: str | Path | Cluster,
    plan: str | Path | Plan | Mapping[str, Any], *,
    batch: int, seq: int | None, microbatch: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """What a search takes, from names and texts, checked."""
    from meshwise.plan.workload import Workload

    shape, sizes = _model(model), tuple(microbatch)
    works = [Workload(batch=batch, seq=_seq(shape, seq), microbatch=size) for size in sizes or (1,)]
    stated = dict(_choices(plan)) | ({"microbatch": sizes} if sizes else {})
    return {
        "model": shape, "cluster": _cluster(cluster), "batch": batch, "seq": works[0].seq, "stated": stated,
    }  # fmt: skip


def _share(memory_frac: float | None) -> float:
    """Of the memory that a plan of training may need."""
    from meshwise.search.search import MEMORY_FRAC

    refuse("share of the memory", WorkloadError, memory_frac=memory_frac)
    return MEMORY_FRAC if memory_frac is None else memory_frac


def usd_per_hour(price: str | float | None) -> float | None:
    """Dollars of a GPU-hour of the one machine that is priced; WorkloadError for prices by chip."""
    if price is None:
        return None
    from meshwise.serve.answer import parse_prices

    found = parse_prices(str(price))
    refuse("price of one machine", WorkloadError, price=price, chips={*found} - {""})
    return found.get("")


@reads_texts
def fit_card(
    card: str | Path | Cluster,
    *,
    models: Sequence[str | Path] = (),
    methods: Sequence[str] = (),
    batch: int = 16,
    seq: int = 2048,
    memory_frac: float | None = None,
    tokens: Quantity | None = None,
    price: str | float | None = None,
) -> CardFit:
    """Which models a card fine-tunes, by which method, with how much memory, and how fast.

    Args:
        card: A chip of the catalog (4090), or a TOML file of a cluster of one.
        models: Presets or config.json files to try; repeat for several [the open ones of the catalog].
        methods: full, lora or qlora; repeat for several [all].
        batch: Sequences of a step; microbatches are chosen.
        seq: Tokens of a sequence.
        memory_frac: As in `search`.
        tokens: Tokens of the whole run, as 10M: hours.
        price: Dollars of a GPU-hour, with the tokens.

    Returns:
        For each model and method the fastest run that fits, or the one that needs least memory.

    Raises:
        MeshwiseError: A name is unknown or a number makes no sense.
    """
    from meshwise.search.fit_card import fit_card as find

    is_name = isinstance(card, str) and not card.endswith(".toml") and not set(card) & set(":/")
    on = _cluster(f"{card}:1" if is_name else card)
    refuse("card", ClusterError, on=on)
    on = replace(on, name=str(card)) if isinstance(card, str | Path) and not is_name else on
    shapes = [_model(one) for one in models]
    share = _share(memory_frac)
    return find(
        on, shapes, methods, batch=batch, seq=seq, memory_frac=share, tokens=tokens, price=usd_per_hour(price)
    )


@reads_texts
def serve(
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    plan: str | Path | Plan = "",
    *,
    prompt: int | None = None,
    output: int | None = None,
    images: int = 0,
    image_size: str = "",
    audio_s: float = 0.0,
    sequences: Counts = (),
    token_s: Latency | None = None,
    ttft_s: Latency | None = None,
    memory_frac: float | None = None,
    engine_s: Latency = 0.0,
    rate: float | None = None,
    rates: str | Path | None = None,
    concurrency: int | None = None,
    requests: str | Path | None = None,
    num_requests: int | None = None,
    burstiness: float | None = None,
    length_ratio: float | None = None,
    length_sigma: float | None = None,
    shared_prefix: int | None = None,
    turns: int = 1,
    turn_prompt: int | None = None,
    think_s: float | None = None,
    engine: str = "",
    workers: int = 1,
    router: str = "round-robin",
    autoscale: str = "",
    offload: str = "",
    prefill_plan: str | Path | Plan = "",
    prefill_cluster: str | Path | Cluster = "",
    prefill_workers: int = 1,
    speculate: str = "",
    draft_model: str | Path | Model | None = None,
    expert_skew: float = 0.0,
    expert_loads: str | Path | None = None,
    redundant_experts: int = 0,
    capacity_factor: float | None = None,
    percentile: float = 90.0,
    pareto: bool = False,
    pools: str = "",
    collectives: Sequence[str | Path] = (),
    price: str | float | None = None,
    pue: float | None = None,
    carbon: float | None = None,
    to: str = "",
) -> ServingAnswer:
    """Estimate an inference server: time to first token, time per token, what fits, tokens a second.

    With `rate`, `concurrency` or `requests` the server is simulated under that load, queue included. With
    requests that arrive, `ttft_s` or `token_s`, and no tp in the plan, the answer is the fewest GPUs, up to
    those of the cluster, that keep the limits: `sizing` holds what was considered.

    Args:
        model: As in `estimate`.
        cluster: The GPUs of an instance: a preset, chip:count, or a TOML file.
        plan: tp, ep, etp, dtype, kv_dtype: tp=8,ep=8,dtype=fp8; the rest is dp [tp=all, the formats of the
            released weights; without tp, cp, pp, ep or dp instances of a node or more, so that the model
            fits].
        prompt: Tokens of a prompt [2048], of its text where it has images or sound too.
        output: Tokens generated after it [256].
        images: Images in each request; their tokens come on top of those of the prompt.
        image_size: As in `estimate`.
        audio_s: Seconds of sound in each request; its tokens come on top too.
        sequences: Running sequences of the instance: 1,8,64 [powers of two, up to what fits].
        token_s: Latency target per output token; also report the largest batch that meets it.
        ttft_s: Latency target for the first token under load.
        memory_frac: As in `search`.
        engine_s: The engine's own time between two passes.
        rate: Load: requests a second.
        rates: Load: requests a second over time, as of a day: CSV of second and rate; the last row ends it.
        concurrency: Load: clients that each send a request when the last has ended.
        requests: Load: a trace (CSV of arrival [s], prompt, output; Azure's, BurstGPT's; Mooncake's JSON
            lines with hash_ids, session_id, delay), or a CSV of prompt and output to draw lengths from.
        num_requests: Requests of the load, all of which count [until the figures have settled].
        burstiness: Gamma shape of the gaps between arrivals at a rate [1: Poisson].
        length_ratio: Lengths are uniform from this share of the stated ones up [1].
        length_sigma: Lengths are lognormal around the stated means; deviation of their logs.
        shared_prefix: Tokens that all prompts begin with; the engine caches them.
        turns: Requests of a session, each after the last one's answer, with all that was said before.
        turn_prompt: Tokens that each later turn adds [256].
        think_s: Mean pause before each later turn, in seconds (exponential) [0].
        engine: vllm, sglang or trtllm, or a file of `calibrate --serving`; with version and settings:
            vllm@0.12.0,max_tokens=2048 [vllm].
        workers: Instances that take the requests.
        router: Which instance takes one: round-robin, least-loaded, session, or prefix (the one that has most
            of it in its cache and least to do; prefix=4 weighs the cache more).
        autoscale: Instances follow the load: utilization=0.7 (of what one can take) or sla (so many that the
            limits are kept), with min=1,max=64,start_s=180,every_s=30,hold_s=300.
        offload: Memory of each GPU's host, and disk, for cached prefixes: host=64GiB,disk=1TB,disk_rate=3GB.
        prefill_plan: Plan of instances that only take prompts; those of the plan then only decode.
        prefill_cluster: Their cluster, of other chips or another number [the cluster].
        prefill_workers: How many of them.
        speculate: Guesses that a pass checks, and their odds: drafts=3,accept=0.8.
        draft_model: The model that guesses [multi-token prediction: a block like the last, and the head].
        expert_skew: Power law of the experts' loads: that of rank r is r^-SKEW [even].
        expert_loads: Text of the tokens that each expert was sent, instead.
        redundant_experts: Copies of the busiest experts, which spread their load; ep divides all together.
        capacity_factor: Also say what experts of at most this times their even share would drop.
        percentile: Share of the requests, in percent, that must keep the limits.
        pareto: Trade-offs of all layouts: tokens/s a user against a GPU; and what else was simulated.
        pools: Of the fewest GPUs: one (prompts and tokens together) or two (apart) [the better].
        collectives: Measured collectives, which replace predicted ones (nccl-tests' output, or CSV).
        price: Dollars of a GPU-hour: 2.5, or by chip h100-80g-sxm=2.5,b200-sxm=4.
        pue: Power of the building over that of its nodes, with a load [1].
        carbon: Grams of CO2 of a kWh, with a load.
        to: Also write what runs the fleet, and a command that loads it: kubernetes, dynamo, llm-d or
            vllm-stack.

    Returns:
        Times in seconds, memory in bytes. An instance without room for one sequence is an answer too
        (`max_sequences` is 0).

    Raises:
        MeshwiseError: A name is unknown, or the plan does not divide model or cluster.
    """
    asked = dict(locals())
    from meshwise.model.architecture import in_sequence, with_capacity, with_copies
    from meshwise.plan.plan import Plan
    from meshwise.serve.answer import answer, fewest, parse_prices
    from meshwise.serve.engine import parse_engine
    from meshwise.serve.instances import Instances, StatedPlan
    from meshwise.serve.kubernetes import pools_under
    from meshwise.serve.load import Fleet, traffic
    from meshwise.serve.prefix_cache import parse_offload
    from meshwise.serve.requests import Turns, read_rates, read_requests
    from meshwise.serve.router import parse_router
    from meshwise.serve.simulate import limits_of
    from meshwise.serve.size import Wanted

    def stated(plan: str | Path | Plan) -> StatedPlan:
        return StatedPlan(_plan(plan), _choices(plan), is_whole=isinstance(plan, Plan))

    refuse("serve options", WorkloadError, **asked)
    trace = None if requests is None else read_requests(Path(requests))
    mean_prompt, mean_output = trace.mean_tokens if trace else (2048, 256)
    prompt, output = mean_prompt if prompt is None else prompt, mean_output if output is None else output
    mixture = with_copies(with_capacity(_model(model), capacity_factor), redundant_experts)
    architecture = _with_inputs(mixture, images, image_size, audio_s)
    prompt += in_sequence(architecture) * (trace is None)
    instances = Instances(
        model=architecture, prompt=prompt, output=output, engine=parse_engine(engine or "vllm"),
        engine_s=engine_s, memory_frac=0.9 if memory_frac is None else memory_frac, expert_skew=expert_skew,
        expert_loads=None if expert_loads is None else Path(expert_loads), speculate=speculate,
        draft_model=None if draft_model is None else _model(draft_model),
    )  # fmt: skip
    load = traffic(
        prompt, output, rate=rate, concurrency=concurrency, trace=trace, num_requests=num_requests,
        burstiness=burstiness, length_ratio=length_ratio, length_sigma=length_sigma,
        shared_prefix=shared_prefix, most=architecture.max_seq,
        turns=Turns(turns, turn_prompt or 256, think_s or 0.0) if turns > 1 else None,
        rates=None if rates is None else read_rates(Path(rates)),
    )  # fmt: skip
    tiers, policy = parse_offload(offload) if offload else None, parse_router(router)
    usd = None if price is None else parse_prices(str(price))
    keys, limits = _choices(plan), limits_of(ttft_s, token_s, percentile)
    arrives = load is not None and not load.concurrency
    is_laid_out = bool(prefill_plan or prefill_cluster) or (workers, prefill_workers) != (1, 1)
    names = cluster.split(",") if isinstance(cluster, str) else [cluster]
    known = all(_cluster(name).chip.power_watts for name in names)
    refuse("energy of a server", WorkloadError, pue=pue, carbon=carbon, load=load, known=known)
    if pareto or ("tp" not in keys and arrives and limits.any and not is_laid_out):
        asked_of_one = instances.is_uneven or speculate or {"cp", "pp"} & set(keys)
        refuse("serve layouts", WorkloadError, laid_out=is_laid_out, autoscale=autoscale, one=asked_of_one)
        wanted = Wanted(
            engine=instances.engine, requests=load, limits=limits, router=policy, offload=tiers,
            pools=pools or pools_under(to), usd_per_gpu_hour=usd,
        )  # fmt: skip
        clusters = [_cluster(name, collectives) for name in names]
        found = fewest(instances, clusters, keys, wanted, sequences, has_details=pareto)
        return _deployed(replace(found, pue=pue, carbon=carbon), to, asked)
    refuse("serve one layout", WorkloadError, pools=pools, clusters=names)
    machine, one, num_instances = _cluster(cluster, collectives), stated(plan), 1
    if one.has_layout or is_laid_out:
        whole = instances.on(machine, one)
    else:
        whole = instances.default(machine, one)
        num_instances = machine.num_chips // whole.num_chips
        workers = num_instances if load else 1
    first = None
    if prefill_plan or prefill_cluster:
        of_prompts = _cluster(prefill_cluster or cluster, collectives)
        first = instances.on(of_prompts, stated(prefill_plan or plan), instances.engine.of_prompts)
    fleet = Fleet(whole, workers, first, prefill_workers, policy, tiers)
    found = answer(
        fleet, sequences, limits, requests=load, engine=engine, autoscale=autoscale, usd_per_gpu_hour=usd
    )
    return _deployed(replace(found, num_instances=num_instances, pue=pue, carbon=carbon), to, asked)


def _deployed(found: ServingAnswer, to: str, asked: Mapping[str, Any]) -> ServingAnswer:
    """`found` with what runs its fleet under `to`, if that is stated."""
    from meshwise.serve.kubernetes import deployment

    return replace(found, deployment=deployment(found, to, asked)) if to else found


def calibrate_server(
    records: Sequence[str | Path],
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    plan: str | Path | Plan = "",
    *,
    engine: str = "vllm",
) -> ServerFit:
    """Fit an engine's constants to what a load generator measured of a server of one's own.

    Args:
        records: Files of vLLM's or SGLang's bench, GenAI-Perf or AIPerf.
        model: What was served.
        cluster: The GPUs of the server.
        plan: Its plan, as in `serve`.
        engine: vllm, sglang or trtllm, with version and settings: vllm@0.12.0.

    Returns:
        The constants before and after, and what both predict of each record.
    """
    from meshwise.calibrate.fit_server import fit_server
    from meshwise.calibrate.server_records import read_records
    from meshwise.serve.engine import parse_engine
    from meshwise.serve.load import Fleet
    from meshwise.serve.serving import serving

    architecture, machine, runs = _model(model), _cluster(cluster), parse_engine(engine)
    served = _plan(plan or f"tp={machine.num_chips}")

    def fleet(prompt: int, output: int) -> Fleet:
        return Fleet(serving(architecture, machine, served, prompt=prompt, output=output, engine=runs))

    return fit_server([one for path in records for one in read_records(Path(path))], fleet, runs)


@reads_texts
def rl(
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    *,
    prompts: int | None = None,
    samples: int | None = None,
    prompt: int = 512,
    output: int | None = None,
    max_output: int | None = None,
    length_sigma: float | None = None,
    lengths: str | Path | None = None,
    mode: str = "",
    rollout_gpus: int | None = None,
    train_plan: str | Path | Plan = "",
    rollout_plan: str | Path | Plan = "",
    updates: int = 1,
    staleness: int | None = None,
    partial: bool | None = None,
    turns: int = 1,
    env_s: float = 0.0,
    tool_tokens: int = 0,
    algorithm: str = "grpo",
    oversample: float = 1.0,
    reference: bool = True,
    old_logprobs: bool | None = None,
    reward_model: str | Path | Model | None = None,
    teacher: str | Path | Model | None = None,
    framework: str = "nemo-rl",
    engine: str = "",
    transport: str = "",
    memory_frac: float | None = None,
    pack_length: int | None = None,
    score_tokens: int | None = None,
    train_steps: int | None = None,
    price: str | float | None = None,
) -> RlAnswer:
    """Price a step of post-training by reinforcement: rollout, scoring, update, weight sync.

    Where `mode` or a plan is left out, the answer is found: how to share the GPUs, and which plans.

    Args:
        model, cluster: As in `estimate`.
        prompts: Groups of a step: prompts that it trains on.
        samples: Answers to each prompt.
        prompt: Tokens of a prompt.
        output: Mean tokens of an answer.
        max_output: Cap of an answer in tokens; longer ones are cut [4 x output, or what the model allows].
        length_sigma: Lengths are lognormal; deviation of their logs [0.9].
        lengths: CSV of measured answers with a column output (tokens); instead of a mean and a spread.
        mode: colocated, split (two pools in turn), one_step_off or async [the best].
        rollout_gpus: GPUs of the rollout pool, where pools are apart [the best of eighths, in whole nodes].
        train_plan: Plan of training: tp=4,pp=2,zero=1 [the best of Megatron-LM's with zero=1, a bin at a time
            and at most 92 % of the memory].
        rollout_plan: Plan of one engine: tp=4; as many as fit the pool [the best of bf16, up to 64 GPUs].
        updates: Optimizer steps on the samples of one rollout.
        staleness: Versions by which a sample may be behind in mode=async [1].
        partial: Answers go on after a sync, instead of ending before it [as the framework does].
        turns: Turns of an answer, each but the last followed by its environment.
        env_s: Seconds of the environment after a turn.
        tool_tokens: Tokens that an environment returns, which the engine reads.
        algorithm: grpo, rloo, dapo, or ppo, which has a critic of the policy's shape.
        oversample: Groups that are generated for one that is trained on (DAPO).
        reference: Score with a reference policy (KL).
        old_logprobs: Score with the policy itself before the update [as the framework does].
        reward_model: A model that judges each answer in a pass [rewards by rules].
        teacher: A model whose log-probabilities are distilled.
        framework: Whose overheads and defaults: nemo-rl or verl, with a version as nemo-rl=0.4.
        engine: vllm, sglang or trtllm, with version and settings: vllm@0.12.0 [the framework's].
        transport: How weights travel: ipc, nccl, reshard, checkpoint-engine, per-tensor [the framework's].
        memory_frac: As in `search`.
        pack_length: Tokens of a packed bin in training [the longest sample, at least 8192].
        score_tokens: The same in scoring [as in training].
        train_steps: Steps of the whole run: its days.
        price: Dollars of a GPU-hour: what a step and a run cost.

    Returns:
        Seconds by phase, memory of both pools, idle shares. A job that does not fit is an answer too.

    Raises:
        MeshwiseError: A name is unknown, or numbers contradict each other.
    """
    asked = dict(locals())
    from meshwise.rl.best_split import answer

    for name in ("train_steps", "price"):
        del asked[name]
    return answer(_open_rl_job(**asked), train_steps, usd_per_hour(price))


def _open_rl_job(
    model: str | Path | Model, cluster: str | Path | Cluster, *, framework: str, lengths: str | Path | None,
    length_sigma: float | None, oversample: float, **asked: Any,
) -> OpenJob:  # fmt: skip
    """What the options of `rl` ask for."""
    from meshwise.rl.framework import find_framework
    from meshwise.rl.job import OpenJob
    from meshwise.rl.rollouts import rollouts_of

    missing = [name for name in ("prompts", "samples") if asked[name] is None]
    refuse("rl groups", WorkloadError, missing=missing)
    shape = _model(model)
    of_work = ("prompts", "samples", "prompt", "output", "max_output", "turns", "env_s", "tool_tokens")
    work = rollouts_of(
        shape.max_seq, sigma=length_sigma, lengths=None if lengths is None else Path(lengths),
        oversample=oversample, **{name: asked.pop(name) for name in of_work},
    )  # fmt: skip
    machine, runs = _cluster(cluster), find_framework(framework)
    readers: dict[str, Callable[..., Any]] = {"reward_model": _model, "teacher": _model}
    readers |= {"train_plan": partial(_plan, trained_on=machine), "rollout_plan": _plan}
    asked |= {name: read(asked[name]) if asked[name] else None for name, read in readers.items()}
    return OpenJob(model=shape, cluster=machine, rollouts=work, framework=runs, **asked)


def launch(
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    plan: str | Path | Plan = "",
    *,
    to: str,
    batch: int | None = None,
    seq: int | None = None,
    microbatch: int | None = None,
    **rollout: Any,
) -> Launch:
    """State what starts a plan under another framework: its arguments, its files, a Slurm script.

    Args:
        model, cluster, plan, seq: As in `estimate`.
        to: megatron-lm, megatron-bridge, torchtitan, deepspeed, accelerate or peft; for one card unsloth;
            for serving vllm, sglang or tensorrt-llm; for post-training verl or nemo-rl.
        batch: Global batch in sequences; in serving, those that run at a time.
        microbatch: Sequences of a microbatch [1].
        rollout: Options of `rl`, where `to` is verl or nemo-rl; `plan` is then that of training.

    Returns:
        The arguments and files, what the framework cannot be told (`not_expressed`), and the price of the
        files read back (`as_written`) where the framework says all of a plan.

    Raises:
        MeshwiseError: A name is unknown, the plan does not divide model, batch or cluster, or the framework
            refuses it.
    """
    from meshwise.launch.read import as_written
    from meshwise.launch.settings import SERVING
    from meshwise.launch.write import launch as state

    asked, of_rl = {name: rollout[name] for name in stated_in(rollout, rl)}, to in RL_FRAMEWORKS
    refuse("launch", WorkloadError, to=to, of_rl=of_rl, sizes=(batch, seq, microbatch), asked=[*asked])
    if of_rl:
        return _launch_rl(model, cluster, plan, to, asked)
    kind, shape, machine = "decode" if to in SERVING else "train", _model(model), _cluster(cluster)
    cut = _plan(plan, machine if kind == "train" else None)
    work = _workload(shape, machine, cut, batch=batch, seq=seq, microbatch=microbatch, kind=kind)
    return as_written(state(shape, machine, cut, work, to), shape, machine, cut, work)


def _launch_rl(
    model: str | Path | Model, cluster: str | Path | Cluster, plan: str | Path | Plan, to: str,
    asked: dict[str, Any],
) -> Launch:  # fmt: skip
    """What starts a job of post-training; what its layout leaves open is found."""
    from meshwise.rl.best_split import best_split
    from meshwise.rl.rollouts import CAP_OVER_MEAN
    from meshwise.rl.settings import write_settings

    missing = [name for name in ("prompts", "samples") if name not in asked]
    missing += ["output"] * (not {"output", "max_output"} & {*asked})
    refuse("launch rl", WorkloadError, plan=plan, asked=asked, missing=missing, to=to)
    others = ("train_steps", "price", "model", "cluster")
    options = {name: of.default for name, of in options_of(rl).items() if name not in others}
    mean = max(asked.get("max_output", 0) // CAP_OVER_MEAN, 1)
    options |= {"framework": to, "output": mean, "train_plan": plan} | asked
    found = _open_rl_job(model, cluster, **options)
    assumed = told("launch rl lengths", found=found, asked=asked)
    jobs = [step.job for step in best_split(found).best] if found.is_open else [found.job()]
    for job in jobs[:-1]:  # the fastest that the framework runs
        with suppress(PlanError):
            return write_settings(job, to, assumed)
    return write_settings(jobs[-1], to, assumed)


def explain_rl(
    log: str | Path,
    model: str | Path | Model | None = None,
    cluster: str | Path | Cluster | None = None,
    job: str | Path | None = None,
    **stated: Any,
) -> RlExplanation:
    """Where the measured step of a post-training job differs from the predicted one, phase by phase.

    Args:
        log: The step log of verl or NeMo-RL.
        model: What ran: a preset or a config.json; without it there is no prediction.
        cluster: Where: a preset, chip:count or a TOML file.
        job: The recipe or script that ran.
        stated: Options of `rl` that the job does not say, or other than it; mean lengths are the log's.

    Raises:
        MeshwiseError: The log has no time of a step, or as in `rl`.
    """
    from meshwise.rl.step_log import RlExplanation, read_step_log

    found = read_step_log(Path(log))
    refuse("explained log", WorkloadError, model=model, cluster=cluster, job=job, stated=stated)
    if model is None or cluster is None:
        return RlExplanation(found, None)
    of_log = {name: round(mean) for name, mean in found.lengths.items() if name == "prompt"} | stated
    options = (read_rl_job(job, of_log.get("prompt"))[0] if job is not None else {}) | of_log
    if not options.keys() & {"output", "lengths"}:
        refuse("lengths of a log", WorkloadError, output=found.lengths.get("output"))
        options["output"] = round(found.lengths["output"])
    return RlExplanation(found, rl(model, cluster, **options).step)


def read_rl_job(path: str | Path, prompt: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Read a job of verl or NeMo-RL as options of `rl`, and what no option holds.

    Args:
        path: A YAML recipe, or a script with name=value words.
        prompt: Tokens of a prompt, which leaves the others of a sample to its answer [its cap or the usual].

    Raises:
        DataError: The file cannot be read, or is of neither framework.
    """
    from meshwise.rl.settings import read_settings

    return read_settings(Path(path), prompt)


def read_job(path: str | Path, cluster: str | Path | Cluster | None = None) -> Job:
    """Read an existing job of another framework as model, plan and workload.

    Args:
        path: A script or argument file of Megatron-LM or torchtitan, a torchtitan TOML file, a DeepSpeed JSON
            file or an Accelerate YAML file.
        cluster: Where it runs; only its number of GPUs is used.

    Returns:
        The job; what its file does not say is None, and what a plan cannot say is listed (`unread`).

    Raises:
        MeshwiseError: The file cannot be read, or is no job of these frameworks.
    """
    from meshwise.launch.read import read_job as read

    return read(Path(path), None if cluster is None else _cluster(cluster).num_chips)


def dry_run(
    program: str,
    *,
    ranks: int = 1,
    rank: int = 0,
    device: str = "h100-80g-sxm",
    quiet: bool = True,
    **options: str | int | float | bool,
) -> Outcome:
    """Run one rank of any world of a program on fake tensors: no GPU, no other ranks, no memory.

    Args:
        program: A program: ulysses, model-2d, train, tensor-parallel, eval-lm, generate, rl.
        ranks: Ranks in the world.
        rank: The rank to be.
        device: A chip, or a cluster's TOML file, whose allocator is replayed; or cpu.
        quiet: Whether the program prints nothing.
        options: The options of the program, as `seq=4096`.

    Returns:
        Shapes, FLOP, collectives and peak memory [bytes] as that rank would have them.

    Raises:
        MissingExtraError: torch is not installed.
        MeshwiseError: An option is unknown or does not fit.
    """
    found, checked = _program(program, options)
    from meshwise.runtime.dry_run import dry_run as play

    return play(found.name, checked, ranks=ranks, rank=rank, device=device, quiet=quiet)


def dry_run_script(
    command: Sequence[str], *, ranks: int = 1, rank: int = 0, device: str | Cluster = "h100-80g-sxm",
    stdout: Any = None,
) -> ScriptOutcome:  # fmt: skip
    """Run anybody's torch program, unmodified, as one rank of a job on GPUs that are not there.

    Args:
        command: The command and its words: `["python", "train.py", "--layers", "4"]`.
        ranks: Ranks in the world.
        rank: The rank to be.
        device: A chip in its usual nodes, or a cluster (a preset or TOML file), where the ranks lie.
        stdout: Where the program's output goes, as in `subprocess.run`.

    Returns:
        What the rank did: ledger, collectives, the peak and what was alive then [bytes], how long its last
        step takes, run op by op [s], and what was assumed where the program asked for values.

    Raises:
        MissingExtraError: torch is not installed.
        MeshwiseError: The program failed; the message has file and line.
    """
    from meshwise.runtime.script.start import dry_run_script as play

    return play(command, ranks=ranks, rank=rank, device=device, stdout=stdout)


def compare_script(
    command: Sequence[str], estimate: Estimate, *, rank: int = 0, stdout: Any = None
) -> tuple[Comparison, ScriptOutcome]:
    """Hold anybody's torch program against the closed form of the model and plan that it should train.

    Args:
        command: The command and its words, as in `dry_run_script`.
        estimate: What `estimate` says of model, cluster, plan and workload; the cluster says how many ranks.
        rank: The rank to be.
        stdout: Where the program's output goes, as in `subprocess.run`.

    Returns:
        FLOP by part of the model and phase, collectives by kind and group size, and bytes of the states, of
        one step of the rank; and the dry run itself.

    Raises:
        MissingExtraError: torch is not installed.
        MeshwiseError: The program failed; the message has file and line.
    """
    from meshwise.runtime.script.compare import compare_script as hold
    from meshwise.runtime.script.start import dry_run_script as play

    on = estimate.cluster
    outcome = play(command, ranks=on.num_chips, rank=rank, device=on, stdout=stdout)
    return hold(outcome, estimate), outcome


def run(
    program: str,
    *,
    ranks: int = 0,
    device: str = "cpu",
    root: int = 0,
    port: int = 0,
    profile: str | Path | None = None,
    recorded: bool = True,
    quiet: bool = True,
    **options: str | int | float | bool,
) -> Outcome | None:
    """Run a program on real ranks: started here, or by torchrun or srun.

    Ranks that are started here are processes that import the main module again: a script that calls this
    does so under `if __name__ == "__main__":`.

    Args:
        program: As in `dry_run`.
        ranks: Ranks in the world (0: as torchrun or srun say, or 1).
        device: cpu (over gloo) or cuda (over NCCL).
        root: The rank that prints and whose ledger is shown.
        port: Port where the ranks meet (0: a free one).
        profile: Write each rank's trace into this folder.
        recorded: Record every op, or run at full speed.
        quiet: Whether the program prints nothing.
        options: The options of the program, as `seq=4096`.

    Returns:
        What rank `root` did; None on the other ranks that torchrun or srun started.

    Raises:
        MissingExtraError: torch or the device is missing.
        MeshwiseError: An option is unknown or does not fit, or a rank failed.
    """
    found, checked = _program(program, options)
    from meshwise.runtime.start import start

    folder = None if profile is None else str(profile)
    return start(
        found, checked, ranks=ranks, device=device, root=root, port=port, folder=folder, recorded=recorded,
        quiet=quiet,
    )  # fmt: skip


def compare(
    program: str,
    *,
    ranks: int = 2,
    rank: int = 0,
    with_run: bool = True,
    port: int = 0,
    cluster: str | Path | Cluster | None = None,
    **options: str | int | float | bool,
) -> Comparison:
    """Hold the estimate, the dry run and the real CPU run of a program against each other, op by op.

    Args:
        program: As in `dry_run`.
        ranks: Ranks in the world.
        rank: The rank whose numbers are compared.
        with_run: Run it for real too, on CPU ranks of this machine.
        port: As in `run`.
        cluster: Also seconds: of each op alone, as `estimate` prices it there, and as run.
        options: The options of the program, as `seq=4096`.

    Returns:
        Every count of every op, and whether all agree.

    Raises:
        MissingExtraError: torch is not installed.
        MeshwiseError: An option is unknown or does not fit, or a rank failed.
    """
    found, checked = _program(program, options)
    from meshwise.runtime.compare_program import compare_program
    from meshwise.runtime.start import check_memory

    found.check(checked, ranks)
    if with_run:
        check_memory(found, checked, ranks)
    on = None if cluster is None else _cluster(cluster)
    refuse("cluster of a program", ClusterError, on=on, ranks=ranks)
    return compare_program(found, checked, ranks=ranks, rank=rank, with_run=with_run, port=port, cluster=on)


def explain(
    traces: str | Path | Sequence[str | Path],
    model: str | Path | Model | None = None,
    cluster: str | Path | Cluster | None = None,
    plan: str | Path | Plan = "",
    *, batch: int | None = None, seq: int | None = None, microbatch: int | None = None, kind: str = "train",
    steps: str = "", command: Sequence[str] = (),
) -> Explanation:  # fmt: skip
    """Where the measured step of a job differs from the predicted one, by class of kernel and collective.

    Args:
        traces: Trace files, or folders of them (*.json, *.json.gz).
        model: What ran: a preset or a config.json; without it there is no prediction.
        cluster: Where: a preset, chip:count or a TOML file.
        plan: How: tp=8,pp=4,... or a TOML file [zero=0 where gradients are all-reduced].
        batch: Global batch in sequences [as the plan].
        seq: Tokens of a sequence [as the plan].
        microbatch: Sequences of a microbatch [as the plan].
        kind: As in `estimate`.
        steps: Only these: 3-7, or complete (launched before the last one) [neither warm-up nor cut off].
        command: In place of a model and plan, the program that ran, which is dry-run as in `dry_run_script`.

    Returns:
        Rows in seconds a step, each side summing to its step, and findings in words. Where the traces are
        not of the stated job, `mismatches` says why, and nothing is predicted.

    Raises:
        MeshwiseError: A trace is missing or unreadable, or as in `estimate`.
    """
    from meshwise.trace.explain import explain as join, reduces_all
    from meshwise.trace.summary import summarize_paths

    of_pass = None if kind == "train" else kind
    job = [one for one in (model, plan or None, batch, seq, microbatch, of_pass) if one is not None]
    refuse("explain", DataError, job=job, model=model, cluster=cluster, command=command)
    summary = summarize_paths([traces] if isinstance(traces, str | Path) else traces, steps=steps)
    summary.check_readable()
    if command and cluster is not None:
        from meshwise.runtime.script.explain import explain_script

        on, rank = _cluster(cluster), min(summary.traces.ranks)
        outcome = dry_run_script(command, ranks=on.num_chips, rank=rank, device=on, stdout=2)
        return explain_script(summary, outcome, on)
    if model is None or cluster is None:
        return join(summary)
    note = ""
    if isinstance(plan, str) and "zero" not in plan and not plan.endswith(".toml") and reduces_all(summary):
        plan = ",".join(filter(None, (plan, "zero=0")))
        note = "gradients are all-reduced: priced with zero=0 (DDP)"
    predicted = estimate(model, cluster, plan, batch=batch, seq=seq, microbatch=microbatch, kind=kind)
    found = join(summary, predicted)
    return replace(found, findings=[*found.findings, note]) if note and not found.mismatches else found


def profile(
    command: Sequence[str],
    directory: str | Path = "profiles",
    *,
    shapes: bool = True,
    memory: bool = True,
    stacks: bool = False,
    overhead: bool = False,
    stdout: Any = None,
) -> Profiled:
    """Run any command and capture all its ranks, its code untouched.

    Args:
        command: The program and its words, such as python train.py or torchrun train.py.
        directory: Folder for the traces, one rank-N.json each.
        shapes: Record the shapes of operators.
        memory: Record allocations.
        stacks: Record Python stacks (slow).
        overhead: Run without capture first; state its overhead.
        stdout: Where the command prints, as in `subprocess.run`.

    Returns:
        Its exit code, its time in seconds, and the files of the traces.

    Raises:
        MissingExtraError: torch is not installed, or there is no such command.
        DataError: The folder holds profiles already or cannot be written.
    """
    from meshwise.runtime.profile import profile_command

    return profile_command(
        command, Path(directory), shapes=shapes, memory=memory, stacks=stacks, compare=overhead, stdout=stdout
    )


@reads_texts
def collective(
    kind: str,
    cluster: str | Path | Cluster,
    sizes_bytes: Sequence[Quantity] = (),
    *,
    ranks: int | None = None,
    stride: int = 1,
    collectives: Sequence[str | Path] = (),
    data: Sequence[str | Path] = (),
) -> CollectiveTimes:
    """Time one collective by size, and gather measured times to stand beside.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce or send.
        cluster: As in `estimate`.
        sizes_bytes: Bytes of the full tensor, as 64MiB or 1e9; repeat for several [1 KiB to 16 GiB, and those
            measured].
        ranks: Ranks of the group [two of send; else the most that the cluster has at this stride, or of those
            measured].
        stride: Distance between neighbours of the group in ranks.
        collectives: Measured collectives, which replace predicted ones (nccl-tests' output, or CSV).
        data: Measured collectives to show beside (nccl-tests' output, or CSV).

    Returns:
        The predicted times in the order of size, and measured seconds by size.

    Raises:
        MeshwiseError: A name is unknown, a number makes no sense, or a file cannot be read.
    """
    from meshwise.calibrate.collectives import measured_ranks, measured_times
    from meshwise.estimate import collective as timed

    on = _cluster(cluster, collectives)
    group = timed.group_size(kind, on, ranks, stride)
    if ranks is None:
        group = measured_ranks(map(Path, collectives or data), kind, on, group, stride)
    if collectives and not timed.measured_of(kind, on, group, stride):
        raise DataError(f"{', '.join(map(str, collectives))} has no {kind} of {group} ranks {stride} apart")
    measured = measured_times(map(Path, data), kind, on, group, stride)
    sizes = sorted(sizes_bytes or {*timed.SIZES_BYTES, *measured})
    times = timed.collective_times(kind, on, sizes, ranks=group, stride=stride)
    return timed.CollectiveTimes(times, measured, group, timed.notes(kind, on, group, stride))


@reads_texts
def frontier(
    chip: str | Path, *, months: float | None = None, utilization: float = 0.7, **settings: str | float
) -> Frontier:
    """Find the best utilization of `chip` at each training compute, and the largest runs.

    Args:
        chip: A chip or cluster of the catalog, or a TOML file.
        months: Longest duration of a run, in months of 30 days [3].
        utilization: Share of the peaks that throttling leaves.
        settings: A law, an option or a number of the run, as `schedule="interleaved"` (docs/frontier.md).

    Raises:
        MeshwiseError: A name is unknown or a number makes no sense.
    """
    from meshwise.published.frontier import find_device, frontier as find, settings_of

    return find(find_device(str(chip), utilization=utilization), *settings_of(months, settings))


@reads_texts
def validate(runs: Iterable[str | Path] = ()) -> Validation:
    """Predict every row of files of measurements, and say how wrong the predictions are.

    Args:
        runs: CSV files of measured runs, ops or collectives [the published runs that ship with the package].

    Raises:
        DataError: A file cannot be read as a table of measurements.
    """
    from meshwise.calibrate.validate import validate as predict

    return predict(map(Path, runs))


@reads_texts
def budget(
    *,
    tokens: Quantity | None = None,
    price: str | float | None = None,
    watts: float | None = None,
    pue: float | None = None,
    carbon: float | None = None,
    mtbf: float | None = None,
    storage: Quantity | None = None,
    restart: float | None = None,
) -> TokenBudget:
    """The length of a whole run, and what it takes beside the pace of its steps.

    Its `run` says of an estimate what the run takes; `Study.to_json` says it of each machine.

    Args:
        tokens: Tokens of the whole run, as 15T: days, GPU-hours, failures.
        price: Dollars of a GPU-hour, 2.5 or by chip h100-80g-sxm=2.5,b200-sxm=4: dollars of a million tokens
            and, with the tokens, of the run.
        watts: Mean power at the wall for each GPU in watts, with the tokens [predicted].
        pue: Power of the building over that of its nodes, with the tokens [1].
        carbon: Grams of CO2 of a kWh, with the tokens.
        mtbf: GPU-hours between failures, with the tokens [50,700].
        storage: Bytes/s that checkpoints are written with, as 200GB [122 MB/s a GPU].
        restart: Seconds to restart after a failure [920].

    Raises:
        MeshwiseError: A number makes no sense, or is stated without tokens.
    """
    from meshwise.estimate.token_budget import TokenBudget
    from meshwise.serve.answer import parse_prices

    return TokenBudget(
        tokens=tokens, price=None if price is None else parse_prices(str(price)), watts=watts, pue=pue,
        carbon=carbon, mtbf=mtbf, storage=storage, restart=restart,
    )  # fmt: skip


def refusal(
    model: str | Path | Model, cluster: str | Path | Cluster, plan: Mapping[str, Any], *,
    batch: int | None = None, seq: int | None = None, microbatch: int | None = None, kind: str = "train",
) -> str:  # fmt: skip
    """Why the keys `plan` are no plan of `model` on `cluster`, in one sentence; empty where they are one."""
    from meshwise.core.errors import MeshwiseError
    from meshwise.plan.mesh import SERVING
    from meshwise.plan.rules import resolve

    try:
        shape, machine = _model(model), _cluster(cluster)
        cut = _plan(plan, None if kind in SERVING else machine)
        work = _workload(shape, machine, cut, batch=batch, seq=seq, microbatch=microbatch, kind=kind)
        resolve(shape, cut, work, machine)
        machine.chip.matrix_peak(cut.dtype)
    except MeshwiseError as error:
        return str(error)
    return ""


# --- what they share ---------------------------------------------------------------------------


def _model(model: str | Path | Model) -> Model:
    from meshwise.model.architecture import Model, checked_model
    from meshwise.model.find import find_model

    return checked_model(model, model.name) if isinstance(model, Model) else find_model(str(model))


def _cluster(cluster: str | Path | Cluster, collectives: Sequence[str | Path] = ()) -> Cluster:
    from meshwise.machine.hardware import Cluster, find_cluster

    found = cluster if isinstance(cluster, Cluster) else find_cluster(str(cluster))
    if not collectives:
        return found
    from meshwise.calibrate.collectives import with_measured

    return with_measured(found, map(Path, collectives))


def _choices(plan: str | Path | Plan | Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
    """The values that each stated key of a plan may have."""
    from meshwise.plan.plan import Plan, plan_choices, plan_text

    stated = plan_text(plan) if isinstance(plan, Plan) else plan
    return plan_choices(stated if isinstance(stated, Mapping) else str(stated))


def _plan(plan: str | Path | Plan | Mapping[str, Any], trained_on: Cluster | None = None) -> Plan:
    """A plan, or that of a text; to train on chips that run their maker's software alone, under that."""
    from meshwise.machine.overheads import software_on
    from meshwise.plan.plan import Plan, parse_plan

    own = software_on(trained_on.chip) if trained_on else ""
    if not isinstance(plan, Plan):
        return parse_plan(plan if isinstance(plan, Mapping) else str(plan), own)
    is_silent = plan.software == plan.done_by.software
    return replace(plan, software=own) if own and is_silent else plan


def _seq(model: Model, seq: int | None) -> int:
    """The sequence that is meant where none is given: what the model allows, 4096 tokens at most."""
    if seq is not None:
        return seq
    return model.max_seq if model.patches is not None else min(model.max_seq, 4096)


def _with_inputs(
    model: Model, images: int, image_size: str, audio_s: float, frames: int | None = None
) -> Model:
    """`model` as it reads these images, or this sound, in each sequence; or makes images of this size."""
    from meshwise.model.inputs import Inputs, parse_size, with_inputs, with_latent

    if frames is not None or (model.diffusion is not None and image_size):
        model = with_latent(model, frames, parse_size(image_size) if image_size else None)
        image_size = ""
    refuse("size of images", WorkloadError, image_size=image_size, images=images)
    width, height = parse_size(image_size or "1024x1024")
    return with_inputs(model, Inputs(images=images, width=width, height=height, audio_s=audio_s))


def _workload(
    model: Model, cluster: Cluster, plan: Plan, *,
    batch: int | None, seq: int | None, microbatch: int | None, kind: str, steps: int | None = None,
    guidance: bool = False,
) -> Workload:  # fmt: skip
    from meshwise.plan.workload import Workload, usual_batch

    if steps is None:
        steps = 50 if kind == "sampling" else 1
    if batch is None and guidance:  # whose two passes replicas may share
        batch = max(plan.data_parallel(cluster.num_chips) // 2, 1) * (microbatch or 1)
    if batch is None:
        batch = usual_batch(plan, cluster.num_chips, microbatch or 1)
    if microbatch is None:  # an engine decodes all its sequences together
        microbatch = max(batch // plan.data_parallel(cluster.num_chips), 1) if kind == "decode" else 1
    return Workload(
        batch=batch, seq=_seq(model, seq), microbatch=microbatch, kind=kind, steps=steps, guidance=guidance
    )


def _program(name: str, options: dict[str, str | int | float | bool]) -> tuple[Any, Any]:
    """The program called `name` and its checked options; MissingExtraError without torch."""
    from meshwise.runtime.programs import find_program, make_options

    found = find_program(name)
    checked = make_options(found, options)
    need_torch()
    return found, checked


def need_torch() -> None:
    """MissingExtraError where torch is not installed, or too old for meshwise's own programs."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError('torch is not installed; run: pip install "meshwise[torch]"')
    from meshwise.runtime.torch_private import release

    with suppress(importlib.metadata.PackageNotFoundError):
        have = importlib.metadata.version("torch")
        is_old = release(have) < release(OLDEST_TORCH)
        refuse("torch", MissingExtraError, is_old=is_old, oldest=OLDEST_TORCH, have=have)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its notes about groups are none of the user's
