"""What a session keeps from step to step: residuals, what methods keep of their own, and what belongs to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..arrays import device
from ..collectives.kept import CARRY, Key, tensor_of
from ..errors import StateError
from ..types import buffer_name

Members = tuple[tuple[str, int], ...]
"""(name, elements) of the tensors that are compressed as one."""

_SIZES = 8
"""Sizes of one tensor whose residuals are kept: a tensor whose size changes for ever must not fill the memory."""

V = TypeVar("V")


class ByTensor(dict[str, V]):
    """A dict by the text of a ``Key``, which also knows the keys of each tensor: to search all takes too long."""

    def __init__(self, content: Mapping[str, V] | None = None) -> None:
        super().__init__()
        self._of: dict[tuple[str, str], dict[str, None]] = {}
        self.update(content or {})

    def of(self, name: str, n: int) -> list[str]:
        """The keys of a tensor of n elements."""
        return list(self._of.get((name, str(n)), ()))

    def __setitem__(self, key: str, value: V) -> None:
        if key not in self:
            self._of.setdefault(tensor_of(key), {})[key] = None
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        tensor = tensor_of(key)
        del self._of[tensor][key]
        if not self._of[tensor]:
            del self._of[tensor]

    def pop(self, key: str, *default: Any) -> Any:
        """As that of dict, which goes past the two methods above; so do those that follow."""
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault


class Memory(ByTensor[Any]):
    """What a session keeps from step to step, by key.

    What was carried over from other ranks waits here, whole, until its tensor is synchronised. Between ``begin`` and
    ``end`` of that, whoever asks for the array of a region that is not there gets its share of what was carried over.
    """

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        self._begun: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        self._waiting: dict[tuple[str, int], list[Key]] = {}
        super().__init__(content)
        for key in map(Key.parse, self):
            if key.point == CARRY:
                self._waiting.setdefault((key.name, key.n), []).append(key)

    @property
    def waiting(self) -> bool:
        """Whether something was carried over for any tensor, which it has not taken yet."""
        return bool(self._waiting)

    def owes(self, name: str, n: int) -> bool:
        """Whether something was carried over for a tensor, which it has not taken yet."""
        return (name, n) in self._waiting

    def owe(self, name: str, rest: np.ndarray) -> None:
        """Something is to be added to a tensor the next time, on this rank: float32, shape (n,)."""
        key = Key(name, rest.size, CARRY, 0, rest.size, "residual")
        before = dict.get(self, str(key))
        self[str(key)] = rest if before is None else before + rest
        if before is None:
            self._waiting.setdefault((name, rest.size), []).append(key)

    def take(self, name: str, n: int) -> dict[str, np.ndarray]:
        """What waits for a tensor, whole, float32, by its kind; it is the caller's from now on."""
        return {key.what: self.pop(str(key)) for key in self._waiting.pop((name, n), ())}

    def begin(self, name: str, n: int, fed_back: bool, more: np.ndarray | None = None) -> np.ndarray | None:
        """The synchronisation of a tensor, or of a group that is compressed as one, begins.

        Args:
            fed_back: whether it is compressed with plain feedback: then the residual is cut up like the rest. Regions
                that have a residual get their share added to it: which these are differs between ranks.
            more: float32, shape (n,): what it is owed besides; the same on every rank.

        Returns:
            None, or, where it is not cut up, the mean residual, float32, shape (n,), that is to be added to the tensor
            on every rank.
        """
        found = self.take(name, n)
        if more is not None:
            found["residual"] = found["residual"] + more if "residual" in found else more
        residual = None if fed_back else found.pop("residual", None)
        if "residual" in found:
            self._add_to_regions(name, n, found["residual"])
        if found:
            self._begun[name, n] = found
        return residual

    def _add_to_regions(self, name: str, n: int, owed: np.ndarray) -> None:
        """Rare, therefore simple: the sum is made on the host, and moves to where it is asked for."""
        for key in map(Key.parse, self.of(name, n)):
            if key.point == "0" and key.what == "residual":
                here = np.empty(key.size, np.float32)
                device.copy(here, self[str(key)])
                self[str(key)] = here + owed[key.start : key.stop]

    def end(self, name: str, n: int) -> None:
        """The tensor is synchronised: every region that this rank has a part in was asked for."""
        self._begun.pop((name, n), None)

    def forget(self, name: str, n: int) -> None:
        """Drop everything that is kept of a tensor of this size."""
        self._waiting.pop((name, n), None)
        for key in self.of(name, n):
            del self[key]

    def __missing__(self, text: str) -> Any:
        if not self._begun:
            raise KeyError(text)
        key = Key.parse(text)
        whole = _whole(key, self._begun.get((key.name, key.n), {}))
        if whole is None:
            raise KeyError(text)
        self[text] = whole[key.start : key.stop].copy()
        return self[text]

    def get(self, key: str, default: Any = None) -> Any:
        """As ``self[key]``, or the default."""
        try:
            return self[key]
        except KeyError:
            return default


