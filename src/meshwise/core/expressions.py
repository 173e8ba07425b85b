"""Expressions of the catalog: a part of Python without private attributes, as functions of their names.

Nothing that is read can run code.
"""

import ast
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

_OPERATORS: dict[type, Any] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg},
    **{ast.Not: operator.not_, ast.BitAnd: operator.and_, ast.BitOr: operator.or_},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many},
}


Names = Mapping[str, Any]
Value = Callable[[Names], Any]


@cache
def parsed(text: str) -> Value:
    """The expression `text` as a function of its names."""
    return _value(ast.parse(text, mode="eval").body)


def value_of(text: str, names: Names) -> Any:
    """What the expression `text` is where its names have these values."""
    return parsed(text)(names)


def formulas(table: Mapping[str, str], names: Names) -> dict[str, Any]:
    """What each expression of a table is, the later ones by the earlier too; an unknown name is None.

    Names that begin with _ are steps on the way, and left out.
    """
    known: dict[str, Any] = defaultdict(lambda: None, names)
    for name, text in table.items():
        known[name] = value_of(text, known)
    return {name: known[name] for name in table if name[0] != "_"}


def _value(node: Any) -> Value:
    """The value of a part of an expression, as a function of its names."""
    match node:
        case None:
            return lambda names: None
        case ast.Constant(value=value):
            return lambda names: value
        case ast.Name(id=name):
            return itemgetter(name)
        case ast.Attribute(attr=attr) if not attr.startswith("_"):
            owner = _value(node.value)
            return lambda names: getattr(owner(names), attr)
        case ast.Subscript():
            return _applied(operator.getitem, node.value, node.slice)
        case ast.Slice():
            return _applied(slice, node.lower, node.upper, node.step)
        case ast.Call():
            function, several = _value(node.func), _several(node.args)
            return lambda names: function(names)(*several(names))
        case ast.List():
            return _several(node.elts)
        case ast.Tuple():
            return _applied(lambda *parts: parts, *node.elts)
        case ast.Dict():
            keys, values = _several(node.keys), _several(node.values)
            return lambda names: dict(zip(keys(names), values(names), strict=True))
        case ast.IfExp():
            test, body, other = map(_value, (node.test, node.body, node.orelse))
            return lambda names: (body if test(names) else other)(names)
        case ast.UnaryOp():
            return _applied(_OPERATORS[type(node.op)], node.operand)
        case ast.BinOp():
            return _applied(_OPERATORS[type(node.op)], node.left, node.right)
        case ast.BoolOp():
            return _first(isinstance(node.op, ast.Or), [*map(_value, node.values)])
        case ast.Compare(ops=[op]):
            return _applied(_OPERATORS[type(op)], node.left, *node.comparators)  # an array, of arrays
        case ast.Compare():
            steps = zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False)
            return _first(False, [_applied(_OPERATORS[type(op)], *pair) for op, *pair in steps])
    raise ValueError(f"{type(node).__name__} is no part of an expression")


def _several(nodes: Sequence[Any]) -> Value:
    parts = [*map(_value, nodes)]
    return lambda names: [part(names) for part in parts]


def _applied(function: Callable[..., Any], *nodes: Any) -> Value:
    """What `function` gives of the values of `nodes`."""
    if len(nodes) == 2:
        left, right = map(_value, nodes)
        return lambda names: function(left(names), right(names))
    several = _several(nodes)
    return lambda names: function(*several(names))


def _first(wanted: bool, parts: Sequence[Value]) -> Value:
    """The first value that is true (false) as `wanted`, or the last."""

    def value(names: Names) -> Any:
        found = None
        for part in parts:
            found = part(names)
            if bool(found) is wanted:
                break
        return found

    return value
