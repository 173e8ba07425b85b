"""What the options of the language model's programs mean: model, placement, tokenizer and type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.model.gpt_config import GptConfig, find_gpt_config, with_vocab
from meshwise.program.expert_parallel import Placement, check_tp, place
from meshwise.runtime.programs.checkpoint_index import check_config
from meshwise.runtime.programs.text_data import Tokenizer, find_tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What the options mean: the model, where it lies, how text becomes tokens."""

    config: GptConfig
    placement: Placement
    tokenizer: Tokenizer
    dtype: str


def setting(options: Any, ranks: int) -> Setting:
    """The setting of `options` (of `eval_lm` or `generate`) on `ranks`; a MeshwiseError if it has none."""
    tokenizer = find_tokenizer(options.tokenizer)
    config = with_vocab(find_gpt_config(options.config, options.override), tokenizer.vocab_size)
    if options.checkpoint:
        check_config(Path(options.checkpoint), config)
    num_experts = config.moe_expert_count if config.num_moe_layers else 0
    placement = place(ranks, num_experts, tp=options.tp, ep=options.ep or None)
    check_tp(config, options.tp)
    return Setting(config, placement, tokenizer, options.dtype or ("fp16" if config.fp16 else "fp32"))
