"""Post-training by reinforcement: lengths, packing, drains and asynchronous flow in closed form; the verb."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

import meshwise as mw
from data_tables import DATA, table
from meshwise import api
from meshwise.core.each import telling
from meshwise.core.errors import PlanError
from meshwise.launch.arguments import framework_arguments
from meshwise.model.find import find_model
from meshwise.model.weights import num_params
from meshwise.plan.plan import parse_plan
from meshwise.report.answer import Chart
from meshwise.report.rl import page
from meshwise.rl.asynchronous import steady
from meshwise.rl.engines import RolloutPool, drain
from meshwise.rl.framework import find_framework
from meshwise.rl.measured import _NAMES
from meshwise.rl.passes import TrainerTimes, num_bins, pack, trainer_times
from meshwise.rl.rollouts import Rollouts, cut_mean, log_mean
from meshwise.rl.settings import write_settings
from meshwise.rl.step import rl_step
from meshwise.serve.instance import ServingWorker
from servers import NO_LIMIT, passes

PASS_S, TOKEN_S = 1e-2, 1e-5


def pool(num: int) -> RolloutPool:
    """Engines whose passes take `PASS_S` and `TOKEN_S` a prompt token, whatever they decode."""
    unused: Any = None
    return RolloutPool(unused, num, ServingWorker(passes(PASS_S, TOKEN_S), NO_LIMIT))


def rollouts(**others: Any) -> Rollouts:
    stated = {"prompts": 8, "samples": 4, "prompt": 100, "output": 50.0, "max_output": 50} | others
    return Rollouts(**stated)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@given(mean=st.floats(20, 900), sigma=st.floats(0.1, 1.5))
def test_mean_of_lengths_that_are_cut(mean: float, sigma: float) -> None:
    assert cut_mean(log_mean(mean, sigma, 1000.0), sigma, 1000.0) == pytest.approx(mean, rel=1e-6)


def test_drawn_lengths_have_the_stated_mean_and_groups_are_alike() -> None:
    drawn = rollouts(samples=64, output=300.0, max_output=1000).draw(4000, rng())
    assert drawn.max() == 1000 and drawn.mean() == pytest.approx(300, rel=0.02)
    logs = np.log(rollouts(samples=64, output=300.0, max_output=10**6, sigma=0.5).draw(4000, rng()))
    assert logs.mean(axis=1).var() == pytest.approx(0.5 * logs.var(), rel=0.1)


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), ranks=st.integers(1, 4))
def test_packed_bins_hold_all_tokens(lengths: list[int], ranks: int) -> None:
    """First fit decreasing needs at most 11/9 of the fewest bins and 6/9 (Dosa 2007)."""
    bins, fewest = num_bins(tuple(lengths), 100), -(-sum(lengths) // 100)
    assert fewest <= bins and (bins <= 2 * fewest or bins <= sum(length > 50 for length in lengths) + 1)
    packed = pack(np.array(lengths), 100, ranks=ranks)
    assert packed.bins * ranks * packed.fill == pytest.approx(sum(lengths))
    assert packed.samples * packed.sample_tokens >= packed.fill - 1e-9


@pytest.mark.parametrize("engines", [1, 4])
def test_a_drain_of_equal_lengths(engines: int) -> None:
    """One prompt of each group in a pass, the others find it but for its last token; then a token a pass."""
    drained = drain(pool(engines), rollouts(), rng())
    groups = 8 // engines
    first_s = PASS_S + TOKEN_S * groups * 4 * 100  # all arrive in one pass, before any prompt is cached
    assert drained.seconds == pytest.approx(first_s + 49 * PASS_S)
    assert drain(pool(engines), rollouts(), rng(), share=0.3).seconds == drained.seconds


def test_turns_wait_for_the_environment_and_prefill_what_tools_return() -> None:
    with_tools = rollouts(prompts=1, samples=1, turns=5, env_s=7.0, tool_tokens=30)
    works = (rollouts(prompts=1, samples=1), with_tools)
    one_s, turns_s = (drain(pool(1), work, rng()).seconds for work in works)
    assert turns_s - one_s == pytest.approx(4 * (7.0 + 30 * TOKEN_S), abs=1e-3)


@pytest.mark.parametrize(("trains_s", "in_flight"), [(0.2, False), (5.0, False), (0.2, True), (5.0, True)])
def test_one_step_off_is_as_slow_as_the_slower_pool(trains_s: float, in_flight: bool) -> None:
    """Equal lengths: a period is max(T, D) + S; every group is trained on once, a version after it began."""
    work, two = rollouts(), pool(2)
    flow = steady(two, work, rng(), trains_s=trains_s, sync_s=0.3, staleness=1, in_flight=in_flight)
    drained_s = drain(two, work, rng()).seconds
    assert flow.wait_s + trains_s == pytest.approx(max(trains_s, drained_s), rel=0.02)
    assert (flow.num_trained, flow.staleness) == (6 * work.prompts, 1.0)  # three cycles of two


def test_a_looser_bound_never_waits_longer() -> None:
    """The trainer's wait falls with the bound; in a saturated queue the period is that of the engines."""
    work = rollouts(prompts=16, output=40.0, max_output=400)
    how: Any = {"trains_s": 1.0, "sync_s": 0.1, "in_flight": True}
    bounds = [steady(pool(2), work, rng(), staleness=bound, **how) for bound in (1, 2, 8)]
    assert bounds[0].wait_s > bounds[1].wait_s >= bounds[2].wait_s - 1e-9
    assert [one.staleness for one in bounds] == [1.0, 2.0, 8.0]


