import sys
from pathlib import Path

import tasks
from meshwise.sweep import sweep as sweeps

sweeps.answer_of = tasks.slow_answer
with sweeps.Store(Path(sys.argv[1]).with_suffix(".sqlite")) as store:
    sweeps.run_sweep(sweeps.read_sweep(Path(sys.argv[1])), store, jobs=1)
