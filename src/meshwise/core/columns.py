"""Columns of numbers that repeat: price each kind once, then spread the price."""

from collections.abc import Callable, Hashable, Iterable
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwise.core.units import Num

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def some_columns(value: Num, places: NDArray[np.intp], num: int) -> Num:
    """A number [..., `num` columns] at some of them; one that all columns share as it is."""
    return np.take(value, places, axis=-1) if np.shape(value)[-1:] == (num,) else value


def chosen_cells(value: Num, cells: tuple[NDArray[np.intp], ...], shape: tuple[int, ...]) -> Num:
    """A number of a grid of `shape` in some of its cells, as a row; one that all cells share as it is."""
    return np.broadcast_to(value, shape)[cells] if np.ndim(value) else value


def distinct_columns(table: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where each kind of column of `table` [rows, columns] first occurs, and the kind of each column.

    Kinds are told apart by a weighted sum of the rows, thirty times as fast as comparing columns; the result
    is checked, and columns are compared after all where two kinds have the same sum. No fractions of the
    weights add up to zero (e is transcendental), so only rounding makes sums of different columns equal.
    """
    sums = sum(np.exp(i / 8.0) * row for i, row in enumerate(table))
    order = np.argsort(sums)
    in_order = sums[order]
    is_new = np.r_[True, in_order[1:] != in_order[:-1]][: len(order)]
    first = np.minimum.reduceat(order, np.flatnonzero(is_new)) if len(order) else order
    kind = np.empty_like(order)
    kind[order] = np.cumsum(is_new) - 1
    like = first[kind]
    if not all(np.array_equal(row[like], row) for row in table):
        _, first, kind = np.unique(table, axis=1, return_index=True, return_inverse=True)
    return first, kind.ravel()


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """`items` by `key`, in the order of first appearance."""
    return by_key((key(item), item) for item in items)


def by_key(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """The items of each key of `pairs`, in the order of first appearance."""
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def pareto_front(ordered: Iterable[Item], figure: Callable[[Item], float]) -> list[Item]:
    """Of items in the order of one figure those whose other `figure` is less than that of all before."""
    front: list[Item] = []
    for item in ordered:
        if not front or figure(item) < figure(front[-1]):
            front.append(item)
    return front


def any_of(conditions: Iterable[Any]) -> Any:
    """Where one of them holds: those of few axes first, so that few steps are as large as the grid."""
    return reduce(np.logical_or, sorted(conditions, key=np.size))
