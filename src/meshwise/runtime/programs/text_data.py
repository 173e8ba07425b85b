"""Text as token blocks.

Tokens are bytes, each above the four special ones of fairseq's dictionaries, or those of a
`tokenizer.json`, above the same four. All files make one stream, an end-of-sentence token after each; the
stream is cut into blocks of fixed length, the last one padded. A block's inputs are its targets one token
earlier, the very first an end of sentence, so that every token of the stream is predicted exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import MissingExtraError, WorkloadError

BOS, PAD, EOS, UNK = 0, 1, 2, 3
NUM_SPECIAL = 4


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

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return sum(self.lengths)

    def split(self, count: int) -> tuple[Blocks, Blocks]:
        """The first `count` blocks, and the others."""
        first = Blocks(self.inputs[:count], self.targets[:count])
        return first, Blocks(self.inputs[count:], self.targets[count:])

    def batch(self, index: int, size: int) -> Blocks:
        """Batch `index` of `size` blocks, filled up with blocks of padding."""
        rows = slice(index * size, (index + 1) * size)
        missing = size - len(self.inputs[rows])
        both = (self.inputs[rows], self.targets[rows])
        return Blocks(*(np.pad(part, ((0, missing), (0, 0)), constant_values=PAD) for part in both))


class ByteTokenizer:
    """One token a byte."""

    vocab_size = NUM_SPECIAL + 256

    def encode(self, content: bytes) -> NDArray[np.int64]:
        """Tokens of a text."""
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64) + NUM_SPECIAL

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; special ones are left out, broken characters and words beyond it marked."""
        no_text = 255  # a byte that UTF-8 does not have
        codes = (min(t - NUM_SPECIAL, no_text) for t in tokens if t >= NUM_SPECIAL)
        return bytes(codes).decode(errors="replace")


class FileTokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json` (needs the package `tokenizers`)."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise MissingExtraError(
                'tokenizers is not installed; run: pip install "meshwise[text]"'
            ) from None
        if not Path(path).is_file():
            raise WorkloadError(f"no tokenizer file {path}; leave --tokenizer out for bytes")
        try:
            self._tokenizer: Any = Tokenizer.from_file(path)
        except Exception as error:  # the package raises bare Exception
            raise WorkloadError(f"{path} is not a tokenizer.json: {error}") from None
        self.vocab_size = NUM_SPECIAL + self._tokenizer.get_vocab_size()

    def encode(self, content: bytes) -> NDArray[np.int64]:
        """Tokens of a text."""
        ids = self._tokenizer.encode(content.decode(errors="replace"), add_special_tokens=False).ids
        return np.array(ids, dtype=np.int64) + NUM_SPECIAL

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; special ones are left out."""
        return str(self._tokenizer.decode([t - NUM_SPECIAL for t in tokens if t >= NUM_SPECIAL]))


Tokenizer = ByteTokenizer | FileTokenizer


def find_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in the file at `path`, or that of bytes where it is empty."""
    return FileTokenizer(path) if path else ByteTokenizer()


def text_files(path: str) -> list[Path]:
    """The files at `path`: itself, or all in the folder; where empty, Python's own library sources."""
    if not path:
        return sorted(Path(os.__file__).parent.glob("*.py"))
    place = Path(path)
    if not place.exists():
        raise WorkloadError(f"no text {path}; name a file or a folder")
    return sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]


def read_blocks(path: str, tokenizer: Tokenizer, block_tokens: int, max_blocks: int = 0) -> Blocks:
    """The text at `path` in blocks of `block_tokens`, the first `max_blocks` of them (0: all).

    Files that are not text (they hold a zero byte) are passed over. WorkloadError if nothing is left.
    """
    wanted = max_blocks * block_tokens if max_blocks else None
    pieces: list[NDArray[np.int64]] = []
    num_tokens = 0
    for content in _texts(path):
        tokens = tokenizer.encode(content)
        pieces += [tokens, np.array([EOS])]
        num_tokens += len(tokens) + 1
        if wanted is not None and num_tokens >= wanted:
            break
    if not pieces:
        raise WorkloadError(f"{path} holds no text; name a file or folder with some")
    stream = np.concatenate(pieces)[:wanted]
    num_blocks = -(-len(stream) // block_tokens)
    padded = np.full(num_blocks * block_tokens, PAD)
    inputs, targets = padded, padded.copy()
    targets[: len(stream)] = stream
    inputs[: len(stream)] = np.concatenate([[EOS], stream[:-1]])
    return Blocks(inputs.reshape(num_blocks, -1), targets.reshape(num_blocks, -1))


def _texts(path: str) -> Iterator[bytes]:
    for file in text_files(path):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise WorkloadError(f"cannot read {file}: {error.strerror}") from None
        if content and b"\0" not in content:
            yield content
