"""What the options of the language model's programs mean: the model, its place on the ranks, its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from meshwise.model.gpt_config import GptConfig, find_gpt_config, with_vocab
from meshwise.program.expert_parallel import Placement, check_tp, place
from meshwise.runtime.programs import Dtype
from meshwise.runtime.programs.text_data import NUM_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelOptions:
    """What the command line may choose in every program of the language model."""

    config: Annotated[str, Meta(description="preset, or file of transformer_lm_gpt fields")] = "moe-tiny"
    override: Annotated[str, Meta(description="fields to change: decoder_layers=2,moe_freq=1")] = ""
    text: Annotated[str, Meta(description="file or folder (default: the Python library's sources)")] = ""
    dtype: Annotated[Dtype | None, Meta(description="element type (default: the config's)")] = None
    tp: Annotated[int, Meta(ge=1, description="tensor-parallel ranks")] = 1
    ep: Annotated[int, Meta(ge=0, description="ranks that share the experts (0: as many as can)")] = 0
    seed: Annotated[int, Meta(description="seed of the weights")] = 1


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModelSetting:
    """What the options mean: the model, where it lies, and its element type."""

    config: GptConfig
    placement: Placement
    dtype: str


def setting(options: LanguageModelOptions, ranks: int) -> LanguageModelSetting:
    """The setting of `options` on `ranks`; a MeshwiseError if it has none."""
    config = with_vocab(find_gpt_config(options.config, options.override), NUM_TOKENS)
    num_experts = config.moe_expert_count if config.num_moe_layers else 0
    placement = place(ranks, num_experts, tp=options.tp, ep=options.ep or None)
    check_tp(config, options.tp)
    return LanguageModelSetting(config, placement, options.dtype or ("fp16" if config.fp16 else "fp32"))
