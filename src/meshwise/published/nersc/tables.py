"""The models that both published models of NERSC know, GPT and ViT blocks, and the tables of each."""

from __future__ import annotations

from meshwise.core.files import read_catalog
from meshwise.published.scope import ANY, Values

NERSC_TABLES = read_catalog("nersc.toml")
GPT_BLOCKS: dict[str, Values] = {name: tuple(values) for name, values in NERSC_TABLES["blocks"].items()}
GPT_BLOCKS |= dict.fromkeys(GPT_BLOCKS.pop("any"), ANY)
