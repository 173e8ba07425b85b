"""Images and sound of requests: what encoding them takes an instance.

An encoder runs before the prompt whose tokens it gives, on the same GPUs: cut by tp as the language model is,
or, with `tower_dp=1`, each of these ranks encodes whole inputs (vLLM's `--mm-encoder-tp-mode data`). All
inputs of a request are one batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwise.estimate.priced_model import PricedModel
from meshwise.estimate.priced_part import DENSE, Part, price_parts
from meshwise.estimate.timing import Machine
from meshwise.estimate.tower import FRONT, tower_mesh, tower_stage
from meshwise.model.architecture import Model, Tower, across, in_sequence
from meshwise.model.weights import projector_weights
from meshwise.plan.mesh import Mesh
from meshwise.program.cut import Cut
from meshwise.program.parts import cut_of, parts
from meshwise.program.serving import working_bytes
from meshwise.program.tensor_1d import shards
from meshwise.program.vocabulary import projected
from meshwise.program.weights_of_ops import hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What the images or sound of a request take: `request_s` on a group of ranks, each with `weight_bytes`.

    `working_bytes`: what a pass of the largest encoder works on. `num_inputs` of the encoders become
    `num_tokens` of the prompt, or `num_across` that its layers of cross-attention read.
    """

    num_inputs: int
    num_tokens: int
    num_across: int
    request_s: float
    weight_bytes: float
    working_bytes: float


def encoding(model: Model, mesh: Mesh, machine: Machine) -> Encoding | None:
    """What `model` needs to encode what a request brings; None where that is text alone."""
    towers = [tower for tower in model.towers if tower.num_tokens]
    if not towers:
        return None
    seconds, params = 0.0, 0.0
    for part, count in _parts(model, mesh, machine):
        seconds += count * float(part.forward_s)
        params += count * float(part.held[DENSE].params)
    return Encoding(
        num_inputs=sum(tower.num_inputs for tower in towers), num_tokens=in_sequence(model),
        num_across=across(model), request_s=seconds,
        weight_bytes=params * cut_of(mesh).precision.act_bytes,
        working_bytes=max(float(working_bytes(one.encoder, _cut(one, mesh))) for one in towers),
    )  # fmt: skip


def _cut(tower: Tower, mesh: Mesh) -> Cut:
    """How the inputs of one request are cut."""
    return cut_of(tower_mesh(tower, replace(mesh, kind="prefill", microbatch=1.0)))


def _parts(model: Model, mesh: Mesh, machine: Machine) -> Iterator[tuple[Part, float]]:
    """The parts of the towers and of what joins them to the model, and how often a request runs each."""
    of_request = replace(mesh, kind="prefill", microbatch=1.0, seq=float(in_sequence(model) + across(model)))
    for tower in model.towers:
        if tower.num_tokens:
            cut = _cut(tower, mesh)
            by_name = price_parts(parts(tower.encoder, cut), machine)
            priced = PricedModel(tower.encoder, mesh, machine, cut, by_name)
            for count, part in priced.contents(tower_stage(tower.encoder, FRONT)):
                yield part, float(count)
    cut = cut_of(of_request)
    forward = [op for op in projected(model, cut) if op.phase == "forward"]
    ops = hold(forward, projector_weights(model), cut, shards)
    yield price_parts({"projector": ops}, machine)["projector"], 1.0
