"""The index of a checkpoint, `checkpoint.json`: its config, and in which file each tensor lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwise.errors import DataError

INDEX = "checkpoint.json"


def read_index(folder: Path) -> dict[str, Any]:
    """The contents of `checkpoint.json`; DataError if there is no checkpoint in `folder`."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except OSError:
        raise DataError(f"{folder} is no checkpoint: it has no {INDEX}") from None
    except ValueError:
        raise DataError(f"{folder / INDEX} is damaged: it is not JSON") from None
    if not isinstance(index, dict) or not isinstance(index.get("tensors"), dict):
        raise DataError(f"{folder / INDEX} is damaged: it lists no tensors")
    return index
