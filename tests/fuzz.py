"""Hostile input for the command line, and the contract that it holds to whatever it is given.

`strange` are values that no option or field expects; `damaged` cuts, flips and stuffs the bytes of a real
file. `check_contract` runs a command in this process: it ends with exit code 0 to 3, says what is wrong in
one sentence without a traceback, prints no number that is none, and takes bounded time and memory.
"""

import json
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from meshwise.cli import run

NUMBERS = (0, -1, 1, 2, 3, 7, 8, 64, 2**31, 2**63, 10**30, 10**400, 1e-320, 1e-9, 0.5, 1e18, 1e308)
WORDS = ("", " ", "[/]", "[bold red]", "é", "1e999", "-inf", "nan", "true", "a" * 3000, "%s", "{tp}")
SCRIPT = "<script>alert(1)</script>"
MORE_WORDS = ("٣", "1_0", "0x10", "tp=8", "a,b", "\udcff", "🂡", SCRIPT)
PATHS = (".", "..", "/dev/null", "/dev/full", "/proc/nowhere/x.toml", "x.csv", "x.png", "x.html", "x.json")
strange_text = st.sampled_from([*map(str, NUMBERS), *WORDS, *MORE_WORDS, *PATHS])
PLANS = ("tp=2,pp=2", "dtype=fp8|bf16", "layout=*", "zero=3,recompute=full", "tp=2|4", "gpus=4|8", "pp")
NAMES = ("llama3-8b", "mixtral-8x7b", "en-moe-lm-15b", "h100-80g-sxm", "a100-80g-sxm:16", "nersc-2024-10")
OTHERS = ("10", "0,0.5", "0-1", "1e12", "2GB", "4MiB", "complete", "all", "cuda", "evaluate", "decode")
PAIRS = ("vllm,max_tokens=512", "drafts=3,accept=0.8", "decoder_layers=2", "schedule=interleaved")
plausible_text = st.sampled_from([*PLANS, *NAMES, *OTHERS, *PAIRS])
"""Words that some option takes."""
strange = st.one_of(
    st.sampled_from([*NUMBERS, *WORDS, SCRIPT, None, True, False, [], {}, [1], {"a": 1}]),
    st.integers(1, 4096),
    st.floats(allow_nan=False, allow_infinity=False),
)
STUFFING = (
    *(b"\xff\xfe", b"\x00", b"[" * 5000, b'{"a":' * 5000, b'"', b"[/]", b"\n", b"9" * 5000, b"=", b"1e999"),
)
MAY_BE_NEGATIVE = (
    *("self_cpu_bytes", "cpu_bytes", "device_bytes", "offsets_s"),
    *("signed", "change", "bias", "error", "headroom"),
)
MAX_CPU_S = 20.0
MAX_BYTES = 4 << 30
"""That a command may take beyond what the tests hold."""


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` after one or two accidents: cut short, a byte flipped, bytes stuffed in, a piece doubled, a
    number that is another.
    """
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, max(len(whole) - 1, 0)))
        kind = draw(st.sampled_from(("cut", "flip", "stuff", "double", "number")))
        if kind == "cut":
            whole = whole[:at]
        elif kind == "flip":
            whole = whole[:at] + bytes([draw(st.integers(0, 255))]) + whole[at + 1 :]
        elif kind == "stuff":
            whole = whole[:at] + draw(st.sampled_from(STUFFING)) + whole[at:]
        elif kind == "double":
            whole = whole[:at] + whole[at // 2 :]
        elif number := re.compile(rb"\d+").search(whole, at):
            other = str(draw(st.sampled_from(NUMBERS))).encode()
            whole = whole[: number.start()] + other + whole[number.end() :]
    return whole


@st.composite
def changed(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """`document` with one to three fields (of it, or of a table in it) strange or removed."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        table = document
        key = draw(st.sampled_from(sorted(table)))
        while isinstance(table[key], dict) and table[key] and draw(st.booleans()):
            table = table[key]
            key = draw(st.sampled_from(sorted(table)))
        if draw(st.integers(0, 9)):
            table[key] = deepcopy(draw(strange))  # what is drawn is shared by all cases
        elif len(table) > 1:
            del table[key]
    return document


def toml_text(document: dict[str, Any], path: tuple[str, ...] = ()) -> str:
    """A document as TOML; tables last, as they must be. What TOML has no word for is left out."""
    rows = [f"{key} = {toml_value(value)}" for key, value in document.items() if not isinstance(value, dict)]
    for key, value in document.items():
        if isinstance(value, dict):
            rows += [f"[{'.'.join((*path, key))}]", toml_text(value, (*path, key))]
    return "\n".join(row for row in rows if not row.endswith("= null"))


def toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def check_contract(words: list[str], *, json_option: bool = True, may_warn: bool = False) -> None:
    """Run `meshwise WORDS --json` and hold what it does to the contract; the message names the words.

    `may_warn`: files that are left out may be named, a line each, before the sentence of a refusal.
    """
    words = [*words, *["--json"] * json_option]
    begin_s = time.process_time()
    code, out, err = run(words)
    took_s = time.process_time() - begin_s
    shown = f"{words}: exit code {code}\n{err[-3000:]}"
    assert code in (0, 1, 2, 3), shown
    assert "Traceback" not in err, shown
    assert took_s < MAX_CPU_S, f"{took_s:.1f} s of {shown}"
    if code >= 2:
        lines = err.splitlines()
        assert all(line.startswith("meshwise: ") for line in lines) and len(err) < 8000, shown
        assert len(lines) == 1 or (may_warn and lines), shown
        assert out == "" or words[:2] == ["trace", "summary"], shown  # which tells of every file
    elif json_option:
        check_numbers(document(out), shown)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """What asks for more than `MAX_BYTES` has a MemoryError, as an example that can be kept."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held_bytes + MAX_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def document(text: str) -> Any:
    """A JSON document, which holds no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {text[:3000]}")

    return json.loads(text, parse_constant=refuse)


def check_numbers(value: Any, where: str) -> None:
    """No quantity in a JSON document is negative, unless its name says that it has a sign."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not any(word in key for word in MAY_BE_NEGATIVE):
                check_numbers(item, f"{key} in {where}")
    elif isinstance(value, list):
        for item in value:
            check_numbers(item, where)
    elif isinstance(value, int | float):
        assert value >= 0, f"{value} as {where}"
