"""Settings of other frameworks: allowed by their argument lists, complete, and refused where they refuse."""

import ast
import re
import subprocess
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

import meshwise as mw
from data_tables import DATA, table, values
from meshwise.calibrate.express import ENTRIES
from meshwise.launch.arguments import framework_arguments, read_value
from meshwise.launch.runs import runs
from meshwise.launch.settings import FINETUNING, FRAMEWORKS, SERVING, TRAINING
from meshwise.launch.tables import VALUE, table_of
from meshwise.model.architecture import is_moe_layer
from meshwise.plan.implementation import IMPLEMENTATIONS, Implementation
from test_one_path import VALUES

CLUSTER = "h100-80g-sxm:64"
JOBS = DATA / "jobs"
WRITTEN, READ = table("jobs/written"), table("jobs/read")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_argument_of_a_table_exists(framework: str) -> None:
    """With a value that the framework's own list allows, where the table states one."""
    listed = framework_arguments(framework)
    known = listed.arguments
    assert listed.version and listed.source and listed.date.startswith("2026-")
    for fact, setting in table_of(framework).items():
        for option in setting.values():
            for name, value in option.settings.items():
                assert name in known, fact
                assert value is VALUE or read_value(framework, name, value) is not None


def test_a_value_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(mw.MeshwiseError, match="--cp-comm-type does not take ring; it takes p2p"):
        read_value("megatron-lm", "--cp-comm-type", "ring")


OF_VALUES = ("sp", "cp", "vpp", "zero", "zero_group", "recompute", "loss_fusion", "grad_dtype", "attention")
OF_VALUES += ("offload_optimizer", "overlap_dp", "overlap_tp", "overlap_pp", "ep", "dispatch")
CHOICES = {key: VALUES[key] for key in OF_VALUES} | values("launched")


@st.composite
def plans(draw: Any, keys: tuple[str, ...] = tuple(CHOICES), **fixed: Any) -> mw.Plan:
    """Plans with a handful of keys stated."""
    stated = draw(st.sets(st.sampled_from(keys), max_size=6))
    try:
        return mw.Plan(**{key: draw(st.sampled_from(CHOICES[key])) for key in sorted(stated)}, **fixed)
    except mw.MeshwiseError:
        assume(False)
        raise


def launched(framework: str, model: str, plan: mw.Plan, microbatch: int = 1) -> Any:
    try:
        return mw.launch(model, CLUSTER, plan, to=framework, batch=128, seq=4096, microbatch=microbatch)
    except mw.MeshwiseError as error:
        assert "\n" not in str(error)
        assume(False)


MODELS = ["llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "phi-4"]


@given(st.sampled_from(TRAINING), st.sampled_from(MODELS), plans())
def test_nothing_of_a_plan_is_dropped(framework: str, model: str, plan: mw.Plan) -> None:
    """Two plans whose jobs are alike, word for word, cost the same."""
    job = launched(framework, model, plan)
    other = launched(framework, model, mw.Plan())
    if (job.arguments, job.files, job.not_expressed) == (other.arguments, other.files, other.not_expressed):
        prices = [mw.estimate(model, CLUSTER, one, batch=128, seq=4096) for one in (plan, mw.Plan())]
        assert prices[0].step_s == prices[1].step_s
        assert prices[0].memory_bytes == prices[1].memory_bytes


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_files_are_written_whole(meshwise: Any, tmp_path: Path, framework: str) -> None:
    cluster, plan = ("4090:1", "lora_rank=8") if framework in FINETUNING else ("h100-80g-sxm:8", "tp=8")
    words = ("launch", "llama3-8b", "--cluster", cluster, "--plan", plan, "--batch", "8")
    folder = tmp_path / "job"
    done = meshwise(*words, "--seq", "4096", "--to", framework, "-o", str(folder), "--json")
    assert done.code == 0
    document = done.document
    assert {"framework", "version", "files", "arguments", "not_expressed"} <= set(document)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        file["path"]: file["text"] for file in document["files"]
    }
    for path in folder.glob("job.*"):
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(
    ("model", "lost"), [("qwen3-vl-8b", 0), ("deepseek-v4-flash", 6), ("nemotron-3-nano", 2)]
)
def test_what_a_model_loses_is_told_in_a_few_words(model: str, lost: int) -> None:
    """Without images a tower is no part of it."""
    job = mw.launch(model, "h200-sxm:64", "", to="megatron-lm", batch=64, seq=8192)
    assert len(job.not_expressed) == lost
    assert all(len(sentence) < 150 for sentence in job.not_expressed)


