"""The input of one run of a program besides the tensor: the names of its state, and the keys of random numbers."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from ..feedback import Feedback
from .store_keys import Store

ALL_RANKS = -1


@dataclass(frozen=True)
class Job:
    """One run of a program: the synchronisation of one bucket in one step."""

    name: str
    store: Store
    """State that lasts from step to step, by key: residuals and compressors' own arrays."""
    feedback: Feedback
    seed: int
    step: int
    """Number of earlier synchronisations of this tensor."""
    weights: MutableMapping[str, float] = field(default_factory=dict)
    """The weight of each residual in the mean, by key; see ``EncodeStep.weight``."""
    tally: Counter[str] = field(default_factory=Counter)
    """Counts "saturated": values and sums of payloads that were clipped to the end of their range."""
    store_name: str = ""
    """The name in the store, if it differs from ``name``."""


def encode_key(seed: int, step: int, rank: int, point: int, start: int, name: str) -> int:
    """The 64-bit key of one encode of a part; different encodes share no random bits.

    Args:
        rank: ALL_RANKS for bits that all ranks share.
        point: number of the encode point.
        start: first element of the part.
    """
    text = struct.pack("<qqqqq", seed, step, rank, point, start) + name.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
