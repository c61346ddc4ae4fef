"""Tensors of a plan's groups wait here until their group is complete: it travels in one buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from .batches import Item


class Call(Protocol):
    """What brings tensors. ``parked``: how many of them wait."""

    parked: int


C = TypeVar("C", bound=Call)
Part = tuple[C, Item, bool]
"""A tensor: the call that brought it, the tensor, and whether it is skipped."""


@dataclass
class _Group(Generic[C]):
    """``waiting``: parts by name, in the group's order, None for an empty tensor; ``missing``: names that have none."""

    waiting: dict[str, deque[Part[C] | None]]
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.waiting)


class Parking(Generic[C]):
    """The groups whose tensors did not all come yet.

    Attributes:
        count: tensors that wait.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group[C]] = {}  # by its first tensor, for no tensor is in two groups
        self._dissolved: set[str] = set()
        self.count = 0

    def add(self, call: C, item: Item, skip: bool) -> list[Part[C]] | None:
        """A tensor of a group has come; returns what travels together now, in the group's order, if anything does."""
        if item.group[0] in self._dissolved:
            return [(call, item, skip)]
        call.parked += 1
        self.count += 1
        return self._put(item.spec.name, item.group, (call, item, skip))

    def add_empty(self, name: str, group: tuple[str, ...]) -> list[Part[C]] | None:
        """As ``add`` for a tensor of a group that has no elements: the others do not wait for it, nor does its call."""
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
            call.parked -= 1
        self.count -= len(taken)
        return taken

    def absent(self) -> Iterator[str]:
        """The names that others of their group wait for."""
        for group in self._groups.values():
            if group.missing < len(group.waiting):
                yield from (name for name, parts in group.waiting.items() if not parts)

    def dissolve(self) -> list[Part[C]]:
        """The tensors that wait, which travel alone from now on: so they need not wait for the others at every step."""
        found = []
        for first, group in self._groups.items():
            parts = [part for waiting in group.waiting.values() for part in waiting if part is not None]
            if parts:
                self._dissolved.add(first)
                found += parts
        for call, _, _ in found:
            call.parked -= 1
        self._groups = {first: group for first, group in self._groups.items() if first not in self._dissolved}
        self.count = 0
        return found

    def clear(self) -> None:
        """Nothing waits any more."""
        self._groups.clear()
        self.count = 0
