"""`meshwise run`, `dryrun`, `compare`, `calibrate`: the programs, real or not, and this machine's numbers.

The options of a program follow its name: `meshwise run ulysses --ranks 4 --seq 4096 --causal`. A dry run also
takes any command: `meshwise dryrun --ranks 64 -- python train.py`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from meshwise import api
from meshwise.cli.output import STDERR, console, print_json, print_parts, show
from meshwise.core.errors import DataError, PlanError
from meshwise.core.options import takes

if TYPE_CHECKING:
    from meshwise.runtime.outcome import Outcome
    from meshwise.runtime.programs import Program
    from meshwise.runtime.script.start import ScriptOutcome


@takes(api.run, without=("quiet",), optional=("program",))
def run(
    context: typer.Context,
    *,
    csv: Path | None = None,
    json: bool = False,
    show_help: bool = False,
    **asked: Any,
) -> None:
    """Run a program on real ranks. They are started here, or by torchrun or srun.

    On the CPU the ranks talk over gloo, on GPUs over NCCL. Each step prints its tensors, FLOP and memory.

    Args:
        csv: Write the ledger to this file.
    """
    if csv is not None and not asked["recorded"]:
        raise PlanError("--csv writes the ledger, which --no-ledger leaves out; give one of them")
    found, options = _parse(context, asked.pop("program") or "", show_help)
    outcome = api.run(found.name, quiet=json, **asked, **options)
    if outcome is not None:
        _show(outcome, csv, json, says_result=found.says_result)


@takes(api.dry_run, without=("quiet",), optional=("program",))
def dryrun(
    context: typer.Context,
    *,
    csv: Path | None = None,
    json: bool = False,
    show_help: bool = False,
    **asked: Any,
) -> None:
    """Run any rank of a program of any size on fake tensors. No GPU, no other rank and no memory is needed.

    Yields what `run` on that device would: shapes, FLOP, collectives, and peak memory with the caching
    allocator's rounding and the cuBLAS workspace. In place of a program: `-- python train.py ...` (or
    torchrun, accelerate launch), anybody's script on torch, unmodified.

    Args:
        csv: Write the ledger to this file.
    """
    program = asked.pop("program") or ""
    if is_command(program):
        command = [program, *context.args]
        script = api.dry_run_script(command, stdout=STDERR if json else None, **asked)
        _show(script, csv, json)
        return
    found, options = _parse(context, program, show_help)
    outcome = api.dry_run(found.name, quiet=json, **asked, **options)
    _show(outcome, csv, json, says_result=found.says_result)


@takes(api.compare, optional=("program",))
def compare(
    context: typer.Context,
    *,
    stated: str = "",
    json: bool = False,
    show_help: bool = False,
    **asked: Any,
) -> None:
    """Compare estimate, dry run and real run of a program, op by op.

    Exit code 1 if any count differs: FLOP, shapes, bytes, collectives, payloads, tensors kept and alive. In
    place of a program: `--estimate "MODEL --cluster C --plan P --batch N" -- python train.py ...` holds
    anybody's script on torch, dry-run, against the closed form of what it should do.

    Args:
        stated: Words of estimate, for a script: "MODEL --cluster C --plan P".
    """
    program = asked.pop("program") or ""
    if is_command(program):
        if asked["cluster"] is not None:
            raise PlanError("--cluster times programs; a script's cluster is a word of --estimate")
        _compare_script([program, *context.args], stated, asked["rank"], json)
        return
    if stated:
        raise PlanError(f"--estimate is for scripts; {program} knows its own closed form")
    found, options = _parse(context, program, show_help)
    result = api.compare(found.name, **asked, **options)
    of = {"program": found.name, "ranks": asked["ranks"], "rank": asked["rank"]}
    show(result, of | result.to_json(), json=json, ok=result.agree)


def calibrate(
    *,
    device: str = "cpu",
    out: Path = Path("this-machine.toml"),
    ranks: int = 0,
    quick: bool = False,
    source: list[Path] | None = None,
    steps: str = "",
    serving: list[Path] | None = None,
    model: str = "",
    cluster: str = "",
    plan: str = "",
    engine: str = "vllm",
    json: bool = False,
) -> None:
    """Write a cluster file of this machine.

    Or, of a job, from its traces; or an engine file of a server, from its benchmark records.

    Args:
        device: cpu or cuda.
        out: The file to write.
        ranks: Ranks of the measured collectives (0: two on a CPU, else all GPUs).
        quick: Fewer and smaller measurements.
        source: Traces of a job, instead of measuring this machine.
        steps: Of --from, only these steps: 3-7, or complete.
        serving: Records of vLLM's or SGLang's bench, GenAI-Perf or AIPerf, to fit an engine's constants to.
        model: Of --serving, what was served.
        cluster: Of --serving, the GPUs of the server.
        plan: Of --serving, its plan, as for serve.
        engine: Of --serving, vllm, sglang or trtllm, with version and settings: vllm@0.12.0.
    """
    from meshwise.core.files import check_writable

    check_writable(out)
    if serving:
        if source or steps or ranks or quick or device != "cpu":
            raise DataError("--serving reads records of a server; leave options of this machine out")
        _calibrate_server(serving, model, cluster, plan, engine, out, json)
        return
    if model or cluster or plan:
        raise DataError("--model, --cluster and --plan are of --serving RECORDS; name them too")
    if source:
        if device != "cpu" or ranks or quick:
            raise DataError("--from reads traces, it measures nothing; leave --device, --ranks, --quick out")
        from meshwise.calibrate.from_traces import calibrate_from

        found = calibrate_from(source, steps=steps)
    elif steps:
        raise DataError("--steps chooses steps of traces; name them with --from DIR")
    else:
        api.need_torch()
        from meshwise.runtime.calibrate import calibrate as measure

        found = measure(device, ranks=ranks, quick=quick)
    found.write(out)
    if json:
        print_json(found.to_json() | {"file": str(out)})
        return
    from meshwise.core.units import with_prefix
    from meshwise.report.table import Fields, records_table

    columns: Fields = {"what": "what", "shape": "shape", "dtype": "dtype", "time": "time_s"}
    columns["rate"] = lambda one: with_prefix(one.rate, one.unit)
    left = ("what", "shape", "dtype")
    console().print(records_table(found.source, found.samples, columns, left=left, no_wrap=False))
    print(f"wrote {out}; use it as --cluster {out}")


def _calibrate_server(
    records: list[Path], model: str, cluster: str, plan: str, engine: str, out: Path, json: bool
) -> None:
    from meshwise.core.files import write_text

    if not (model and cluster):
        raise DataError("--serving needs what was served and on what: --model, --cluster and --plan")
    found = api.calibrate_server(records, model, cluster, plan, engine=engine)
    write_text(out, found.toml)
    if json:
        print_json(found.to_json() | {"file": str(out)})
        return
    from meshwise.report.fit import server_fit

    print_parts(server_fit(found))
    print(f"wrote {out}; use it as serve --engine {out}")


def is_command(program: str) -> bool:
    """Whether `program` is a command of this machine, not one of our programs."""
    from meshwise.runtime.programs import PROGRAMS

    return program not in PROGRAMS and (program == "python" or shutil.which(program) is not None)


# --- what they share ---------------------------------------------------------------------------


def _parse(context: typer.Context, name: str, show_help: bool) -> tuple[Program, dict[str, Any]]:
    """The program and its options; `--help` prints the options of both and ends."""
    from meshwise.runtime.programs import PROGRAMS, find_program, parse_options

    if show_help:
        typer.echo(context.get_help())
        if name:
            _print_options(find_program(name))
        else:
            typer.echo(f"\nPrograms: {', '.join(PROGRAMS)}.")
            typer.echo(f"The options of each: meshwise {context.info_name} PROGRAM --help")
        raise typer.Exit
    if not name:
        raise PlanError(f"name a program: {', '.join(PROGRAMS)}")
    program = find_program(name)
    options = parse_options(program, context.args)
    return program, {field.name: getattr(options, field.name) for field in fields(options)}


def _print_options(program: Program) -> None:
    from rich.table import Table

    from meshwise.runtime.programs import option_help

    table = Table.grid(padding=(0, 2))
    for row in option_help(program):
        default = f"[{row.default}]" if row.default else ""
        table.add_row(f"  {row.flag} {row.kind}".rstrip(), row.doc, default)
    out = console()
    out.print(f"\n{program.doc}\n\nOptions of {program.name}:")
    out.print(table)


def _show(outcome: Outcome | ScriptOutcome, csv: Path | None, json: bool, **shown: Any) -> None:
    if csv is not None:
        outcome.ledger.to_csv(csv)
    show(outcome, json=json, **shown)


def _compare_script(command: list[str], stated: str, rank: int, json: bool) -> None:
    words = _Words(prog="--estimate", add_help=False, allow_abbrev=False)
    words.add_argument("model")
    for name in ("--cluster", "--plan"):
        words.add_argument(name, default="")
    for name in ("--batch", "--seq", "--microbatch"):
        words.add_argument(name, type=int)
    asked = vars(words.parse_args(shlex.split(stated)))
    place = [asked.pop(name) for name in ("model", "cluster", "plan")]
    estimate, stdout = api.estimate(*place, **asked), STDERR if json else None
    found, outcome = api.compare_script(command, estimate, rank=rank, stdout=stdout)
    if json:
        of = {"program": outcome.program, "ranks": outcome.ranks, "rank": rank}
        print_json(of | found.to_json() | {"peak_bytes": outcome.peak_bytes})
    else:
        from meshwise.report.script import difference_parts

        print_parts(difference_parts(found))
    if not found.agree:
        raise typer.Exit(1)


class _Words(argparse.ArgumentParser):
    """A parser whose complaints are ours."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(f"--estimate: {message}; give the words of meshwise estimate")
