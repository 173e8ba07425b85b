"""Ulysses in closed form."""
from __future__ import annotations
from dataclasses import dataclass
from meshwise.layout.tape import Tape
@dataclass(frozen=True, slots=True, kw_only=True)
class Ulysses:
    ranks: int
    ring: int
    seq: int
    hidden: int
    heads: int
    dtype: str
    elem_bytes: int
    is_flash: bool
    is_causal: bool
    has_backward: bool
def write_ulysses(u: Ulysses, tape: Tape) -> None: ...
