"""A job that srun starts, one process a rank: `outside_job.py HOW`, rank 1 fails so."""

import os
import sys

from meshwise.core.errors import MeshwiseError
from meshwise.runtime.launch import launch
from ranks import fail_on

if __name__ == "__main__":
    try:
        launch(fail_on, int(os.environ["SLURM_STEP_NUM_TASKS"]), 1, sys.argv[1])
    except MeshwiseError as error:
        print(f"meshwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
