"""`read_job`: what an existing job of another framework is, as model, plan and workload.

A Megatron-LM, Megatron-Bridge or torchtitan command line (in a shell script, or one argument a line), a YAML
file of Megatron-LM (`--yaml-cfg`, or `MODEL_ARGS` of its tests), Megatron-Bridge or Accelerate, a torchtitan
TOML file or a DeepSpeed JSON file. What is read is written again by the same table; arguments
of the file that do not come out the same change the cost in a way that no plan says, and are listed.

`as_written` prices what `launch` wrote beside what was asked: a framework that is told a plan whole takes as
long, and as much memory, as the plan does; where something is not expressed, the difference is what that is
worth.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwise.core.errors import DataError
from meshwise.core.expressions import value_of
from meshwise.core.files import parse_text, read_text
from meshwise.core.refusals import told
from meshwise.core.toml import flat, parse_toml
from meshwise.core.units import whole
from meshwise.core.yaml import parse_yaml, yaml_value
from meshwise.estimate.one_plan import estimate
from meshwise.launch.arguments import framework_arguments, read_value
from meshwise.launch.bridge import megatron_settings
from meshwise.launch.facts import Facts, derive, idle_keys, plan_of, recover
from meshwise.launch.settings import TRAINING, Settings, read_settings, restated, write_settings
from meshwise.launch.shape import model_of
from meshwise.launch.tables import constants_of, launch_tables, software_of, table_of
from meshwise.launch.write import AsWritten, Launch
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.plan.plan import DEFAULTS, Plan
from meshwise.plan.stages import layers_of_chunks
from meshwise.plan.workload import Workload

_MOST = 10**6
_OLD_NAMES = {"--gradient_checkpointing": "--activation_checkpointing"}
"""Names of arguments that still hold."""
_YAML_OF_MEGATRON = re.compile(
    r"^(MODEL_ARGS|language_model|model|train|ddp|dist|optimizer|dataset|comm_overlap|mixed_precision):",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Job:
    """A job that a framework's file states; None where the file does not say it.

    `unread`: what the file says, or leaves to the training script, that the plan does not hold.
    `other_model`: the argument by which the model, then None, is another than the others say.
    """

    framework: str
    model: Model | None
    plan: Plan
    batch: int | None
    seq: int | None
    microbatch: int | None
    num_gpus: int | None
    unread: tuple[str, ...]
    other_model: str = ""


def read_job(path: Path, num_gpus: int | None = None) -> Job:
    """The job that the file at `path` states, on `num_gpus` GPUs where it does not say on how many.

    Raises:
        DataError: The file cannot be read, is of no known framework, or has a value that is not allowed.
    """
    framework, stated, words_gpus = _parse(path)
    _state_vocabulary(framework, stated)
    layout = str(stated.get("--pipeline-model-parallel-layout") or "")
    stated = restated(framework, stated)
    facts, unread = read_settings(framework, stated)
    facts.setdefault("software", software_of(framework))
    _check_counts(facts, path)
    num_gpus = num_gpus or words_gpus
    if num_gpus is not None:
        facts["num_gpus"] = num_gpus
    elif facts.get("num_gpus", 0) < 0:
        facts["num_gpus"] = None
    is_config = any("_target_" in name for name in stated)
    known = launch_tables().other_model
    other_model = next((name for name in stated if stated[name] and re.match(known, name)), "")
    is_shaped = framework.startswith("megatron") and not other_model
    model = model_of(facts, facts["tp"], path.stem) if is_shaped else _preset(stated)
    facts |= {"has_experts": bool(facts.get("num_experts")) or facts.get("ep", 1) > 1}
    if model is not None:
        facts |= {"num_layers": model.num_layers, "has_experts": model.moe is not None}
    facts = recover(dict.fromkeys(("cp", "pp"), 1) | facts)
    names = [*_unread_names(framework, stated, facts, is_config=is_config)]
    for name in filter(launch_tables().decisive.__contains__, names):
        why = "is not read here, and batch, dtype or zero depend on it; state these without the file"
        raise DataError(f"{path}: {name} {stated[name]} {why}")
    unread += [f"{name} {stated[name]}: no key of a plan says this" for name in names]
    of_recipe = framework == "megatron-bridge" and not is_config
    unread += told("read job", layout=layout, of_recipe=of_recipe, facts=facts)
    batch = facts.get("batch")
    if batch is not None and batch < 0:  # torchtitan's -1 is one microbatch of every rank
        batch = facts["local_batch"] * facts["dp"] if facts.get("dp") else None
    said: Facts = {name: facts.get(name) for name in ("seq", "microbatch", "num_gpus")}
    said |= {"unread": tuple(unread), "other_model": other_model}
    return Job(framework=framework, model=model, plan=plan_of(facts), batch=batch, **said)


def _state_vocabulary(framework: str, stated: Settings) -> None:
    """Megatron-LM's vocabulary, where its tokenizer alone says it."""
    if framework == "megatron-lm" and "--vocab-size" not in stated:
        kind = "GPT2BPETokenizer" if "--merge-file" in stated else str(stated.get("--tokenizer-type"))
        if kind in launch_tables().tokenizers:
            stated["--vocab-size"] = launch_tables().tokenizers[kind]


