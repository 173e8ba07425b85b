"""Packages that only some calls need, imported when they do."""

import importlib
from typing import Any

from meshwise.core.errors import MissingExtraError


def import_extra(module: str, extra: str) -> Any:
    """A module of an optional package; MissingExtraError without it, which names the extra that has it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise MissingExtraError(f'{package} is not installed; run: pip install "meshwise[{extra}]"') from None
