"""Draws the figures of docs/frontier.md and prints its tables: `python docs/figures/frontier.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwise.core.units import with_prefix
from meshwise.cost.failures import Failures
from meshwise.published.frontier.assumptions import (
    KINDS,
    OPTIONS,
    Assumptions,
    assumptions,
    law_names,
    params_where,
    sizes,
)
from meshwise.published.frontier.device import Device, find_device
from meshwise.published.frontier.run import RUN_UTILIZATION, frontier
from meshwise.published.frontier.step import all_reduce_latency_s
from meshwise.report.frontier import flop, picture
from meshwise.report.pages import draw

LATENCIES = ("kernel_s", "base_s", "inner_step_s", "outer_step_s")

CHIPS = ("v100-16g-sxm", "a100-80g-sxm", "h100-80g-sxm", "h200-sxm", "b200-sxm", "gb200-nvl72")


def latency_wall_flop(run: Assumptions, layer_s: float) -> tuple[float, float]:
    """Parameters and training compute at which `layer_s` per layer and step alone fill the duration.

    With the default laws N = (T B / (20 x 0.088 x layer_s)) ** (1 / 1.27). No number of devices helps.
    """
    params = params_where(
        lambda n: run.tokens(n * run.num_experts) / run.batch(n) * run.depth(n) * layer_s, run.duration_s
    )
    return float(params), float(6 * params * run.tokens(params * run.num_experts))


def chips_table(found: list) -> str:
    lines = [
        "| chip | plateau | 80 % of it up to | devices there | power | wall | 80 % with failures | wall |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        ideal, failing = one.ideal, one.with_failures
        lines.append(
            f"| {one.device.name} | {ideal.plateau:.1%} | {flop(ideal.limit_80pct_flop)} "
            f"| {with_prefix(ideal.limit.devices, '', 3)} "
            f"| {with_prefix(ideal.limit.devices * one.device.power_watts, 'W', 2)} "
            f"| {flop(ideal.wall_flop)} | {flop(failing.limit_80pct_flop)} | {flop(failing.wall_flop)} |"
        )
    return "\n".join(lines)


def choices_table(device: Device) -> str:
    """The limits with one choice changed at a time."""
    run = Assumptions()
    known = {kind: law_names(kind) for kind in KINDS} | OPTIONS
    known |= {
        "duration_s": [factor * run.duration_s for factor in (1 / 3, 2, 3)],
        "elem_bytes": [1, 4],
        "num_experts": [8],
        "sequential_maps": [4],
    }
    changes = [(name, value, {name: value}) for name, values in known.items() for value in values]
    changes += [
        ("all latencies", f"x {factor}", {name: factor * getattr(run, name) for name in LATENCIES})
        for factor in (0, 0.5, 2)
    ]
    given = {kind: getattr(run, kind).name for kind in KINDS} | {name: getattr(run, name) for name in OPTIONS}
    rows = [("as given", "", frontier(device, run).ideal)]
    rows += [
        (name, value, frontier(device, assumptions(**change)).ideal)
        for name, value, change in changes
        if given.get(name) != value
    ]
    return limits_table(rows)


def failures_table(device: Device) -> str:
    """The limits with failures, one rate of them better at a time, then all."""
    known = Failures.llama3()
    better = {
        "device_s_between_interruptions": ("x 10", 10 * known.device_s_between_interruptions),
        "restart_s": ("/ 10", known.restart_s / 10),
        "storage_bytes_per_s": ("x 10", 10 * known.storage_bytes_per_s),
    }
    values = {name: value for name, (_, value) in better.items()}
    changes = [("with failures", "as given", {})]
    changes += [(name, factor, {name: value}) for name, (factor, value) in better.items()]
    changes += [("all three", "10 times better", values)]
    found = [
        (name, text, frontier(device, failures=replace(known, **change)).with_failures)
        for name, text, change in changes
    ]
    return limits_table(found)


def limits_table(rows: list) -> str:
    lines = ["| choice | value | 80 % of the plateau up to | wall |", "| --- | --- | --- | --- |"]
    for name, value, limits in rows:
        text = value if isinstance(value, str) else f"{value:.4g}"
        lines.append(f"| {name} | {text} | {flop(limits.limit_80pct_flop)} | {flop(limits.wall_flop)} |")
    return "\n".join(lines)


def curve_table(found) -> str:
    lines = [
        "| FLOP | parameters | devices | tp | pp | dp | microbatches | utilization | lost to |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for point in found.ideal.curve[::10]:
        if point.plan:
            plan = point.plan
            lines.append(
                f"| {point.training_flop:.0e} | {with_prefix(point.params, '', 3)} "
                f"| {with_prefix(point.devices, '', 3)} | {plan['tp_in']:.0f} x {plan['tp_out']:.0f} "
                f"| {plan['pp']:.0f} | {plan['dp']:.0f} "
                f"| {plan['microbatches']:.0f} x {plan['microbatch_tokens']:.0f} tokens "
                f"| {point.utilization:.1%} | {point.lost_to} |"
            )
    return "\n".join(lines)


def gtx_580() -> str:
    """The published 2012 example, on the network one might have had."""
    lines = ["| network, sent + received | batch | 80 % of the plateau up to |", "| --- | --- | --- |"]
    for name, bytes_per_s in (("10 Gb/s Ethernet", 2.5e9), ("FDR InfiniBand", 14e9)):
        device = Device(
            name="GTX 580",
            flop_per_s_8bit=4 * 1.581e12,
            memory_bytes_per_s=192.4e9,
            inner_bytes_per_s=bytes_per_s,
            outer_bytes_per_s=bytes_per_s,
            memory_bytes=1.5e9,
            utilization=RUN_UTILIZATION,
        )
        for batch in ("fixed-4M", "fixed-60M"):
            found = frontier(device, assumptions(elem_bytes=4, batch=batch))
            lines.append(f"| {name} | {batch} | {flop(found.ideal.limit_80pct_flop)} |")
    return "\n".join(lines)


def walls() -> str:
    run = Assumptions()
    lines = ["| all-reduces | per layer and step | parameters | wall |", "| --- | --- | --- | --- |"]
    for name, hops, ranks, inner in (
        ("inside a node of 8", "direct", 8.0, 8.0),
        ("between nodes, direct", "direct", 128.0, 8.0),
        ("between 16 nodes, tree", "tree", 128.0, 8.0),
    ):
        layer_s = 4 * (run.kernel_s + float(all_reduce_latency_s(assumptions(hops=hops), ranks, inner)))
        params, wall = latency_wall_flop(run, layer_s)
        lines.append(f"| {name} | {layer_s * 1e6:.1f} µs | {params:.2g} | {flop(wall)} |")
    return "\n".join(lines)


def main() -> None:
    here = Path(__file__).parent
    found = [frontier(find_device(name, utilization=RUN_UTILIZATION)) for name in CHIPS]
    h100 = found[CHIPS.index("h100-80g-sxm")]
    draw(h100, here / "frontier_h100.png")
    draw(picture(found), here / "frontier_chips.png")
    model = sizes(h100.run, h100.ideal.limit.training_flop)
    print(
        f"at the limit: {float(model.params):.3g} parameters, {float(model.layers):.0f} layers of width "
        f"{float(model.width):.0f}, {h100.ideal.limit.step_s:.2f} s a step, an interruption every "
        f"{h100.failures.interruption_s(h100.ideal.limit.devices):.0f} s"
    )
    tables = (curve_table(h100), chips_table(found), choices_table(h100.device))
    print(*tables, failures_table(h100.device), walls(), gtx_580(), sep="\n\n")


if __name__ == "__main__":
    main()