def _unread_names(framework: str, stated: Settings, facts: Facts, *, is_config: bool) -> Iterator[str]:
    """Arguments that change the cost, and that do not come out as stated when `facts` are written again."""
    idle = idle_keys(DEFAULTS | facts)
    again, _ = write_settings(framework, derive({k: v for k, v in facts.items() if k not in idle}))
    again = constants_of(framework) | again
    arguments, table, tables = framework_arguments(framework).arguments, table_of(framework), launch_tables()
    costly = "(?!)" if is_config else tables.costly.get(framework.partition("-")[0], "(?!)")
    passed = {*tables.neutral} | {
        name for key in idle & table.keys() for one in table[key].values() for name in one.settings
    }
    for name in (one for one in stated if one not in passed):
        if name not in arguments:
            is_unread = bool(re.match(costly, name))
        else:
            value, unstated = read_value(framework, name, stated[name]), arguments[name].unstated
            is_unread = value not in (unstated, again.get(name, unstated))
        if is_unread:
            yield name


def _check_counts(facts: Facts, path: Path) -> None:
    for name in facts.keys() & launch_tables().counts:
        if facts[name] is not None and not 1 <= facts[name] <= _MOST:
            raise DataError(f"{path}: {name} is {facts[name]}; it must be a whole number from 1 to {_MOST}")
    if facts.get("batch") and facts["batch"] < 0 and not facts.get("local_batch"):
        raise DataError(f"{path}: the batch is {facts['batch']}; it must be at least 1")


def _preset(stated: Settings) -> Model | None:
    """The preset that torchtitan's module and config are."""
    chosen = stated.get("--module"), stated.get("--config")
    names = (name for name, known in launch_tables().torchtitan_models.items() if known == chosen)
    return next(map(find_model, names), None)


NOISE = 1e-6


def as_written(job: Launch, model: Model, cluster: Cluster, plan: Plan, workload: Workload) -> Launch:
    """`job` with the price of what its files say, where it trains on many cards."""
    if job.framework not in TRAINING:
        return job
    with TemporaryDirectory() as folder:
        *_, script = job.write(Path(folder))
        found = read_job(script, cluster.num_chips)
    read = replace(found.plan, imbalance=plan.imbalance)  # which the data decide
    asked = estimate(model, cluster, plan, workload)
    if not plan.stages and read.stages:  # stages that are listed are played
        asked = asked.changed(stages=layers_of_chunks(model, asked.mesh))
    sizes = {name: getattr(found, name) for name in ("batch", "seq", "microbatch")}
    work = replace(workload, **{name: size for name, size in sizes.items() if size})
    priced = estimate(found.model or model, cluster, read, work)
    memory_bytes, asked_bytes = (one.memory_bytes["total"] for one in (priced, asked))
    off = max(abs(priced.step_s / asked.step_s - 1.0), abs(memory_bytes / asked_bytes - 1.0))
    return replace(job, as_written=AsWritten(priced.step_s, memory_bytes, priced.fits, off <= NOISE))


# --- files -------------------------------------------------------------------------------------


def _parse(path: Path) -> tuple[str, Settings, int | None]:
    """The framework of a file, its arguments, and the number of GPUs where a launcher in it says so."""
    text = read_text(path, "job")
    if text.lstrip().startswith("{"):
        return _parse_deepspeed(text, path)
    if re.search(r"^(distributed_type|compute_environment):", text, re.MULTILINE):
        return _accelerate(_parse_yaml(text, path), path)
    if _YAML_OF_MEGATRON.search(text):
        stated = megatron_settings(_parse_yaml(text, path))
        is_bridge = "MODEL_ARGS:" not in text and "\nlanguage_model:" not in f"\n{text}"
        return ("megatron-bridge", _bridge(stated), None) if is_bridge else ("megatron-lm", stated, None)
    if re.search(r"^\[(parallelism|training)\]", text, re.MULTILINE):
        return "torchtitan", _titan_toml(flat(parse_toml(text, str(path)))), None
    words = shell_words(text, path)
    if "--deepspeed" in words[:-1]:
        _, stated, _ = _parse_deepspeed(*_beside(words, "--deepspeed", path))
        return "deepspeed", stated | _arguments("deepspeed", words, path), _gpus(words)
    if "--config_file" in words[:-1]:
        stated = _parse_yaml(*_beside(words, "--config_file", path))
        return _accelerate(stated | _arguments("accelerate", words, path), path)
    if any(word.startswith(("--parallelism.", "--training.")) for word in words):
        return "torchtitan", _arguments("torchtitan", words, path), _gpus(words)
    if any(word.startswith(("model.tensor_", "train.global_", "train.micro_")) for word in words):
        return "megatron-bridge", _bridge(megatron_settings(_bridge_words(words))), _gpus(words)
    if any(word.partition("=")[0] in ("--micro-batch-size", "--num-layers") for word in words):
        return "megatron-lm", _arguments("megatron-lm", words, path), _gpus(words)
    raise DataError(
        f"{path} is no job of Megatron, torchtitan, DeepSpeed or Accelerate; name a script with its "
        "arguments, or its JSON, YAML or TOML file"
    )


