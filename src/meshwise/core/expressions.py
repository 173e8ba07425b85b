"""Expressions of the catalog: a part of Python without private attributes, walked by hand.

Nothing that is read can run code.
"""

import ast
import operator
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

_OPERATORS: dict[type, Any] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg},
    **{ast.Not: operator.not_, ast.BitAnd: operator.and_, ast.BitOr: operator.or_},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many},
}


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """What the expression `text` is where its names have these values."""
    return _value(_parsed(text), names)


def formulas(table: Mapping[str, str], names: Mapping[str, Any]) -> dict[str, Any]:
    """What each expression of a table is, the later ones by the earlier too; an unknown name is None."""
    known: dict[str, Any] = defaultdict(lambda: None, names)
    found = {}
    for name, text in table.items():
        found[name] = known[name] = value_of(text, known)
    return found


def _value(node: Any, names: Mapping[str, Any]) -> Any:
    def of(part: Any) -> Any:
        return None if part is None else _value(part, names)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.Attribute() if not node.attr.startswith("_"):
            return getattr(of(node.value), node.attr)
        case ast.Subscript():
            return of(node.value)[of(node.slice)]
        case ast.Slice():
            return slice(of(node.lower), of(node.upper), of(node.step))
        case ast.Call():
            return of(node.func)(*map(of, node.args))
        case ast.List():
            return [*map(of, node.elts)]
        case ast.Tuple():
            return (*map(of, node.elts),)
        case ast.Dict():
            return dict(zip(map(of, node.keys), map(of, node.values), strict=True))
        case ast.IfExp():
            return of(node.body if of(node.test) else node.orelse)
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](of(node.operand))
        case ast.BinOp():
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        case ast.BoolOp():
            found = None
            for one in node.values:
                found = of(one)
                if bool(found) is isinstance(node.op, ast.Or):
                    break
            return found
        case ast.Compare():
            left, found = of(node.left), None
            for op, right in zip(node.ops, map(of, node.comparators), strict=True):
                found = _OPERATORS[type(op)](left, right)  # an array, of arrays
                if len(node.ops) > 1 and not found:
                    break
                left = right
            return found
    raise ValueError(f"{type(node).__name__} is no part of an expression")
