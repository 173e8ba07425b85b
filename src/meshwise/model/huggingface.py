"""Hugging Face `config.json` files, read into `Model` without the transformers library.

A config names its family (`model_type`, or else the class in `architectures`) and says only what
varies inside the family: that Phi has a bias on its LM head, or Gemma 2 four norms per block, is
written in the family's code. So a family is an entry of `catalog/huggingface.toml`: how it spells its config
(field names, and what an omitted field means), which block it has, which *rules* apply, and what it does
differently. A rule is a short function of `config_rules`: how fields of `Model` follow from several of the
config.
The sizes a model cannot be without have no defaults, except inside the config of a part of a model,
where the library omits what equals its own.

A model that reads more than text is its language model (of CLIP and SigLIP: its vision tower); its other
towers and what joins them are named in `Model.left_out` with their parameters, and in `Model.towers` as
models. The class in `architectures` says which head the model ends with.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from meshwise.core.errors import ModelError, did_you_mean
from meshwise.core.files import parse_file
from meshwise.core.refusals import refuse
from meshwise.core.toml import converted
from meshwise.model import config_fields as spelled
from meshwise.model.architecture import Model, Projector, Side, Tower, check_count, checked_model
from meshwise.model.config_fields import NAMES, Config, Fields, Spelling, follows, spellings, worked_out
from meshwise.model.config_rules import block_fields, head_fields, said_by, with_layers
from meshwise.model.weights import num_params, num_projected

ENDS = "embedding", "head"


def families() -> list[str]:
    """The `model_type`s that `read_config` knows."""
    return [family for family, spelling in spellings().items() if spelling.block != "none"]


def read_config(path: str | Path, like: str = "") -> Model:
    """The model that a `config.json`, or the directory holding it, describes.

    `like`: a family that an unknown one is to be read as. Raises `ModelError` if the file cannot be read,
    lacks a field, or contradicts itself.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    raw = parse_file(path, "JSON", partial(json.loads, parse_constant=_infinity), ModelError)
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return model_from_config(raw, name=name, where=str(path), like=like)


def _infinity(text: str) -> float:
    """The Infinity that some files hold; ValueError for NaN, which says nothing."""
    if text == "NaN":
        raise ValueError("NaN is no number")
    return float(text)


def model_from_config(raw: Any, *, name: str, where: str = "config", like: str = "") -> Model:
    """The model that a parsed config describes; `where` begins the messages of its errors."""
    if not isinstance(raw, dict):
        raise ModelError(f"{where} is not a JSON object; a config.json begins with {{")
    try:
        family = _family(raw, like)
        whole = spellings()[family].whole
        fields = _fields(raw, family, nested=False) if whole is None else _fields_of_whole(raw, whole)
        model = Model(name=name, source=where, quantized=_quantized(raw, bool(fields.get("moe"))), **fields)
        if like:
            stated = {spellings()[family].names.get(key, key): value for key, value in raw.items()}
            refuse("like", ModelError, like=like, family=family, model=model, stated=stated)
        return checked_model(converted(msgspec.to_builtins(model), Model, where, ModelError), where)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith(where) else f"{where}: {text}") from None


def _quantized(raw: dict[str, Any], has_experts: bool) -> str:
    """Plan keys that serve quantized weights as they are; all that there are where layers differ.

    Packed weights of a mixture are those of its experts (Kimi K2.5); DeepSeek-V4 says so with `expert_dtype`.
    Of 2 or 3 bits there is no key.
    """
    parts = (raw, *(part for part in raw.values() if isinstance(part, dict)))
    own = next((part["quantization_config"] for part in parts if "quantization_config" in part), None)
    if not own or not isinstance(own, dict):
        return ""
    names = (own.get(key) for key in ("quant_algo", "format", "quant_method"))
    name = next((name.lower() for name in names if isinstance(name, str)), "")
    packed = re.search(r"'weights': \{[^}]*'num_bits': (\d+)", str(own.get("config_groups")))
    bits = int(packed[1]) if packed else own.get("bits")
    unknown = "dtype, weight_dtype or expert_dtype"
    keys = NAMES["formats"].get(name, unknown) if bits in (None, 4, 8) else unknown
    if has_experts and name == "pack-quantized":
        keys = keys.replace("weight_dtype=", "expert_dtype=")
    left_out = " ".join(str(own.get(key)) for key in ("ignore", "modules_to_not_convert", "exclude_modules"))
    wide = [what for what, names in NAMES["left_wide"].items() if re.search(names, left_out)]
    if keys == "dtype=fp4" and wide:
        return f"{keys},wide_modules={'+'.join(wide)}"
    if bits == 8 or own.get("load_in_8bit"):
        keys = keys.replace("int4", "int8")
    return keys + ",expert_dtype=mxfp4" * (raw.get("expert_dtype") == "fp4" and "=" in keys)


