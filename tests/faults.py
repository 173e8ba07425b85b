"""How many injected faults are named, and how many healthy jobs blamed: `python tests/faults.py [jobs]`.

So many jobs of each fault are drawn at random: 2 to 64 ranks, 8 to 16 steps, a fault of 20 to 60 % of a
step, GPUs or CPUs, with and without the profiler's marks of steps, sequence numbers and host names, clocks
apart by seconds and drifting. A fault is named if the first finding about single ranks names these ranks, and
a cause that fits; a healthy job is blamed if there is any such finding. Clocks are judged by where the first
event of each rank comes to lie.
"""

import random
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from jobs import FAULTS, Job, write_job
from kineto import BASE_NS
from meshwise.trace.summary import Summary, summarize_paths

CAUSES = {
    "slow device": ("slow device",),
    "slow host": ("slow host", "idle"),
    "late rank": ("slow host", "idle"),
    "uneven load": ("larger work", "more work"),
    "pause": ("pause",),
    "slow link": ("slow link",),
}
"""The kinds of finding that fit each fault; only launches tell a slow host from other idle time."""
NUM_RANKS = (2, 3, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Verdict:
    """What the summary made of one job."""

    job: Job
    is_right: bool
    """The guilty rank is named, or nobody if nobody is."""
    has_cause: bool
    clock_error_s: float
    """The largest distance of a rank's first event from where it lay on the clock of rank 0."""
    findings: list[str]


def draw(fault: str, seed: int, most_ranks: int = 64) -> Job:
    """A random job with this fault."""
    chance = random.Random(f"{fault} {seed}")
    ranks = [n for n in NUM_RANKS if n <= most_ranks and (fault != "slow link" or n >= 8)]
    num_ranks = chance.choice(ranks)
    one_host = chance.random() < 0.5
    on_cpu = fault != "slow link" and chance.random() < 0.3
    return Job(
        num_ranks=num_ranks,
        num_steps=chance.randint(8, 16),
        fault=fault,
        rank=chance.randrange(num_ranks),
        size=chance.uniform(0.2, 0.6),
        seed=seed,
        has_marks=chance.random() < 0.5,
        has_numbers=chance.random() < 0.5,
        has_host=one_host,
        clock_s=0.0 if one_host or on_cpu else chance.choice((0.001, 0.5, 5.0)),
        drift_ppm=0.0 if one_host or on_cpu else chance.choice((0.0, 20.0)),
        on_cpu=on_cpu,
        overlaps=fault != "slow link" and chance.random() < 0.3,
    )


def judge(job: Job, folder: Path) -> Verdict:
    """Play the job into `folder` and hold the summary of its traces against what was injected."""
    first_ns = write_job(folder, job)
    found = summarize_paths([folder])
    single = [one for one in found.findings if 0 < len(one.ranks) < job.num_ranks]
    named = single[0].ranks if single else ()
    has_cause = not job.guilty or bool(single and single[0].kind in CAUSES[job.fault])
    error_s = _clock_error_s(found, first_ns)
    return Verdict(job, named == job.guilty, has_cause, error_s, [one.text for one in found.findings])


def _clock_error_s(found: Summary, first_ns: dict[int, int]) -> float:
    offsets = found.alignment.offsets_ns
    where = {t.rank: int(t.start_ns[0]) - offsets[t.rank] - BASE_NS for t in found.traces}
    apart = [where[rank] - first_ns[rank] - (where[0] - first_ns[0]) for rank in where]
    return max(map(abs, apart)) / 1e9


def verdicts(num_jobs: int, most_ranks: int = 64, first_seed: int = 0) -> dict[str, list[Verdict]]:
    """`num_jobs` of each fault, and as many healthy ones."""
    judged: dict[str, list[Verdict]] = defaultdict(list)
    for fault in ("none", *FAULTS):
        for seed in range(first_seed, first_seed + num_jobs):
            with tempfile.TemporaryDirectory() as folder:
                judged[fault].append(judge(draw(fault, seed, most_ranks), Path(folder)))
    return judged


def main() -> None:
    """Print one line a fault, and every job that was judged wrongly."""
    judged = verdicts(*map(int, sys.argv[1:] or ["30"]))
    print(f"{'fault':<14}{'jobs':>6}{'right':>8}{'cause':>8}{'clock, median':>16}{'worst':>10}")
    for fault, every in judged.items():
        right, cause = sum(one.is_right for one in every), sum(one.has_cause for one in every)
        errors = sorted(one.clock_error_s * 1e6 for one in every if not one.job.on_cpu)
        clock = f"{errors[len(errors) // 2]:13.2f} us{errors[-1]:7.1f} us"
        print(f"{fault:<14}{len(every):>6}{right:>8}{cause:>8}{clock}")
    for every in judged.values():
        for one in every:
            if not (one.is_right and one.has_cause):
                print(f"\n{one.job}\n  " + "\n  ".join(one.findings))


if __name__ == "__main__":
    main()
