"""Images and sound among the tokens of a language model: how many inputs of an encoder, and how many tokens.

A processor cuts an image in a way of its own, its *sizing*; `catalog/image_sizing.toml` says what each kind
does. Sound is cut into pieces as long as the encoder knows, the last one filled up (`sound`: Whisper), or
into equal pieces, at most as long as the encoder knows (`unpadded sound`: Gemma 4).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import WorkloadError
from meshwise.core.expressions import formulas
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.model.architecture import InputSizing, Model, Patches, Tower

_MOST = 10**5
"""Pixels of a side at most, and images of a sequence."""
_SIZINGS = read_catalog("image_sizing.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a sequence has beside text: `images` of `width` x `height` pixels, `audio_s` seconds of sound."""

    images: int = 0
    width: int = 1024
    height: int = 1024
    audio_s: float = 0.0


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `1024x768`; WorkloadError if it is something else."""
    width, x, height = text.partition("x")
    if not (x and width.isdecimal() and height.isdecimal() and 0 < int(width) <= _MOST >= int(height) > 0):
        raise WorkloadError(f"image_size={text} must be width x height in pixels, as in 1024x768")
    return int(width), int(height)


def with_inputs(model: Model, inputs: Inputs) -> Model:
    """`model` as it reads `inputs` in each sequence, its towers sized for them.

    Raises:
        WorkloadError: The model reads no images, or no sound, or a number makes no sense.
    """
    wanted = {"images": ("vision", inputs.images), "audio_s": ("audio", inputs.audio_s)}
    known = {tower.name for tower in model.towers}
    for option, (name, number) in wanted.items():
        refuse(
            "inputs", WorkloadError, model=model, option=option, name=name, number=number, most=_MOST,
            is_read=name in known, is_counted=any(part.startswith(name) for part, _ in model.left_out),
        )  # fmt: skip
    return replace(model, towers=tuple(_sized(tower, inputs) for tower in model.towers))


def with_latent(model: Model, frames: int | None, size: tuple[int, int] | None) -> Model:
    """A diffusion transformer for an image of `size` (width, height), or a video of `frames` of them.

    Raises:
        WorkloadError: It makes no images, or none of that size.
    """
    own, patches = model.diffusion, model.patches
    square = own and patches and own.side_stride * patches.patch
    refuse("latent", WorkloadError, model=model, own=own, frames=frames, size=size, square=square, most=_MOST)
    assert own is not None and patches is not None
    if size is not None:
        patches = replace(patches, width=size[0] // own.side_stride, height=size[1] // own.side_stride)
    if frames is not None:
        patches = replace(patches, frames=(frames - 1) // own.frame_stride + 1)
    return replace(model, patches=patches, max_seq=patches.num_tokens + own.joint_tokens)


def _sized(tower: Tower, inputs: Inputs) -> Tower:
    encoder, sizing = tower.encoder, tower.sizing
    if encoder.frames is not None:
        frames, pieces = encoder.frames, inputs.audio_s / encoder.frames.seconds
        tokens, number = math.ceil(pieces * math.ceil(frames.number / tower.merge)), math.ceil(pieces)
        if sizing.kind == "unpadded sound" and number:
            frames = replace(frames, number=math.ceil(frames.number * pieces / number))
        return replace(tower, encoder=replace(encoder, frames=frames), num_inputs=number, num_tokens=tokens)
    assert encoder.patches is not None
    cut = cut_image(sizing, encoder.patches, math.isqrt(tower.merge), inputs.width, inputs.height)
    num, rows, columns, patch = cut["num_inputs"], cut["rows"], cut["columns"], encoder.patches.patch
    of_image = cut.get("num_tokens") or num * (rows * columns // tower.merge + cut.get("row_ends", 0))
    encoder = replace(encoder, patches=replace(encoder.patches, height=rows * patch, width=columns * patch))
    images = inputs.images
    return replace(tower, encoder=encoder, num_inputs=images * num, num_tokens=images * of_image)


def cut_image(sizing: InputSizing, patches: Patches, merged: int, width: int, height: int) -> dict[str, Any]:
    """How an image of `width` x `height` pixels is cut, by the catalog's names."""
    names = {"sizing": sizing, "patches": patches, "merged": merged, "width": width, "height": height}
    names |= {"square": patches.patch * merged, "along": patches.width // patches.patch}
    return formulas(_SIZINGS[sizing.kind], _FUNCTIONS | names)


def _rounded(height: int, width: int, square: int, least: int, most: int) -> tuple[int, int]:
    """Sides in whole squares, of an area from `least` to `most` pixels."""
    sides = [max(round(side / square) * square, square) for side in (height, width)]
    if math.prod(sides) > most:
        scale = math.sqrt(most / (height * width))
        sides = [max(math.floor(side * scale / square) * square, square) for side in (height, width)]
    elif math.prod(sides) < least:
        scale = math.sqrt(least / (height * width))
        sides = [math.ceil(side * scale / square) * square for side in (height, width)]
    return sides[0], sides[1]


def _slices(width: int, height: int, side: int, most: int) -> int:
    """Slices of the grid whose ratio is nearest; so many that each has about `side` squared pixels."""
    number = min(math.ceil(width * height / side**2), most)
    near = [each for each in (number - 1, number, number + 1) if 1 < each <= most]
    grids = [(each // rows, rows) for each in near for rows in range(1, each + 1) if each % rows == 0]
    ratio = math.log(width / height)
    best = min(grids, key=lambda grid: abs(ratio - math.log(grid[0] / grid[1])), default=(1, 1))
    return 1 if number <= 1 else math.prod(best)


def _most_kept(grids: Iterable[tuple[int, int]], width: int, height: int, side: int) -> tuple[int, int]:
    """The one of `grids` that keeps most pixels of an image, with least padding."""

    def kept(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[0] * side / width, grid[1] * side / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - math.prod(grid) * side**2

    return max(grids, key=kept)


def _grids(most: int) -> list[tuple[int, int]]:
    """Columns and rows of all grids of at most so many tiles, fewest first."""
    sides = range(1, most + 1)
    pairs = ((columns, rows) for columns in sides for rows in sides if columns * rows <= most)
    return sorted(pairs, key=math.prod)


def _nearest_ratio(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """The grid whose ratio is nearest; of equals a larger one, if the image fills half of it."""
    best, nearest = (1, 1), math.inf
    for columns, rows in _grids(most):
        away = abs(width / height - columns / rows)
        fills = width * height > 0.5 * side**2 * columns * rows
        if away < nearest or (away == nearest and fills):
            best, nearest = (columns, rows), away
    return best


def _least_scaled(width: int, height: int, side: int, most: int) -> int:
    """Tiles of the smallest grid on which the image grows least, or, where it fits none, shrinks least."""
    scaled = [
        (min(columns * side / width, rows * side / height), columns * rows) for columns, rows in _grids(most)
    ]
    up = [(scale, tiles) for scale, tiles in scaled if scale >= 1.0]
    scale = min(up)[0] if up else max(scaled)[0]
    return min(tiles for each, tiles in scaled if each == scale)


_FUNCTIONS: dict[str, Any] = {
    **{"max": max, "min": min, "round": round, "int": int, "inf": math.inf, "prod": math.prod},
    **{"ceil": math.ceil, "floor": math.floor, "sqrt": math.sqrt, "rounded": _rounded, "grids": _grids},
    **{"nearest_ratio": _nearest_ratio, "least_scaled": _least_scaled, "most_kept": _most_kept},
    "slices": _slices,
}
"""What formulas of the catalog call."""
