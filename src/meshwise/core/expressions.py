"""Expressions of the catalog: a part of Python without statements, loops and private attributes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

_PARTS = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Call, ast.List),
    *(ast.Tuple, ast.Dict, ast.IfExp, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)


@cache
def _compiled(text: str) -> CodeType:
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        attribute = getattr(node, "attr", "")
        if not isinstance(node, _PARTS) or attribute.startswith("_"):
            raise ValueError(f"{attribute or type(node).__name__} is no part of an expression")
    return compile(tree, "<expression>", "eval")


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """What the expression `text` is where its names have these values; it knows no others."""
    return eval(_compiled(text), {"__builtins__": {}}, names)


def formulas(table: Mapping[str, str], names: Mapping[str, Any]) -> dict[str, Any]:
    """What each expression of a table is, the later ones by the earlier too; an unknown name is None."""
    known: dict[str, Any] = defaultdict(lambda: None, names)
    found = {}
    for name, text in table.items():
        found[name] = known[name] = value_of(text, known)
    return found