JOB: dict[str, Any] = {
    "model": "llama3-8b", "cluster": "h100-80g-sxm:8", "prompts": 16, "samples": 8, "prompt": 128,
    "output": 512, "max_output": 2048, "mode": "colocated", "train_plan": "pp=2,recompute=full",
    "rollout_plan": "tp=1",
}  # fmt: skip


def step(**others: Any) -> dict[str, Any]:
    return mw.rl(**JOB | others).to_json()


@pytest.mark.parametrize(
    "mode", [{}, *({"mode": mode, "rollout_gpus": 4} for mode in ("split", "one_step_off", "async"))], ids=str
)
def test_phases_sum_to_the_step(mode: dict[str, Any]) -> None:
    found = step(updates=2, framework="verl", **mode)
    assert found["phases_s"]["sync"] < 2  # not what engines still generate before it
    assert sum(found["phases_s"].values()) == pytest.approx(found["step_s"])
    between = found["step_s_interval"]
    assert found["fits"] and between["p10"] < found["step_s"] < between["p90"]
    assert (found["phases_s"]["switch"] > 0) == (not mode)
    assert (found["staleness"] > 0) == (mode.get("mode") in ("one_step_off", "async"))
    assert set(found["scoring_s"]) == {"reference"} | ({"policy"} if not mode else set())
    assert all(0 <= frac < 1 for frac in found["idle_frac"].values())


@pytest.mark.parametrize(("framework", "usual"), [("verl", (True, False)), ("nemo-rl", (False, True))])
def test_the_policy_scores_where_its_framework_makes_that_pass(framework: str, usual: Any) -> None:
    """verl's main_ppo always, its programs of two pools never (bypass_mode); both can be told otherwise."""
    for mode, is_usual in zip(({}, {"mode": "one_step_off", "rollout_gpus": 4}), usual, strict=True):
        assert ("policy" in step(framework=framework, **mode)["scoring_s"]) == is_usual
        for states in (True, False):
            job = mw.launch(**JOB | mode | {"old_logprobs": states}, to=framework)
            names = ("algorithm.rollout_correction.bypass_mode", "loss_fn.force_on_policy_ratio")
            off = str(not states).lower()
            assert any(f"{name}={off}" in job.arguments for name in names) and not job.not_expressed


