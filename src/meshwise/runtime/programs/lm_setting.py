"""What the options of the language model's programs mean: the model, its place on the ranks, its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.model.gpt_config import GptConfig, find_gpt_config, with_vocab
from meshwise.program.expert_pass import Placement, check_tp, place
from meshwise.runtime.programs.text_data import NUM_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModelSetting:
    """What the options mean: the model, where it lies, and its element type."""

    config: GptConfig
    placement: Placement
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """What a program's result says of it."""
        return {"dtype": self.dtype, **{name: getattr(self.placement, name) for name in ("tp", "dp", "ep")}}


def setting(options: Any, ranks: int) -> LanguageModelSetting:
    """The setting of `options` on `ranks`; a MeshwiseError if it has none."""
    config = with_vocab(find_gpt_config(options.config, options.override), NUM_TOKENS)
    num_experts = config.moe_expert_count if config.num_moe_layers else 0
    placement = place(ranks, num_experts, tp=options.tp, ep=options.ep or None)
    check_tp(config, options.tp)
    return LanguageModelSetting(config, placement, options.dtype or ("fp16" if config.fp16 else "fp32"))
