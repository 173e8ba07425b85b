"""`launch`: the files and the command line that start a plan under a framework.

The plan is resolved first, so only plans that divide model, batch and cluster are written. Each framework has
a table of its settings (`tables.py`); here are the forms in which they are written: flags, JSON, YAML, and a
Slurm script around the command.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from meshwise.core.errors import PlanError
from meshwise.core.files import write_files
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse, told
from meshwise.core.toml import nested
from meshwise.core.yaml import yaml_text
from meshwise.estimate.one_plan import estimate
from meshwise.launch.arguments import framework_arguments, read_value
from meshwise.launch.bridge import bridge_settings
from meshwise.launch.facts import Facts, facts_of
from meshwise.launch.finetune import model_id, peft_script, unsloth_script
from meshwise.launch.runs import check
from meshwise.launch.settings import FINETUNING, FRAMEWORKS, TRAINING, Settings, training_on, write_settings
from meshwise.launch.shape import shape_of, unsaid
from meshwise.launch.tables import constants_of, launch_tables
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.plan.rules import resolve
from meshwise.plan.workload import Workload

ELSEWHERE = ("batch", "seq", "model", "recipe", "quant_storage", "fp8_recipe", "deepep")
"""What no argument of some frameworks says, but the data, the training script, a recipe, or how it loads."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to write: its name in the folder of the job, and what it holds."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class AsWritten:
    """The price of a job's own files; `is_asked`: it is that of the plan."""

    step_s: float
    memory_bytes: float
    fits: bool
    is_asked: bool