def test_what_a_step_is_made_of() -> None:
    base = step()
    assert [*base["scoring_s"]] == ["reference"]  # one update: the policy's pass is the update's own
    assert step(reference=False)["phases_s"]["scoring"] == 0
    ppo = step(algorithm="ppo")
    assert ppo["phases_s"]["train"] == pytest.approx(2 * base["phases_s"]["train"])
    assert set(ppo["scoring_s"]) == {"reference", "critic"}
    drained = [step(oversample=times)["generation_s"] for times in (1.0, 1.25, 2.0, 3.0)]
    assert drained == sorted(drained) and drained[-1] < 3 * drained[0]
    tools = step(turns=3, tool_tokens=100)
    assert tools["tokens_per_step"] == base["tokens_per_step"] + 16 * 8 * 2 * 100
    assert step(teacher="llama3-70b")["scoring_s"]["teacher"] > 4 * base["scoring_s"]["reference"]
    judged = (step(reward_model="llama3-8b", oversample=times)["scoring_s"]["reward"] for times in (2, 1))
    assert next(judged) > 1.5 * next(judged)  # groups are filtered by their rewards
    adapters = {"train_plan": "pp=2,lora_rank=1"}  # of a rank r (d_in + d_out) r; others sync all weights
    both = [step(framework=name, **adapters)["phases_s"]["sync"] for name in ("verl", "nemo-rl")]
    linear = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert both == pytest.approx([1 + 0.015e-9 * 2 * linear, base["phases_s"]["sync"]])
    slow = step(transport="per-tensor")["phases_s"]["sync"] - 0.12
    assert slow / (step(transport="ipc")["phases_s"]["sync"] - 1.0) == pytest.approx(0.125 / 0.015)


def trainer_s(
    plan: str, tokens: Any = (1000,) * 16, *, model: str = "llama3-8b", **constants: Any
) -> TrainerTimes:
    """What the trainer of a job takes whose framework has other `constants`; samples of so many `tokens`."""
    job = mw.rl(**JOB | {"model": model, "train_plan": plan, "rollout_plan": "tp=4"}).step.job
    framework = msgspec.structs.replace(job.framework, **constants)
    return trainer_times(replace(job, framework=framework), np.array(tokens))


def test_what_reaches_ranks_and_the_loss_of_each_sample_take_time() -> None:
    """Of a token 24 bytes to score, 32 to train; to each of pp=2 ranks of 4 replicas, or once."""
    free = trainer_s("pp=2", send_s_per_byte=0.0, sample_s=0.0)
    for copies in (1, 2):
        found = trainer_s("pp=2", send_s_per_byte=1e-6, sample_s=0.5, sends_copies=copies > 1)
        sent_s = 1e-6 * copies * 16 * 1000
        assert found.scoring_s["reference"] - free.scoring_s["reference"] == pytest.approx(24 * sent_s)
        assert found.train_s - free.train_s == pytest.approx(32 * sent_s + 0.5 * 16 / 4)
    sends = {"send_s_per_byte": 1e-6, "sends_copies": False}
    padded_s, bare_s = (
        trainer_s("tp=1", [500, 1500], pads_samples=of, **sends).train_s for of in (True, False)
    )
    assert padded_s - bare_s == pytest.approx(32e-6 * (2 * 1500 - 2000))


def test_trainers_are_priced_as_they_run() -> None:
    """Megatron's stages are even; FSDP2 runs the modules of transformers, and hides nothing beside tp."""
    even, uneven = (trainer_s(f"pp=2,stages={stages}").train_s for stages in ("even", "17-15"))
    assert trainer_s("pp=2").train_s == even != uneven
    fsdp2, eager = "zero=3,implementation=fsdp2", "zero=3,implementation=huggingface,software=torch-2023"
    assert trainer_s(fsdp2) == trainer_s(eager)
    assert trainer_s(f"tp=2,{fsdp2}") == trainer_s(f"tp=2,sp=0,{eager},overlap_dp=0")
    experts: Any = {"plan": "ep=8,etp=1", "model": "qwen3-30b-a3b"}
    waits, sorts = (trainer_s(**experts, fuses_permutation=of).train_s for of in (False, True))
    assert waits > 1.1 * sorts
    assert trainer_s("pp=2", fuses_permutation=True) == trainer_s("pp=2")  # no experts
    qlora, lora = (trainer_s(f"lora_rank=16{frozen}") for frozen in (",frozen_dtype=int4", ""))
    assert qlora.scoring_s == lora.scoring_s  # adapters are off, weights are computed with in bf16


def test_a_job_that_does_not_fit_says_what_and_exits_with_1(meshwise: Any) -> None:
    words = "rl llama3-8b --cluster h100-80g-sxm:8 --prompts 8 --samples 8 --output 99 --mode colocated"
    done = meshwise(*words.split(), "--train-plan", "tp=8", "--teacher", "llama3-405b")
    assert done.code == 1 and "to score with the teacher a GPU needs" in done.out