def test_serving_spreads_experts_over_all_ranks_and_tells_each_node_of_the_others() -> None:
    """SGLang divides the running requests that it is told among its dp ranks, vLLM counts those of each."""
    words: Any = {"batch": 256, "seq": 8192}
    vllm, sglang = (
        mw.launch("deepseek-v3", "h200-sxm:16", "tp=8,ep=16", to=name, **words) for name in SERVING[:2]
    )
    of, other = (dict(zip(job.arguments, job.arguments[1:], strict=False)) for job in (vllm, sglang))
    assert "--enable-expert-parallel" in of and of["--max-num-seqs"] == "128"
    told = ("--tp-size", "--dp-size", "--max-running-requests", "--nnodes")
    assert [other[name] for name in told] == ["16", "2", "256", "2"]
    assert "--data-parallel-size-local 1 --data-parallel-start-rank $((SLURM_NODEID * 1))" in vllm.command
    assert "--node-rank $SLURM_NODEID --dist-init-addr $MASTER_ADDR:" in sglang.command
    whole = mw.launch("llama3-405b", "h200-sxm:16", "tp=16", to="vllm", **words).command
    assert "--nnodes 2 --node-rank $SLURM_NODEID --master-addr $MASTER_ADDR" in whole
    lost = mw.launch("mixtral-8x7b", "h200-sxm:8", "tp=8,ep=4,etp=2", to="vllm", **words).not_expressed
    assert any(sentence.startswith("ep=4") for sentence in lost)
    assert set(SERVING) < set(FRAMEWORKS)


@pytest.mark.parametrize(("model", "cluster", "plan", "told", "lost"), table("serving")["told"])
def test_formats_and_exchanges_are_said(
    model: str, cluster: str, plan: str, told: list[str], lost: str
) -> None:
    """As flags (`--quantization`, what sends tokens to experts), or among what is not expressed."""
    flags = r"--quantization \S+|--\S*(?:a2a|all2all)\S* \S+|--enable\S*(?:dbo|overlap)"
    for framework, wanted in zip(SERVING, told, strict=False):
        job = mw.launch(model, cluster, plan, to=framework, batch=64, seq=4096)
        assert " ".join(re.findall(flags, " ".join(job.arguments))) == wanted
        assert wanted or lost in str(job.not_expressed)


# --- and back ----------------------------------------------------------------------------------


def test_pipelines_that_no_layers_fill_are_refused_at_once(tmp_path: Path) -> None:
    layout = "pretrain_gpt.py --num-layers 32 --pipeline-model-parallel-layout 'Et*17|t*15L'"
    for job, says in (
        ("-m torchtitan.train --parallelism.pipeline_parallel_degree 214740", "pp=214740"),
        (f"{layout} --pipeline-model-parallel-size 3", "2 parts, which pp=3 does not divide"),
    ):
        (tmp_path / "job.sh").write_text(f"torchrun --nproc-per-node 8 {job}")
        with pytest.raises(mw.MeshwiseError, match=says):
            plan = mw.read_job(tmp_path / "job.sh", CLUSTER).plan
            mw.estimate("llama3-8b", CLUSTER, plan, batch=8, seq=128)


