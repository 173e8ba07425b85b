"""Default options from a file: `./meshwise.toml`, or the one that `--config` names.

    cluster = "h100-80g-sxm:64"      # of every verb that has --cluster

    [estimate]
    plan = "tp=8,zero=1"
    seq = 8192

    [trace.summary]
    steps = "complete"

An option on the command line goes before the file, the verb's table before the top of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwise.core.errors import DataError
from meshwise.core.files import read_toml

FILE = Path("meshwise.toml")


def read_defaults(command: Any, path: Path | None) -> dict[str, Any]:
    """The default options by verb, as the command line wants them; DataError for what no verb takes."""
    if path is None and not FILE.is_file():
        return {}
    path = path or FILE
    content = read_toml(path)
    verbs = dict(verbs_of(command))
    defaults: dict[str, Any] = {}
    of_all = {key: value for key, value in content.items() if not isinstance(value, dict)}
    for key, value in content.items():
        if key not in of_all:
            _add_table(defaults, verbs, key, value, path)
        elif not any(key in options for options in verbs.values()):
            raise DataError(f"{path}: no verb has an option --{key}; see meshwise VERB --help")
    for name, options in verbs.items():
        for key in of_all.keys() & options.keys():
            _table(defaults, name).setdefault(options[key], of_all[key])
    print(f"meshwise: defaults from {path}", file=sys.stderr)
    return defaults


def verbs_of(command: Any, name: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Every verb by its full name (`trace summary`), and its options with the names of their parameters."""
    if hasattr(command, "commands"):
        for word, inner in command.commands.items():
            yield from verbs_of(inner, f"{name} {word}".strip())
    else:
        options = (param for param in command.params if param.param_type_name == "option")
        yield name, {param.opts[0].removeprefix("--"): param.name for param in options}


def _add_table(
    defaults: dict[str, Any], verbs: dict[str, dict[str, str]], name: str, table: dict[str, Any], path: Path
) -> None:
    for key, value in table.items():
        if isinstance(value, dict):
            _add_table(defaults, verbs, f"{name} {key}", value, path)
        elif name not in verbs:
            raise DataError(f"{path}: there is no verb {name!r}; see meshwise --help")
        elif key not in verbs[name]:
            raise DataError(f"{path}: {name} has no option --{key}; see meshwise {name} --help")
        else:
            _table(defaults, name)[verbs[name][key]] = value


def _table(defaults: dict[str, Any], name: str) -> dict[str, Any]:
    for word in name.split():
        defaults = defaults.setdefault(word, {})
    return defaults
