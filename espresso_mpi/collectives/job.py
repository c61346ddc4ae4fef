"""What one run of a program is given: names for what is kept, and keys for randomness."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from ..feedback import Feedback
from .kept import Memory

ALL_RANKS = -1


@dataclass(frozen=True)
class Job:
    """What makes one run of a program differ from the next: names for what is kept, seeds for randomness."""

    name: str
    memory: Memory
    """What is kept from step to step, by key: residuals and what methods keep of their own."""
    feedback: Feedback
    seed: int
    step: int
    """How often this tensor was synchronised before."""
    weights: MutableMapping[str, float] = field(default_factory=dict)
    """What a unit of each residual will add to the mean, by key; see ``EncodeStep.weight``."""
    tally: Counter[str] = field(default_factory=Counter)
    """Counts "saturated": values, and sums of payloads, that were cut to the end of their range."""
    kept: str = ""
    """The name in the memory, where it is not ``name``."""


def encode_key(seed: int, step: int, rank: int, point: int, start: int, name: str) -> int:
    """The 64-bit key of the encode of a part: two encodes that differ in anything share no random bits.

    Args:
        rank: ALL_RANKS for what all ranks have in common.
        point: number of the encode along the route; start: first element of the part.
    """
    text = struct.pack("<qqqqq", seed, step, rank, point, start) + name.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
