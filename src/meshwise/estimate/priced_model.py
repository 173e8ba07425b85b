"""A model on a mesh, its parts priced: what times, exchanges and memory of stages follow from.

In a grid of plans parts are priced once for every distinct cut of a block, and what is not of experts once
for all cuts that differ in experts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import chosen_cells, distinct_columns
from meshwise.core.numbers import added
from meshwise.core.units import Num
from meshwise.estimate.priced_part import Part, paced, price_parts
from meshwise.estimate.timing import Machine
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage
from meshwise.program.cut import Cut
from meshwise.program.exchange import grad_bytes
from meshwise.program.implementation import shards_each_weight
from meshwise.program.parts import cut_of, parts


@dataclass(frozen=True, eq=False)
class PricedModel:
    """A model under the plans of `mesh`, which `cut` its blocks so, on `machine`.

    `of_cuts`: the parts of one rank and one microbatch by name (embedding, blocks of each kind, head), priced
    once for each distinct cut. `kind`: the cut of each row of a grid; None where all rows have one. `name`:
    of a tower. `lone`: the parts of microbatches beside which no other runs, where exchanges hide behind it.
    """

    model: Model
    mesh: Mesh
    machine: Machine
    cut: Cut
    of_cuts: dict[str, Part]
    kind: NDArray[np.intp] | None = None
    name: str = ""
    lone: dict[str, Part] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The parts of every row, in the mean of its microbatches."""

        def of_rows(part: Part) -> Part:
            kind = self.kind
            if kind is None:
                return part
            return part.mapped(lambda one: np.take(one, kind, axis=-1) if np.ndim(one) else one)

        found = {name: of_rows(part) for name, part in self.of_cuts.items()}
        alone = {name: of_rows(part) for name, part in self.lone.items()}
        return found | {name: paced(found[name], part, self.mesh.lone_frac) for name, part in alone.items()}

    @cached_property
    def by_part(self) -> list[Part]:
        """The same in their order."""
        return list(self.parts.values())

    def contents(self, stage: Stage) -> list[tuple[Num, Part]]:
        """How many of each part a stage holds."""
        return list(zip((stage.embeddings, *stage.layers, stage.heads), self.by_part, strict=True))

    def of_rows(self, rows: Any, mesh: Mesh) -> PricedModel:
        """Some rows, whose plans are those of `mesh`."""
        kind = self.kind if self.kind is None else self.kind[rows]
        return replace(self, mesh=mesh, cut=cut_of(mesh), kind=kind)

    def total(self, name: str, counts: Sequence[float]) -> Num:
        """The sum over so many of each part of one of their numbers, in every row."""
        each = [getattr(part, name) for part in self.of_cuts.values()]
        found = np.asarray(added(count * number for count, number in zip(counts, each, strict=True)))
        return found[self.kind] if self.kind is not None and found.ndim else found[()]


def priced_model(model: Model, mesh: Mesh, machine: Machine, name: str = "") -> PricedModel:
    """A model in all rows of `mesh`; its keys of `estimate.grid.TAIL` play no part."""
    cut = cut_of(mesh)
    hide = tuple(axis for axis in ("tp", "ep") if getattr(mesh.plan, f"overlap_{axis}"))
    lone: dict[str, Part] = {}
    if mesh.plan.overlap_ep and mesh.trains:
        alone = replace(mesh, plan=replace(mesh.plan, overlap_ep=False))
        lone = priced_model(model, alone, machine).of_cuts
    numbers = {each.name: getattr(cut, each.name) for each in fields(cut)}
    arrays = {name: value for name, value in numbers.items() if isinstance(value, np.ndarray)}
    if not arrays:
        alike = _price_alike(model, cut, hide, machine, grad_bytes(mesh))
        return PricedModel(model, mesh, machine, cut, alike, name=name, lone=lone)
    columns = np.stack(np.broadcast_arrays(*arrays.values()))
    flat = columns.reshape(len(arrays), -1)
    first, cells = distinct_columns(flat)
    table, places = _by_experts(cuts := dict(zip(arrays, flat[:, first], strict=True)))
    along = {name: values[table if name in OF_EXPERTS else table[:, :1]] for name, values in cuts.items()}
    found = _priced(model, replace(cut, **along), hide, machine, grad_bytes(mesh))
    of_cuts = partial(chosen_cells, cells=places, shape=table.shape)
    by_cut = {name: part.mapped(of_cuts) for name, part in found.items()}
    return PricedModel(model, mesh, machine, cut, by_cut, cells.reshape(columns.shape[1:]), name, lone)


OF_EXPERTS = ("ep", "etp", "ep_stride", "dispatch_per_rank", "imbalance")
"""Numbers of a cut that experts alone depend on."""


def _by_experts(cuts: dict[str, NDArray[Any]]) -> tuple[NDArray[np.intp], tuple[NDArray[np.intp], ...]]:
    """A table of the numbers of cuts, those in a row alike but `OF_EXPERTS`; the place of each cut in it.

    So what is not of experts is computed once for each row. Short rows are filled up with their first cut.
    """
    alike = [np.zeros_like(values) if name in OF_EXPERTS else values for name, values in cuts.items()]
    first, kind = distinct_columns(np.stack(alike))
    order = np.argsort(kind, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.searchsorted(kind[order], kind[order])
    table = np.repeat(first[:, None], np.max(place) + 1, axis=1)
    table[kind, place] = np.arange(len(kind))
    return table, (kind, place)


def _priced(
    model: Model, cut: Cut, hide: tuple[str, ...], machine: Machine, sum_bytes: float
) -> dict[str, Part]:
    computed_bytes = cut.precision.act_bytes * shards_each_weight(cut)
    return price_parts(parts(model, cut), machine, hide=hide, sum_bytes=sum_bytes, grad_bytes=computed_bytes)


_price_alike = lru_cache(maxsize=512)(_priced)
"""The parts of plans that cut a block alike, whatever their depth."""