def test_a_trainer_needs_the_memory_of_the_passes_that_are_priced() -> None:
    """What a framework runs may be stated too; logits have 6 bytes; judges stay in GPUs that only train."""

    def passes(plan: str = JOB["train_plan"], **others: Any) -> dict[str, dict[str, float]]:
        apart = {"mode": "one_step_off", "rollout_gpus": 4, "framework": "verl", "train_plan": plan}
        return mw.rl(**JOB | apart | others).step.pass_bytes

    nemo = {"framework": "nemo-rl=0.4"}  # later ones keep the optimizer where they score
    assert passes("pp=2,recompute=full,loss_fusion=log_probs", **nemo) == passes(**nemo)
    modules = ("implementation=fsdp2", "implementation=huggingface,software=torch-2023")
    totals = (sum(passes(f"zero=3,recompute=full,{each}")["update"].values()) for each in modules)
    assert next(totals) == pytest.approx(next(totals))
    few, many = (passes("tp=2", score_tokens=tokens)["reference"] for tokens in (2**15, 2**16))
    assert many["buffers"] - few["buffers"] == pytest.approx(2**15 * 128256 / 2 * 6, rel=0.1)
    assert many["optimizer"] > 0 == passes(**nemo)["reference"]["optimizer"]
    one = 2 * num_params(find_model("llama3-8b")) / 2  # of tp=2
    for copies, others in ((1, {}), (0, {"reference": False}), (0, {"plan": "tp=2,lora_rank=8"}), (0, nemo)):
        judges = passes(**{"plan": "tp=2"} | others)["update"]["judges"]
        assert judges == pytest.approx(copies * one, rel=1e-3)
    assert passes("tp=2", teacher="llama3-8b")["update"]["judges"] == pytest.approx(2 * one, rel=1e-3)


OPEN: dict[str, Any] = {"mode": "", "train_plan": "", "rollout_plan": "", "prompts": 8, "updates": 1}


def test_the_best_split_is_a_job_that_can_be_stated() -> None:
    """The first has the bound asked for and is the fastest of these; stated, it gives the same digits."""
    found = step(**OPEN)
    first, *others = found["best"]
    assert first["step_s"] == found["step_s"]
    assert {"colocated", "split", "async"} <= {one["mode"] for one in others}
    assert all(first["step_s"] <= one["step_s"] for one in others if one["mode"] != "async" and one["fits"])
    keys = ("mode", "train_plan", "rollout_plan")
    gpus = {} if first["mode"] == "colocated" else {"rollout_gpus": first["gpus"]["rollout"]}
    again = step(**OPEN | {key: first[key] or "tp=1" for key in keys} | gpus)
    assert again["step_s"] == first["step_s"]
    front = [(one["step_s"], one["num_gpus"], one["staleness"]) for one in found["pareto"]]
    assert front == sorted(front) and len({gpus for _, gpus, _ in front}) > 1
    for i, one in enumerate(front):
        assert not any(all(np.less_equal(faster[1:], one[1:])) for faster in front[:i])


def test_latent_attention_generates_in_groups_of_ranks() -> None:
    """Each has the caches of its own samples; parts of the cluster that ep=8 does not divide are left out."""
    job = {"model": "deepseek-v2-lite", "train_plan": "ep=8,recompute=full", "output": 4096}
    found = step(**job | {"rollout_plan": ""}, max_output=8192)
    others = (step(**job | {"rollout_plan": plan}, max_output=8192) for plan in ("tp=2", "tp=4", "tp=8"))
    assert "ep=" in found["rollout_plan"]
    assert all(found["generation_s"] < other["generation_s"] for other in others)


def test_the_search_for_a_split_says_how_far_it_is_and_can_be_ended() -> None:
    heard: list[str] = []

    def hear(so_far: str) -> None:
        heard.append(so_far)
        if len(heard) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError), telling(lambda done, total: None, hear):
        step(**OPEN)
    assert heard[-1] == "3 candidates looked at on 8 GPUs"


def test_a_dense_model_judges_samples_of_experts() -> None:
    asked: Any = {"prompts": 16, "samples": 8, "output": 500, "mode": "colocated", "rollout_plan": "tp=4"}
    judged = mw.rl("qwen3-30b-a3b", "h100-80g-sxm:16", train_plan="ep=8", reward_model="llama3-8b", **asked)
    assert judged.to_json()["scoring_s"]["reward"] > 0


