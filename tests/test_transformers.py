"""All configs of the library `transformers`, where it is installed: each is exact or refused in a sentence.

`make frameworks` installs it; without it, the recorded counts of `data/transformers_5.23.jsonl` stand in
(`test_huggingface.py`).
"""

from __future__ import annotations

import json
import os
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
    return sorted({name for each in found for name in ([each] if isinstance(each, str) else each)})


def counted(name: str, config: Any) -> int | None:
    """Parameters of the class, with the biases that balance experts; None: it cannot be built by default."""
    try:
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
    except Exception:  # whatever the library raises on its own defaults
        return None
    balance = ("correction_bias", "expert_bias")
    return sum(weight.numel() for weight in model.parameters()) + sum(
        buffer.numel() for name, buffer in model.named_buffers() if name.endswith(balance)
    )


@pytest.mark.parametrize("kind", list(CONFIG_MAPPING_NAMES))
def test_a_default_config_is_exact_or_refused(kind: str) -> None:
    try:
        raw = json.loads(CONFIG_MAPPING[kind]().to_json_string())
    except Exception as error:
        pytest.skip(f"transformers cannot make its own default: {error}")
    for name in classes(kind):
        try:
            model = model_from_config(raw | {"architectures": [name]}, name=kind)
        except ModelError as error:
            assert "\n" not in str(error)
            continue
        total = counted(name, CONFIG_MAPPING[kind]())
        assert total in (None, num_params(model) + sum(number for _, number in model.left_out))