@pytest.mark.parametrize("name", READ)
def test_a_job_is_read(name: str) -> None:
    """As a table says: of a job the fields, of its model too, and which layers have experts."""
    job, says = mw.read_job(JOBS / name), READ[name]
    stated = dict(says.get("job", {}))
    assert job.plan == mw.parse_plan(stated.pop("plan", mw.plan_text(job.plan)))
    for word, sentence in zip(stated.pop("unread", job.unread), job.unread, strict=True):
        assert word in sentence
    assert {key: getattr(job, key) for key in stated} == stated
    model = says.get("model", {})
    if isinstance(model, str):
        assert job.model == mw.find_model(model)
    elif model or "experts" in says:
        assert {key: attrgetter(key)(job.model) for key in model} == model
        experts = [is_moe_layer(job.model, layer) for layer in range(job.model.num_layers)]
        assert experts == says.get("experts", experts)
    else:
        assert job.model is None


def test_overrides_of_a_recipe_are_read(tmp_path: Path) -> None:
    """The YAML file and the command line say the same; what they leave out is the recipe's."""
    words = {"batch": 128, "seq": 8192, "microbatch": 2}
    plan = mw.Plan(
        tp=4, pp=2, vpp=2, stages="even", cp=2, zero=1, recompute="full", dtype="fp8", param_dtype="fp8"
    )
    job = mw.launch("llama3-8b", CLUSTER, plan, to="megatron-bridge", **words)
    job.write(tmp_path)
    found = [mw.read_job(tmp_path / name, CLUSTER) for name in ("overrides.yaml", "job.sbatch")]
    assert {one.framework for one in found} == {"megatron-bridge"}
    assert [one.plan for one in found] == [plan, plan]
    assert [(one.batch, one.seq, one.microbatch) for one in found] == [(128, 8192, 2)] * 2
    assert found[0].model.ffn_hidden == mw.find_model("llama3-8b").ffn_hidden
    assert found[0].unread and all("recipe" in sentence for sentence in found[0].unread)
    text = (tmp_path / "overrides.yaml").read_text().replace("  seq_length: 8192", "  seq_length: 4096", 1)
    (tmp_path / "lengths.yaml").write_text(text)
    assert mw.read_job(tmp_path / "lengths.yaml").unread[0].startswith("model.seq_length=4096 is not")


def test_what_a_job_needs_or_does_beside_its_plan_is_told() -> None:
    for cluster, plan, of in (
        ("mi355x:64", "ep=8,dispatch=per_rank", "deepep=ROCm: "),
        ("h100-80g-sxm:64", "dtype=fp8,param_dtype=fp8", "fp8_recipe=tensorwise: "),
    ):
        job = mw.launch("qwen3-30b-a3b", cluster, plan, to="megatron-bridge", batch=64, seq=4096)
        assert not job.not_expressed and any(one.startswith(of) for one in job.elsewhere)


SAID, FIXED = {"megatron-lm": tuple(CHOICES)} | WRITTEN["said"], WRITTEN["fixed"]
"""Keys of which a framework says at least some values, and others that it needs to have one value."""


@given(st.sampled_from(TRAINING), st.sampled_from(MODELS), st.data())
def test_a_grid_has_what_is_written_whole(framework: str, model: str, data: Any) -> None:
    """What `search --to` leaves out is what `launch` refuses or cannot say."""
    keys = SAID.get(framework, tuple(CHOICES))
    plan = data.draw(plans(keys=keys, **FIXED.get(framework, {})))
    job = {"batch": 128, "seq": 4096}
    try:
        of = mw.estimate(model, CLUSTER, plan, **job)
    except mw.MeshwiseError:
        assume(False)
    try:
        whole = not mw.launch(model, CLUSTER, plan, to=framework, **job).not_expressed
    except mw.MeshwiseError:
        whole = False
    assert np.all(runs((framework,), of.model, of.mesh)) == whole


def read_back(framework: str, job: Any, folder: Path, cluster: str = CLUSTER) -> Any:
    job.write(folder)
    names = {"deepspeed": "ds_config.json", "accelerate": "accelerate.yaml"}
    return mw.read_job(folder / names.get(framework, "job.sbatch"), cluster)