def _fields(raw: dict[str, Any], family: str, *, nested: bool) -> Fields:
    """The fields of `Model` that the config of one family says."""
    spelling = spellings()[family]
    if spelling.block == "none":
        raise ModelError(
            f"{family} is a part of a model that is counted and not priced; give the whole config"
        )
    c = _typed(raw, spelling, nested=nested)
    _check_refused(spelling, lambda text: follows(text, c), structs.asdict(c))
    for name, text in spelling.derived.items():
        c = structs.replace(c, **{name: follows(text, c)})
    fields = block_fields(c, spelling.block)
    each: Fields = {}
    for rule in spelling.rules:
        said = said_by(rule, c)
        each |= said.get("each", {})
        fields |= said
    each |= {name: follows(text, c) for name, text in spelling.each.items()}
    fields |= {"each": each} if each else {}
    if fields.get("moe") is not None:
        fields["moe"] = replace(fields["moe"], **spelling.experts)
    fields |= spelling.fields | {name: follows(text, c) for name, text in spelling.taken.items()}
    if fields["head_dim"] is None:
        fields["head_dim"], rest = divmod(c.hidden_size, c.num_attention_heads)
        if rest:
            raise ModelError(
                f"hidden_size {c.hidden_size} does not divide by {c.num_attention_heads} heads; give head_dim"
            )
    sides = _sides(spelling.sides, _sizes(raw | structs.asdict(c) | fields))
    blocks = [(on, side) for on, side in sides if side.module not in ENDS]
    fields = with_layers(fields | head_fields(c, spelling.head, fields), blocks)
    fields["sides"] = tuple(side for _, side in sides if side.module in ENDS)
    sizes = _sizes(spelling.nested | raw | {"tower": fields["hidden"]})
    return fields | {"left_out": _left_out("merger", spelling.joints, sizes)}


def _check_refused(spelling: Spelling, holds: Callable[[str], Any], fields: Mapping[str, Any]) -> None:
    """ModelError where an expression that its family refuses holds."""
    for what, sentence in spelling.refused.items():
        if holds(what):
            raise ModelError(sentence.format(**fields))


def _fields_of_whole(raw: dict[str, Any], whole: spelled.WholeConfig) -> Fields:
    """The language model, with the class and the tied embedding of the whole; its tower is left out."""
    version = str(raw.get("version"))
    if whole.families and version not in whole.families:
        raise ModelError(f"version is {version}; known are {', '.join(whole.families)}")
    family = whole.families.get(version, whole.family)
    text = _part(raw, whole.text) or raw | {"model_type": family}
    tied = raw.get("tie_word_embeddings", whole.tied)
    above = {"architectures": raw.get("architectures")}
    above |= {} if tied is None else {"tie_word_embeddings": tied}
    labels = {key: raw[key] for key in ("id2label", "num_labels", "token_classification_bias") if key in raw}
    fields = _fields(text | above | labels, _part_family(text, family), nested=True)
    left_out: list[tuple[str, int]] = []
    towers: list[Tower] = []
    is_alone = whole.alone and raw.get("architectures") == [whole.alone]
    for tower in () if is_alone else whole.towers:
        try:
            counted, priced = _tower(raw, tower, fields["hidden"])
            left_out, towers = left_out + counted, towers + priced
        except ModelError as error:
            raise ModelError(
                f"{tower.key}: {error}; save {whole.text or 'its fields'} as a config.json to price the rest"
            ) from None
    return fields | {"left_out": tuple(left_out), "towers": tuple(towers)}


