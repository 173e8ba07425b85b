"""What follows from a Hugging Face config: the fields of `Model` that a block, a rule or a head says.

A *block* is what most models of a kind share. A *rule* is a short function: how fields of `Model` follow from
several of the config. A *head* is what the class in `architectures` ends with.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any

from msgspec import structs

from meshwise.core.errors import ModelError
from meshwise.model import architecture as arch
from meshwise.model.architecture import Layer, Model, Side
from meshwise.model.config_fields import NAMES, Config, Fields, LayerSizes, formulas_of, part, said_of

# --- blocks ------------------------------------------------------------------------------------

_GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "relu2": "reglu"}


def _activation(name: str, *, gated: bool) -> str:
    plain = NAMES["activations"].get(name)
    if plain is None or (gated and plain not in _GATED):
        raise ModelError(f"hidden_act is {name!r}; known are {', '.join(NAMES['activations'])}")
    return _GATED[plain] if gated else plain


def block_fields(c: Config, kind: str) -> Fields:
    """What every model states (its sizes, its heads, its dropout), and what blocks of its kind share."""
    shared = dict(NAMES["blocks"][kind])
    activation = _activation(c.hidden_activation or c.hidden_act, gated=shared.pop("gated"))
    return shared | {"activation": activation} | said_of("Model", c)


# --- which layers have experts, and a window ---------------------------------------------------


_Pattern = tuple[Any, ...]
"""A value for each layer. What rules say of each layer stands under `each`: fields of `Layer`."""


def _named(c: Config, what: str, kinds: Sequence[Any], known: Collection[str] = ()) -> Sequence[Any]:
    """`kinds`, where there is one for each layer, each of `known` (if any are); else a ModelError."""
    if len(kinds) == c.num_hidden_layers + c.num_nextn_predict_layers:  # some name those of the MTP too
        kinds = kinds[: c.num_hidden_layers]
    if len(kinds) != c.num_hidden_layers or (known and not {*known} >= {*kinds}):
        names = f" {' or '.join(known)}" if known else ""
        raise ModelError(f"{what} must name each of the {c.num_hidden_layers} layers{names}")
    return kinds


_FULL = ("full_attention", "global", "sparse_attention")


def window(c: Config) -> Fields:
    """The window of each layer, 0 for none: by their names, by a step, or from one layer on."""
    every, window, layers = c.full_attention_every or 0, c.sliding_window or 0, range(c.num_hidden_layers)
    if c.layer_types is not None:
        near = ("sliding_attention", "chunked_attention", "local")
        kinds = _named(c, "layer_types", c.layer_types, (*_FULL, *near))
        windows = tuple(window * (kind in near) for kind in kinds)
        return {"each": {"window": windows, "kind": tuple((kind,) for kind in kinds)}}
    if not isinstance(every, int):
        raise ModelError(f"sliding_window_pattern is {every!r}; give layer_types, a name for each layer")
    if not window or not c.use_sliding_window:
        return {}
    looks_back = (layer < c.max_window_layers or (every and (layer + 1) % every == 0) for layer in layers)
    return {"each": {"window": tuple(window * (not all_of_it) for all_of_it in looks_back)}}


def _numbers(text: str) -> list[int]:
    """The numbers of a list that is written as text, such as 3,4,5."""
    try:
        return [int(one) for one in text.split(",") if one.strip()]
    except ValueError:
        raise ModelError(f"the layers with experts are {text!r}; numbers are needed") from None


def _moe_layers(c: Config) -> _Pattern:
    """Which layers have experts: by their names or numbers, or from one on, every n-th."""
    layers, dense = range(c.num_hidden_layers), c.mlp_only_layers or ()
    if c.mlp_layer_types is not None:
        kinds = _named(c, "mlp_layer_types", c.mlp_layer_types, ("dense", "sparse", "moe", "hash_moe"))
        return tuple(kind != "dense" for kind in kinds)
    if c.moe_layers is not None:
        numbers = c.moe_layers if isinstance(c.moe_layers, list) else _numbers(c.moe_layers)
        return tuple(layer in numbers for layer in layers)
    if isinstance(c.moe_layer_freq, list):
        return tuple(map(bool, _named(c, "moe_layer_freq", c.moe_layer_freq)))
    arch.check_count(c.moe_layer_freq, "moe_layer_freq")
    arch.check_count(c.decoder_sparse_step, "decoder_sparse_step")
    if c.expert_layer_period:
        return tuple(layer % c.expert_layer_period == c.expert_layer_offset for layer in layers)
    return tuple(
        layer >= c.first_k_dense_replace
        and layer % c.moe_layer_freq == 0
        and (layer + 1) % c.decoder_sparse_step == 0
        and layer not in dense
        for layer in layers
    )


def _window_rule(windows: _Pattern) -> Fields | None:
    """`sliding_window` and `full_attention_every` that say the same as `windows`, or None."""
    window = max(windows, default=0)
    every = windows.index(0) + 1 if window and 0 in windows else 0
    if any(here != (window if not every or (i + 1) % every else 0) for i, here in enumerate(windows)):
        return None
    return {"sliding_window": window, "full_attention_every": every} if window else {}


def moe_rule(has_experts: Sequence[bool]) -> Fields | None:
    """`first_dense_layers` and `every` of an `MoE` that say the same as `has_experts`, or None."""
    number, having = len(has_experts), [layer for layer, here in enumerate(has_experts) if here]
    if not having:
        return {"first_dense_layers": number, "every": 1}
    every = having[1] - having[0] if len(having) > 1 else max(number - having[0], 1)
    first = having[0] + 1 - every
    if len(having) == 1 and first < 0:
        first, every = 0, having[0] + 1
    if first < 0 or having != list(range(having[0], number, every)):
        return None
    return {"first_dense_layers": first, "every": every}


def with_layers(fields: Fields, sides: Sequence[tuple[Collection[str], Side]] = ()) -> Fields:
    """What the rules say of each layer as steps where there are some, else as `layers`.

    `sides`: small layers of a block, each with the kinds of layers that have it (none named: all of them).
    """
    number, each = fields["num_layers"], dict(fields.pop("each", {}))
    kinds = each.pop("kind", ((),) * number)
    if not any(each.get("moe", (True,))):
        fields = fields | {"moe": None}
    moe, mixers = each.setdefault("moe", (False,) * number), each.get("mixer", ("attention",) * number)
    windows = each.setdefault("window", (0,) * number)
    if fields.get("layers"):
        return fields | ({"layers": _with_sides(fields["layers"], kinds, sides)} if sides else {})
    steps, moe_steps = _window_rule(windows), moe_rule(moe)
    if steps is not None and moe_steps is not None and not sides and {*each} == {"moe", "window"}:
        if any(moe):
            fields["moe"] = replace(fields["moe"], **moe_steps)
        return fields | steps
    with_mlp = "none" not in mixers and fields["ffn_hidden"] > 0
    each.setdefault("mlp", tuple(with_mlp or mixer == "none" for mixer in mixers))
    found = tuple(Layer(**{name: values[i] for name, values in each.items()}) for i in range(number))
    layers = tuple(layer for layer in _with_sides(found, kinds, sides) if layer.mixer != "none" or layer.mlp)
    ends = {"layers": layers, "num_layers": len(layers)}
    return fields | ends | {"ffn_hidden": fields["ffn_hidden"] or fields["hidden"]}


def _with_sides(
    layers: Sequence[Layer], kinds: Sequence[Sequence[str]], sides: Sequence[tuple[Collection[str], Side]]
) -> tuple[Layer, ...]:
    def own(layer: Layer, kind: Sequence[str]) -> Layer:
        mine = {*kind, layer.mixer, ("moe" if layer.moe else "dense") if layer.mlp else ""}
        return replace(layer, sides=tuple(side for on, side in sides if not on or mine & {*on}))

    return tuple(own(layer, kind) for layer, kind in zip(layers, kinds, strict=True))


# --- rules, by the name of their function or part -----------------------------------------------


def said_by(rule: str, c: Config) -> Fields:
    """What a rule says, by formulas of `catalog/huggingface_names.toml` or by the function of its name."""

    def part_of(name: str) -> Any:  # of its kind, the first word of the name
        return part(getattr(arch, name.split()[0]), c, name)

    if rule not in NAMES["rules"]:
        said: Fields = globals()[rule](c)
        return said
    known = {"part_of": part_of, "recurrence_of": lambda: _recurrence(c)}
    return formulas_of(NAMES["rules"][rule], c, **known)


def experts(c: Config) -> Fields:
    """Experts in place of the MLP, shared ones beside them."""
    if not c.num_experts:
        return {}
    if c.moe_intermediate_size is None is c.intermediate_size:
        raise ModelError("the width of the experts is missing; an MoE config needs it")
    if not c.num_experts_per_tok:
        raise ModelError("num_experts_per_tok is missing; an MoE config needs it")
    return {"moe": part(arch.MoE, c), "each": {"moe": _moe_layers(c)}}


def hybrid(c: Config) -> Fields:
    """Layers of which some have a recurrence in place of attention, and some, in Nemotron-H, only an MLP."""
    number, kinds = c.num_hidden_layers, list(c.hybrid_pattern) or c.layer_types or []
    if not kinds:
        period, offset, indices = c.attn_layer_period, c.attn_layer_offset, c.attn_layer_indices or ()
        every = c.full_attention_every if isinstance(c.full_attention_every, int) else 0
        for layer in range(number):
            attends = layer in indices or (period and layer % period == offset)
            kinds.append("attention" if attends or (every and (layer + 1) % every == 0) else "mamba")
    known = NAMES["mixers"]
    mixers = tuple(known[kind] for kind in _named(c, "layer_types", kinds, known))
    each: Fields = {"mixer": mixers}
    if "sliding_attention" in kinds:
        each["window"] = tuple((c.sliding_window or 0) * (kind == "sliding_attention") for kind in kinds)
    if "none" in mixers:
        each["moe"] = tuple(kind in ("moe", "E") for kind in kinds)
    return {"each": each, "recurrence": _recurrence(c) if {"recurrence", "beside"} & {*mixers} else None}


def _recurrence(c: Config) -> Any:
    inner = c.state_expand * c.hidden_size if c.state_inner is None else c.state_inner
    return part(arch.Recurrence, structs.replace(c, state_inner=inner))


def zamba2(c: Config) -> Fields:
    """Mamba 2, and before some of it one of a few blocks of attention and MLP, whose weights are shared.

    They read the embedding beside the stream, twice its width together: the other half of their first
    matmul is a side.
    """
    number = 0
    each: dict[str, list[Any]] = {"mixer": [], "mlp": [], "shares": []}
    for kind in _named(c, "layers_block_type", c.layer_types or (), ("mamba", "linear_attention", "hybrid")):
        if kind == "hybrid":
            each["mixer"].append("attention")
            each["mlp"].append(True)
            each["shares"].append(number >= c.num_mem_blocks)
            number += 1
        each["mixer"].append("recurrence")
        each["mlp"].append(False)
        each["shares"].append(False)
    return {"each": each, "num_layers": len(each["mixer"]), "recurrence": _recurrence(c)}


def heads_by_layer(c: Config) -> Fields:
    """Layers with numbers of heads of their own (Laguna)."""
    heads = c.num_attention_heads_per_layer
    if heads is None or {*heads} == {c.num_attention_heads}:
        return {}
    return {"each": {"num_heads": tuple(_named(c, "num_attention_heads_per_layer", heads))}}


def kimi_linear(c: Config) -> Fields:
    """Gated DeltaNet, whose gates come through a layer as narrow as a head, and latent attention between."""
    own = c.linear_attn_config
    if own is not None:
        attends = (layer + 1 in own.full_attn_layers for layer in range(c.num_hidden_layers))
        c = structs.replace(
            c, layer_types=["attention" if here else "linear_attention" for here in attends],
            state_heads=own.num_heads, state_head_dim=own.head_dim, conv_kernel=own.short_conv_kernel_size,
            wide_gate=own.use_full_rank_gate,
        )  # fmt: skip
    elif c.layer_types is None:
        raise ModelError("linear_attn_config is missing; it says which layers have linear attention")
    dim = c.state_head_dim
    if isinstance(dim, str):
        raise ModelError(f"the width of a linear head is {dim!r}; a number is needed")
    return hybrid(structs.replace(c, gate_rank=dim, state_size=dim, state_groups=c.state_heads))


def mla(c: Config) -> Fields:
    if not c.use_mla:
        return {}
    mla = arch.MLA(**{field.name: getattr(c, field.name) or 0 for field in fields(arch.MLA)})
    return _indexer(c) | {"mla": mla, "head_dim": mla.head_dim, "num_kv_heads": c.num_attention_heads}


def mistral_large4(c: Config) -> Fields:
    """Latent attention without positions in some layers, whose heads are as wide; some share latents."""
    numbers, said = range(c.num_hidden_layers), mla(c)
    plain = replace(said["mla"], qk_nope_head_dim=said["head_dim"], qk_rope_head_dim=0)
    turned = _named(c, "no_rope_layers", c.no_rope_layers or [(i + 1) % 4 for i in numbers])
    sources = _named(c, "kv_source_layers", c.kv_source_layers or numbers)
    sparse = said.get("each", {}).get("sparse") or [said["sparse"] for _ in numbers]
    own = {
        "kind": tuple(("scored",) * bool(one.heads) for one in sparse),
        "mla": tuple(None if one else plain for one in turned),
        "keys": tuple("shared" * (source != i) for i, source in enumerate(sources)),
    }
    return said | {"each": said.get("each", {}) | own}


def _indexer(c: Config) -> Fields:
    """Sparse attention, whose choice of keys some layers may take from the one before them (GLM-5.2)."""
    own = part(arch.Sparse, c)
    if own is None:
        return {}
    kinds = c.indexer_types
    if kinds is None and c.index_topk_freq > 1:
        numbers, first = range(c.num_hidden_layers), c.index_skip_topk_offset
        kinds = ["shared" if max(i + 1 - first, 0) % c.index_topk_freq else "full" for i in numbers]
    if kinds is None or "shared" not in kinds:
        return {"sparse": own}
    shared, named = arch.Sparse(top_k=c.index_topk), _named(c, "indexer_types", kinds, ("full", "shared"))
    return {"each": {"sparse": tuple(own if kind == "full" else shared for kind in named)}}


def compressed(c: Config) -> Fields:
    """DeepSeek-V4: a window, and of most layers keys of 4 tokens, chosen, or of 128, all of them."""
    few, many = "compressed_sparse_attention", "heavily_compressed_attention"
    rates, number = {few: 4, many: 128} | c.compress_rates, c.num_hidden_layers
    kinds = _named(c, "compress_ratios", c.layer_types[:number], ("near", "sliding_attention", *rates))
    of_kind = {
        few: arch.Sparse(
            top_k=c.index_topk, heads=c.index_n_heads, head_dim=c.index_head_dim, ratio=rates[few]
        ),
        many: arch.Sparse(ratio=rates[many]),
    }
    hashed = c.mlp_layer_types or ["hash_moe"] * c.num_hash_layers
    scored = [i >= len(hashed) or hashed[i] != "hash_moe" for i in range(number)]
    each = {
        "window": (c.sliding_window or 0,) * number,
        "sparse": tuple(of_kind.get(kind) for kind in kinds),
        "kind": tuple((kind, "scored" * scored[i]) for i, kind in enumerate(kinds)),
    }
    return {"each": each}


def minimax_m3(c: Config) -> Fields:
    """Sparse attention, by blocks of tokens, in some layers."""
    own = c.sparse_attention_config
    block = own.get("sparse_block_size", c.index_block_size)
    sparse = arch.Sparse(
        top_k=own.get("sparse_topk_blocks", c.index_topk_blocks) * block,
        heads=own.get("sparse_num_index_heads", c.index_n_heads),
        head_dim=own.get("sparse_index_dim", c.index_head_dim),
        weighted=False,
    )
    named = _named(c, "sparse_attention_freq", c.layer_types)
    return {"each": {"sparse": tuple(None if kind == "full_attention" else sparse for kind in named)}}


def near_heads(c: Config) -> Fields:
    """Layers with a window have heads, or key-value heads, of their own (Step 3.5, MiMo-V2)."""
    fields = window(c)
    heads = c.num_sliding_attention_heads or c.attention_other_setting.get("num_attention_heads", 0)
    own = {"num_heads": heads, "num_kv_heads": c.swa_num_key_value_heads or 0}
    usual = {"num_heads": c.num_attention_heads, "num_kv_heads": c.num_key_value_heads}
    each = {
        name: tuple(value * bool(near) for near in fields["each"]["window"])
        for name, value in own.items()
        if value and value != usual[name]
    }
    return fields | {"each": fields["each"] | each}


def searched(c: Config) -> Fields:
    """Nemotron-NAS (arXiv 2411.19146): attention and MLP differ by layer, or are missing."""
    each: dict[str, list[Any]] = {"mixer": [], "mlp": [], "num_kv_heads": [], "ffn_hidden": [], "kind": []}
    for own in _named(c, "block_configs", c.block_configs):
        attention, ffn = own.get("attention") or {}, own.get("ffn") or {}
        linear = {half: bool(part.get("replace_with_linear")) for half, part in own.items() if part}
        group = attention.get("n_heads_in_group")
        attends = not attention.get("no_op") and not linear.get("attention")
        if attends and not group:
            raise ModelError("block_configs: n_heads_in_group is missing")
        width = ffn.get("intermediate_size")
        if width is None:
            width = -(-int(2 * (ffn.get("ffn_mult") or 0) * c.hidden_size / 3) // 256) * 256
        has_mlp = not ffn.get("no_op") and not linear.get("ffn")
        each["mixer"].append("attention" if attends else "none")
        each["mlp"].append(has_mlp)
        each["num_kv_heads"].append(c.num_attention_heads // group if attends and group else 0)
        each["ffn_hidden"].append(width if has_mlp else 0)
        each["kind"].append(tuple(f"linear_{half}" for half, here in linear.items() if here))
    heads, widths = max(each["num_kv_heads"]), max(each["ffn_hidden"])
    return {"each": each, "num_kv_heads": heads or c.num_attention_heads, "ffn_hidden": widths}


def t5(c: Config) -> Fields:
    gate, _, name = c.feed_forward_proj.rpartition("-")
    return {"activation": _activation(name, gated=gate == "gated")}


def gemma4(c: Config) -> Fields:
    """Layers of two sizes of heads, the last ones with the keys of earlier ones, and per-layer embeddings."""
    number, own = c.num_hidden_layers, c.per_layer_config
    kinds = _named(c, "layer_types", c.layer_types)
    if not all(layer.isdecimal() for layer in own):
        raise ModelError("per_layer_config must name layers by number")
    heads = c.num_global_key_value_heads if c.attention_k_eq_v else None
    usual = LayerSizes(c.global_head_dim, heads or 0)
    for sizes in (usual, *own.values()):
        arch.check_count(sizes.head_dim, "head_dim", zero=True)
        arch.check_count(sizes.num_key_value_heads, "num_key_value_heads", zero=True)
        if c.num_attention_heads % (sizes.num_key_value_heads or 1):
            raise ModelError(f"{c.num_attention_heads} heads do not divide by {sizes.num_key_value_heads}")
    stated = {int(layer): sizes for layer, sizes in own.items()}

    def layer(i: int) -> Layer:
        is_full = kinds[i] == "full_attention" or i == number - 1
        shares = i >= number - c.num_kv_shared_layers
        sizes = stated.get(i, usual if is_full else LayerSizes())
        return Layer(
            moe=c.enable_moe_block,
            window=0 if is_full else c.sliding_window or 0,
            head_dim=sizes.head_dim,
            num_kv_heads=sizes.num_key_value_heads,
            ffn_hidden=2 * (c.intermediate_size or 0) if c.use_double_wide_mlp and shares else 0,
            keys="shared" if shares else "values" if is_full and c.attention_k_eq_v else "",
        )

    return {"layers": tuple(map(layer, range(number)))}


def gemma3n(c: Config) -> Fields:
    """Several residual streams, per-layer embeddings, and the last layers with the keys of earlier ones."""
    number, widths = c.num_hidden_layers, c.ffn_widths
    widths = [widths] * number if isinstance(widths, int) else widths
    kinds = _named(c, "layer_types", c.layer_types)
    _named(c, "intermediate_size", widths)

    def layer(i: int) -> Layer:
        arch.check_count(widths[i], "intermediate_size")
        window = 0 if kinds[i] == "full_attention" else c.sliding_window or 0
        keys = "shared" if i >= number - c.num_kv_shared_layers else ""
        return Layer(window=window, ffn_hidden=widths[i] * (widths[i] != widths[0]), keys=keys)

    streams = arch.Streams(number=c.altup_num_inputs, laurel_rank=c.laurel_rank)
    return {"layers": tuple(map(layer, range(number))), "ffn_hidden": widths[0], "streams": streams}


def patches(c: Config) -> Fields:
    """An encoder of images: a token for each square, and nothing that only text needs."""
    size, patch = c.image_size, c.patch_size
    side = (patch if isinstance(patch, int) else patch[0]) * c.patches_a_side
    arch.check_count(side, "patch_size")
    if c.num_patches is not None:  # images of any shape: as many squares at most
        arch.check_count(c.num_patches, "num_patches")
        size = side, side * c.num_patches
    height, width = (each - each % side for each in ((size, size) if isinstance(size, int) else size))
    patches = arch.Patches(
        height=height, width=width, patch=side, channels=c.num_channels * c.temporal_patch_size,
        class_token=c.class_token, mask_token=c.use_mask_token, bias=c.patch_bias,
    )  # fmt: skip
    return {"patches": patches, "max_seq": patches.num_tokens, "causal": False, "vocab": 0, "lm_head": False}


def patch_windows(c: Config) -> Fields:
    """Blocks of images attend inside squares of `window_size` pixels, but for those named (Qwen2.5-VL)."""
    assert isinstance(c.patch_size, int)
    reach = (c.window_size // c.patch_size) ** 2 // 2  # patches on either side
    numbers = range(c.num_hidden_layers)
    return {"layers": tuple(Layer(window=reach * (i not in c.fullatt_block_indexes)) for i in numbers)}


# --- heads -------------------------------------------------------------------------------------

_USUAL = {field.name: field.default for field in fields(Model)}


def head_fields(c: Config, kind: str, said: Fields) -> Fields:
    """The fields of `Model` that follow from what the class in `architectures` is for, beside those `said`.

    That is CausalLM of `LlamaForCausalLM`, nothing of `LlamaModel`.
    """
    name, purposes = c.architectures[0] if c.architectures else "", NAMES["purposes"]
    found = re.search(r"(?:For|With)([A-Z].*)$|(LMHeadModel)$", name)
    purpose = (found[1] or found[2]) if found else ""
    known = [one for group in NAMES["heads"][kind] for one in purposes.get(group, [group])]
    if purpose not in ("", *known):
        raise ModelError(
            f"architectures names {name}, a head that is not known for this family; known are "
            f"{', '.join(('none', *known))}"
        )
    labels = 2 if c.num_labels is None else c.num_labels
    labels = NAMES["num_classes"].get(purpose, labels if c.id2label is None else len(c.id2label))
    others = _USUAL | said | purposes | {"architecture": name, "purpose": purpose, "classes": labels}
    return said_of(f"{kind} head", c, **others)
