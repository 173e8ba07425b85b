"""What a chip, its node and its building draw, on average over a step or a pass.

A chip of limit W that works draws most of it whatever it does, as clocks and caches run at full speed; the
matrix unit draws the rest, in proportion to the FLOP/s that it does, up to the rate that the limit sustains.
A chip that waits (for others, for the host, or in a kernel of communication) draws little:

    chip = W ((1 - w) min(1, working + matrix u) + w waiting)

w is the share of time that is spent waiting, u the matrix FLOP/s of the rest over the sustained rate. A node
adds its processors, memory, network cards and fans, and its supplies lose a share; a building adds cooling:

    node = (chip + host) / supply        building = PUE node

Constants and their sources: `catalog/power.toml`.
"""

import numpy as np

from meshwise.core.files import read_catalog
from meshwise.core.units import Num

_CATALOG = read_catalog("power.toml")
CHIP: dict[str, float] = _CATALOG["chip"]
"""Shares of a chip's power limit: working, more of it at the matrix unit's full rate, and waiting."""
NODE: dict[str, float] = _CATALOG["node"]
"""Watts of the rest of a node for each of its chips, and what its supplies pass on of what they take."""


def chip_watts(limit_watts: Num, *, waiting_frac: Num, matrix_frac: Num) -> Num:
    """Mean watts of a chip that waits `waiting_frac` of the time and else does `matrix_frac` of the matrix
    FLOP/s that its limit sustains."""
    working = np.minimum(CHIP["working_frac"] + CHIP["matrix_frac"] * matrix_frac, 1.0)
    return limit_watts * ((1.0 - waiting_frac) * working + waiting_frac * CHIP["waiting_frac"])


def node_watts(watts: Num) -> Num:
    """Mean watts that a node takes from the wall for one of its chips, which draws `watts`."""
    return (watts + NODE["host_watts"]) / NODE["supply_frac"]
