"""Expressions of the catalog: a part of Python without private attributes, as functions of their names.

Nothing that is read can run code: an expression is compiled only if it has no other parts, and no builtins.
"""

import ast
import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

_PARTS = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Call, ast.Load),
    *(ast.List, ast.Tuple, ast.Dict, ast.IfExp, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.unaryop, ast.operator, ast.boolop, ast.cmpop),
)
_NO_BUILTINS: dict[str, Any] = {"__builtins__": {}}

Names = Mapping[str, Any]


@cache
def _compiled(text: str) -> CodeType:
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _PARTS) or (isinstance(node, ast.Attribute) and node.attr.startswith("_")):
            raise ValueError(f"{type(node).__name__} is no part of an expression")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a number that is called or indexed, which fails by itself
        return compile(tree, text, "eval")


def value_of(text: str, names: Names) -> Any:
    """What the expression `text` is where its names have these values."""
    return eval(_compiled(text), _NO_BUILTINS, names)


def formulas(table: Mapping[str, str], names: Names) -> dict[str, Any]:
    """What each expression of a table is, the later ones by the earlier too; an unknown name is None."""
    known: dict[str, Any] = defaultdict(lambda: None, names)
    found = {}
    for name, text in table.items():
        found[name] = known[name] = value_of(text, known)
    return found
