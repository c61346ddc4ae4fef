"""The training text: English that every full Python installation carries, so that nothing is downloaded.

``pydoc_data.topics`` holds the language reference, about 465 000 characters. It differs between Python
versions; the hash says whether two results were made on the same text.
"""

from __future__ import annotations

import hashlib
import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from espresso_mpi.errors import EspressoError

ALPHABET = 64
VALIDATION_SHARE = 0.1
MODULE = "pydoc_data.topics"


class CorpusError(EspressoError):
    """The text is missing from this Python installation."""


@dataclass(frozen=True)
class Corpus:
    """Text as symbols, uint8 below ``len(alphabet)``; symbol 0 stands for all characters not in ``alphabet``.

    ``sha256`` is that of the whole text in UTF-8, before the alphabet is reduced.
    """

    train: np.ndarray
    validation: np.ndarray
    alphabet: str
    sha256: str
    characters: int


def load(alphabet: int = ALPHABET, validation_share: float = VALIDATION_SHARE) -> Corpus:
    """The corpus, its last ``validation_share`` kept from training.

    Raises CorpusError where Python was installed without ``pydoc_data``.
    """
    text = _text()
    symbols, kept = _encode(text, alphabet)
    cut = len(symbols) - round(validation_share * len(symbols))
    return Corpus(symbols[:cut], symbols[cut:], kept, hashlib.sha256(text.encode()).hexdigest(), len(text))


def shard_bounds(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Start and end of ``rank``'s contiguous part of ``length`` symbols; parts are disjoint and cover all."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")
    return length * rank // ranks, length * (rank + 1) // ranks


def windows(symbols: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Contexts [batch, context] at ``starts`` [batch] and the symbols [batch] that follow them, as int64."""
    positions = starts[:, None] + np.arange(context + 1)
    block = symbols[positions].astype(np.int64)
    return block[:, :context], block[:, context]


def _text() -> str:
    try:
        topics = importlib.import_module(MODULE).topics
    except (ImportError, AttributeError) as error:
        raise CorpusError(_missing(str(error))) from error
    if not isinstance(topics, Mapping) or not topics:
        raise CorpusError(_missing(f"it holds {type(topics).__name__}, not a dictionary of texts"))
    return "\n".join(str(topics[key]) for key in sorted(topics))


def _missing(reason: str) -> str:
    return (
        f"the training text, Python's own module {MODULE}, cannot be read ({reason}). This Python was "
        "installed without a part of its standard library: install that part (Debian and Ubuntu: apt install "
        "libpython3-stdlib), or use a Python from python.org or conda-forge"
    )


def _encode(text: str, alphabet: int) -> tuple[np.ndarray, str]:
    """Symbols 1.. for the ``alphabet - 1`` most frequent characters (ties by code point), 0 for the rest."""
    counts = Counter(text)
    frequent = sorted(counts, key=lambda char: (-counts[char], char))[: alphabet - 1]
    table = {ord(char): index for index, char in enumerate(frequent, start=1)}
    symbols = np.fromiter((table.get(ord(char), 0) for char in text), np.uint8, len(text))
    return symbols, "\N{REPLACEMENT CHARACTER}" + "".join(frequent)
