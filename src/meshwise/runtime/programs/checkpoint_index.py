"""The index of a checkpoint, `checkpoint.json`: its config, and in which file each tensor lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.errors import DataError, ModelError
from meshwise.core.files import parse_file
from meshwise.model.gpt_config import GptConfig

INDEX = "checkpoint.json"
SHAPING = (
    *("decoder_layers", "decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_attention_heads", "moe_freq"),
    *("moe_expert_count", "moe_expert_ffn_dim", "no_decoder_final_norm", "vocab_size"),
)
"""Fields of a config that say which tensors there are, of what shape, and how heads lie in them."""


def read_index(folder: Path) -> dict[str, Any]:
    """The contents of `checkpoint.json`; DataError if there is no checkpoint in `folder`."""
    if not (folder / INDEX).is_file():
        raise DataError(f"{folder} is no checkpoint: it has no {INDEX}")
    index = parse_file(folder / INDEX, "JSON", msgspec.json.decode)
    if not isinstance(index, dict) or not isinstance(index.get("tensors"), dict):
        raise DataError(f"{folder / INDEX} is damaged: it lists no tensors")
    for file in index["tensors"].values():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise DataError(f"{folder / INDEX} is damaged: {file!r} is no file of this folder")
    return index


def check_config(folder: Path, config: GptConfig) -> None:
    """ModelError if the checkpoint in `folder` is of a model of another shape than `config`."""
    stored = read_index(folder).get("config")
    for name in SHAPING:
        wanted = getattr(config, name)
        found = stored.get(name, wanted) if isinstance(stored, dict) else wanted
        if found != wanted:
            raise ModelError(
                f"checkpoint {folder} has {name}={found}, the config {wanted}; "
                f"use --override {name}={found}, or name another checkpoint"
            )
