"""A user's script against the closed form of the model and plan that it is said to train, module by module.

The two name modules and kernels differently, so what is compared are totals of one step: FLOP of matmuls and
attention by part of the model and phase, collectives by kind and group size, and bytes of the states. What
ranks tell each other in less than a token's bf16 activations (norms to clip by, a loss) is no part of a plan.
"""

import re
from collections import defaultdict

from meshwise.core.compare import OPS_BY_DIMS, Comparison, Row
from meshwise.core.files import read_catalog
from meshwise.core.ledger import Ledger
from meshwise.estimate.one_plan import Estimate
from meshwise.runtime.script.start import ScriptOutcome

PARTS: dict[str, str] = read_catalog("scripts.toml")["parts"]
_STATES = {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}

Place = tuple[str, str, str, str]


def compare_script(outcome: ScriptOutcome, estimate: Estimate) -> Comparison:
    """A row for each total; a part that one of the two does not have counts as zero."""
    least_bytes = 2.0 * estimate.model.hidden
    stated = _totals(estimate.rank_ledger(outcome.rank), least_bytes)
    found = _totals(outcome.step_ledger, least_bytes)
    for name, label in _STATES.items():
        stated["states", label, "", "bytes"] = float(estimate.memory_bytes[name])
        found["states", label, "", "bytes"] = outcome.states_bytes.get(label, 0.0)
    places = sorted(place for place in stated.keys() | found.keys() if stated[place] or found[place])
    return Comparison(tuple(Row(*at, "", {"estimate": stated[at], "script": found[at]}) for at in places))


def _totals(ledger: Ledger, least_bytes: float) -> defaultdict[Place, float]:
    """Sums of a step, by module (or axis size), op, phase and column; of collectives that carry so much."""
    sums: defaultdict[Place, float] = defaultdict(float)
    for row in ledger.rows():
        if row["collective"] and row["payload_bytes"] >= least_bytes:
            place = (f"{row['group_size']} ranks", row["collective"], "")
            sums[*place, "count"] += row["count"]
            sums[*place, "payload_bytes"] += row["count"] * row["payload_bytes"]
        elif row["flop"] and (kind := OPS_BY_DIMS.get(row["shape"].count("x") + 1)):
            name = f"{row['module']}.{row['op']}".lower()
            part = next((part for part, words in PARTS.items() if re.search(words, name)), "other")
            sums[part, kind, row["phase"], "flop"] += row["count"] * row["flop"]
    return sums