def _parse_yaml(text: str, path: Path) -> Settings:
    return flat(parse_yaml(text, str(path)))


def _beside(words: list[str], option: str, path: Path) -> tuple[str, Path]:
    """The text of the file that `option` names, which lies beside the script at `path`."""
    named = words[words.index(option) + 1]
    if named.startswith("-"):
        raise DataError(f"{path}: {option} names no file, from which settings are read; write it behind it")
    file = path.parent / Path(named).name
    return read_text(file, "job"), file


def _titan_toml(stated: Settings) -> Settings:
    """The names of torchtitan's TOML files (up to 0.2.2) as those of today; their loss had no chunks."""
    found: Settings = {"loss.num_chunks": 1, **stated}
    if "training.compile" in found:
        found["compile.enable"] = found.pop("training.compile")
    mode = found.pop("activation_checkpoint.mode", None)
    if mode is not None:
        found["activation_checkpoint"] = f"activation-checkpoint:{mode}"
    name, flavor = found.pop("model.name", ""), str(found.pop("model.flavor", "")).lower()
    return found | {"--module": name, "--config": f"{name}_{flavor}"}


def _parse_deepspeed(text: str, path: Path) -> tuple[str, Settings, None]:
    stated = parse_text(text, str(path), "JSON", lambda text: flat(json.loads(text)))
    if not any(name.startswith(("zero_optimization", "train_")) for name in stated):
        raise DataError(f"{path} is no DeepSpeed configuration: it has no zero_optimization and no batch")
    said_twice = launch_tables().instead["deepspeed"]
    found = {name: value for name, value in stated.items() if value != "auto" or name in said_twice}
    return "deepspeed", found, None


def _accelerate(stated: Settings, path: Path) -> tuple[str, Settings, int | None]:
    """Settings of Accelerate, or of DeepSpeed where that is what it starts, and then the number of GPUs."""
    if stated.get("distributed_type") != "DEEPSPEED":
        return "accelerate", stated, None
    names, option = launch_tables().accelerate_deepspeed, "deepspeed_config.deepspeed_config_file"
    found = {names.get(name, name): value for name, value in stated.items()}
    if option in stated:
        found |= _parse_deepspeed(*_beside([option, stated[option]], option, path))[1]
    return "deepspeed", found, whole(str(stated.get("num_processes")))


def _bridge(stated: Settings) -> Settings:
    """Settings of Megatron-Bridge, with the precision by its name where only `model.bf16` says it."""
    found = dict(stated)
    for dtype in ("bf16", "fp16"):
        if found.pop(f"--{dtype}", False):
            found.setdefault("mixed_precision", f"{dtype}_mixed")
    return found


def _bridge_words(words: list[str]) -> Settings:
    """Overrides of a recipe on its command line: `section.name=value`; a leading + adds a name."""
    pairs = (word.lstrip("+").split("=", 1) for word in words if re.match(r"\+*[a-z0-9_.]+=", word))
    return flat({name: _word(value) for name, value in pairs})


def _word(text: str) -> Any:
    try:
        return yaml_value(text)
    except ValueError:  # which only data and names of runs are
        return text


# --- command lines -----------------------------------------------------------------------------


def shell_words(text: str, path: Path) -> list[str]:
    """The words of a shell script with its variables, arrays and arithmetic put in."""
    text = re.sub(r"\$\(\(((?:[^()]|\([^()]*\))+)\)\)", _one_word, text.replace("\\\n", " "))
    tokens = _split(text, path)
    known: dict[str, str] = {}
    for name, option in launch_tables().slurm.items():
        counts = re.findall(rf"^#SBATCH\s(?:.*\s)?{option}[ =]*(\d+)", text, re.MULTILINE)
        known.update((name, count) for count in counts)
    words: list[str] = []
    array = content = ""
    for token in tokens:
        start = None if array else re.match(r"(\w+)(\+?)=(\(?)(.*)", token, re.DOTALL)
        if start:
            name, adds, opens, token = start.groups()
            content = known.get(name, "") if adds else ""
            if opens:
                array = name
            else:
                known[name] = content + _expand(token, known)
        if array:
            closes = token.count(")") > token.count("(")
            content += _member(token[:-1] if closes else token, known) + " "
            if closes:
                known[array], array = content, ""
        elif not start:
            parts = _expand(token, known).split("\n")  # a variable, or `bash -c '...'`
            for part in (one for one in parts if one.strip() or one == token):
                is_several = " --" in f" {part}" or _SEVERAL.match(part) or _ARRAY.fullmatch(token)
                words += _split(part, path) if is_several else [part]
    if not any(word.startswith("--") or "=" in word for word in words):  # a file of variables only
        words = " ".join(known.values()).split()
    return words


