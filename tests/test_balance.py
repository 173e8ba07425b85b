"""Layers are placed as well on one machine as on another: random plans of dense models and mixtures."""

import random
from typing import Any

import meshwise as mw
from data_tables import table
from meshwise.cost.schedule import SCHEDULES
from meshwise.search.study import changed

SOMETIMES, AMONG = table("drawn")["balance"].values()
CHANGES = (("inner", 1.5), ("outer", 1.5), ("compute", 1.3), ("compute", 1.05), ("memory_rate", 1.5))


def drawn(draw: random.Random) -> tuple[str, str, dict[str, Any], dict[str, int]]:
    """A model, a cluster, a plan with any schedule, and its work."""
    schedule, model = draw.choice((*SCHEDULES, "1f1b", "interleaved")), draw.choice(AMONG["models"])
    keys: dict[str, Any] = {"schedule": schedule, "vpp": 1 + draw.randint(1, 5) * (schedule == "interleaved")}
    keys |= {key: draw.choice(values) for key, (often, values) in SOMETIMES.items() if draw.random() < often}
    if keys.get("recompute") != "full":
        keys.pop("recompute_layers", None)
    if mw.find_model(model).moe is None:
        keys.pop("ep", None)
    work = {"batch": draw.choice((64, 256, 1024)), "seq": draw.choice((2048, 4096, 8192))}
    return model, draw.choice(AMONG["clusters"]), keys, work


def test_a_faster_machine_makes_no_plan_slower() -> None:
    draw, slower, num_plans = random.Random(0), [], 0
    while num_plans < 80:
        model, name, keys, work = drawn(draw)
        cluster = mw.find_cluster(name)
        try:
            before = mw.estimate(model, cluster, mw.Plan(**keys), **work).step_s
        except mw.MeshwiseError:
            continue
        num_plans += 1
        for part, times in CHANGES:
            after = mw.estimate(model, changed(cluster, {part: times}), mw.Plan(**keys), **work).step_s
            if after > before * (1 + 1e-3):
                slower.append((model, name, keys, work, part, after / before))
    assert not slower