@dataclass(frozen=True, slots=True, repr=False)
class Launch(Shown):
    """What starts a plan under a framework.

    `arguments` are those of the framework's own program; `not_expressed` says, one sentence each, what the
    framework cannot be told, `elsewhere` what the data, the training script or a recipe says.
    """

    framework: str
    version: str
    files: tuple[File, ...]
    arguments: tuple[str, ...]
    not_expressed: tuple[str, ...]
    elsewhere: tuple[str, ...]
    command: str
    as_written: AsWritten | None = None
    rows_in: ClassVar[str] = "files"

    @property
    def runs_as_priced(self) -> bool:
        """Whether what is written fits, and differs from the plan only in what `not_expressed` names."""
        found = self.as_written
        return found is None or (found.fits and (found.is_asked or bool(self.not_expressed)))

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise launch --json` prints."""
        return msgspec.to_builtins(self)

    def write(self, folder: Path) -> list[Path]:
        """Write all files, or none, into `folder`, which is made where it is missing; else DataError."""
        return write_files(folder, {file.path: file.text for file in self.files})


def launch(
    model: Model, cluster: Cluster, plan: Plan, workload: Workload, framework: str,
    more: Settings | None = None,
) -> Launch:  # fmt: skip
    """What starts `plan` on all of `cluster` under `framework`, with `more` of its settings.

    Raises:
        PlanError: The plan does not divide model or cluster, or the framework refuses it.
        WorkloadError: The batch does not divide into microbatches.
    """
    runs, names = framework not in TRAINING or framework in training_on(cluster.chip), ", ".join(FRAMEWORKS)
    refuse("framework", PlanError, to=framework, names=names, runs=runs, of=model, on=cluster)
    mesh = resolve(model, plan, workload, cluster)
    if mesh.trains:  # layers are placed by what they cost
        mesh = estimate(model, cluster, plan, workload).mesh
    node = cluster.num_chips // cluster.num_hosts
    facts = shape_of(model, workload.seq) | facts_of(model, mesh, cluster)
    facts |= {"num_nodes": cluster.num_hosts, "kv_heads": model.num_kv_heads, "model": model}
    facts |= {"mtp_layers": model.mtp_layers, "trained_seq": model.max_seq}
    check(framework, facts)
    settings, lost = write_settings(framework, facts)
    settings = constants_of(framework) | settings | (more or {})
    if settings.get("distributed_type") == "MULTI_GPU":  # plain data parallelism takes no sections of FSDP
        settings = {name: value for name, value in settings.items() if not name.startswith(("fsdp", "para"))}
    if framework == "megatron-bridge":
        settings, without_name = bridge_settings(settings)
        lost |= {sentence: sentence for sentence in without_name}
    settings = {name: value and read_value(framework, name, value) for name, value in settings.items()}
    lost |= _model_not_expressed(framework, model, plan)
    flags, files = _forms(framework, settings, model, facts)
    lacks = told("hosts of a job", cluster=cluster, node=node, num_nodes=facts["num_nodes"])
    lost |= {sentence: sentence for sentence in lacks}
    beside = {file.path: f'"${{JOB:-.}}"/{file.path}' for file in files}
    command = _command(
        framework, [beside.get(word) or shlex.quote(word) for word in flags], model, facts, node
    )
    script = File("job.sbatch", _slurm(framework, command, settings, facts["num_nodes"], node))
    if framework in FINETUNING and facts["num_nodes"] == 1:
        script = File("job.sh", launch_tables().scripts["shell"] % {"command": command})
    return Launch(
        framework=framework,
        version=framework_arguments(framework).version,
        files=(*files, script),
        arguments=tuple(flags),
        not_expressed=tuple(sentence for key, sentence in lost.items() if key not in ELSEWHERE),
        elsewhere=tuple(sentence for key, sentence in lost.items() if key in ELSEWHERE),
        command=command,
    )


def _model_not_expressed(framework: str, model: Model, plan: Plan) -> dict[str, str]:
    """What is not said of a model, by its name: no argument does, or a script, a recipe or a registry."""
    fields, tables = unsaid(model) if framework.startswith("megatron") else [], launch_tables()
    lost = {field: f"{field}: no argument says it" for field in fields}
    is_registered = framework == "torchtitan" and model.name in tables.torchtitan_models
    if is_registered and model.mtp_layers:
        lost["model"] = "model: torchtitan's has no multi-token prediction, which is priced"
    is_registered |= framework in FINETUNING and "/" in model_id(model)
    if framework in tables.model_elsewhere and not is_registered:
        key, sentence = tables.model_elsewhere[framework]
        lost[key] = sentence % {"model": model.name, "implementation": plan.implementation}
    return lost


# --- forms -------------------------------------------------------------------------------------


def _forms(framework: str, settings: Settings, model: Model, facts: Facts) -> tuple[list[str], list[File]]:
    """The words of the command line, and the files that they name."""
    if framework in FINETUNING:
        script = {"peft": peft_script, "unsloth": unsloth_script}[framework](settings, model)
        beside = [_accelerate_file(settings)] * (facts["num_gpus"] > 1)
        return ["train.py"], [File("train.py", script), *beside]
    dashed = {name: value for name, value in settings.items() if name.startswith("--")}
    dotted = {name: value for name, value in settings.items() if name[0] not in "-$"}
    if framework == "torchtitan":
        module, config = launch_tables().torchtitan_models.get(model.name, ("", ""))
        chosen = ["--module", module, "--config", config] if module else []
        return chosen + _titan_words(dotted), []
    if framework == "megatron-bridge":
        overrides = [f"{name}={_override(value)}" for name, value in dotted.items()]
        return overrides, [File("overrides.yaml", yaml_text(nested(dotted)))]
    words = [word for name, value in dashed.items() for word in _flag(name, value)]
    if framework == "megatron-lm":
        flags = (_flag(name, value) for name, value in dashed.items() if value is not False)
        return words, [File("megatron_args.txt", "\n".join(map(shlex.join, flags)) + "\n")]
    if framework == "deepspeed":
        text = msgspec.json.format(msgspec.json.encode(nested(dotted)), indent=2).decode() + "\n"
        return ["--deepspeed", "ds_config.json", *words], [File("ds_config.json", text)]
    if framework == "accelerate":
        return words, [_accelerate_file(dotted)]
    if framework == "tensorrt-llm":
        return [*words, "--config", "llm_args.yaml"], [File("llm_args.yaml", yaml_text(nested(dotted)))]
    return words, []


def _accelerate_file(settings: Settings) -> File:
    """What `accelerate launch` reads of the settings of a job."""
    known = framework_arguments("accelerate").arguments
    stated = {name: one for name, one in settings.items() if name in known and name[0] != "-"}
    return File("accelerate.yaml", yaml_text(nested(stated)))


def _flag(name: str, value: Any) -> list[str]:
    """One argument as words; booleans of the Trainer are `--name True`, flags stand alone."""
    if name.startswith("--") and "_" in name and isinstance(value, bool):
        return [name, str(value)]
    if isinstance(value, bool):
        return [name] if value else []
    return [name, *map(str, value)] if isinstance(value, list) else [name, str(value)]


def _titan_words(settings: Settings) -> list[str]:
    """torchtitan's overrides: `--section.name value`, `--section.no_name`; the subcommand comes last."""
    words: list[str] = []
    last = [value for name, value in settings.items() if "." not in name]
    for name, value in settings.items():
        section, _, key = name.partition(".")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--{section}.no_{key}")
        elif key:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words + last


def _override(value: Any) -> str:
    """A value in Hydra's grammar, whose keys have no quotation marks."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_override(one)}" for name, one in value.items()) + "}"
    return str(value) if isinstance(value, str) else msgspec.json.encode(value).decode()


# --- what is started ---------------------------------------------------------------------------


def _command(framework: str, words: list[str], model: Model, facts: Facts, node: int) -> str:
    """The line that starts one node, of words as the shell reads them."""
    tables = launch_tables()
    line = " ".join(filter(None, (tables.programs.get(framework), *words)))
    names = {"words": line, "model": model.name, "num_nodes": facts["num_nodes"], "node": node}
    names["across"] = across_nodes(framework, facts["dp"], facts["num_nodes"])
    is_alone = framework in tables.commands and facts["num_nodes"] * node == 1
    return tables.commands[framework if is_alone else tables.starters.get(framework, framework)] % names


def across_nodes(
    framework: str, dp: int, num_nodes: int, rank: str = "SLURM_NODEID", leader: str = "MASTER_ADDR"
) -> str:
    """What a server's command says of its other nodes: `rank` and `leader` are variables of the shell.

    They hold the number of the node that runs it and the address of the first one.
    """
    lines = launch_tables().across_nodes
    if num_nodes == 1 or framework not in lines:
        return ""
    names = {"num_nodes": num_nodes, "local_dp": dp // num_nodes, "rank": rank, "leader": leader}
    return " " + lines.get(f"{framework} dp" if dp > 1 else framework, lines[framework]) % names


def _slurm(framework: str, command: str, settings: Settings, num_nodes: int, node: int) -> str:
    """A batch script: one task on each node, which starts all its GPUs."""
    exports = "".join(f"export {name[1:]}={settings[name]}\n" for name in settings if name[0] == "$")
    folder = launch_tables().scripts["folder"] * ("${JOB" in command)
    names = {"framework": framework, "num_nodes": num_nodes, "node": node, "exports": folder + exports}
    return launch_tables().scripts["slurm"] % (names | {"command": shlex.quote(command)})