def test_what_is_stated_stays() -> None:
    plan = "tp=2,recompute=full"
    for one in step(**OPEN | {"mode": "split", "rollout_gpus": 4, "train_plan": plan})["best"]:
        assert (one["mode"], one["gpus"]["rollout"], one["train_plan"]) == ("split", 4, plan)


def test_an_update_has_as_many_samples_for_each_data_parallel_rank() -> None:
    """NeMo-RL and verl refuse others: 64 samples over dp=3, stated; no open plan is one of those."""
    with pytest.raises(PlanError, match="the 64 samples of an update do not divide by dp=3 "):
        step(**OPEN | {"mode": "split", "rollout_gpus": 2, "train_plan": "tp=2"})
    found = mw.rl(**JOB | OPEN | {"model": "qwen3-8b", "mode": "split", "rollout_gpus": 2})
    assert {64 % one.job.train_dp for one in found.best} == {0}


def test_where_nothing_fits_the_answer_is_what_comes_nearest(meshwise: Any) -> None:
    for layout in ("llama3-405b", "qwen3-235b-a22b --mode split"):
        job = f"{layout} --cluster h100-80g-sxm:8 --prompts 16 --samples 8 --output 512"
        found = meshwise("rl", *job.split(), "--json")
        needed = [max(one["memory_bytes"].values()) for one in found.document["best"]]
        assert found.code == 1 and found.document["fits"] is False and needed == sorted(needed)
        short = {note.split()[1] for note in found.document["notes"] if "fit:" in note}
        assert short == {"training", "rollout"}


def test_plans_whose_stages_divide_the_layers_are_found_among_faster_ones() -> None:
    lengths: Any = {"samples": 16, "prompt": 512, "output": 1000, "max_output": 4096, "rollout_plan": "tp=16"}
    assert mw.rl("qwen3-235b-a22b", "h100-80g-sxm:128", prompts=64, mode="colocated", **lengths).step.fits


@pytest.mark.parametrize(("job", "stated"), table("tables")["rl"]["open"])
def test_no_stated_engine_or_split_is_faster_than_an_open_one(meshwise: Any, job: str, stated: str) -> None:
    asked = ("rl", *job.split(), "--samples", "16", "--json")
    assert meshwise(*asked).document["step_s"] <= meshwise(*asked, *stated.split()).document["step_s"]


LAUNCHED: dict[str, Any] = {
    "prompts": 16, "samples": 8, "prompt": 128, "max_output": 2048, "updates": 2, "rollout_plan": "tp=2",
    "memory_frac": 0.7, "pack_length": 4096, "score_tokens": 8192,
}  # fmt: skip


RECIPES = DATA / "recipes"
READ: dict[str, dict[str, Any]] = tomllib.loads((RECIPES / "read.toml").read_text())


@pytest.mark.parametrize("to", ["verl", "nemo-rl"])
@pytest.mark.parametrize(("mode", "plan"), READ["launched"], ids=str)
def test_a_launched_job_reads_as_the_same_job(
    to: str, mode: dict[str, Any], plan: str, tmp_path: Path
) -> None:
    """Settings, read again, give the step of the job to the last digit; verl counts tokens of each GPU."""
    job = mw.launch("llama3-8b", "h100-80g-sxm:16", plan, to=to, **LAUNCHED | mode)
    job.write(tmp_path)
    known = framework_arguments(to).arguments
    assert all(word.partition("=")[0] in known for word in job.arguments) and not job.not_expressed
    if to == "verl":
        tokens = 4096 // parse_plan(plan).cp
        assert f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}" in job.arguments
        assert ("rollout.total_rollout_steps=null" in job.arguments) == (mode["mode"] in ("split", "async"))
    read, unread = api.read_rl_job(tmp_path / ("job.sh" if to == "verl" else "recipe.yaml"))
    assert [text[:15] for text in unread] == ["the mean prompt"]
    same = mw.rl("llama3-8b", "h100-80g-sxm:16", output=512, **read)
    asked = LAUNCHED | mode | {"output": 512, "train_plan": plan, "framework": to}
    assert same.to_json() == mw.rl("llama3-8b", "h100-80g-sxm:16", **asked).to_json()