def _split(text: str, path: Path) -> list[str]:
    """The words of a command line of the script `path`, `;` apart; DataError where a quotation has no end."""
    words = shlex.shlex(text, posix=True, punctuation_chars=";")
    words.whitespace_split = True
    try:
        return [word for word in words if not word or word.strip(";")]
    except ValueError as error:
        raise DataError(f"{path} is not a shell script that can be read: {error}") from None


_MOST_DEFAULTS, _MOST_CHARACTERS = 10, 10**5
"""Defaults within each other, and characters of a word that is put in."""
_SEVERAL = re.compile(r"\s*\+*[\w.]+\.\w+=\S+\s+\+*[\w.]+\.\w+=")
_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")


def _member(token: str, known: dict[str, str]) -> str:
    """A word of an array, in quotes where it would be several; what holds options is several."""
    text = _expand(token, known)
    return text if _ARRAY.fullmatch(token) or "--" in text or " " not in text else shlex.quote(text)


def _expand(text: str, known: dict[str, str]) -> str:
    """`$X`, `${X}`, `${X[@]}`, `${X:-default}` and `$[X * 2]` replaced where they are known."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return known.get(name, default if default is not None else match[0])

    def result(match: re.Match[str]) -> str:
        numbers = {name: int(text) for name, text in known.items() if text.isdecimal()}
        try:
            return str(value_of(match[1].replace("/", "//"), numbers))
        except (KeyError, SyntaxError, TypeError, ValueError, ZeroDivisionError):
            return f"$(({match[1]}))"

    for _ in range(_MOST_DEFAULTS):  # `${X:-${Y:-4}}` from the inside out, `${X:-$Y}` from the outside in
        before, text = text, re.sub(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|\$(\w+)", value, text)
        if text == before or len(text) > _MOST_CHARACTERS:
            break
    return re.sub(r"\$\[([\w$+\-*/%()]+)\]", result, text)


def _one_word(match: re.Match[str]) -> str:
    """Arithmetic `$((X * 2))` in the shell's older form `$[X*2]`, which has no space and no such end."""
    return f"$[{''.join(match[1].split())}]"


def _options(words: list[str]) -> dict[str, list[str]]:
    """The values of each `--name value ...` and `--name=value`, up to a pipe; the last of a name holds."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        elif re.match(r"\d*[<>]|[|&]", word):
            name = ""
        elif name:
            found[name].append(word)
    return found


def _arguments(framework: str, words: list[str], path: Path) -> Settings:
    """The arguments of a framework in a command line: names with values, with several, or alone.

    torchtitan's are `--section.name`, turned off by `--section.no_name`; recomputation is a word.
    """
    known = framework_arguments(framework).arguments
    modes = [word for word in words if word.startswith("activation-checkpoint:")]
    found: Settings = {"activation_checkpoint": modes[-1]} if modes else {}
    for option, values in _options([word for word in words if word not in modes]).items():
        section, dot, key = option[2:].replace("-", "_").partition(".")
        name, turned_off = f"{section}.{key}" if dot else option, f"{section}.{key.removeprefix('no_')}"
        name = option[2:] if name not in known and option[2:] in known else _OLD_NAMES.get(name, name)
        kind = known[name].type if name in known else ""
        if turned_off != name and turned_off in known:
            found[turned_off] = False
        elif kind == "flag" or not values:
            if kind not in ("flag", "bool", ""):
                raise DataError(f"{path}: {name} has no value")
            found[name] = True
        elif "$" in values[0] and kind and name not in launch_tables().neutral:
            raise DataError(f"{path}: the value {values[0]} of {name} is not in the file; write it out")
        else:
            found[name] = values if kind.startswith("list") else values[0]
    return found


def _gpus(words: list[str]) -> int | None:
    """GPUs of all nodes, where the words of torchrun, or of deepspeed, say how many."""
    said = {name.replace("_", "-"): values for name, values in _options(words).items()}
    nodes = whole((said.get("--nnodes") or said.get("--num-nodes") or ["1"])[0])
    node = whole((said.get("--nproc-per-node") or said.get("--num-gpus") or [""])[0])
    return nodes * node if nodes and node else None