@given(st.sampled_from(["megatron-lm", "torchtitan", "deepspeed", "accelerate"]), st.data())
def test_a_job_that_says_all_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, framework: str, data: Any
) -> None:
    """Where nothing of a plan is lost, what is read costs the same and is written the same."""
    model = data.draw(st.sampled_from(MODELS if framework == "megatron-lm" else ["llama3-8b"]))
    plan = data.draw(plans(keys=SAID[framework], **FIXED.get(framework, {})))
    job = launched(framework, model, plan)
    lost = {sentence.partition("=")[0] for sentence in job.not_expressed}
    assume(lost <= {"model.mtp_layers"})
    found = read_back(framework, job, tmp_path_factory.mktemp("job"))
    assert found.framework == framework
    assert not [sentence for sentence in found.unread if "not in this file" not in sentence]
    shape = found.model or model
    prices = [mw.estimate(model, CLUSTER, one, batch=128, seq=4096) for one in (plan, found.plan)]
    if framework in ("megatron-lm", "torchtitan"):  # others leave recompute and the optimizer to the script
        assert prices[0].step_s == prices[1].step_s
        assert prices[0].memory_bytes == prices[1].memory_bytes
    again = mw.launch(shape, CLUSTER, found.plan, to=framework, batch=found.batch or 128,
                      seq=found.seq or 4096, microbatch=found.microbatch)  # fmt: skip
    if framework in ("megatron-lm", "torchtitan"):
        assert (again.arguments[4:], again.not_expressed) == (job.arguments[4:], job.not_expressed)
    else:
        assert again.files[0] == job.files[0]


@pytest.mark.parametrize(("model", "plan", "to", "code", "says"), WRITTEN["priced_again"])
def test_what_is_written_is_priced_again(
    meshwise: Any, model: str, plan: str, to: str, code: int, says: tuple[str, ...]
) -> None:
    """It costs what was asked unless `not_expressed` says why not; a job that does not fit ends with 1."""
    words = ("launch", model, "--plan", plan, *f"--cluster {CLUSTER} --batch 64 --seq 4096 --to {to}".split())
    shown = meshwise(*words)
    assert shown.code == code
    assert all(text in shown.out for text in ("as written: ", *says))
    document = meshwise(*words, "--json").document
    asked = mw.estimate(model, CLUSTER, plan, batch=64, seq=4096)
    if not document["not_expressed"]:
        assert document["as_written"]["step_s"] == pytest.approx(asked.step_s, rel=1e-9)
    assert document["as_written"]["fits"] is (code == 0)


@pytest.mark.parametrize(("model", "plan", "to", "says"), WRITTEN["refused"])
def test_what_a_framework_refuses_is_refused(model: str, plan: str, to: str, says: str) -> None:
    with pytest.raises(mw.MeshwiseError, match=says):
        mw.launch(model, CLUSTER, plan, to=to, batch=64, seq=65536)


@pytest.mark.parametrize(("model", "cluster", "plan", "to", "words"), WRITTEN["words"])
def test_what_a_framework_asks_for_is_written(
    tmp_path: Path, model: str, cluster: str, plan: str, to: str, words: str
) -> None:
    """And the whole is read as the plan that it is."""
    job = mw.launch(model, cluster, plan, to=to, batch=64, seq=4096)
    assert any(words in file.text for file in job.files)
    job.write(tmp_path)
    assert not [one for one in mw.read_job(tmp_path / "job.sbatch").unread if "recipe" not in one]
    assert job.as_written is not None and job.as_written.is_asked


