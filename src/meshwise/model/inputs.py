"""Images and sound among the tokens of a language model: how many inputs of an encoder, and how many tokens.

A processor cuts an image in a way of its own, its *sizing*:

- `fixed`: every image is scaled to the size that the encoder knows (LLaVA 1.5, Gemma 3);
- `native`: each side is rounded to whole squares of merged patches, and the image is scaled if it has less
  than `min_pixels` or more than `max_pixels` (Qwen2-VL's `smart_resize`, arXiv 2409.12191);
- `rows`: the same, scaled down where a side is longer than the encoder's, squares rounded up, and a token
  ends each row (Pixtral, arXiv 2410.07073);
- `tiles`: up to `max_tiles` squares of the encoder's size in the grid whose ratio of sides is nearest to the
  image's, and the whole image as one more where they are several (InternVL 1.5, arXiv 2404.16821);
- `canvas`: the same in the grid on which the image is least scaled up, or else least scaled down (Llama 4);
- `split`: the longest side becomes `max_tiles` squares of the encoder's size, which cover the image, and the
  whole image is one more (Idefics 3, arXiv 2408.12637);
- `joined`: as `canvas`, but the tiles are one input, a class token each, without the whole image (Llama 3.2);
- `area`: scaled to as many whole squares of merged patches as `max_pixels` allow (Gemma 4);
- `slices`: up to `max_tiles` slices of `side` squared pixels, in the grid whose ratio is nearest, and the
  whole, all priced as squares (MiniCPM-V, arXiv 2408.01800);
- `native or tiles`: `native` up to twice `max_pixels`; else as `tiles`, of `side` squared pixels, and the
  whole image as `native` (LFM2-VL);
- `anyres`: tiles in the one of `grids` that loses fewest pixels, and the whole; as for `crops`, but tokens
  are made fewer where they are more than those of `max_tiles` tiles (LLaVA-OneVision, arXiv 2408.03326);
- `padded`: up to `max_tiles` in the grid that loses fewest pixels, with its padding, a token at the end of
  each row, and the whole (DeepSeek-VL2, arXiv 2412.10302);
- `crops`: squares of the encoder's size that cover the image, and the whole; what is padded gives no tokens,
  and a token ends each row (Phi-4-multimodal);
- `sound`: pieces as long as the encoder knows, the last one filled up (Whisper);
- `unpadded sound`: equal pieces, at most as long as the encoder knows (Gemma 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwise.core.errors import WorkloadError
from meshwise.model.architecture import InputSizing, Model, Patches, Tower

_MOST = 10**5
"""Pixels of a side at most, and images of a sequence."""


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
        if not 0 <= number <= _MOST:
            raise WorkloadError(f"{option} must be at least 0 and at most {_MOST}")
        if number and name not in known:
            counted = any(part.startswith(name) for part, _ in model.left_out)
            reason = f"the {name} tower is counted, not priced" if counted else f"it has no {name} tower"
            raise WorkloadError(f"{option}={number:g}: {model.name} cannot read that here: {reason}")
    towers = tuple(_sized(tower, inputs) for tower in model.towers)
    return replace(model, towers=towers)


def with_latent(model: Model, frames: int | None, size: tuple[int, int] | None) -> Model:
    """A diffusion transformer for an image of `size` (width, height), or a video of `frames` of them.

    Raises:
        WorkloadError: It makes no images, or none of that size.
    """
    own, patches = model.diffusion, model.patches
    if own is None or patches is None:
        raise WorkloadError(f"frames={frames}: {model.name} makes no images; leave it out")
    square = own.side_stride * patches.patch
    if size is not None:
        if any(side % square for side in size):
            raise WorkloadError(
                f"image_size={size[0]}x{size[1]}: {model.name} makes multiples of {square} pixels"
            )
        patches = replace(patches, width=size[0] // own.side_stride, height=size[1] // own.side_stride)
    if frames is not None:
        latent, rest = divmod(frames - 1, own.frame_stride)
        if rest or not 0 <= latent <= _MOST or (frames > 1 and own.frame_stride == 1):
            made = f"1 + a multiple of {own.frame_stride}" if own.frame_stride > 1 else "1"
            raise WorkloadError(f"frames={frames}: {model.name} makes {made} frames")
        patches = replace(patches, frames=latent + 1)
    return replace(model, patches=patches, max_seq=patches.num_tokens + own.joint_tokens)


def _sized(tower: Tower, inputs: Inputs) -> Tower:
    encoder, sizing = tower.encoder, tower.sizing
    if encoder.frames is not None:
        frames, pieces = encoder.frames, inputs.audio_s / encoder.frames.seconds
        tokens, number = math.ceil(pieces * math.ceil(frames.number / tower.merge)), math.ceil(pieces)
        if sizing.kind == "unpadded sound" and number:
            frames = replace(frames, number=math.ceil(frames.number * pieces / number))
        encoder = replace(encoder, frames=frames)
        return replace(tower, encoder=encoder, num_inputs=number, num_tokens=tokens)
    assert encoder.patches is not None
    cut = cut_image(sizing, encoder.patches, math.isqrt(tower.merge), inputs.width, inputs.height)
    patch = encoder.patches.patch
    patches = replace(encoder.patches, height=cut.rows * patch, width=cut.columns * patch)
    of_image = cut.num_tokens or cut.num_inputs * (cut.rows * cut.columns // tower.merge + cut.row_ends)
    num_inputs, num_tokens = inputs.images * cut.num_inputs, inputs.images * of_image
    encoder = replace(encoder, patches=patches)
    return replace(tower, encoder=encoder, num_inputs=num_inputs, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class CutImage:
    """One image as `num_inputs` inputs of `rows` x `columns` patches; `row_ends`: further tokens of each.

    `num_tokens`: tokens of the image, where they are not all of its inputs (0: they are).
    """

    num_inputs: int
    rows: int
    columns: int
    row_ends: int = 0
    num_tokens: int = 0


def cut_image(sizing: InputSizing, patches: Patches, merged: int, width: int, height: int) -> CutImage:
    """How an image of `width` x `height` pixels is cut; `merged` patches along a side become one token."""
    square = patches.patch * merged
    if sizing.kind.startswith("native"):
        pixels = math.prod(max(round(one / square) * square, patches.patch) for one in (width, height))
        if sizing.kind != "native" and pixels > 2 * sizing.max_pixels:
            along = sizing.side
            tiles = math.prod(_nearest_ratio(width, height, along, sizing.max_tiles))
            whole = math.prod(_rounded(height, width, square, sizing.min_pixels, sizing.max_pixels))
            tokens, along = (tiles * along**2 + whole) // square**2, along // patches.patch
            return CutImage(tiles + 1, along, along, num_tokens=tokens)
        height, width = _rounded(height, width, square, sizing.min_pixels, sizing.max_pixels)
        ends = height // square + 2 if sizing.row_ends else 0
        return CutImage(1, height // patches.patch, width // patches.patch, row_ends=ends)
    if sizing.kind == "rows":
        longest = patches.width
        shrink = max(width / longest, height / longest, 1.0)
        rows, columns = (math.ceil(int(side / shrink) / square) for side in (height, width))
        return CutImage(1, merged * rows, merged * columns, row_ends=rows)
    if sizing.kind == "area":
        scale = math.sqrt(sizing.max_pixels / (width * height))
        rows, columns = (max(math.floor(side * scale / square), 1) for side in (height, width))
        return CutImage(1, merged * rows, merged * columns)
    if sizing.kind == "crops":
        return _crops(patches, merged, width, height, sizing.max_tiles)
    if sizing.kind == "slices":
        tiles, along = _slices(width, height, sizing.side, sizing.max_tiles), sizing.side // patches.patch
        return CutImage(tiles + (tiles > 1), along, along)
    if sizing.kind == "padded":
        columns, rows = _most_kept(_grids(sizing.max_tiles), width, height, sizing.side)
        along, seen = patches.width // patches.patch, math.ceil(patches.width // patches.patch / merged)
        tokens = rows * seen * (columns * seen + 1) + 1 + seen * (seen + 1)
        return CutImage(columns * rows + 1, along, along, num_tokens=tokens)
    if sizing.kind == "anyres":
        return _anyres(sizing, patches, width, height)
    tiles = 1
    if sizing.kind == "tiles":
        tiles = math.prod(_nearest_ratio(width, height, patches.width, sizing.max_tiles))
    elif sizing.kind in ("canvas", "joined"):
        tiles = _least_scaled(width, height, patches.width, sizing.max_tiles)
    elif sizing.kind == "split":
        scale = sizing.max_tiles * patches.width / max(width, height)
        tiles = math.prod(math.ceil(side * scale / patches.width) for side in (width, height))
    rows, columns = patches.height // patches.patch, patches.width // patches.patch
    if sizing.kind == "joined":
        return CutImage(1, tiles * rows, columns, row_ends=tiles)
    number = tiles + (tiles > 1)
    return CutImage(number, rows, columns, num_tokens=number * sizing.tokens)


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


def _crops(patches: Patches, merged: int, width: int, height: int, most: int) -> CutImage:
    side, along = patches.width, patches.width // patches.patch
    columns, rows = math.ceil(width / side), math.ceil(height / side)
    if columns * rows > most:
        columns, rows = _nearest_ratio(width, height, side, most)
    scale, whole = min(columns * side / width, rows * side / height), along // merged
    padding = (columns * side - int(width * scale), rows * side - int(height * scale))
    seen = [
        math.ceil((tiles * along - padded // patches.patch) / merged)
        for tiles, padded in zip((columns, rows), padding, strict=True)
    ]
    tokens = seen[1] * (seen[0] + 1) + 1 + whole * (whole + 1)
    return CutImage(columns * rows + 1, along, along, num_tokens=tokens)


def _slices(width: int, height: int, side: int, most: int) -> int:
    """Slices of the grid whose ratio is nearest; so many that each has about `side` squared pixels."""
    number = min(math.ceil(width * height / side**2), most)
    near = [each for each in (number - 1, number, number + 1) if 1 < each <= most]
    grids = [(each // rows, rows) for each in near for rows in range(1, each + 1) if each % rows == 0]
    ratio = math.log(width / height)
    best = min(grids, key=lambda grid: abs(ratio - math.log(grid[0] / grid[1])), default=(1, 1))
    return 1 if number <= 1 else math.prod(best)


def _anyres(sizing: InputSizing, patches: Patches, width: int, height: int) -> CutImage:
    along = patches.width // patches.patch
    columns, rows = _most_kept(sizing.grids, width, height, sizing.side or patches.width)
    seen = [columns * along, rows * along]
    short = 1 if width / height > columns / rows else 0  # the side that is padded
    length = int(round(seen[1 - short] * (height / width if short else width / height), 7))
    seen[short] -= 2 * ((seen[short] - length) // 2)
    ratio = math.sqrt(math.prod(seen) / (sizing.max_tiles or math.inf)) / along
    if ratio > 1.1:
        seen = [int(each // ratio) for each in seen]
    tokens = seen[1] * (seen[0] + 1) + along**2
    return CutImage(columns * rows + 1, along, along, num_tokens=tokens)


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
