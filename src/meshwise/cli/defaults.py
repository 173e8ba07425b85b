"""Default options from a file: `./meshwise.toml`, or the one that `--config` names.

    cluster = "h100-80g-sxm:64"      # of every verb that has --cluster

    [estimate]
    plan = "tp=8,zero=1"
    seq = 8192

    [trace.summary]
    steps = "complete"

An option on the command line goes before the file, the verb's table before the top of it.

A folder may be a stranger's. A file that was found there and not named gives defaults of answers alone: no
file to write or read elsewhere, no address, nothing that starts a program.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from meshwise.cli.command import flags
from meshwise.core.errors import DataError, did_you_mean
from meshwise.core.files import read_catalog
from meshwise.core.options import Option
from meshwise.core.refusals import refuse
from meshwise.core.toml import nested, read_toml

FILE = Path("meshwise.toml")
ANSWERS: list[str] = read_catalog("verbs.toml")["answers"]
"""Verbs (the first word of their names) that only answer; the others start programs, listen or write."""


def read_defaults(command: Any, path: Path | None) -> dict[str, Any]:
    """The default options by verb, as the command line wants them; DataError for what no verb takes."""
    if path is None and not FILE.is_file():
        return {}
    found, path = path is None, path or FILE
    content = read_toml(path)
    verbs = dict(verbs_of(command))
    defaults: dict[str, Any] = {}
    for name, key, value in _stated(content):
        having = [verb for verb in ([name] if name else verbs) if key in verbs.get(verb, ())]
        taking = [verb for verb in having if not found or _is_of_answer(verb, verbs[verb][key], value)]
        near = did_you_mean(key, verbs.get(name, ()), f"see meshwise {name} --help")
        inner = [verb.replace(" ", ".") for verb in verbs if verb.startswith(f"{name} ")]
        line = {"path": path, "name": name, "key": key, "value": value, "near": near, "inner": inner}
        line["is_on"] = isinstance(value, bool) and all(verbs[verb][key].kind is not bool for verb in having)
        refuse("defaults", DataError, **line, verbs=verbs, having=having, taking=taking)
        for verb in taking:
            defaults[f"{verb} {verbs[verb][key].name}".replace(" ", ".")] = value
    print(f"meshwise: defaults from {path}", file=sys.stderr)
    return nested(defaults)


def verbs_of(command: Any, name: str = "") -> Iterator[tuple[str, dict[str, Option]]]:
    """Every verb by its full name (`trace summary`), and its options as they are typed, without their --."""
    if hasattr(command, "commands"):
        for word, inner in command.commands.items():
            yield from verbs_of(inner, f"{name} {word}".strip())
    else:
        options = (option for option in command.callback.options.values() if not option.is_word)
        yield name, {flags(one)[0].partition("/")[0].removeprefix("--"): one for one in options}


def _stated(table: Mapping[str, Any], verb: str = "") -> Iterator[tuple[str, str, Any]]:
    """Verb (empty: every), option and value of each line of a file; what is of every verb comes first."""
    for key, value in sorted(table.items(), key=lambda line: isinstance(line[1], dict)):
        if isinstance(value, dict):
            yield from _stated(value, f"{verb} {key}".strip())
        else:
            yield verb, key, value


def _is_of_answer(verb: str, option: Option, value: Any) -> bool:
    """Whether `value` can only change an answer, and names no file outside of this folder."""
    kinds = get_args(option.kind) or (option.kind,)
    leaves = Path in kinds or option.name == "ray"
    return verb.split()[0] in ANSWERS and not leaves and _lies_here(value)


def _lies_here(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_lies_here, value))
    names = [str(value), *(part.strip() for part in re.split("[,|=:]", str(value)))]
    here = Path.cwd()
    return all("\0" not in name and Path(name).resolve().is_relative_to(here) for name in names)