def _tower(
    raw: dict[str, Any], tower: spelled.TowerConfig, text_width: int
) -> tuple[list[tuple[str, int]], list[Tower]]:
    """The parameters of a tower, of what reduces its tokens, and of what joins it to the text; and itself."""
    if tower.optional and raw.get(tower.key) is None:
        return [], []
    config = tower.defaults | _part(raw, tower.key)
    family = tower.family if tower.always else _part_family(config, tower.family)
    name = tower.key.rpartition(".")[2].partition("_")[0]
    name = {"img": "vision", "vq": "vision"}.get(name, name)
    spelling = spellings()[family]
    config = spelling.nested | config | {"text": text_width}
    if spelling.block == "none":  # known by its sizes alone
        _check_refused(spelling, lambda text: worked_out(text, config), config)
        sizes = _sizes(config | raw | {"tower": config["hidden_size"]})
        counted = _left_out(f"{name} tower", spelling.joints, _sizes(config))
        return [*counted, *_left_out("projector", tower.joints, sizes)], []
    found = Model(name=family, **_fields(config | {"architectures": None}, family, nested=True))
    encoder = replace(checked_model(found, family), left_out=())
    sizes = _sizes(config | raw | {"tower": found.hidden})
    sizes["merge"] = merge = _size(str(tower.merge), sizes)
    check_count(merge, f"the tokens that become one, {tower.merge}")
    counted = (
        (f"{name} tower", num_params(found)), *found.left_out, *_left_out("projector", tower.joints, sizes)
    )  # fmt: skip
    projectors = tuple(
        one
        for joints, of in ((spelling.joints, _sizes(config | {"tower": found.hidden})), (tower.joints, sizes))
        for joint in joints
        for one in _projectors(joint, of)
    )
    sizing = spelling.sizing or tower.sizing
    if sizing is None:
        return list(counted), []
    sizes = {"projectors": projectors, "merge": merge, "sizing": sizing, "crossed": tower.crossed}
    return list(counted), [Tower(name=name, encoder=encoder, **sizes)]


def _sides(stated: list[spelled.SideLayer], sizes: dict[str, Any]) -> list[tuple[list[str], Side]]:
    """The small layers of a family with their sizes in one model, and the kinds of layers that have each."""
    found = []
    for one in stated:
        if one.when and not sizes.get(one.when):
            continue
        d_in, d_out = (_size(text, sizes) for text in one.linear or ("0", one.vector))
        own = {name: getattr(one, name) for name in ("module", "name", "bias", "op", "shared", "kept")}
        own |= {name: _size(getattr(one, name), sizes) for name in ("taps", "rows", "times", "every")}
        found.append((one.on, Side(d_in=d_in, d_out=d_out, **own)))
    return found


