"""A job that torchrun or srun starts, one process a rank: `outside_job.py FUNCTION [WORDS]` of `ranks`."""

from __future__ import annotations

import os
import sys

import ranks
from meshwise.core.errors import MeshwiseError
from meshwise.runtime.launch import launch, outside_place

if __name__ == "__main__":
    place = outside_place(os.environ)
    assert place is not None
    try:
        launch(getattr(ranks, sys.argv[1]), place.world_size, *(sys.argv[2:] or [1]))
    except MeshwiseError as error:
        print(f"meshwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
