"""How Hugging Face configs are written: the fields that decide an architecture, as each family spells them.

`catalog/huggingface.toml` has an entry for each family, a `Spelling`; a config is read into a `Config`, the
same for all families, whose fields `catalog/huggingface_fields.toml` lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count, islice
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from msgspec import structs

from meshwise.core.errors import ModelError
from meshwise.core.expressions import value_of
from meshwise.core.files import read_catalog
from meshwise.model.architecture import InputSizing, check_count

Fields = dict[str, Any]  # fields of Model
Part = TypeVar("Part")


class AttnConfig(msgspec.Struct):
    """The nested `attn_config` of MPT and DBRX."""

    kv_n_heads: int | None = None
    alibi: bool = True
    qk_ln: bool = False


class FfnConfig(msgspec.Struct):
    """The nested `ffn_config` of DBRX."""

    ffn_hidden_size: int
    moe_num_experts: int
    moe_top_k: int


class LinearAttention(msgspec.Struct):
    """The nested `linear_attn_config` of Kimi-Linear; its layers are numbered from 1."""

    head_dim: int
    num_heads: int
    short_conv_kernel_size: int
    full_attn_layers: list[int]
    use_full_rank_gate: bool = False


class LayerSizes(msgspec.Struct):
    """What one layer has otherwise, in the nested `per_layer_config` of Gemma 4."""

    head_dim: int = 0
    num_key_value_heads: int = 0


_FIELDS = read_catalog("huggingface_fields.toml")
_TYPES = {name: kind for kind, names in _FIELDS["types"].items() for name in names}
DEFAULTS: Fields = dict.fromkeys(_TYPES) | _FIELDS["defaults"]
"""The fields that decide an architecture, and what each means where a file omits it."""
if TYPE_CHECKING:
    Config = Any
else:
    Config = msgspec.defstruct(
        "Config", [(name, _TYPES.get(name, type(value))) for name, value in DEFAULTS.items()], module=__name__
    )


NEEDED, ONE_FOR_ALL, NULL_MEANS_NONE = (
    _FIELDS["handling"][kind] for kind in ("needed", "one_for_all", "null_means_none")
)
"""Sizes that no model is without, numbers that may differ by layer, fields whose null says none."""
NAMES: dict[str, dict[str, Any]] = read_catalog("huggingface_names.toml")
"""Words that mean the same: of families, formats of weights, activation functions, and kinds of layers."""


class Joint(msgspec.Struct, forbid_unknown_fields=True):
    """Layers beside a transformer: `norms` of a width, `linears` from a width to another.

    A width is an expression such as `2*2*tower` or `hidden_size // heads`: of numbers, of `tower` and `text`
    (the hidden sizes), of `merge` (`TowerConfig`), and of fields of the tower's config, of whose lists there
    are `len(sizes)` and `sizes[0]`. A name stands for the number of that name.
    """

    norms: list[str] = []
    linears: list[tuple[str, str]] = []
    vectors: list[str] = []
    bias: bool = True
    norm_bias: bool = True
    times: str = "1"


class SideLayer(msgspec.Struct, forbid_unknown_fields=True):
    """A small layer beside the large ones (`architecture.Side`); its widths are expressions, as of a `Joint`.

    `linear`: from a width to another; `vector`: so many learned numbers. `on`: kinds of layers that have it
    (`layer_types`, or attention, recurrence, moe, dense; none named: all; of the ends: none). `when`: a
    field without whose value no layer has it. `kept`: what it gives is kept for the backward. `taps`, `rows`:
    as of a `Side`.
    """

    module: str
    name: str
    linear: tuple[str, str] | None = None
    vector: str = ""
    op: str = ""
    on: list[str] = []
    when: str = ""
    bias: bool = False
    taps: str = "0"
    rows: str = "0"
    times: str = "1"
    every: str = "1"
    shared: bool = False
    kept: bool = False


class TowerConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What stands beside a model and is left out: its key, its family, and the layers that join it.

    `optional`: a config without the key has no such tower; else it has the family's own sizes. `merge`: so
    many of its tokens become one of the text, a number or an expression. `always`: it is of that family,
    whatever it calls itself. `sizing`: how an image is cut (`model.inputs`); without it the tower is counted
    alone.
    `crossed`: as of `architecture.Tower`.
    """

    family: str
    always: bool = False
    key: str = "vision_config"
    optional: bool = False
    defaults: dict[str, Any] = {}
    joints: list[Joint] = []
    merge: int | str = 1
    sizing: InputSizing | None = None
    crossed: bool = False


class WholeConfig(msgspec.Struct, forbid_unknown_fields=True):
    """A model of several parts: key and family of the part that is priced, and its towers.

    `alone`: a class of the whole that is that part alone. `families`: of that part, by the file's `version`.
    """

    text: str = "text_config"
    family: str = ""
    families: dict[str, str] = {}
    tied: bool | None = None
    alone: str = ""
    towers: list[TowerConfig] = []


