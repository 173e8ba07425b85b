"""The same training step in one process that holds everything, to compare losses and gradients with."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.runtime.programs import decoder as plain
from meshwise.runtime.programs.functions import turned_width, turns
from meshwise.runtime.programs.training import Trainer


def differences(trainer: Trainer, loss: float) -> dict[str, float]:
    """Largest differences of all ranks: of the loss, over the loss; of gradients, over their largest number.

    Rank 0 computes the reference; each rank compares its own pieces' gradients, put together, with it.
    """
    held: list[Any] = [reference_step(trainer) if trainer.context.rank == 0 else None]
    dist.broadcast_object_list(held)
    expected, grads = held[0]
    # each tensor is gathered twice, of which DTensor warns
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    largest = max(grad.abs().max() for grad in grads.values())
    worst = torch.zeros(2, dtype=torch.float64, device=trainer.context.device)
    worst[0] = abs(loss - expected) / abs(expected)
    for piece in trainer.pieces.values():
        for name, parameter in piece.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad
            if not parameter.requires_grad:
                continue
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            expected_grad = grads[name].to(grad.device)
            if trainer.setting.routes and grad.dim() == 3:  # the experts that this rank holds
                expected_grad = part_of(expected_grad, name, trainer.setting.routes.place)
            worst[1] = torch.maximum(worst[1], (grad - expected_grad).abs().max() / largest)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"loss": float(worst[0]), "gradients": float(worst[1])}


def reference_step(trainer: Trainer) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, by name and on the host, of the whole model on the whole batch.

    In the type of the states; where matmuls are fp8, in the type of the rest."""
    options, model, device = trainer.options, trainer.model, trainer.context.device
    kept = torch.float64 if trainer.plan.dtype == "fp64" else torch.float32
    dtype = trainer.context.dtype("fp8") if trainer.setting.is_narrow else kept
    places = torch.arange(options.seq, device=device)
    angles = turns(places, turned_width(model), dtype)
    way = plain.routes(places, 1, model) if model.moe else None
    setting = plain.Setting(
        turns=angles, own_places=places, recorder=trainer.context.recorder, routes=way,
        is_narrow=trainer.setting.is_narrow, lora_rank=trainer.plan.lora_rank,
    )  # fmt: skip
    with torch.device(device):
        decoder = plain.Decoder(model, setting, range(model.num_layers)).to(kept)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            plain.fill(decoder.alias(name), parameter, options.seed)
            parameter.requires_grad_(decoder.trains(name))
    decoder.to(dtype)  # what is cast to fp8 depends on every bit
    total = 0.0
    batch = trainer.all_tokens().flatten(0, 1)
    for sequence in batch.split(1):
        labels = sequence[:, 1:].unfold(1, options.seq, 1)  # the next tokens, and later ones
        loss = decoder(sequence[:, : options.seq], labels) / len(batch)
        loss.backward()
        total += float(loss.detach())
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    if plain.TABLE in grads and decoder.tie():
        grads[plain.TIED] = grads[plain.TABLE]
    return total, {name: grad.cpu() for name, grad in grads.items()}


def part_of(experts: Tensor, name: str, place: plain.ExpertPlace) -> Tensor:
    """Of the matrices `name` of all experts, those at `place`."""
    mine = experts.chunk(place.ranks.size)[place.ranks.index]
    return mine.chunk(place.parts.size, plain.cut_dim(name))[place.parts.index]
