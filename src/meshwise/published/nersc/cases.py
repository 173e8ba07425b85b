"""Cases of a published model, compared with our reproduction number by number.

A file of cases (JSON) has two lists. `cases`: each with `inputs` (a model, a machine, a plan, in the
paper's units: TFLOP/s, GB, GB/s) and `outputs` (rows of ops, rows of communication, totals), which we
compute again from the inputs alone, under convention `nersc-2024-10`. `collectives`: times of single
collectives on the paper's machines. A difference is relative to the larger of the two numbers; a text
that differs, or a cell that we do not have, counts as 1. Numbers less than 1e-18 apart (1e-18 s, 1e-6 FLOP,
1e-9 bytes) are equal: differences of two equal times leave such remainders.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

import meshwise.published.nersc.paper as sheet
from meshwise.core.errors import DataError
from meshwise.core.expressions import formulas
from meshwise.core.files import parse_file
from meshwise.core.ledger import COLLECTIVES
from meshwise.core.refusals import refuse
from meshwise.core.toml import held_types
from meshwise.machine.hardware import cluster_names, find_cluster
from meshwise.published.nersc.paper import PaperRun, PaperSystem, collective_s, paper_system, price
from meshwise.published.nersc.paper_ops import PaperCut
from meshwise.published.nersc.tables import NERSC_TABLES

TOLERANCE = 1e-9
_ROUNDING = 1e-18

_KINDS = {sheet.paper_name(kind): kind for kind in COLLECTIVES if kind != "recv"}
_STRATEGIES = {"1d": "1d", "2d": "2d", "seqp": "2d-seqp", "2d-seqp": "2d-seqp"}
_HELD: dict[str, Any] = {
    **held_types(NERSC_TABLES["held"]),
    "texts": dict[str, str],
    "off": Literal[False],
    "strategy": Literal[tuple(_STRATEGIES)],
    "attention": Literal["", "fused", "separate", "summa"],
    "rows": Annotated[dict[str, Any], msgspec.Meta(min_length=1)],
}
"""What a key of a file may hold, by the name that the catalog has for it."""


def _entry(name: str) -> Any:
    """What holds the object `name` of a file; a key that the catalog does not name is refused."""
    found: list[Any] = []
    for key, stated in NERSC_TABLES["cases"][name].items():
        kind, *default = stated if isinstance(stated, list) else [stated]
        held = _HELD[kind]
        found.append((key, held | None, None) if default == ["none"] else (key, held, *default))
    return msgspec.defstruct(name, found, kw_only=True, forbid_unknown_fields=True)


for _name in NERSC_TABLES["cases"]:  # each after those that it holds
    _entry_of: Any = _entry(_name)
    _HELD |= {_name: _entry_of, f"{_name}s": list[_entry_of]}


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one number of a case is from ours, and which one it is."""

    rel: float
    where: str

    def to_json(self) -> dict[str, Any]:
        """What a document says of the largest difference."""
        return {"max_rel_diff": self.rel, "worst": self.where}


