"""Text as blocks of tokens.

Tokens are bytes, each above the four special ones of fairseq's dictionaries. All files make one stream, an
end-of-sentence token after each; the stream is cut into blocks of fixed length, the last one padded. A
block's inputs are its targets one token earlier, the very first an end of sentence, so that every token of
the stream is predicted exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import WorkloadError

BOS, PAD, EOS, UNK = 0, 1, 2, 3
NUM_SPECIAL = 4
NUM_TOKENS = NUM_SPECIAL + 256


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """`inputs` and `targets`, int64 [blocks, T]; what is beyond the text is `PAD` in both."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each block."""
        return [int(n) for n in (self.targets != PAD).sum(axis=1)]

    def batch(self, index: int, size: int) -> Blocks:
        """Batch `index` of `size` blocks, filled up with blocks of padding."""
        rows = slice(index * size, (index + 1) * size)
        missing = size - len(self.inputs[rows])
        both = (self.inputs[rows], self.targets[rows])
        return Blocks(*(np.pad(part, ((0, missing), (0, 0)), constant_values=PAD) for part in both))


def encode(content: bytes) -> NDArray[np.int64]:
    """Tokens of a text."""
    return np.frombuffer(content, dtype=np.uint8).astype(np.int64) + NUM_SPECIAL


def decode(tokens: list[int]) -> str:
    """The text of `tokens`; special ones are left out, broken characters and words beyond it marked."""
    no_text = 255  # a byte that UTF-8 does not have
    codes = (min(t - NUM_SPECIAL, no_text) for t in tokens if t >= NUM_SPECIAL)
    return bytes(codes).decode(errors="replace")


def text_files(path: str) -> list[Path]:
    """The files at `path`: itself, or all in the folder; where empty, Python's own library sources."""
    if not path:
        return sorted(Path(os.__file__).parent.glob("*.py"))
    place = Path(path)
    if not place.exists():
        raise WorkloadError(f"no text {path}; name a file or a folder")
    return sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]


def read_blocks(path: str, block_tokens: int, max_blocks: int = 0) -> Blocks:
    """The text at `path` in blocks of `block_tokens`, the first `max_blocks` of them (0: all).

    Files that are not text (they hold a zero byte) are passed over. WorkloadError if nothing is left.
    """
    wanted = max_blocks * block_tokens if max_blocks else None
    pieces: list[NDArray[np.int64]] = []
    num_tokens = 0
    for content in _texts(path):
        pieces += [encode(content), np.array([EOS])]
        num_tokens += len(content) + 1
        if wanted is not None and num_tokens >= wanted:
            break
    if not pieces:
        raise WorkloadError(f"{path} holds no text; name a file or folder with some")
    stream = np.concatenate(pieces)[:wanted]
    targets = np.pad(stream, (0, -len(stream) % block_tokens), constant_values=PAD)
    inputs = np.where(targets == PAD, PAD, np.concatenate([[EOS], targets[:-1]]))
    return Blocks(inputs.reshape(-1, block_tokens), targets.reshape(-1, block_tokens))


def _texts(path: str) -> Iterator[bytes]:
    for file in text_files(path):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise WorkloadError(f"cannot read {file}: {error.strerror}") from None
        if content and b"\0" not in content:
            yield content
