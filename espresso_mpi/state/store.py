"""The state that lasts from step to step: residuals, compressors' own arrays, weights and counters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..arrays import device
from ..collectives.store_keys import WHOLE, Key, tensor_of
from ..errors import StateError
from ..types import buffer_name

Members = tuple[tuple[str, int], ...]
"""(name, elements) of the tensors that are compressed as one."""

_SIZES = 8
"""Maximum number of sizes of one tensor whose state is kept, so that changing sizes do not fill the memory."""

V = TypeVar("V")


class ByTensor(dict[str, V]):
    """A dict by the text of a ``Key`` with an index of the keys of each tensor.

    Attributes:
        version: changes whenever a key gets another value.
    """

    def __init__(self, content: Mapping[str, V] | None = None) -> None:
        super().__init__()
        self.version = 0
        self._of: dict[tuple[str, str], dict[str, None]] = {}
        self.update(content or {})

    def of(self, name: str, n: int) -> list[str]:
        """The keys of a tensor of n elements."""
        return list(self._of.get((name, str(n)), ()))

    def __setitem__(self, key: str, value: V) -> None:
        if key not in self:
            self._of.setdefault(tensor_of(key), {})[key] = None
        elif dict.__getitem__(self, key) is value:
            return
        self.version += 1
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self.version += 1
        tensor = tensor_of(key)
        del self._of[tensor][key]
        if not self._of[tensor]:
            del self._of[tensor]

    def pop(self, key: str, *default: Any) -> Any:
        """As ``dict.pop``, which bypasses the methods above; so do the methods below."""
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault


class StateStore(ByTensor[Any]):
    """The arrays of a session's state, by key.

    Resharded arrays are *pending*: they are stored whole until their tensor is synchronised. Between ``begin`` and
    ``end`` of that synchronisation, the missing array of a region is created as a slice of the pending array.
    """

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        self._begun: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        self._pending: dict[tuple[str, int], list[Key]] = {}
        super().__init__(content)
        for key in map(Key.parse, self):
            if key.point == WHOLE:
                self._pending.setdefault((key.name, key.n), []).append(key)

    @property
    def any_pending(self) -> bool:
        """Whether any tensor has a pending array."""
        return bool(self._pending)

    def has_pending(self, name: str, n: int) -> bool:
        """Whether a tensor of n elements has a pending array."""
        return (name, n) in self._pending

    def add_pending_residual(self, name: str, residual: np.ndarray) -> None:
        """Add to the pending residual of a tensor on this rank: float32, shape (n,)."""
        key = Key(name, residual.size, WHOLE, 0, residual.size, "residual")
        before = dict.get(self, str(key))
        self[str(key)] = residual if before is None else before + residual
        if before is None:
            self._pending.setdefault((name, residual.size), []).append(key)

    def take_pending(self, name: str, n: int) -> dict[str, np.ndarray]:
        """Remove and return the pending arrays of a tensor: float32, shape (n,), by kind."""
        return {key.what: self.pop(str(key)) for key in self._pending.pop((name, n), ())}

    def begin(self, name: str, n: int, split: bool, extra: np.ndarray | None = None) -> np.ndarray | None:
        """Begin the synchronisation of a tensor, or of a group that is compressed as one.

        Args:
            name: name in the store.
            n: number of elements.
            split: split the pending residual into regions like the other arrays, and add it to the residuals of
                regions that have one already. It must be the same on every rank.
            extra: another pending residual, float32, shape (n,); of every rank, or of none.

        Returns:
            The pending residual, float32, shape (n,), to be added to the tensor on this rank. None if there is none, or
            if it is split.
        """
        found = self.take_pending(name, n)
        if extra is not None:
            found["residual"] = found["residual"] + extra if "residual" in found else extra
        residual = None if split else found.pop("residual", None)
        if "residual" in found:
            self._add_to_regions(name, n, found["residual"])
        if found:
            self._begun[name, n] = found
        return residual

    def _add_to_regions(self, name: str, n: int, residual: np.ndarray) -> None:
        """Add a pending residual to those of regions. Rare, therefore simple: the sum is computed on the host."""
        for key in map(Key.parse, self.of(name, n)):
            if key.point == "0" and key.what == "residual":
                here = np.empty(key.size, np.float32)
                device.copy(here, self[str(key)])
                self[str(key)] = here + residual[key.start : key.stop]

    def end(self, name: str, n: int) -> None:
        """End the synchronisation: all regions of this rank have their arrays."""
        self._begun.pop((name, n), None)

    def forget(self, name: str, n: int) -> None:
        """Drop the state of a tensor of this size."""
        self._pending.pop((name, n), None)
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


def _whole(key: Key, pending: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The pending array with the first content of a region; None if the region starts as zeros.

    Every encode and decode needs what was sent so far (ef21); all other arrays belong to the first encode point. If the
    route has more encode points than the route of the state, the later ones start from the last one of the state.
    """
    if key.what not in ("sent", "mean"):
        return pending.get(key.what) if key.point == "0" else None
    known = [point for point in range(int(key.point.partition("-")[0]) + 1) if f"sent.{point}" in pending]
    return pending[f"sent.{known[-1]}"] if known else None