class Spelling(msgspec.Struct, forbid_unknown_fields=True):
    """How one family writes its config; the fields are explained in `catalog/huggingface.toml`."""

    like: str = ""
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    optional: list[str] = []
    block: Literal["", "llama", "plain", "gpt", "none"] = ""
    refused: dict[str, str] = {}
    derived: dict[str, str] = {}
    rules: list[str] = []
    fields: Fields = {}
    taken: dict[str, str] = {}
    each: dict[str, str] = {}
    experts: Fields = {}
    sides: list[SideLayer] = []
    joints: list[Joint] = []
    sizing: InputSizing | None = None
    head: Literal["decoder", "encoder", "seq2seq", "image", "always", "none"] = "decoder"
    whole: WholeConfig | None = None


@cache
def spellings() -> dict[str, Spelling]:
    spellings = msgspec.convert(read_catalog("huggingface.toml"), dict[str, Spelling])
    everywhere = spellings.pop("*").names
    for own in spellings.values():  # a family stands below the one that it is like
        if own.like:
            for name in own.__struct_fields__:
                mine, others = getattr(own, name), getattr(spellings[own.like], name)
                if isinstance(mine, dict):
                    setattr(own, name, others | mine)
                elif mine in ("", [], None, "decoder"):
                    setattr(own, name, others)
        own.names = everywhere | own.names
    return spellings


def follows(text: str, c: Config, /, **others: Any) -> Any:
    """What an expression of the catalog makes of the fields of a config, and of `others`.

    Besides Python's own: `every(n, one, others)`, a kind for each layer, `one` for each n-th of them;
    `among(numbers, one, others, first)`, `one` for those of these numbers, counted from `first`;
    `cycled(kinds)`, the same in turn; `renamed(values, names)`; `up(value, unit)`, rounded up to a multiple;
    `primes(start, number)`, the sum of as many primes from `start` on.
    """
    layers = range(c.num_hidden_layers)

    def every(n: int, one: str, others: str) -> list[str]:
        check_count(n, "layers of a group")
        return [others if (layer + 1) % n else one for layer in layers]

    def among(numbers: Sequence[int], one: Any, others: Any, first: int = 0) -> list[Any]:
        return [one if first + layer in numbers else others for layer in layers]

    def cycled(kinds: Sequence[str]) -> list[str]:
        return [kinds[layer % len(kinds)] for layer in layers]

    def renamed(values: Sequence[Any] | None, names: dict[Any, str]) -> list[Any]:
        return [names.get(value, value) for value in values or ()]

    def up(value: int, unit: int) -> int:
        check_count(unit, "unit of a width")
        return -(-value // unit) * unit

    known: dict[str, Any] = {"every": every, "among": among, "cycled": cycled, "renamed": renamed, "up": up}
    known["primes"] = _primes
    known |= {"int": int, "bool": bool, "str": str, "isinstance": isinstance, "max": max}
    return worked_out(text, known | structs.asdict(c) | others)


def worked_out(text: str, names: Mapping[str, Any]) -> Any:
    """What an expression makes of these names; ModelError where it makes nothing."""
    try:
        return value_of(text, names)
    except (AttributeError, KeyError) as error:
        missing = getattr(error, "name", error.args[0])
        raise ModelError(f"{missing} is missing; the model cannot be sized without it") from None
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise ModelError(f"a size does not follow from the others: {error}") from None


def _primes(start: int, number: int) -> int:
    check_count(start, "rows of a table")
    found = (n for n in count(max(start, 2)) if all(n % d for d in range(2, isqrt(n) + 1)))
    return sum(islice(found, number))


def formulas_of(table: dict[str, str], c: Config, /, **others: Any) -> Fields:
    """What each expression of a table makes of the fields of a config, the later by the earlier too."""
    said: Fields = {}
    for field, text in table.items():
        said[field] = follows(text, c, **others | said)
    return said


def said_of(name: str, c: Config, /, **others: Any) -> Fields:
    """The fields of a part of an architecture that a config says.

    Names that begin with `is_` are no fields: others follow from them; no field does unless it `is_there`.
    """
    table = NAMES["parts"].get(name, {})
    if not follows(table.get("is_there", "True"), c, **others):
        return {}
    said = formulas_of(table, c, **others)
    return {field: value for field, value in said.items() if not field.startswith("is_")}


def part(kind: type[Part], c: Config, name: str = "") -> Part | None:
    """The part of an architecture that a config says, if it has one; `name`: of formulas of its own."""
    said = said_of(name or kind.__name__, c)
    return kind(**said) if said else None
