"""`dryrun -- python train.py ...`: start a user's program as one rank, and hand back what it did."""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from meshwise.core.each import ended_how
from meshwise.core.errors import ClusterError, MeshwiseError, MissingExtraError, PlanError
from meshwise.core.ledger import Ledger
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse
from meshwise.machine.hardware import Cluster, find_cluster
from meshwise.program.tape import VERDICT
from meshwise.runtime.profile import hooked, run_command
from meshwise.runtime.step_time import StepTime, step_time

OWNER = "MESHWISE_SCRIPT_PROCESS"
"""The variable that names the process which is the rank; those that it starts are not."""
REPORT, REFUSED, BEGUN = "report.json", "refused", "begun"
_AS_THEY_ARE = (
    *("program", "ranks", "rank", "device", *VERDICT, "peak_bytes", "tensors_peak_bytes"),
    *("states_bytes", "num_steps", "guesses"),
)
"""Fields of an outcome that its document has under their names."""
_PACKAGE = Path(__file__).parents[3]


class ScriptError(MeshwiseError):
    """The program ended early, or never came to torch; the message says where and what may help."""

    exit_code = 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScriptOutcome(Shown):
    """One rank of a user's program. `ledger` is the whole program, `step_ledger` its last whole step.

    Whether it fits: `meshwise.program.tape.VERDICT`. `time` is that of its last whole step, of one without
    steps the program's; None where the chip has no units for a dtype, as `untimed` says.
    """

    program: str
    ranks: int
    rank: int
    device: str
    memory_bytes: float
    peak_bytes: float
    reserved_bytes: float | None
    fits: bool
    out_of_memory: dict[str, Any]
    tensors_peak_bytes: float
    peak_row: dict[str, Any]
    alive_at_peak: dict[str, float]
    states_bytes: dict[str, float]
    num_steps: int
    ledger: Ledger
    step_ledger: Ledger
    guesses: list[dict[str, Any]]
    time: StepTime | None
    untimed: str
    rows_in: ClassVar[str] = "step_ledger"

    def collectives(self) -> list[dict[str, Any]]:
        """Collectives of the last step by mesh axis, group size and kind: how many, and their payload."""
        found: dict[tuple[str, int, str], dict[str, Any]] = {}
        for row in self.step_ledger.rows():
            if row["collective"]:
                place = {name: row[name] for name in ("axis", "group_size", "collective")}
                total = found.setdefault(tuple(place.values()), place | {"count": 0, "payload_bytes": 0})
                total["count"] += row["count"]
                total["payload_bytes"] += row["count"] * row["payload_bytes"]
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        """The document that `dryrun --json -- COMMAND` prints."""
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "steps": [],
            "peak": {name: self.peak_row.get(name) for name in ("module", "op", "phase", "shape")},
            "alive_at_peak": [{"what": what, "bytes": size} for what, size in self.alive_at_peak.items()],
            "collectives": self.collectives(),
            "step_s": self.time and self.time.step_s,
            "step_s_interval": self.time and self.time.interval.to_json(),
            "time_s": self.time and self.time.parts_s,
            "notes": [*(self.time.notes if self.time else ())],
            "ledger": self.ledger.to_json(),
            "step_ledger": self.step_ledger.to_json(),
        }


def dry_run_script(
    command: Sequence[str], *, ranks: int, rank: int = 0, device: str | Cluster, stdout: Any = None
) -> ScriptOutcome:
    """Run `command` as rank `rank` of `ranks` on a chip or a cluster; ScriptError where it fails."""
    refuse("rank of a script", PlanError, device=device, rank=rank, ranks=ranks, last=ranks - 1, argv=command)
    cluster = device if isinstance(device, Cluster) else find_cluster(f"{device}:{ranks}")
    chip, text = cluster.chip, shlex.join(command)
    with tempfile.TemporaryDirectory() as folder:
        # torch's stand-in for CUDA, made for fakes, knows eight devices of a host
        devices = int(min(chip.levels[0].ranks, ranks, 8)) if chip.levels else 1
        place = {"asked": rank, "rank": rank, "ranks": ranks, "devices": devices, "chip": asdict(chip)}
        search = [str(_PACKAGE), *sys.path]
        settings = {"command": list(command), "search": search, "folder": folder, **place}
        (Path(folder) / f"started-{rank}").touch()
        exit_code, _ = run_command(command, rank_environment(settings), stdout)
        path = Path(folder) / REPORT
        report: Any = json.loads(path.read_text()) if path.exists() else None
        refused, has_begun = Path(folder) / REFUSED, (Path(folder) / BEGUN).exists()
        if refused.exists():
            raise MissingExtraError(refused.read_text())
    ended = {"exit_code": exit_code, "how": ended_how(exit_code), "has_begun": has_begun}
    refuse("refused script", PlanError, report=report)
    refuse("script", ScriptError, command=text, report=report, **ended)
    del report["failure"]
    report |= {name: Ledger.from_rows(report[name]) for name in ("ledger", "step_ledger")}
    report |= {"time": None, "untimed": ""}
    how = {name: report.pop(name) for name in ("launches", "fp32")}
    try:
        report["time"] = step_time(report["step_ledger"], cluster=cluster, rank=rank, **how)
        report["step_ledger"] = report["time"].ledger
    except ClusterError as error:
        report["untimed"] = str(error)
    return ScriptOutcome(program=text, ranks=ranks, rank=rank, device=chip.name, **report)


def rank_environment(settings: dict[str, Any], *, launched: bool = False) -> dict[str, str]:
    """The settings of the hook, and what torchrun sets: of one rank only where it is `launched`."""
    rank, ranks, devices = settings["rank"], settings["ranks"], settings["devices"]
    place = {
        "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % devices, "LOCAL_WORLD_SIZE": devices,
        "GROUP_RANK": rank // devices, "GROUP_WORLD_SIZE": -(-ranks // devices), "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": ranks, "ROLE_NAME": "default", "MASTER_ADDR": "localhost", "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in {*place, OWNER}}
    environment |= {name: str(value) for name, value in place.items() if launched or ranks > 1}
    environment |= {"NGPU": str(ranks), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    return hooked(environment) | {"MESHWISE_SCRIPT": json.dumps(settings)}