def test_what_experts_are_priced_with_is_written_and_missed(tmp_path: Path) -> None:
    job = mw.launch("mixtral-8x7b", CLUSTER, "tp=2,ep=8,etp=1", to="megatron-lm", batch=64, seq=4096)
    switches = ("--moe-grouped-gemm", "--moe-permute-fusion", "--cross-entropy-loss-fusion")
    assert set(switches) <= set(job.arguments)
    assert {"--moe-token-dispatcher-type", "--overlap-grad-reduce"} <= set(job.arguments)
    text = job.files[0].text.replace("--moe-grouped-gemm\n", "")
    (tmp_path / "job.sh").write_text(text)
    (unread,) = mw.read_job(tmp_path / "job.sh", CLUSTER).unread
    assert unread.startswith("--moe-grouped-gemm and --moe-permute-fusion are not both set")


PRICED = ("parts", "losses", "shards_each_weight", "fuses_norms", "sorts_arrivals")
"""Fields of an implementation that say what its ops are; the others say what it cannot do."""
SAYS = table("exceptions")["implementation_said"]
"""Where a framework says a field of an implementation; DeepSpeed and Accelerate leave modules to a script."""


@pytest.mark.parametrize("framework", TRAINING)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_assumption_of_an_implementation_is_said(framework: str, name: str) -> None:
    """By a flag, by the model that a script builds, or among what is not expressed."""
    plan = mw.Plan(implementation=name, zero=3, loss_fusion="kernels", cp_kind="all_gather")
    model = "mixtral-8x7b" if IMPLEMENTATIONS[name].sorts_arrivals else "llama3-8b"
    job = mw.launch(model, CLUSTER, plan, to=framework, batch=64, seq=4096)
    said = " ".join((*job.arguments, *job.elsewhere, *(file.text for file in job.files)))
    lost = any(sentence.startswith(f"implementation={name}: ") for sentence in job.not_expressed)
    for field in () if lost else PRICED:
        if getattr(IMPLEMENTATIONS[name], field) != getattr(Implementation(software=""), field):
            by_script = f"as implementation={name}" if field != "shards_each_weight" else None
            assert SAYS.get(f"{framework} {field}", by_script or "?") in said, field
    switches = dict.fromkeys(("deepspeed", "accelerate"), "--use_liger_kernel")
    switches |= {"megatron-lm": "--cross-entropy-loss-fusion", "torchtitan": "--compile.enable"}
    loss_is_lost = any(sentence.startswith("loss_fusion=") for sentence in job.not_expressed)
    assert loss_is_lost or switches.get(framework, "cross_entropy_loss_fusion") in said


@pytest.mark.parametrize(
    ("cluster", "hosts"), [("gb300:256", "64 4"), ("mi250x:32", "4 8"), ("h100:12", "3 4")]
)
def test_hosts_start_as_many_ranks_as_they_have_gpus(cluster: str, hosts: str) -> None:
    """A tray of an NVL72 rack has four GPUs, a node eight halves of an MI250X."""
    job = mw.launch("llama3-8b", cluster, "zero=3", to="torchtitan", batch=768, seq=4096)
    nodes, _, each, *_ = job.command.partition("--nnodes ")[2].split()
    assert f"{nodes} {each}" == hosts
    assert any("do not fill hosts of 8" in one for one in job.not_expressed) == (cluster == "h100:12")


@pytest.mark.parametrize("framework", sorted(TRAINING))
def test_a_job_is_priced_as_the_software_of_its_framework(tmp_path: Path, framework: str) -> None:
    """The generation that `validate` takes for its runs of today."""
    job = mw.launch("llama3-8b", CLUSTER, "zero=3", to=framework, batch=64, seq=4096)
    name_there = "transformers" if framework in ("deepspeed", "accelerate") else framework
    usual = next(entry for entry in ENTRIES if name_there in entry.names and entry.until > "2026-11")
    assert read_back(framework, job, tmp_path).plan.software == usual.software


def test_norms_of_latents_are_told_and_read(tmp_path: Path) -> None:
    """Megatron Core leaves them out without `--qk-layernorm`; merges are of the vocabulary of GPT-2."""
    job = mw.launch("deepseek-v3", CLUSTER, "ep=8", to="megatron-lm", batch=64, seq=4096)
    assert "--qk-layernorm" in job.arguments
    text = job.files[0].text.replace("--vocab-size", "--merge-file $4 --lr $5 #")
    (tmp_path / "job.sh").write_text(text)
    model = mw.read_job(tmp_path / "job.sh", CLUSTER).model
    assert model is not None and model.mla and not model.qk_norm and model.vocab == 50257


