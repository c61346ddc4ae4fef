"""The incomplete groups of a plan: tensors wait here until all of their group have arrived, to share one buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from .batches import Item


class HasTensors(Protocol):
    """A call. ``waiting_tensors``: number of its tensors that wait for their group."""

    waiting_tensors: int


C = TypeVar("C", bound=HasTensors)
Part = tuple[C, Item, bool]
"""A tensor: the call that brought it, the tensor, and whether it is skipped."""


@dataclass
class _Group(Generic[C]):
    """``waiting``: parts by name, in the group's order, None for an empty tensor; ``missing``: names without parts."""

    waiting: dict[str, deque[Part[C] | None]]
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.waiting)


class PendingGroups(Generic[C]):
    """The groups of which not all tensors have arrived.

    Attributes:
        count: number of tensors that wait.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group[C]] = {}  # by its first tensor, for no tensor is in two groups
        self._dissolved: set[str] = set()
        self.count = 0

    def add(self, call: C, item: Item, skip: bool) -> list[Part[C]] | None:
        """Add a tensor of a group; returns the tensors of the group, in its order, if it is complete now."""
        if item.group[0] in self._dissolved:
            return [(call, item, skip)]
        call.waiting_tensors += 1
        self.count += 1
        return self._put(item.spec.name, item.group, (call, item, skip))

    def add_empty(self, name: str, group: tuple[str, ...]) -> list[Part[C]] | None:
        """As ``add``, for a tensor without elements."""
        return None if group[0] in self._dissolved else self._put(name, group, None)

    def _put(self, name: str, names: tuple[str, ...], part: Part[C] | None) -> list[Part[C]] | None:
        group = self._groups.get(names[0])
        if group is None:
            group = self._groups[names[0]] = _Group({name: deque() for name in names})
        parts = group.waiting[name]
        group.missing -= not parts
        parts.append(part)
        return None if group.missing else self._take(group)

    def _take(self, group: _Group[C]) -> list[Part[C]]:
        taken = [part for part in [parts.popleft() for parts in group.waiting.values()] if part is not None]
        group.missing = sum(not parts for parts in group.waiting.values())
        for call, _, _ in taken:
            call.waiting_tensors -= 1
        self.count -= len(taken)
        return taken

    def absent(self) -> Iterator[str]:
        """The missing tensors of groups that are partly there."""
        for group in self._groups.values():
            if group.missing < len(group.waiting):
                yield from (name for name, parts in group.waiting.items() if not parts)

    def dissolve(self) -> list[Part[C]]:
        """Remove and return the tensors that wait. The tensors of their groups travel alone from now on."""
        found = []
        for first, group in self._groups.items():
            parts = [part for waiting in group.waiting.values() for part in waiting if part is not None]
            if parts:
                self._dissolved.add(first)
                found += parts
        for call, _, _ in found:
            call.waiting_tensors -= 1
        self._groups = {first: group for first, group in self._groups.items() if first not in self._dissolved}
        self.count = 0
        return found

    def clear(self) -> None:
        """Drop everything that waits."""
        self._groups.clear()
        self.count = 0
