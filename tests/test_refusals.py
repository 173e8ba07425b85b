"""Bad input is refused by one sentence on stderr, with exit code 2 and nothing on stdout."""

import shlex
from typing import Any

import pytest

from data_tables import DATA

LINES = [line for line in (DATA / "refusals.txt").read_text().splitlines() if "=>" in line]
CASES = [tuple(part.strip() for part in line.split("=>")) for line in LINES]


@pytest.mark.parametrize(("command", "says"), CASES, ids=[command for command, _ in CASES])
def test_bad_input_is_one_sentence(meshwise: Any, command: str, says: str) -> None:
    done = meshwise(*shlex.split(command.replace("DATA", str(DATA))))
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert done.err.count("\n") == 1