def test_estimate_and_search_take_a_file(meshwise: Any) -> None:
    words = ("--cluster", "h100-80g-sxm:32", "--from", str(JOBS / "megatron.sh"), "--json")
    priced = meshwise("estimate", *words).document
    assert priced["plan"]["tp"] == 4
    assert priced["workload"]["batch"] == 128
    assert priced["from"]["unread"]
    found = meshwise("search", *words).document
    assert found["beside"]["step_s"] == pytest.approx(priced["step_s"], rel=1e-12)
    assert found["best"][0]["step_s"] <= found["beside"]["step_s"]
    shown = meshwise("search", *words[:-1])
    assert "tp=4" in shown.out
    assert "--cuda-graph-impl" in shown.out


@pytest.mark.parametrize(("text", "sentence"), table("tables")["launch"]["no_jobs"])
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "job").write_text(text)
    with pytest.raises(mw.MeshwiseError, match=sentence):
        mw.read_job(tmp_path / "job")


def test_a_value_of_two_settings_is_read_from_those_stated(tmp_path: Path) -> None:
    script = "torchrun --nproc-per-node 8 x.py --deepspeed d.json --bf16 --per_device_train_batch_size 2"
    (tmp_path / "job.sh").write_text(script)
    for size in ('"auto"', "2", "4"):
        sizes = f'"train_micro_batch_size_per_gpu": {size}, "gradient_accumulation_steps": 8'
        text = f'{{"zero_optimization": {{"stage": 3}}, {sizes}, "fp16": {{"enabled": "auto"}}}}'
        (tmp_path / "d.json").write_text(text)
        if size == "4":
            with pytest.raises(mw.MeshwiseError, match="is 4 and --per_device_train_batch_size 2"):
                mw.read_job(tmp_path / "job.sh")
            continue
        job = mw.read_job(tmp_path / "job.sh")
        assert (job.batch, job.microbatch, job.plan.dtype, job.plan.zero, job.unread) == (
            128,
            2,
            "bf16",
            3,
            (),
        )


def test_deepspeed_under_accelerate_and_variables_of_slurm_are_read(tmp_path: Path) -> None:
    lines = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
    (tmp_path / "a.yaml").write_text(lines)
    script = """#SBATCH -N 2
#SBATCH --gres=gpu:h100:8
export LAUNCHER="accelerate launch --config_file a.yaml \\
  --num_processes $((SLURM_NNODES * SLURM_GPUS_ON_NODE)) --num_machines $SLURM_NNODES \\
  "
export ARGS=" \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16
"
srun $LAUNCHER x.py $ARGS
"""
    (tmp_path / "job.sh").write_text(script)
    job = mw.read_job(tmp_path / "job.sh")
    assert (job.framework, job.batch, job.plan.zero, job.plan.dtype) == ("deepspeed", 128, 3, "bf16")
    (tmp_path / "job.sh").write_text(script.replace("-N 2", ""))
    with pytest.raises(mw.MeshwiseError, match="of num_processes is not in the file; write it out"):
        mw.read_job(tmp_path / "job.sh")


@pytest.mark.parametrize(
    ("strategy", "zero", "group"),
    [("FULL_SHARD", 3, None), ("SHARD_GRAD_OP", 2, None), ("HYBRID_SHARD", 3, 8), ("NO_SHARD", 0, None)],
)
def test_strategies_of_fsdp1_are_read(tmp_path: Path, strategy: str, zero: int, group: int | None) -> None:
    lines = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: {strategy}\n"
    (tmp_path / "a.yaml").write_text(f"{lines}mixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\n")
    sizes = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16 --gradient_checkpointing"
    (tmp_path / "job.sh").write_text(f"accelerate launch --config_file a.yaml x.py {sizes}")
    job = mw.read_job(tmp_path / "job.sh")
    assert (job.batch, job.plan.zero, job.plan.zero_group, job.plan.recompute) == (128, zero, group, "full")
    assert (job.plan.dtype, job.unread) == ("bf16", ())