@pytest.mark.parametrize(("mode", "is_partial"), [("one_step_off", False), ("async", True)])
def test_answers_go_on_after_a_sync_where_verl_lets_them_by_default(
    mode: str, is_partial: bool, tmp_path: Path
) -> None:
    """As fully_async_ppo_trainer.yaml of v0.9.0 has it (partial_rollout); one_step_off_policy has none."""
    asked: Any = LAUNCHED | {"mode": mode, "rollout_gpus": 8}
    words = mw.launch("llama3-8b", "h100-80g-sxm:16", "tp=2", to="verl", **asked).command
    (tmp_path / "job.sh").write_text(re.sub(r"async_training.partial_rollout=\w+", "", words))
    read, _ = api.read_rl_job(tmp_path / "job.sh")
    usual = mw.rl("llama3-8b", "h100-80g-sxm:16", train_plan="tp=2", output=512, framework="verl", **asked)
    assert usual.step.job.partial is is_partial is bool(read.get("partial"))


def test_a_recipe_inherits_and_refers_to_other_settings() -> None:
    """As NeMo-RL's recipes are written (`defaults:`, `${mul:a,b}`); of verl's trainers FSDP is usual."""
    read, unread = api.read_rl_job(RECIPES / "longer.yaml")
    assert READ["longer"].items() <= read.items() and len(unread) == 1
    read, unread = api.read_rl_job(RECIPES / "longer.yaml", 4096)  # 8,192 tokens less a prompt that is stated
    assert (read["prompt"], read["max_output"], unread) == (4096, 4096, [])
    read, _ = api.read_rl_job(RECIPES / "verl.sh")
    assert read["train_plan"] == "cp=2,zero=3,recompute=full,implementation=fsdp2"
    assert (read["mode"], read["engine"]) == ("colocated", "vllm,max_tokens=8192,max_sequences=256")


