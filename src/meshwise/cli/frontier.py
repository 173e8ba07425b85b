"""`meshwise frontier`: one layer, and a whole run."""

from itertools import chain
from pathlib import Path
from typing import Any

from meshwise import api
from meshwise.cli.output import print_answer
from meshwise.core.errors import WorkloadError
from meshwise.core.options import takes
from meshwise.core.refusals import refuse


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
    own = [f"--{name.replace('_', '-')}" for name in stated]
    refuse("frontier layer", WorkloadError, chip=chip, own=own)
    if chip is not None:
        device = find_device(chip, utilization=utilization)
    else:
        network = stated.pop("network_bytes_per_s")
        links = {"inner_bytes_per_s": network, "outer_bytes_per_s": network}
        device = Device(name="given", utilization=utilization, **links, **stated)
    layer = LinearLayer(d_in=d_in, d_out=d_out, tp_in=tp_in, tp_out=tp_out, dp=dp, elem_bytes=elem_bytes)
    _show([layer_document(device, layer, batch)], "layer", json)


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
    pairs: dict[str, Any] = dict(text.partition("=")[::2] for text in settings or ())
    keys = [text.partition("=")[0] for text in settings or ()]
    if len(pairs) < len(keys):
        raise WorkloadError(f"--set gives {max(keys, key=keys.count)} twice; give it once")
    found = [api.frontier(name, **asked, **pairs) for name in chip]
    if plot is not None:
        from meshwise.report.frontier import draw_frontiers

        draw_frontiers(found, plot)
    usd = api.usd_per_hour(price)
    _show([one.to_json(watts=watts, price_per_device_hour=usd) for one in found], "run", json)


def _show(documents: list[dict[str, Any]], what: str, json: bool) -> None:
    from meshwise.report import frontier

    parts = chain.from_iterable(map(getattr(frontier, f"{what}_parts"), documents))
    print_answer({f"{what}s": documents} if len(documents) > 1 else documents[0], parts, json=json)


COMMANDS = (layer, run)
