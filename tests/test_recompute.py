"""What selective recomputation keeps and runs again, against published bytes and against what must hold."""

from dataclasses import replace
from typing import Any

import pytest

from meshwise.model.architecture import Layer
from meshwise.model.find import find_model
from meshwise.plan.plan import Plan, parse_plan, plan_text
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.op import Op
from meshwise.program.walk import activations

MOE, DENSE = Layer(moe=True), Layer()


def forward(name: str, layer: Layer, **cut: Any) -> list[Op]:
    ops = block(find_model(name), Cut(**{"microbatch": 1.0, "seq": 4096.0} | cut), layer)
    return [op for op in ops if op.phase == "forward"]


def kept_mb(name: str, layer: Layer, *modules: str, **cut: Any) -> float:
    return float(activations(forward(name, layer, recompute_modules=modules, **cut)).kept_bytes) / 1e6


@pytest.mark.parametrize(
    ("layer", "megabytes"),
    # NVIDIA-NeMo/Megatron-Bridge 067f987: activations of DeepSeek-V3 at 4,096 tokens, bf16, by tensor.
    [pytest.param(MOE, 1865.0, id="moe"), pytest.param(DENSE, 1395.0, id="dense")],
)
def test_deepseek_keeps_what_was_published(layer: Layer, megabytes: float) -> None:
    assert kept_mb("deepseek-v3", layer, ep=64.0) == pytest.approx(megabytes, rel=0.003)


def test_torchtitan_keeps_every_other_matmul() -> None:
    # torchtitan b5bcd76, activation_checkpoint.py: 2 (4 h + kv d + f) + 4 heads bytes a token of Llama 3 8B.
    h, kv, f, heads = 4096, 1024, 14336, 32
    found = kept_mb("llama3-8b", DENSE, "per_op", seq=8192.0)
    assert found == pytest.approx(8192 * (2 * (4 * h + kv + f) + 4 * heads) / 1e6)
    ops = forward("llama3-8b", DENSE, recompute_modules=("per_op",))
    again = {op.name: op.redone_frac for op in ops if op.kind != "collective"}
    assert (again["out_proj"], again["fc2"], again["flash"], again["fc1"]) == (1.0, 0.0, 0.0, 0.5)
    assert again["qkv"] == pytest.approx(kv / (h + 2 * kv))


def test_modules_drop_what_they_name() -> None:
    # Queries, keys and values of 128 heads, and the normed latents with their statistics, less the key that
    # all heads share, of which they are made; the input of the experts' second matmul: 8 copies 2,048 wide.
    whole = kept_mb("deepseek-v3", MOE, "core_attn", ep=64.0)
    for module, bytes_a_token in (
        ("mla_up_proj", 2 * (128 * (192 + 192 + 128) + 1536 + 512 + 4 - 64)),
        ("moe_act", 2 * 8 * 2048),
    ):
        less = kept_mb("deepseek-v3", MOE, "core_attn", module, ep=64.0)
        assert whole - less == pytest.approx(4096 * bytes_a_token / 1e6)
    assert kept_mb("deepseek-v3", MOE, "mlp") == kept_mb("deepseek-v3", MOE)  # only dense layers have an mlp
    assert kept_mb("llama3-8b", DENSE, "layernorm") == kept_mb("llama3-8b", DENSE)  # its norms are fused


def test_dualpipe_with_experts_is_deepseeks_framework() -> None:
    plan = Plan(pp=16, ep=64, dtype="fp8", schedule="dualpipe")
    assert plan.overlap_ep and plan.dispatch == "per_rank" and plan.recompute == "selective"
    assert plan.dispatch_dtype == plan.act_input_dtype == "fp8"
    for key, value in (("overlap_ep", False), ("recompute", "none"), ("dispatch", "per_expert")):
        stated = replace(plan, **{key: value, "recompute_modules": ()})
        assert getattr(stated, key) == value and parse_plan(plan_text(stated)) == stated