def _part(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """The config under `key`, which may name a part of a part: thinker_config.text_config."""
    first, _, rest = key.partition(".")
    part = raw.get(first)
    if rest and isinstance(part, dict):
        return _part(part, rest)
    if part is not None and not isinstance(part, dict):
        raise ModelError(f"{key} is not a JSON object; it must hold the config of a part of the model")
    return part or {}


def _left_out(name: str, joints: list[spelled.Joint], sizes: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    number = sum(num_projected(one) for joint in joints for one in _projectors(joint, sizes))
    return ((name, number),) if number else ()


def _sizes(known: dict[str, Any]) -> dict[str, Any]:
    """What expressions of widths name; lists are tables by place, which no number multiplies."""
    sizes: dict[str, Any] = {"len": len, "int": int}
    for name, value in known.items():
        value = known.get(value) if isinstance(value, str) else value
        sizes[name] = dict(enumerate(value)) if isinstance(value, list) else value
    return sizes


def _size(text: str, sizes: dict[str, Any]) -> int:
    """The width that an expression makes of `_sizes`."""
    if not isinstance(size := worked_out(text, sizes), int):
        raise ModelError(f"{text} is {size!r}; the parts beside the model cannot be sized without it")
    check_count(size, f"the size {text!r}", zero=True)
    return size


def _projectors(joint: spelled.Joint, sizes: dict[str, Any]) -> list[Projector]:
    """The layers of a joint, `times` over, in numbers."""

    size = partial(_size, sizes=sizes)
    one = Projector(
        norms=tuple(map(size, joint.norms)),
        linears=tuple((size(d_in), size(d_out)) for d_in, d_out in joint.linears),
        bias=joint.bias,
        norm_params=1 + joint.norm_bias,
        num_others=sum(map(size, joint.vectors)),
    )
    return [one] * size(joint.times)


def _part_family(part: dict[str, Any], usual: str) -> str:
    """The family of a part, which may call itself nothing, or as the whole does: then the `usual` one."""
    named = part.get("model_type")
    own = NAMES["families"].get(named, named) if isinstance(named, str) else None
    return usual if not named or (own in spellings() and spellings()[own].whole) else _family(part)


def _family(raw: dict[str, Any], like: str = "") -> str:
    """By `model_type`, else by the class in `architectures` (`Qwen2MoeForCausalLM` is `qwen2_moe`)."""
    kind, classes = raw.get("model_type"), raw.get("architectures")
    if isinstance(kind, str) and kind:
        key = kind.lower()
    elif isinstance(classes, list) and classes and isinstance(classes[0], str):
        kind = classes[0]
        squeezed = re.sub(r"(For[A-Z].*|LMHeadModel|Model)$", "", kind).lower()
        key = next((family for family in spellings() if family.replace("_", "") == squeezed), squeezed)
    else:
        other = "; it looks like a params.json: give the config.json instead" * ("n_layers" in raw)
        raise ModelError(f"model_type is missing; it names the family of the model, for example llama{other}")
    key = NAMES["families"].get(key, key)
    if key in spellings():
        return key
    if like in spellings():
        return like
    if like:
        raise ModelError(f"like={like} is no model_type; {did_you_mean(like, families(), 'llama is one')}")
    within = [one for one in families() if len(one) > 3 and one.replace("_", "") in key.replace("_", "")]
    near = sorted(within, key=len)[-1:] or get_close_matches(key, families(), 3) or ["llama"]
    raise ModelError(
        f"model_type {kind!r} is not known; near in name: {', '.join(near)} (docs/models.md lists all); "
        f"if its blocks are those of one of them, write that behind the path: config.json,like={near[0]}"
    )


def _typed(raw: dict[str, Any], spelling: Spelling, *, nested: bool) -> Config:
    """The config under common names, with the family's defaults, types checked and sizes above zero."""
    given = {key: value for key, value in raw.items() if value is not None or key in spelled.NULL_MEANS_NONE}
    own_names = {common: own for own, common in spelling.names.items() if own in given}
    renamed = {common: given[own] for common, own in own_names.items()}
    others = {key: value for key, value in given.items() if key not in spelling.names}
    merged = spelling.defaults | (spelling.nested if nested else {}) | others | renamed
    for name in spelled.ONE_FOR_ALL:
        if isinstance(values := merged.get(name), list) and values:
            if any(value != values[0] for value in values):
                raise ModelError(f"{name} differs between layers; only one number for all is expressed")
            merged[name] = values[0]
    if "num_hidden_layers" not in merged and isinstance(merged.get("layer_types"), list):
        merged["num_hidden_layers"] = len(merged["layer_types"])
    needed = [name for name in spelled.NEEDED if name not in spelling.optional]
    for common in needed:
        if common not in merged:
            own = next((own for own, other in spelling.names.items() if other == common), common)
            raise ModelError(f"{own} is missing; the model cannot be sized without it")
    try:
        config = msgspec.convert(spelled.DEFAULTS | merged, Config)
    except msgspec.ValidationError as error:
        text = str(error)
        for common, own in own_names.items():
            text = text.replace(f"`$.{common}`", f"`$.{own}`")
        raise ModelError(text) from None
    for common in needed:
        check_count(getattr(config, common), own_names.get(common, common))
    return config
