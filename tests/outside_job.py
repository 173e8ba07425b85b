"""A job that torchrun or srun starts, one process a rank: `outside_job.py FUNCTION` of `ranks.py`, on two."""

from __future__ import annotations

import sys

import ranks
from meshwise.core.errors import MeshwiseError
from meshwise.runtime.launch import launch

if __name__ == "__main__":
    try:
        launch(getattr(ranks, sys.argv[1]), 2, 1)
    except MeshwiseError as error:
        print(f"meshwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
