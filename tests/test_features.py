"""No field of a model is read past: changing it changes the parameters or the ops, or it says what it is."""

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest

from data_tables import CONFIGS, table
from meshwise.cost.op import attended_pairs
from meshwise.model import architecture
from meshwise.model.architecture import (
    Encoder,
    Layer,
    LowRank,
    Model,
    PerLayer,
    Recurrence,
    Sparse,
    Streams,
    layer_kind,
)
from meshwise.model.find import find_model
from meshwise.model.huggingface import read_config
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.op import Op
from meshwise.program.vocabulary import embed, head
from meshwise.program.walk import with_saved_bytes

GPT, LLAMA, MIXTRAL, DEEPSEEK, GPT_OSS = (
    find_model(name) for name in ("gpt3-175b", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b")
)
HYBRID = replace(
    LLAMA,
    recurrence=Recurrence(kind="ssd", num_heads=64, head_dim=64, num_groups=2, state_dim=128),
    layers=(Layer(), Layer(mixer="recurrence"), Layer(mixer="recurrence", mlp=False), Layer(mixer="none")),
)
SPARSE = replace(DEEPSEEK, sparse=Sparse(heads=4, head_dim=32, top_k=64))
SCAN = replace(
    HYBRID, recurrence=Recurrence(kind="scan", num_heads=4096, head_dim=1, state_dim=16, dt_rank=256)
)
BERT = read_config(CONFIGS / "bert-base-uncased.json")
VIT_B = read_config(CONFIGS / "vit-base-patch16-224.json")


def price(model: Model) -> Counter[tuple[Any, ...]]:
    """Everything that the ops of a model say, with fused attention and without, and how often."""
    found: Counter[tuple[Any, ...]] = Counter()
    for flash in (True, False):
        cut = Cut(microbatch=2.0, seq=256.0, tp=2.0, ep=8.0, flash=flash, dispatch_per_rank=True)
        cut = replace(cut, implementation="huggingface" if flash else "megatron")
        for number in range(model.num_layers):
            found.update(map(_said, with_saved_bytes(block(model, cut, layer_kind(model, number)))))
        found.update(map(_said, [*with_saved_bytes(embed(model, cut)), *with_saved_bytes(head(model, cut))]))
    return found


def _said(op: Op) -> tuple[Any, ...]:
    cost = (float(op.cost.flop), float(op.cost.read_bytes), float(op.cost.write_bytes))
    sizes = (float(op.saved_bytes), float(op.num_params), float(op.num_frozen), float(op.payload_bytes))
    return (op.module, op.name, op.phase, op.kind, op.shape, op.collective, *cost, *sizes, float(op.count))


SHORT = {"num_layers": 4}
TOWER = architecture.Tower(
    name="vision", encoder=VIT_B, sizing=architecture.InputSizing(kind="fixed"), num_tokens=64,
    projectors=(architecture.Projector(linears=((768, 4096),)),),
)  # fmt: skip
WAN, FLUX = (find_model(name) for name in ("wan2.1-1.3b", "flux"))
SOUND = replace(VIT_B, patches=None, frames=architecture.Frames(number=64, channels=80))
TABLE = architecture.Distances(rows=512, num_scores=2, norm=True, shared=True)
OTHERS, OF_PARTS, ELSEWHERE = table("features").values()
ONE_OTHER: list[tuple[Model, dict[str, Any]]] = [  # a model, and another value of each of these fields
    (LLAMA, OTHERS["llama"]),
    (
        LLAMA,
        {
            "layers": (Layer(), Layer(window=64), Layer(), Layer()),
            "encoder": Encoder(num_layers=2),
            "per_layer": PerLayer(rows=1000, width=64),
            "streams": Streams(number=4, laurel_rank=64),
            "sparse": Sparse(heads=4, head_dim=32, top_k=64),
            "low_rank": LowRank(query=512, out=256, groups=8),
            "sides": (architecture.Side(module="head", name="score", d_in=4096, d_out=4),),
            "towers": (TOWER,),
        },
    ),
    (GPT, OTHERS["gpt"]),
    (BERT, OTHERS["bert"] | {"distances": TABLE}),
    (VIT_B, OTHERS["vit"]),
]
CHANGES: dict[str, tuple[Model, dict[str, Any]]] = {
    **{name: (model, {name: value}) for model, others in ONE_OTHER for name, value in others.items()},
    "gate_per_head": (replace(LLAMA, attention_gate=True), {"gate_per_head": True}),
    "qk_norm_weight": (replace(LLAMA, qk_norm=True), {"qk_norm_weight": False}),
    "qk_norm_full": (replace(LLAMA, qk_norm=True), {"qk_norm_full": True}),
    "recurrence": (HYBRID, {"recurrence": replace(HYBRID.recurrence, state_dim=64)}),  # type: ignore[type-var]
    "full_attention_every": (replace(LLAMA, sliding_window=64), {"full_attention_every": 2}),
    "relative_buckets": (replace(LLAMA, positions="relative", relative_buckets=32), {"relative_buckets": 64}),
    "mla": (DEEPSEEK, {"mla": None}),
    "diffusion": (WAN, {"diffusion": replace(WAN.diffusion, text="")}),  # type: ignore[type-var]
    "frames": (SOUND, {"frames": architecture.Frames(number=64, channels=128)}),
    "moe": (MIXTRAL, {"moe": None}),
    "patches": (VIT_B, {"patches": replace(VIT_B.patches, class_token=False), "max_seq": 196}),  # type: ignore[type-var]
}
DESCRIPTIVE = {"name", "source", "checked", "aliases", "left_out", "ships_mtp", "quantized"}
PARTS: dict[str, Model] = {  # a model with the part
    "mla": SPARSE,
    "moe": replace(DEEPSEEK, linear_bias=True, moe=replace(DEEPSEEK.moe, latent=1024)),  # type: ignore[type-var]
    "recurrence": SCAN,
    "encoder": replace(GPT, encoder=Encoder(num_layers=2, seq=128, channels=80)),
    "distances": replace(BERT, distances=replace(TABLE, num_scores=1)),
    "per_layer": replace(LLAMA, per_layer=PerLayer(rows=1000, width=64)),
    "sparse": SPARSE,
    "low_rank": replace(LLAMA, low_rank=LowRank(query=512, out=256, groups=8)),
    "streams": replace(LLAMA, streams=Streams(number=4)),
    "diffusion": replace(FLUX, layers=(), positions="none"),
    "patches": VIT_B,
}
FIELDS = [
    (part, field.name)
    for part, model in PARTS.items()
    for field in fields(getattr(model, part))
    if field.name not in ELSEWHERE.get(part, ())
]


def test_every_field_is_changed_or_descriptive() -> None:
    assert set(CHANGES) | DESCRIPTIVE == {field.name for field in fields(Model)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_changes_the_ops(field: str) -> None:
    model, changes = CHANGES[field]
    model = replace(model, **SHORT)
    changed = architecture.checked_model(replace(model, **changes), field)
    assert price(changed) != price(model)


@pytest.mark.parametrize(("part", "field"), FIELDS)
def test_a_field_of_a_part_changes_the_ops(part: str, field: str) -> None:
    model = replace(PARTS[part], **SHORT)
    whole, special = getattr(model, part), OF_PARTS.get(part, {})
    value = special[field] if field in special else 2 * getattr(whole, field)
    changed: dict[str, Any] = {part: replace(whole, **{field: value})}
    if part == "mla":
        mla = changed[part]
        changed["head_dim"] = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if part == "patches":
        changed["max_seq"] = changed[part].num_tokens
    if part == "diffusion" and model.patches:
        changed["max_seq"] = model.patches.num_tokens + changed[part].joint_tokens
    assert price(architecture.checked_model(replace(model, **changed), field)) != price(model)


def test_compressed_keys_are_few() -> None:
    """DeepSeek-V4: a window of 128 tokens, and one key for 128 tokens, or 512 of those for 4."""
    model = replace(LLAMA, keys="same", num_kv_heads=1)
    cut = Cut(microbatch=1.0, seq=65536.0)

    def pairs(sparse: Sparse | None) -> float:
        ops = block(model, cut, Layer(window=128, sparse=sparse))
        flop = next(op for op in ops if op.name == "flash").cost.flop
        return float(flop) / (4.0 * model.num_heads * model.head_dim)

    near = attended_pairs(65536, 65536, causal=True, window=128)
    chosen = attended_pairs(65536, 65536, causal=True, window=4 * 512) / 4
    assert pairs(None) == near
    assert pairs(Sparse(ratio=128)) == near + attended_pairs(65536, 65536, causal=True) / 128
    assert pairs(Sparse(heads=64, head_dim=128, top_k=512, ratio=4)) == near + chosen


def test_windows_are_those_of_the_layers() -> None:
    """gpt-oss: every other layer looks back on 128 tokens, the others on all; none on the mean of both."""
    near, far = architecture.layer_kinds(GPT_OSS)
    cut = Cut(microbatch=1.0, seq=4096.0)
    pairs = {
        layer: next(op for op in block(GPT_OSS, cut, layer) if op.name == "flash").cost.flop
        / (4.0 * GPT_OSS.num_heads * GPT_OSS.head_dim)
        for layer in (near, far)
    }
    assert (near.window, far.window) == (128, 0)
    assert pairs[near] == attended_pairs(4096, 4096, causal=True, window=128)
    assert pairs[far] == attended_pairs(4096, 4096, causal=True)


def test_multi_token_prediction_is_trained_and_not_served() -> None:
    cut = Cut(microbatch=1.0, seq=64.0)
    without = replace(DEEPSEEK, mtp_layers=0)
    assert len(head(DEEPSEEK, cut)) > len(head(without, cut))
    assert len(head(DEEPSEEK, replace(cut, kind="decode"))) == len(head(without, cut))
