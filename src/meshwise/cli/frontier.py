"""`meshwise frontier`: one layer, and a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise import api
from meshwise.cli.output import print_json, print_parts
from meshwise.core.errors import WorkloadError
from meshwise.core.options import takes


def layer(
    *,
    d_in: float,
    d_out: float,
    batch: float,
    tp_in: float = 1.0,
    tp_out: float = 1.0,
    dp: float = 1.0,
    elem_bytes: float = 2.0,
    chip: str | None = None,
    flop_per_s_8bit: float | None = None,
    memory_bytes_per_s: float | None = None,
    network_bytes_per_s: float | None = None,
    utilization: float = 0.8,
    json: bool = False,
) -> None:
    """Time a linear layer, forward and backward, on one microbatch.

    Args:
        d_in: Inputs of the map.
        d_out: Outputs of the map.
        batch: Tokens of a microbatch, over all replicas.
        tp_in: Ways the inputs are cut.
        tp_out: Ways the outputs are cut.
        dp: Replicas.
        elem_bytes: Bytes of a word.
        chip: A chip or cluster of the catalog, or a TOML file.
        flop_per_s_8bit: Peak of one device on words of 8 bits.
        memory_bytes_per_s: Bandwidth of the memory of one device.
        network_bytes_per_s: Sent plus received, of one device.
        utilization: Share of the peaks that throttling leaves.
    """
    from meshwise.published.frontier import Device, LinearLayer, find_device, layer_document

    rates = {"flop_per_s_8bit": flop_per_s_8bit, "memory_bytes_per_s": memory_bytes_per_s}
    rates["network_bytes_per_s"] = network_bytes_per_s
    stated = {name: value for name, value in rates.items() if value is not None}
    if chip is not None:
        for name in stated:
            raise WorkloadError(f"--chip {chip} has its own rates; leave --{name.replace('_', '-')} out")
        device = find_device(chip, utilization=utilization)
    elif len(stated) < len(rates):
        raise WorkloadError("give --chip, or --flop-per-s-8bit, --memory-bytes-per-s, --network-bytes-per-s")
    else:
        network = stated.pop("network_bytes_per_s")
        links = {"inner_bytes_per_s": network, "outer_bytes_per_s": network}
        device = Device(name="given", utilization=utilization, **stated, **links)
    layer = LinearLayer(d_in=d_in, d_out=d_out, tp_in=tp_in, tp_out=tp_out, dp=dp, elem_bytes=elem_bytes)
    document = layer_document(device, layer, batch)
    _show(document, "layer", json)


@takes(api.frontier)
def run(
    *,
    chip: list[str],
    settings: list[str] | None = None,
    watts: float | None = None,
    price: str | None = None,
    plot: Path | None = None,
    json: bool = False,
    **asked: Any,
) -> None:
    """Find the best utilization by compute, and the largest run.

    Args:
        settings: KEY=VALUE that replaces a law, an option or a number; repeatable.
        watts: Watts per device, all included.
        price: Dollars of a GPU-hour.
        plot: Draw to this .png, .svg, .pdf or .html file.
    """
    pairs: dict[str, Any] = _pairs(settings)
    found = [api.frontier(name, **asked, **pairs) for name in chip]
    if plot is not None:
        from meshwise.report.frontier import draw_frontiers

        draw_frontiers(found, plot)
    documents = [one.to_json(watts=watts, price_per_device_hour=api.usd_per_hour(price)) for one in found]
    if json and len(documents) > 1:
        _show({"runs": documents}, "run", json)
        return
    for document in documents:
        _show(document, "run", json)


def _show(document: dict[str, Any], what: str, json: bool) -> None:
    if json:
        print_json(document)
    else:
        from meshwise.report import frontier

        print_parts(getattr(frontier, f"{what}_parts")(document))


def _pairs(settings: list[str] | None) -> dict[str, str]:
    """`KEY=VALUE` texts as a dict; WorkloadError for one that is malformed or repeated."""
    pairs: dict[str, str] = {}
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise WorkloadError(f"--set {text!r} is not KEY=VALUE; write --set schedule=interleaved")
        if key in pairs:
            raise WorkloadError(f"--set gives {key} twice; give it once")
        pairs[key] = value
    return pairs


COMMANDS = (layer, run)
