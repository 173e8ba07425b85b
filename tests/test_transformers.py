"""All configs of the library `transformers`, where it is installed: each is exact or refused in a sentence.

`make frameworks` installs it; without it, the recorded counts of `data/transformers_5.23.jsonl` stand in
(`test_huggingface.py`).
"""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: recorded counts are used"
)

from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES  # noqa: E402

from meshwise.core.errors import ModelError  # noqa: E402
from meshwise.model.huggingface import model_from_config  # noqa: E402
from meshwise.model.weights import num_params  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def classes(kind: str) -> list[str]:
    """The model classes of one family."""
    maps = [getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES")]
    found = [names.get(kind, ()) for names in maps if hasattr(names, "get")]
    names = {name for each in found for name in ([each] if isinstance(each, str) else each)}
    return sorted(name for name in names if not name.endswith("Config"))


def counted(name: str, config: Any) -> int | None:
    """Parameters of the class, with the biases that balance experts; None: it cannot be built by default.

    Of a model that speaks (Qwen-Omni), those of the part that thinks.
    """
    try:
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
            model = getattr(model, "thinker", model)
    except Exception:  # whatever the library raises on its own defaults
        return None
    balance = ("correction_bias", "expert_bias")
    return sum(weight.numel() for weight in model.parameters()) + sum(
        buffer.numel() for name, buffer in model.named_buffers() if name.endswith(balance)
    )


def reserved(kind: str, config: Any) -> int:
    """Parameters that the library makes and no checkpoint has: rows for experts that compute nothing."""
    if kind != "longcat_flash":
        return 0
    width = config.expert_ffn_hidden_size * config.hidden_size
    return 2 * config.num_layers * config.zero_expert_num * width


@pytest.mark.parametrize("kind", list(CONFIG_MAPPING_NAMES))
def test_a_default_config_is_exact_or_refused(
    kind: str, record_property: Callable[[str, object], None]
) -> None:
    """The walk ends with how many classes are exact, refused, and wrong, of which there must be none."""
    try:
        config = CONFIG_MAPPING[kind]()
        raw = json.loads(config.to_json_string())
    except Exception as error:
        pytest.skip(f"transformers cannot make its own default: {error}")
    found = dict.fromkeys(("exact", "refused", "wrong"), 0)
    for name in classes(kind):
        try:
            model = model_from_config(raw | {"architectures": [name]}, name=kind)
        except ModelError as error:
            assert "\n" not in str(error)
            found["refused"] += 1
            continue
        total = counted(name, CONFIG_MAPPING[kind]())
        if total is None:
            continue
        mine = num_params(model) + sum(number for _, number in model.left_out)
        found["exact" if mine == total - reserved(kind, config) else "wrong"] += 1
    for verdict, number in found.items():
        record_property(verdict, number)
    assert not found["wrong"]
