"""Sets of ranks that meet in calls, directly or through others."""

from __future__ import annotations

from collections.abc import Iterable


def linked(groups: Iterable[Iterable[int]]) -> list[set[int]]:
    """The members of `groups` in the fewest sets that cut no group, by their lowest member."""
    sets: list[set[int]] = []
    for members in {frozenset(group) for group in groups}:
        near = [one for one in sets if one & members]
        sets = [one for one in sets if not one & members] + [set(members).union(*near)]
    return sorted(sets, key=min)