def _whole(key: Key, carried: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The array that holds the first content of a region; None if it begins as zeros.

    What the ranks said so far (ef21) is needed at every encode and decode; the rest is of the first encode. Where a
    route has more encodes than that of the state, the later ones go on from the last that there was.
    """
    if key.what not in ("sent", "mean"):
        return carried.get(key.what) if key.point == "0" else None
    known = [point for point in range(int(key.point.partition("-")[0]) + 1) if f"sent.{point}" in carried]
    return carried[f"sent.{known[-1]}"] if known else None


class Weights:
    """What one unit of each residual adds to the mean, found by region.

    Args:
        weights: by the key of the residual of an encode.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._regions: dict[tuple[str, int, str], dict[tuple[int, int], float]] = {}
        for text, weight in weights.items():
            key = Key.parse(text)
            self._regions.setdefault((key.name, key.n, key.point), {})[key.start, key.stop] = weight

    def of(self, key: Key) -> float:
        """The weight of the region of an array, or of the encode that its part belongs to.

        Raises:
            StateError: there is none, or regions with different weights hold the part.
        """
        regions = self._regions.get((key.name, key.n, key.point), {})
        if (key.start, key.stop) in regions:
            return regions[key.start, key.stop]
        found = {w for (start, stop), w in regions.items() if start <= key.start and key.stop <= stop}
        if len(found) != 1:
            problem = "no weight" if not found else "several weights"
            raise StateError(f"state: {str(key)!r} has {problem}; the state is damaged")
        return found.pop()


@dataclass
class Keeping:
    """Everything that a session keeps.

    Attributes:
        memory: arrays by key.
        weights: what one unit of each residual adds to the mean, by its key; of what is in the memory only.
        counts: how often each compressed tensor was synchronised: seeds and schedules go by it.
        groups: the tensors that are compressed as one, by the name that their arrays have in the memory.
        sizes: by tensor, (name in the memory, elements) of the sizes it came in, the last one used last.
    """

    memory: Memory = field(default_factory=lambda: Memory())
    weights: ByTensor[float] = field(default_factory=lambda: ByTensor())
    counts: Counter[str] = field(default_factory=Counter)
    groups: dict[str, Members] = field(default_factory=dict)
    sizes: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def label(self, kept: str) -> str:
        """The name in statistics of what has this name in the memory."""
        return buffer_name([name for name, _ in self.groups[kept]]) if kept in self.groups else kept

    def members(self, kept: str, n: int) -> Members:
        """(name, elements) of the tensors whose arrays have this name in the memory."""
        return self.groups.get(kept, ((kept, n),))

    def residual_norms(self) -> dict[str, float]:
        """The norm of each tensor's residual, which reads all of them; by the name in statistics."""
        squares: dict[str, float] = {}
        for text, value in list(self.memory.items()):
            key = Key.parse(text)
            if key.what == "residual":
                here, name = np.empty(value.size, np.float32), self.label(key.name)
                device.copy(here, value)
                squares[name] = squares.get(name, 0.0) + float(np.square(here, dtype=np.float64).sum())
        return {name: math.sqrt(square) for name, square in squares.items()}

    def use(self, kept: str, members: Members) -> tuple[str, int] | None:
        """A tensor, or several as one, are about to be compressed.

        Returns:
            None, or the label and number of elements of what was dropped from the memory, because the same tensor was
            seen in too many sizes since.
        """
        n = sum(size for _, size in members)
        if len(members) > 1:
            self.groups[kept] = members
        label = self.label(kept)
        sizes = self.sizes.setdefault(label, [])
        if sizes and sizes[-1] == (kept, n):
            return None
        if (kept, n) in sizes:
            sizes.remove((kept, n))
        sizes.append((kept, n))
        if len(sizes) <= _SIZES:
            return None
        oldest = sizes.pop(0)
        self._drop(*oldest)
        return label, oldest[1]

    def _drop(self, kept: str, n: int) -> None:
        self.memory.forget(kept, n)
        for key in self.weights.of(kept, n):
            del self.weights[key]
        self.groups.pop(kept, None)

    def names(self) -> dict[tuple[str, int], Members]:
        """By name in the memory and elements: the tensors that something is kept of, on this rank or on others.

        A rank that holds no region of a tensor keeps none of its arrays, but knows that it was compressed.
        """
        found = [pair for used in self.sizes.values() for pair in used]
        found += [(key.name, key.n) for key in map(Key.parse, self.memory)]
        return {(kept, n): self.members(kept, n) for kept, n in dict.fromkeys(found)}

    def without(self, moved: Iterable[tuple[str, int]], counts: Counter[str]) -> Keeping:
        """What is kept of all but some tensors, given by their name in the memory and elements."""
        gone = set(moved)

        def stays(text: str) -> bool:
            key = Key.parse(text)
            return (key.name, key.n) not in gone

        left = Memory({key: value for key, value in self.memory.items() if stays(key)})
        weights = ByTensor({key: weight for key, weight in self.weights.items() if stays(key)})
        names = {kept for kept, _ in gone}
        groups = {kept: members for kept, members in self.groups.items() if kept not in names}
        sizes = {label: [one for one in used if one not in gone] for label, used in self.sizes.items()}
        return Keeping(left, weights, counts, groups, {label: used for label, used in sizes.items() if used})

    def counts_of(self, groups: Sequence[Sequence[str]]) -> Counter[str]:
        """The counters, with those of tensors that join or leave a group: as many as any of the tensors had."""
        counts = Counter(self.counts)
        for members in self.groups.values():
            together = self.counts[buffer_name([name for name, _ in members])]
            for name, _ in members:
                counts[name] = max(counts[name], together)
        for group in groups:
            counts[buffer_name(group)] = max(counts[name] for name in [buffer_name(group), *group])
        return +counts