class Weights:
    """The weight of each residual in the mean, by region.

    Args:
        weights: by the key of the residual.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._regions: dict[tuple[str, int, str], dict[tuple[int, int], float]] = {}
        for text, weight in weights.items():
            key = Key.parse(text)
            self._regions.setdefault((key.name, key.n, key.point), {})[key.start, key.stop] = weight

    def of(self, key: Key) -> float:
        """The weight of a region, or of the region that contains it.

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
class SyncState:
    """All state of a session that lasts from step to step.

    Attributes:
        store: the arrays, by key.
        weights: the weight of each residual in the mean, by key; only for residuals in the store.
        counts: number of synchronisations of each compressed tensor; seeds and parameter schedules depend on it.
        groups: the tensors that are compressed as one, by their name in the store.
        sizes: by tensor, (name in the store, elements) of its sizes, the last used one last.
        changes: how often ``sizes`` has changed.
    """

    store: StateStore = field(default_factory=lambda: StateStore())
    weights: ByTensor[float] = field(default_factory=lambda: ByTensor())
    counts: Counter[str] = field(default_factory=Counter)
    groups: dict[str, Members] = field(default_factory=dict)
    sizes: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    changes: int = field(default=0, repr=False, compare=False)

    @property
    def version(self) -> tuple[int, int, int]:
        """Changes whenever an array or a weight is another object, or a tensor has another size than before.

        The counters and what is in the arrays change with every step, and do not count.
        """
        return self.store.version, self.weights.version, self.changes

    def label(self, kept: str) -> str:
        """The name in statistics of a name in the store."""
        return buffer_name([name for name, _ in self.groups[kept]]) if kept in self.groups else kept

    def members(self, kept: str, n: int) -> Members:
        """(name, elements) of the tensors behind a name in the store."""
        return self.groups.get(kept, ((kept, n),))

    def residual_norms(self) -> dict[str, float]:
        """The norm of each tensor's residual, by the name in statistics; reads all residuals."""
        squares: dict[str, float] = {}
        for text, value in list(self.store.items()):
            key = Key.parse(text)
            if key.what == "residual":
                here, name = np.empty(value.size, np.float32), self.label(key.name)
                device.copy(here, value)
                squares[name] = squares.get(name, 0.0) + float(np.square(here, dtype=np.float64).sum())
        return {name: math.sqrt(square) for name, square in squares.items()}

    def use(self, kept: str, members: Members) -> tuple[str, int] | None:
        """Note that a tensor, or several as one, are about to be compressed.

        Returns:
            None, or the label and number of elements of a dropped size: the tensor has had too many sizes since.
        """
        n = sum(size for _, size in members)
        if len(members) > 1:
            self.groups[kept] = members
        label = self.label(kept)
        sizes = self.sizes.setdefault(label, [])
        if sizes and sizes[-1] == (kept, n):
            return None
        self.changes += 1
        if (kept, n) in sizes:
            sizes.remove((kept, n))
        sizes.append((kept, n))
        if len(sizes) <= _SIZES:
            return None
        oldest = sizes.pop(0)
        self._drop(*oldest)
        return label, oldest[1]

    def _drop(self, kept: str, n: int) -> None:
        self.store.forget(kept, n)
        for key in self.weights.of(kept, n):
            del self.weights[key]
        self.groups.pop(kept, None)

    def names(self) -> dict[tuple[str, int], Members]:
        """The tensors with state on any rank, by (name in the store, elements).

        A rank without a region of a tensor has none of its arrays, but knows that it was compressed.
        """
        found = [pair for used in self.sizes.values() for pair in used]
        found += [(key.name, key.n) for key in map(Key.parse, self.store)]
        return {(kept, n): self.members(kept, n) for kept, n in dict.fromkeys(found)}

    def without(self, moved: Iterable[tuple[str, int]], counts: Counter[str]) -> SyncState:
        """The state without that of some tensors, given by (name in the store, elements)."""
        gone = set(moved)

        def stays(text: str) -> bool:
            key = Key.parse(text)
            return (key.name, key.n) not in gone

        left = StateStore({key: value for key, value in self.store.items() if stays(key)})
        weights = ByTensor({key: weight for key, weight in self.weights.items() if stays(key)})
        names = {kept for kept, _ in gone}
        groups = {kept: members for kept, members in self.groups.items() if kept not in names}
        sizes = {label: [one for one in used if one not in gone] for label, used in self.sizes.items()}
        return SyncState(left, weights, counts, groups, {label: used for label, used in sizes.items() if used})

    def counts_of(self, groups: Sequence[Sequence[str]]) -> Counter[str]:
        """The counters after a change of groups: a tensor or group gets the highest count of all that it comes from."""
        counts = Counter(self.counts)
        for members in self.groups.values():
            together = self.counts[buffer_name([name for name, _ in members])]
            for name, _ in members:
                counts[name] = max(counts[name], together)
        for group in groups:
            counts[buffer_name(group)] = max(counts[name] for name in [buffer_name(group), *group])
        return +counts