def test_scripts_of_one_card_are_python_that_says_the_plan() -> None:
    """Arguments are those of the list; peft says the plan whole, and what Unsloth does otherwise is told."""
    plan = "lora_rank=16,frozen_dtype=int4,optimizer=adam-fp32,recompute=full,implementation=huggingface"
    plan, words = f"{plan},loss_chunks=8", {"batch": 16, "seq": 2048, "microbatch": 2}
    scripts = {}
    for framework in ("peft", "unsloth"):
        job = mw.launch("Qwen/Qwen3-8B", "4090:1", plan, to=framework, **words)
        tree = scripts[framework] = ast.parse(job.files[0].text)
        calls = {ast.unparse(one.func): one for one in ast.walk(tree) if isinstance(one, ast.Call)}
        known = framework_arguments(framework).arguments
        for name, call in calls.items():
            callee = name.rpartition(".")[2]
            stated = {word.arg: word.value for word in call.keywords}
            for argument in stated if any(one.startswith(f"{callee}.") for one in known) else ():
                assert f"{callee}.{argument}" in {*known, *OF_SCRIPTS}
        sizes = {word.arg: ast.unparse(word.value) for word in calls["SFTConfig"].keywords}
        assert sizes["per_device_train_batch_size"] == "2" and sizes["gradient_accumulation_steps"] == "8"
        assert sizes["max_length"] == "2048" and sizes["packing"] == "True"
        assert "'Qwen/Qwen3-8B'" in ast.unparse(tree)
        assert bool(job.not_expressed) == (framework == "unsloth")
    assert "bnb_4bit_use_double_quant=True" in (text := ast.unparse(scripts["peft"]))
    assert "target_modules='all-linear'" in text  # of models that join layers too
    several = mw.launch("Qwen/Qwen2.5-0.5B", "4090:4", f"{plan},zero=0", to="peft", **words)
    assert "accelerate launch --config_file" in several.command and not several.not_expressed
    assert "MULTI_GPU" in several.files[1].text and "fsdp" not in several.files[1].text
    assert '"Qwen/Qwen2.5-0.5B"' in several.files[0].text  # of which the preset's source alone tells
    found = mw.search(
        "Qwen/Qwen3-8B", "4090:4", plan="lora_rank=16,frozen_dtype=int4", to="peft", batch=16, seq=2048
    )
    assert found.best[0].plan.implementation == "huggingface" and found.bases[0].runs_in == ("peft",)
    large = mw.search(
        "llama2-70b", "a100-40g-sxm:8", plan="lora_rank=16,frozen_dtype=int4", to="peft", batch=16, seq=2048
    )
    several = mw.launch("llama2-70b", "a100-40g-sxm:8", large.best[0].plan, to="peft", batch=16, seq=2048)
    assert large.best[0].plan.zero >= 2 and "distributed_type: FSDP" in several.files[1].text
    assert 'quant_storage="bfloat16"' in several.files[0].text and not several.not_expressed
    full = mw.launch("qwen3-0.6b", "4090:1", "optimizer=adam-bf16,loss_chunks=8", to="peft", **words)
    assert "import LoraConfig" not in full.files[0].text and "BitsAndBytes" not in full.files[0].text
    of_path = DATA / "configs" / "phi-3-mini-4k.json"
    job = mw.launch(of_path, "4090:1", plan, to="peft", **words)
    assert f'from_pretrained(\n    "{of_path.parent}"' in job.files[0].text


OF_SCRIPTS = {"SFTConfig.output_dir", "from_pretrained.quantization_config"}
"""What a script states beside the plan."""
