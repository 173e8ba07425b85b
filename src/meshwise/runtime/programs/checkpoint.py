"""Checkpoints in safetensors, cut by expert, that a world of any size can read.

A checkpoint is a folder: `shared.safetensors` with everything but the experts, `rank-N.safetensors` with the
experts of expert-parallel rank N, all layers, and `checkpoint.json`, which says what lies where. Tensors are
whole and carry their name in the model; experts are numbered through the layer. So a reader takes the
tensors it holds, and of a tensor that it holds a part of, that part, whoever wrote them.

A folder appears under its name when it is complete, never before.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.core.errors import DataError, MissingExtraError, ModelError
from meshwise.runtime.programs.checkpoint_index import INDEX, read_index
from meshwise.runtime.programs.moe import Shard
from meshwise.runtime.programs.transformer_lm import Part, TransformerDecoder, parts

SHARED = "shared.safetensors"


def save(model: TransformerDecoder, folder: Path, *, is_writer: bool, is_first: bool) -> None:
    """Write `model` to the new `folder`; every rank calls this.

    `is_writer`: this rank and its tp group write the experts they hold (one copy of each suffices);
    `is_first`: they write the shared tensors too, and finish the folder. DataError if it cannot be written.
    """
    partial = folder.with_name(folder.name + ".partial")
    claim = _claimed(partial, folder) if is_first and model.shard.tp_rank == 0 else None
    _barrier()
    try:
        files = _write(model, partial, is_writer=is_writer, is_first=is_first)
        held = _gathered(files)
        if is_first and model.shard.tp_rank == 0:
            index = {name: file for part in held for name, file in part.items()}
            text = json.dumps({"config": asdict(model.config), "tensors": index}, indent=1)
            (partial / INDEX).write_text(text)
            partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DataError(f"cannot write checkpoint {folder}: {error.strerror}; name another place") from None
    finally:
        if claim is not None:
            os.close(claim)
    _barrier()


def load(model: TransformerDecoder, folder: Path) -> None:
    """Fill `model` with what `folder` holds of it; ModelError if a tensor is absent or of another shape."""
    safe_open = _safetensors().safe_open
    index = read_index(folder)["tensors"]
    wanted: dict[str, list[Part]] = {}
    for part in parts(model):
        if part.name not in index:
            raise ModelError(f"checkpoint {folder} has no tensor {part.name}; the config asks for it")
        wanted.setdefault(index[part.name], []).append(part)
    for file, held in wanted.items():
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                for part in held:
                    _fill(part, tensors.get_slice(part.name), folder)
        except OSError as error:
            raise DataError(f"cannot read {folder / file}: {error.strerror or error}") from None
        except _safetensors().SafetensorError as error:
            raise DataError(f"{folder / file} is damaged: {error}") from None


def check_finite(model: TransformerDecoder, folder: Path) -> None:
    """DataError if a weight that came from `folder` is not a number in the model's type."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise DataError(f"checkpoint {folder}: {name} has values that are not finite in {weight.dtype}")


def _fill(part: Part, stored: Any, folder: Path) -> None:
    shape, wanted = tuple(stored.get_shape()), part.full_shape
    if shape != wanted:
        sizes = ["x".join(map(str, dims)) for dims in (shape, wanted)]
        raise ModelError(f"checkpoint {folder}: {part.name} is {sizes[0]}, the config asks for {sizes[1]}")
    if part.piece.numel():  # a rank beyond the last word holds none of the embedding
        part.piece.copy_(stored[part.bounds])


def _write(model: TransformerDecoder, partial: Path, *, is_writer: bool, is_first: bool) -> dict[str, str]:
    """Write this rank's files; the file of each tensor in them."""
    save_file = _safetensors().torch.save_file
    experts: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    for part in _all_parts(model):
        if is_writer if part.is_expert else is_first:
            whole = _whole(part, model.shard)
            (experts if part.is_expert else shared)[part.name] = whole
    files: dict[str, str] = {}
    if model.shard.tp_rank:
        return files
    for tensors, file in ((experts, f"rank-{model.shard.ep_rank}.safetensors"), (shared, SHARED)):
        if tensors:
            try:
                save_file(tensors, partial / file)
            except _safetensors().SafetensorError as error:
                raise OSError(0, str(error)) from None
            files |= dict.fromkeys(tensors, file)
    return files


def _all_parts(model: TransformerDecoder) -> list[Part]:
    """The parts whose pieces every rank of the tp group holds, then those that only the first has."""
    held = list(parts(model))
    return [part for part in held if part.dim is not None] + [part for part in held if part.dim is None]


def _whole(part: Part, shard: Shard) -> Tensor:
    """The whole tensor, from the tp ranks' pieces; the last of them may be shorter than the others."""
    piece = part.piece.detach().contiguous()
    if part.dim is None or shard.tp_group is None:
        return piece.cpu().clone()
    missing = list(piece.shape)
    missing[part.dim] = -(-part.length // shard.tp) - piece.shape[part.dim]
    piece = torch.cat([piece, piece.new_zeros(missing)], dim=part.dim)
    pieces = [torch.empty_like(piece) for _ in range(shard.tp)]
    dist.all_gather(pieces, piece, group=shard.tp_group)
    return torch.cat(pieces, dim=part.dim).narrow(part.dim, 0, part.length).contiguous().cpu()


def _claimed(partial: Path, folder: Path) -> int:
    """Make `partial`, empty and locked against other jobs until the file number returned is closed."""
    if folder.exists():
        raise DataError(f"checkpoint {folder} exists; name another folder or remove it")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        claim = os.open(partial, os.O_RDONLY)
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in partial.iterdir():  # by a job that was killed
            left.unlink()
    except BlockingIOError:
        raise DataError(f"another job is writing checkpoint {folder}; name another folder") from None
    except OSError as error:
        raise DataError(f"cannot write checkpoint {folder}: {error.strerror}; name another place") from None
    return claim


def _gathered(files: dict[str, str]) -> list[dict[str, str]]:
    if not dist.is_initialized():
        return [files]
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, files)
    return held


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise MissingExtraError('safetensors is not installed; run: pip install "meshwise[torch]"') from None
    return safetensors
