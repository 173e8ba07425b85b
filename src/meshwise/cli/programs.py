"""`meshwise run`, `dryrun`, `compare`, `calibrate`: the programs, real or not, and this machine's numbers.

The options of a program follow its name: `meshwise run ulysses --ranks 4 --seq 4096 --causal`. A dry run also
takes any command: `meshwise dryrun --ranks 64 -- python train.py`.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwise import api
from meshwise.cli.output import STDERR, print_answer, show
from meshwise.core.errors import DataError, PlanError
from meshwise.core.options import options_of, stated_in, takes
from meshwise.core.refusals import refuse

if TYPE_CHECKING:
    from meshwise.runtime.programs import Program
    from meshwise.runtime.script.start import ScriptOutcome
    from meshwise.runtime.start import Outcome


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
    refuse("ledger of a run", PlanError, csv=csv, recorded=asked["recorded"])
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
        script = api.dry_run_script([program, *context.args], stdout=STDERR if json else None, **asked)
        _show(script, csv, json)
        return
    found, options = _parse(context, program, show_help)
    _show(api.dry_run(found.name, quiet=json, **asked, **options), csv, json, says_result=found.says_result)


@takes(api.compare, optional=("program",))
def compare(
    context: typer.Context, *, stated: str = "", json: bool = False, show_help: bool = False, **asked: Any
) -> None:
    """Compare estimate, dry run and real run of a program, op by op.

    Exit code 1 if any count differs: FLOP, shapes, bytes, collectives, payloads, tensors kept and alive. In
    place of a program: `--estimate "MODEL --cluster C --plan P --batch N" -- python train.py ...` holds
    anybody's script on torch, dry-run, against the closed form of what it should do.

    Args:
        stated: Words of estimate, for a script: "MODEL --cluster C --plan P".
    """
    program = asked.pop("program") or ""
    is_script = is_command(program)
    about = {"is_script": is_script, "cluster": asked["cluster"], "stated": stated, "program": program}
    refuse("compared program", PlanError, **about)
    if is_script:
        _compare_script([program, *context.args], stated, asked["rank"], json)
        return
    found, options = _parse(context, program, show_help)
    result = api.compare(found.name, **asked, **options)
    of = {"program": found.name, "ranks": asked["ranks"], "rank": asked["rank"]}
    show(result, of | result.to_json(), json=json, ok=result.agree)


@takes(api.calibrate_server, without=("records",), optional=("model", "cluster"))
def calibrate(
    *,
    device: str = "cpu",
    out: Path = Path("this-machine.toml"),
    ranks: int = 0,
    quick: bool = False,
    source: list[Path] | None = None,
    steps: str = "",
    serving: list[Path] | None = None,
    json: bool = False,
    **asked: Any,
) -> None:
    """Write a cluster file of this machine.

    Or, of a job, from its traces; or an engine file of a server, from its benchmark records, which needs to
    know what was served: --model, --cluster, --plan and --engine.

    Args:
        device: cpu or cuda.
        out: The file to write.
        ranks: Ranks of the measured collectives (0: two on a CPU, else all GPUs).
        quick: Fewer and smaller measurements.
        source: Traces of a job, instead of measuring this machine.
        steps: Of --from, only these steps: 3-7, or complete.
        serving: Records of vLLM's or SGLang's bench, GenAI-Perf or AIPerf, to fit an engine's constants to.
    """
    from meshwise.core.files import check_writable, write_text

    check_writable(out)
    measures = stated_in({"device": device, "ranks": ranks, "quick": quick}, calibrate)
    stated = {"serving": serving, "source": source, "steps": steps, "measures": measures}
    refuse("calibrate", DataError, **stated, **asked)
    found: Any
    if serving:
        found, use = api.calibrate_server(serving, **asked), "serve --engine"
        write_text(out, found.toml)
    else:
        found, use = _measured(source, steps, device, ranks, quick), "--cluster"
        found.write(out)
    show(found, found.to_json() | {"file": str(out)}, json=json)
    if not json:
        print(f"wrote {out}; use it as {use} {out}")


def _measured(source: list[Path] | None, steps: str, device: str, ranks: int, quick: bool) -> Any:
    """The machine as traces show it, or as it is measured now."""
    if source:
        from meshwise.calibrate.from_traces import calibrate_from

        return calibrate_from(source, steps=steps)
    api.need_torch()
    from meshwise.runtime.calibrate import calibrate as measure

    return measure(device, ranks=ranks, quick=quick)


def is_command(program: str) -> bool:
    """Whether `program` is a command of this machine, not one of our programs."""
    from meshwise.runtime.programs import PROGRAMS

    return program not in PROGRAMS and (program == "python" or shutil.which(program) is not None)


# --- what they share ---------------------------------------------------------------------------


def _parse(context: typer.Context, name: str, show_help: bool) -> tuple[Program, dict[str, Any]]:
    """The program and its options; `--help` prints the options of both and ends."""
    from meshwise.runtime.programs import PROGRAMS, find_program, parse_options, words_of

    if show_help:
        typer.echo(context.get_help())
        if name:
            typer.echo(f"\n{words_of(find_program(name)).format_help()}")
        else:
            typer.echo(f"\nPrograms: {', '.join(PROGRAMS)}.")
            typer.echo(f"The options of each: meshwise {context.info_name} PROGRAM --help")
        raise typer.Exit
    refuse("no program", PlanError, name=name, known=", ".join(PROGRAMS))
    program = find_program(name)
    options = parse_options(program, context.args)
    return program, {field.name: getattr(options, field.name) for field in fields(options)}


def _show(outcome: Outcome | ScriptOutcome, csv: Path | None, json: bool, **shown: Any) -> None:
    if csv is not None:
        getattr(outcome, outcome.rows_in).to_csv(csv)
    show(outcome, json=json, **shown)


def _compare_script(command: list[str], stated: str, rank: int, json: bool) -> None:
    model, *words = shlex.split(stated) or [""]
    options = {f"--{name.replace('_', '-')}": option for name, option in options_of(api.estimate).items()}
    if not model or len(words) % 2 or not options.keys() >= {*words[::2]} >= {"--cluster"}:
        raise PlanError(f"--estimate {stated!r} must be words of estimate: MODEL --cluster C --plan P ...")
    named = zip(map(options.__getitem__, words[::2]), words[1::2], strict=True)
    asked = {option.name: option.value(text) for option, text in named}
    estimate, stdout = api.estimate(model, asked.pop("cluster"), **asked), STDERR if json else None
    found, outcome = api.compare_script(command, estimate, rank=rank, stdout=stdout)
    from meshwise.report.programs import difference_parts

    document = {"program": outcome.program, "ranks": outcome.ranks, "rank": rank} | found.to_json()
    seconds = {"estimate": estimate.step_s, "script": outcome.time.step_s if outcome.time else None}
    document |= {"peak_bytes": outcome.peak_bytes, "step_s": seconds}
    print_answer(document, difference_parts(found, seconds), json=json)
    if not found.agree:
        raise typer.Exit(1)


# --- captures of programs of others ---------------------------------------------------------------


@takes(api.profile, without=("stdout",))
def profile(*, limit: int = 15, all: bool = False, json: bool = False, **asked: Any) -> None:
    """Run a program, capture all its ranks, and summarise them. It may start them as it likes."""
    from meshwise.trace.summary import summarize_paths

    done = api.profile(**asked, stdout=STDERR if json else None)
    refuse("profile", DataError, done=done, words=" ".join(done.command))
    summary = summarize_paths(done.files)
    names = ("exit_code", "wall_s", "bare_s", "overhead_frac")
    document: dict[str, Any] = {"command": list(done.command), "files": [str(file) for file in done.files]}
    document |= {name: getattr(done, name) for name in names} | summary.to_json()
    show(summary, document, json=json, limit=limit, everything=all)
    if not json:
        folder = asked["directory"]
        print(f"ranks in {folder}: {len(summary.ranks)} (see: meshwise trace table|sections|merge {folder})")
        if done.overhead_frac is not None:
            bare = f"{done.wall_s:.2f} s with capture, {done.bare_s:.2f} s without"
            print(f"overhead of the capture: {100 * done.overhead_frac:+.1f} % ({bare})")
    if done.exit_code != 0:
        print(f"meshwise: the program ended with exit code {done.exit_code}", file=sys.stderr)
        raise typer.Exit(1)
