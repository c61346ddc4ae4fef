"""The keys of the state that lasts from step to step, and the view of it that one encode gets.

A key is text, ``name|n|point|start:stop|what``. Only this module formats and parses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from ..errors import StateError

Store = MutableMapping[str, Any]

OWN = "own."
"""Prefix of the names of compressors' own arrays. The other names belong to feedback: residual, sent, average, mean."""

WHOLE = "whole"
"""Stands for the encode point of resharded state: an array of the whole tensor, not yet split into regions."""

BY_NODES = " (parts by nodes)"
"""Ends the names of tensors whose elements lie in an order that depends on the nodes: other nodes cannot read them."""

OF_RANK = " (of one rank)"
"""Ends the names of tensors of which each rank keeps something else: other ranks cannot read them."""

OF_CALLS = ("allreduce ", "reduce ", "reduce_scatter ", "allgather ")
"""Begin the names of tensors of other calls than ``sync`` and ``push``, which say themselves how they travel. A tensor
of ``sync`` with such a name has the same keys."""

_KEY = re.compile(r"(.*)\|(\d+)\|(\d+|\d+-decoded|whole)\|(\d+):(\d+)\|([^|]+)", re.DOTALL)


@dataclass(frozen=True)
class Key:
    """The key of an array in a store, ``name|n|point|start:stop|what``.

    Attributes:
        name: name of the tensor.
        n: its number of elements.
        point: number of the encode point, ``k-decoded`` for state of its decode, or ``whole`` (see ``WHOLE``).
        start, stop: the elements that the array belongs to.
        what: residual, sent, average, mean, or ``own.`` followed by the name that a compressor gave it.
    """

    name: str
    n: int
    point: str
    start: int
    stop: int
    what: str

    @classmethod
    def parse(cls, text: Any) -> Key:
        """Parse a key.

        Raises:
            StateError: the text is not a key.
        """
        found = _KEY.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise StateError(f"state: arrays has the key {text!r}; expected name|n|point|start:stop|what")
        name, n, point, start, stop, what = found.groups()
        key = cls(name, int(n), point, int(start), int(stop), what)
        if not key.start <= key.stop <= key.n:
            raise StateError(f"state: arrays has the key {text!r}, whose region is not within its {n} elements")
        return key

    @property
    def size(self) -> int:
        """Elements of the region."""
        return self.stop - self.start

    def __str__(self) -> str:
        return key_prefix(self.name, self.n, self.point, self.start, self.stop) + self.what


def key_prefix(name: str, n: int, point: str, start: int, stop: int) -> str:
    """The common prefix of the keys of a region; see ``Key``."""
    return f"{name}|{n}|{point}|{start}:{stop}|"


def tensor_of(text: str) -> tuple[str, str]:
    """Name and number of elements of a key, as text; a name may contain bars."""
    name, n = text.rsplit("|", 4)[:2]
    return name, n


@dataclass
class StoreView(MutableMapping[str, Any]):
    """The part of a store whose keys begin with a prefix."""

    store: Store
    prefix: str

    def __getitem__(self, name: str) -> Any:
        return self.store[self.prefix + name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.store[self.prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self.store[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.store if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