@pytest.mark.parametrize("words", READ["beside"])
def test_what_a_script_says_is_read_or_listed(words: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(f"{READ['words']} {words}")
    wanted, (read, unread) = READ["beside"][words], api.read_rl_job(tmp_path / "job.sh")
    assert unread[-1].startswith(f"the mean prompt: {read['prompt']} tokens are taken")
    assert unread[:-1] == wanted.pop("unread", []) and wanted.items() <= read.items()


@pytest.mark.parametrize("to", ["verl", "nemo-rl"])
def test_candidates_are_what_the_framework_runs_and_no_simple_plan_is_faster(to: str) -> None:
    """Of 16 GPUs a pool has whole nodes; plans are ranked by what the trainer takes, not by full bins."""
    asked: Any = {"prompts": 16, "samples": 8, "output": 256, "mode": "one_step_off", "updates": 4}
    found = mw.rl("qwen2.5-7b", "h100-80g-sxm:16", framework=to, **asked)
    bars = [name for part in page(found).sections if isinstance(part, Chart) for name in part.marks[0].names]
    assert len({name.partition(": ")[2] for name in bars}) == len(bars) > 1
    first, *_ = written = [write_settings(one.job, to) for one in found.best]
    assert not any(one.not_expressed for one in written)
    assert mw.launch("qwen2.5-7b", "h100-80g-sxm:16", to=to, **asked).arguments == first.arguments
    for plan in map(parse_plan, ("recompute=full", "tp=2", "pp=2")):
        stated = rl_step(replace(found.step.job, train_plan=plan))
        assert found.step.step_s and stated.step_s and found.step.step_s <= 1.001 * stated.step_s


def test_what_a_framework_cannot_be_told() -> None:
    """What they refuse, and files that are no jobs: data/refusals.txt."""

    def state(to: str, plan: str = "pp=2", **others: Any) -> Any:
        asked = LAUNCHED | {"mode": "colocated"} | others
        return mw.launch("llama3-8b", "h100-80g-sxm:16", plan, to=to, **asked)

    untold = ("vpp=2", "schedule=interleaved", "offload_optimizer=0.5")
    said = state("nemo-rl", "pp=2,vpp=2,offload_optimizer=0.5").not_expressed
    assert said == tuple(f"{key}: no setting says it" for key in untold)
    for to, name, value in READ["untold"]:
        (said,) = state(to, **{name: value}).not_expressed
        assert said.startswith(f"{name}={value}: ")
    kinds = ("recompute=selective,implementation=fsdp2", "recompute=selective")
    fsdp2, plain = ("".join(state("nemo-rl", plan).not_expressed) for plan in kinds)
    assert "FSDP2's trainer recomputes all" in fsdp2 and "FSDP2" not in plain
    dapo = state("nemo-rl", algorithm="dapo", oversample=1.5)
    assert {"grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5"} < {*dapo.arguments}
    assert "recipe.yaml: copy it" in "".join(dapo.elsewhere)  # beside what it inherits from
    assert not dapo.not_expressed and "512 tokens are taken" in state("verl", "").elsewhere[-1]


def test_a_step_log_beside_the_prediction(meshwise: Any, tmp_path: Path) -> None:
    job = mw.launch("llama3-8b", "h100-80g-sxm:8", "pp=2,recompute=full", to="verl", **LAUNCHED | {
        "mode": "colocated", "prompts": 64, "samples": 32, "updates": 4, "rollout_plan": "tp=1"})  # fmt: skip
    job.write(tmp_path)
    words = ("--model", "llama3-8b", "--cluster", "h100-80g-sxm:8", "--from", str(tmp_path / "overrides.txt"))
    found = meshwise("explain", "--rl-log", str(RECIPES / "verl.log"), *words, "--json").document
    measured = {row["phase"]: row["measured_s"] for row in found["rows"]}
    assert found["num_steps"] == 5 and found["step_s"]["measured"] == pytest.approx(112.0)
    assert (measured["scoring"], measured["wait"]) == pytest.approx((17.5, 112 - 60 - 17.5 - 28))
    for side in ("measured", "predicted"):
        assert sum(row[f"{side}_s"] for row in found["rows"]) == pytest.approx(found["step_s"][side])
    assert any(finding.startswith("look first at") for finding in found["findings"])
    stated = ("--prompt", "512", "--output", "512", "--no-old-logprobs", "--json")  # 512 is the default too
    said = meshwise("rl", *words[1:], *stated).document
    assert said["from"]["unread"] == [] and [*said["scoring_s"]] == ["reference"]
    assert "generation takes 49% of a step" in meshwise("explain", "--rl-log", str(RECIPES / "nemo.log")).out
    again = api.explain_rl(RECIPES / "verl.log", "llama3-8b", "h100-80g-sxm:8", tmp_path / "overrides.txt")
    assert again.step and (again.step.job.rollouts.prompt, again.step.job.rollouts.output) == (100, 795)


def test_a_version_falls_back_to_the_newest_that_is_not_newer() -> None:
    found = {"nemo-rl": "0.7", "nemo-rl=0.3": "0.3", "nemo-rl=0.6": "0.4", "nemo-rl=0.1": "0.3"}
    assert {text: find_framework(text).version for text in found} == found
    assert find_framework("nemo-rl=0.6").source.endswith("; 0.6 itself was not read")


def test_measured_steps_are_predicted_by_their_framework_and_by_others(meshwise: Any) -> None:
    """Of NeMo-RL: its v0.3 blog (quoted in its issue 959), docs/about/performance-summary.md at v0.4."""
    table = str(RECIPES.parent / "validate" / "rl_steps.csv")
    found = meshwise("validate", "--rl", table, "--json").document
    words = ("--leave-one-source-out", "--json")  # by the other version already
    assert meshwise("validate", "--rl", table, *words).document == found
    steps = {row["id"]: row for row in found["rows"] if row["quantity"] == "step_s"}
    assert set(found["summary"]) == {"step_s", "generation_s", "scoring_s", "train_s"}
    assert "column chip is empty" in steps["no chip"]["reason"]
    documented = (RECIPES.parents[2] / "docs" / "data.md").read_text()
    assert all(f"`{name}`" in documented for name in " ".join(_NAMES["rl_columns"].values()).split())
    for name in ("blog", "docs"):
        assert abs(steps[name]["error_frac"]) < 0.12 and abs(steps[name]["left_out_error_frac"]) < 0.2
        assert steps[name]["interval"]["p10"] < steps[name]["measured"] < steps[name]["interval"]["p90"]
