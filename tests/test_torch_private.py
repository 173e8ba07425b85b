"""Private names of torch: each is there in the torch at hand, and no other module uses any."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from meshwise.runtime import torch_private
from meshwise.runtime.script.cuda import HOOK_NAMES

SOURCE = Path(torch_private.__file__).parents[1]
PRIVATE = (  # names of ops (torch.ops, aten) are torch's public names of kernels
    r"from torch[\w.]*\._[\w.]* import",
    r"from torch[\w.]* import [^\n]*(?<![\w.])_\w",
    r"(?<![\w.\"`])torch(?!\.ops)(?:\.(?!ops\b)\w+)*\._(?!_)\w+\(",
)


@pytest.mark.parametrize("name", torch_private.HOMES)
def test_torch_has_it(name: str) -> None:
    try:
        found = getattr(torch_private, name)
    except AttributeError:
        pytest.fail(f"torch {torch.__version__} has no {torch_private.HOMES[name]}; see what took its place")
    assert found is not None


def test_hooks_of_cuda_have_the_order_of_the_headers() -> None:
    """Virtual functions are numbered as they are declared; those that override keep their numbers."""
    headers = Path(torch.__file__).parent / "include" / "ATen" / "detail"
    words = r"virtual [\w:&* ]*?(\w+)\("
    found = [
        name
        for kind in ("Accelerator", "CUDA")
        for name in re.findall(words, (headers / f"{kind}HooksInterface.h").read_text())
        if not name.endswith("Interface")
    ]
    assert tuple(found[: len(HOOK_NAMES)]) == HOOK_NAMES


def test_an_unknown_name_is_none_of_ours() -> None:
    with pytest.raises(AttributeError, match="torch_private has no 'rate'"):
        _ = torch_private.rate


def test_every_private_name_is_in_one_module() -> None:
    used = {
        f"{path.relative_to(SOURCE)}: {found[0]}"
        for path in SOURCE.rglob("*.py")
        if path.name != "torch_private.py"
        for pattern in PRIVATE
        for found in re.finditer(pattern, path.read_text(encoding="utf-8"))
    }
    assert not used
