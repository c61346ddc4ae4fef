"""The names of what is kept from step to step, and the part of a memory that one encode sees.

A key is text, ``name|n|point|start:stop|what``: it is made here, and read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from ..errors import StateError

Memory = MutableMapping[str, Any]

OWN = "own."
"""What the names of what methods keep begin with; the others are those of feedback: residual, sent, average, mean."""

CARRY = "carry"
"""The encode point of what was carried over whole and is still to be cut up."""

_KEY = re.compile(r"(.*)\|(\d+)\|(\d+|\d+-decoded|carry)\|(\d+):(\d+)\|([^|]+)", re.DOTALL)


@dataclass(frozen=True)
class Key:
    """The key of an array in a memory, ``name|n|point|start:stop|what``.

    Attributes:
        name: of the tensor, of ``n`` elements.
        point: number of the encode, ``k-decoded`` after it, or ``carry`` for what is to be cut up.
        start, stop: the elements that the array belongs to.
        what: residual, sent, average, mean, or ``own.`` and the name that a method keeps it by.
    """

    name: str
    n: int
    point: str
    start: int
    stop: int
    what: str

    @classmethod
    def parse(cls, text: Any) -> Key:
        """The parts of a key.

        Raises:
            StateError: it is none.
        """
        found = _KEY.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise StateError(f"state: memory has the key {text!r}; expected name|n|point|start:stop|what")
        name, n, point, start, stop, what = found.groups()
        key = cls(name, int(n), point, int(start), int(stop), what)
        if not key.start <= key.stop <= key.n:
            raise StateError(f"state: memory has the key {text!r}, whose region is not within its {n} elements")
        return key

    @property
    def size(self) -> int:
        """Elements of the region."""
        return self.stop - self.start

    def __str__(self) -> str:
        return place(self.name, self.n, self.point, self.start, self.stop) + self.what


def place(name: str, n: int, point: str, start: int, stop: int) -> str:
    """What the keys of a region begin with; see ``Key``."""
    return f"{name}|{n}|{point}|{start}:{stop}|"


def tensor_of(text: str) -> tuple[str, str]:
    """Name and elements, as text, of a key; a name may have bars itself."""
    name, n = text.rsplit("|", 4)[:2]
    return name, n


@dataclass
class Kept(MutableMapping[str, Any]):
    """The part of a memory whose keys begin with a prefix."""

    memory: Memory
    prefix: str

    def __getitem__(self, name: str) -> Any:
        return self.memory[self.prefix + name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.memory[self.prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self.memory[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.memory if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
