"""Frameworks of post-training by version: what a step pays beside its kernels (`catalog/rl.toml`)."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog
from meshwise.estimate.intervals import Interval, Spread, far_chip
from meshwise.machine.hardware import Chip, Cluster

OVERLAPPED = ("one_step_off", "async")
"""Modes in which both pools work at the same time."""


class Transport(msgspec.Struct, frozen=True):
    """A way for weights to travel to engines: `fixed_s` + `s_per_byte` x bytes of the whole model.

    Every engine gathers the whole model, so no byte is faster than the links of a node to the others, unless
    each link carries its own piece of it (`spread`).
    """

    fixed_s: float
    s_per_byte: float
    source: str
    spread: bool = False

    def seconds(self, weight_bytes: float, cluster: Cluster) -> float:
        """Time of a sync of `weight_bytes`."""
        node = min(cluster.levels[0].ranks, cluster.num_chips)
        link_s = 0.0 if self.spread else 1.0 / (node * cluster.levels[-1].bytes_per_s)
        return self.fixed_s + weight_bytes * max(self.s_per_byte, link_s)


class RlFramework(msgspec.Struct, frozen=True, kw_only=True):
    """Overheads and defaults of one version of a framework; `usual` ones are formulas of an `OpenJob`.

    `host_s`: the engine's own time between two passes, `node_host_s` more for each further node of an engine;
    `loss_fusion`: how log-probabilities are made (`program.loss`), unless a plan says so; `sample_s`: the
    host's time for the loss of a sample, where samples take turns; `fuses_permutation`: one kernel sorts
    tokens by expert, without which the host reads how many each gets in every block; `send_s_per_byte`: of
    samples from the controller to the trainer's replicas, where it `sends_copies` to each of their ranks,
    where it `pads_samples` each as long as the longest; `offload_s_per_byte`: copies of the optimizer's
    states to the host, while engines work on its GPUs, and back; `step_s`: data, rewards, logging of a step.
    `split_offloads`: what leaves GPUs that only train while it is not at work (`rl.passes.pass_bytes`; a
    reference takes the place of the policy's weights); `syncs_adapters`: engines on the same GPUs keep the
    base of LoRA and get its adapters alone.
    """

    name: str
    version: str
    source: str
    engine: str
    usual: Mapping[str, str]
    host_s: float
    node_host_s: float
    loss_fusion: str
    sample_s: float
    fuses_permutation: bool
    send_s_per_byte: float
    sends_copies: bool
    pads_samples: bool
    offload_s_per_byte: float
    step_s: float
    colocated_memory_frac: float
    split_memory_frac: float
    split_offloads: Sequence[str]
    syncs_adapters: bool
    colocated_transport: str
    split_transport: str


class RlCatalog(msgspec.Struct, frozen=True):
    """`catalog/rl.toml`."""

    frameworks: Sequence[RlFramework]
    transports: Mapping[str, Transport]
    measured: Mapping[str, Sequence[str]]
    spreads: Mapping[str, Spread]
    usual: Mapping[str, str]


CATALOG = msgspec.convert(read_catalog("rl.toml"), RlCatalog)


def find_framework(text: str, without: str = "") -> RlFramework:
    """`nemo-rl`, or `nemo-rl=0.3`: the newest version that is not newer than the stated one, if there is one.

    `without`: a version to do as if it was not known; then the one next to it holds, or another framework's.
    """
    name, _, version = text.partition("=")
    every = [one for one in CATALOG.frameworks if one.name != name or one.version != without]
    known = [one for one in every if one.name == name]
    if without and not known:
        return every[-1]
    if not known:
        names = ", ".join(dict.fromkeys(one.name for one in CATALOG.frameworks))
        raise WorkloadError(f"framework {name!r} is not known; known are {names}, with =VERSION if you like")
    older = [one for one in known if not version or _numbers(one.version) <= _numbers(version)]
    found = max(older or known[:1], key=lambda one: _numbers(one.version))
    is_known = version in ("", found.version)
    return found if is_known else replace(found, source=f"{found.source}; {version} itself was not read")


def _numbers(version: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in version.split(".")):
        raise WorkloadError(f"framework version {version!r} must be written as 0.4")
    return tuple(map(int, version.split(".")))


def find_transport(name: str) -> Transport:
    """The transport called `name`."""
    known = CATALOG.transports
    if name not in known:
        raise WorkloadError(f"transport {name!r} is not known; choose among {', '.join(known)}")
    return known[name]


def interval_of(value: float, mode: str, chip: Chip) -> Interval:
    """Between which values a measurement of the prediction lies, 8 times of 10; phases as the step."""
    spread = CATALOG.spreads["overlapped" if mode in OVERLAPPED else "in turn"]
    return spread.around(value, "measured steps", "source", far_chip(chip, CATALOG.measured["chips"]))
