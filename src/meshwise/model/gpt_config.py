"""The config of a GPT decoder with mixtures of experts, in the field names of fairseq's `transformer_lm_gpt`.

fairseq keeps a model as a flat dictionary of some eighty fields. Those that shape the computation are
the fields of `GptConfig`; those that choose a variant which `meshwise.runtime.programs` does not have are
admitted only at the value it does have; those that matter to training or logging alone are read over
(`catalog/transformer_lm.toml` lists both).
A field that fairseq does not print is an error: a typo must not silently change a measurement.

A config is a preset, or a file that holds the dictionary: JSON, TOML, or the Python literal that
fairseq prints. Notation elsewhere: S tokens a rank and pass, M `decoder_embed_dim`, F the width of the
feed-forward, E `moe_expert_count`, V `vocab_size`.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from meshwise.core.errors import ModelError
from meshwise.core.expressions import formulas
from meshwise.core.files import parse_file, read_catalog
from meshwise.core.refusals import refuse
from meshwise.core.toml import converted, parse_toml
from meshwise.model.architecture import Model, MoE

_Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_Share = Annotated[float, msgspec.Meta(le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """A pre-norm GPT decoder, GELU, tied embedding; defaults are those of `transformer_lm_gpt`.

    Layer `i` (from 0) is a MoE layer if `moe_freq` > 0 and `i + 1` divides by `moe_freq`.
    `moe_eval_capacity_token_fraction`: an expert takes at most that share of a batch's tokens in
    evaluation; 0 or less: the training rule. `use_tutel_moe`: sparse dispatch in place of the dense
    einsum. `vocab_size` is not among fairseq's fields (it comes with the dictionary); 0 means: what the
    tokenizer has. `max_target_positions`: the longest text; 0: `tokens_per_sample`.
    """

    decoder_layers: _Size = 12
    decoder_embed_dim: _Size = 768
    decoder_ffn_embed_dim: _Size = 3072
    decoder_attention_heads: _Size = 12
    tokens_per_sample: _Size = 1024
    batch_size_valid: _Size = 1
    fp16: bool = False
    moe_freq: _Count = 0
    moe_expert_count: _Count = 0
    moe_expert_ffn_dim: _Count = 0
    moe_top1_expert: bool = False
    moe_eval_capacity_token_fraction: _Share = 0.25
    use_tutel_moe: bool = False
    vocab_size: _Count = 0
    max_target_positions: _Count = 0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.decoder_embed_dim // self.decoder_attention_heads

    @property
    def expert_ffn_dim(self) -> int:
        """Width of one expert: `moe_expert_ffn_dim`, or that of the dense layers where it is 0."""
        return self.moe_expert_ffn_dim or self.decoder_ffn_embed_dim

    @property
    def top_k(self) -> int:
        """Experts that a token visits."""
        return 1 if self.moe_top1_expert else 2

    @property
    def num_moe_layers(self) -> int:
        """How many layers have experts."""
        return self.decoder_layers // self.moe_freq if self.moe_freq else 0

    @property
    def num_dense_layers(self) -> int:
        """How many layers have an ordinary feed-forward."""
        return self.decoder_layers - self.num_moe_layers

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has experts."""
        return self.moe_freq > 0 and (layer + 1) % self.moe_freq == 0


def find_gpt_config(text: str, overrides: str = "") -> GptConfig:
    """The preset named `text`, or the config in the file at that path, with `overrides` (`key=value,...`)."""
    presets = _catalog()["presets"]
    raw = presets.get(text)
    if raw is None:
        path = Path(text)
        if not path.exists():
            raise ModelError(f"no config {text!r}; give a file or one of {', '.join(presets)}")
        raw = _read(path)
    return gpt_config_from_dict({**raw, **_parsed_overrides(overrides)}, where=text)


def gpt_config_from_dict(raw: dict[str, Any], where: str = "config") -> GptConfig:
    """A checked config from a dictionary of fairseq's fields; ModelError names the field that is wrong."""
    known = {field.name: field.default for field in fields(GptConfig)}
    only, off, unread, widths = (_catalog()["fields"][kind] for kind in ("only", "off", "unread", "widths"))
    for name, value in raw.items():
        if name not in {*known, *only, *off, *unread, *widths}:
            raise ModelError(f"{where}: unknown field {name!r}; it is not one of transformer_lm_gpt")
        if (name in only and value != only[name]) or (name in off and value):
            raise ModelError(f"{where}: {name}={value!r} is not supported; only {only.get(name, False)!r} is")
    stated = {name: raw[name] for name in known if name in raw and (raw[name] is not None or known[name])}
    config = converted(stated, GptConfig, where, ModelError)
    refuse("gpt", ModelError, f"{where}: ", of=config, raw=raw)
    return config


@cache
def _catalog() -> dict[str, Any]:
    return read_catalog("transformer_lm.toml")


def _read(path: Path) -> dict[str, Any]:
    kinds: dict[str, tuple[str, Callable[[str], Any]]] = {
        ".toml": ("TOML", lambda text: parse_toml(text, str(path), ModelError)),
        ".json": ("JSON", msgspec.json.decode),
    }
    kind, parse = kinds.get(path.suffix, ("Python", lambda text: ast.literal_eval(text.strip())))
    raw = parse_file(path, kind, parse, ModelError)
    if not isinstance(raw, dict):
        raise ModelError(f"config {path} holds a {type(raw).__name__}; it must hold a dictionary of fields")
    return raw


def _parsed_overrides(text: str) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ModelError(f"override {item!r} is not field=value; write for example decoder_layers=4")
        try:
            raw[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raw[name] = {"true": True, "false": False}.get(value.lower(), value)
    return raw


def with_vocab(config: GptConfig, vocab_size: int) -> GptConfig:
    """`config` with the vocabulary of a tokenizer, unless it names a larger one itself."""
    refuse("gpt words", ModelError, of=config, vocab_size=vocab_size)
    return replace(config, vocab_size=config.vocab_size or vocab_size)


def to_model(config: GptConfig) -> Model:
    """The same architecture as a `Model`, which knows its parameters."""
    moe = MoE(**formulas(_catalog()["experts"], {"of": config})) if config.num_moe_layers else None
    return Model(**_catalog()["model"], **formulas(_catalog()["sizes"], {"of": config}), moe=moe)