@dataclass(frozen=True, slots=True)
class CaseCheck:
    """The largest difference of each case by its name, and that of the collectives."""

    cases: tuple[tuple[str, Difference], ...]
    num_collectives: int
    collectives: Difference

    @property
    def agrees(self) -> bool:
        """Whether no difference is above `TOLERANCE`."""
        return max([self.collectives.rel, *(worst.rel for _, worst in self.cases)]) <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise validate --cases FILE --json` prints."""
        cases = [{"name": name} | worst.to_json() for name, worst in self.cases]
        collectives = {"num": self.num_collectives} | self.collectives.to_json()
        return {"agree": self.agrees, "cases": cases, "collectives": collectives}


def check_cases(path: Path) -> CaseCheck:
    """Compute every case and collective of `path` again; DataError says what is missing or not known."""
    file = parse_file(path, "JSON", msgspec.json.Decoder(_HELD["file"]).decode)
    found = [
        (case.name, _worst(_case_differences(case, f"{path}, case {case.name!r}"))) for case in file.cases
    ]
    systems = {case.inputs.system_name: _system(case.inputs.system) for case in file.cases}
    times = []
    for i, one in enumerate(file.collectives):
        where = f"collectives[{i}]"
        times.append(_difference(_collective_s(one, systems, f"{path}, {where}"), one.t_s, f"{where}.t_s"))
    return CaseCheck(tuple(found), len(times), _worst(times))


# --- From a file's words to ours ----------------------------------------------------------------------


def _case_differences(case: Any, where: str) -> Iterator[Difference]:
    """Every number of the outputs, and those of the inputs that follow from the others."""
    inputs = case.inputs
    run = _run(inputs, where)
    try:
        with np.errstate(all="raise"):
            priced = price(run, _system(inputs.system))
    except ArithmeticError:
        raise DataError(f"{where}: inputs.model or the batch is cut in more parts than it has") from None
    outputs: dict[str, Any] = {f"{name}_ops": table for name, table in priced.tables.items()}
    outputs |= {name: getattr(priced, name) for name in ("dp_comm", "pp_comm", "totals")}
    outputs |= {"fits": bool(priced.fits)}
    yield from _differences(outputs, case.outputs, f"{where}: outputs")
    derived = {
        "n_gpus": run.cut.m1 * run.cut.m2 * run.dp * run.pp,
        "n_microbatches": run.num_microbatches,
        "pp_p2p_volume_GB": priced.pp_comm["comm_fwd"],
    }
    stated = {name: value for name in derived if (value := getattr(inputs, name)) is not None}
    yield from _differences(derived, stated, f"{where}: inputs", "inputs")


def _run(inputs: Any, where: str) -> PaperRun:
    model, config, inside = inputs.model, inputs.config, inputs.config.nv
    cut = _cut(inputs, f"{where}: inputs.config")
    wanted = ("tp",) if cut.strategy == "1d" else ("tp1", "tp2")
    tp1, tp2 = _degrees(inside, wanted, f"{where}: inputs.config.nv")
    if tp1 * tp2 * inside.dp * inside.pp > inputs.system.nvlink_size:
        raise DataError(f"{where}: inputs.system.nvlink_size is smaller than the parts of config.nv")
    return PaperRun(
        cut=cut, num_layers=model.depth, batch=inputs.global_batch_size, dp=config.dp, pp=config.pp,
        inside={"tp1": tp1, "tp2": tp2, "dp": inside.dp, "pp": inside.pp},
    )  # fmt: skip


def _cut(inputs: Any, where: str) -> PaperCut:
    """The layer as the strategy of a case cuts it; DataError for what does not go with the strategy."""
    config = inputs.config
    strategy = _STRATEGIES[inputs.strategy]
    m1, m2 = _degrees(config, ("tp",) if strategy == "1d" else ("m1", "m2"), where)
    attention = config.attention or ("separate" if config.flash is False else "fused")
    refuse("nersc case", DataError, where, config=config, strategy=inputs.strategy, attention=attention)
    sizes = formulas(NERSC_TABLES["cases_cut"], {"of": inputs})
    return PaperCut(strategy=strategy, attention=attention, m1=m1, m2=m2, **sizes)


def _degrees(entry: Any, wanted: tuple[str, ...], where: str) -> tuple[float, float]:
    """The values of `wanted`, the second one 1 if it is not; no other degree may be given."""
    degrees = ((name, getattr(entry, name, None)) for name in ("tp", "m1", "m2", "tp1", "tp2"))
    stated = {name: float(value) for name, value in degrees if value is not None}
    of = {"stated": (*stated,), "wanted": wanted, "has": ", ".join(stated) or "no degree"}
    refuse("degrees of a case", DataError, f"{where} ", needs=" and ".join(wanted), **of)
    first, second = (*stated.values(), 1.0)[:2]
    return first, second


def _system(entry: Any) -> PaperSystem:
    return PaperSystem(**formulas(NERSC_TABLES["cases_system"], {"of": entry}))


def _collective_s(one: Any, systems: dict[str, PaperSystem], where: str) -> float:
    """Seconds of `one` on the published machine of that name, else on that of a case of the file."""
    preset = f"nersc-{one.system.lower()}"
    system = paper_system(find_cluster(preset)) if preset in cluster_names() else systems.get(one.system)
    names = {"kinds": _KINDS, "known": ", ".join(_KINDS), "system": system}
    refuse("nersc collective", DataError, f"{where}: ", one=one, **names)
    assert system
    num_bytes = one.volume_GB * sheet.GB
    return float(collective_s(_KINDS[one.op], num_bytes, one.n_gpus, one.in_fast_domain, system))


# --- Comparing ----------------------------------------------------------------------------------------


def _differences(ours: Any, theirs: Any, place: str, where: str = "") -> Iterator[Difference]:
    """One difference for every cell of `theirs`; DataError for a key that we do not know."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name, value in theirs.items():
            known = {"name": name, "ours": ours, "known": ", ".join(ours)}
            refuse("key of a case", DataError, f"{place}{where and '.' + where} ", **known)
            yield from _differences(ours[name], value, place, f"{where}.{name}" if where else name)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for i, (mine, value) in enumerate(zip(ours, theirs, strict=True)):
            label = value.get("name", i) if isinstance(value, dict) else i
            yield from _differences(mine, value, place, f"{where}[{label}]")
    else:
        yield _difference(ours, theirs, where)


def _difference(ours: Any, theirs: Any, where: str) -> Difference:
    numbers = [x for x in (ours, theirs) if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) < 2:
        return Difference(float(type(ours) is not type(theirs) or ours != theirs), where)
    largest = max(abs(x) for x in numbers)
    if not largest <= sys.float_info.max:  # a nan, or an integer that no float holds
        return Difference(1.0, where)
    apart = abs(ours - theirs)
    return Difference(float(apart / largest) if apart > _ROUNDING else 0.0, where)


def _worst(differences: Iterable[Difference]) -> Difference:
    return max(differences, key=lambda one: one.rel, default=Difference(0.0, ""))
