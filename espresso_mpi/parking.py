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
    """``waiting``: parts by name, in the group's order; ``missing``: names that have none."""

    waiting: dict[str, deque[Part[C]]]
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
        self.count = 0

    def add(self, call: C, item: Item, skip: bool) -> list[Part[C]] | None:
        """A tensor of a group has come; returns the group's tensors, in its order, if that makes it complete."""
        group = self._groups.get(item.group[0])
        if group is None:
            group = self._groups[item.group[0]] = _Group({name: deque() for name in item.group})
        parts = group.waiting[item.spec.name]
        group.missing -= not parts
        parts.append((call, item, skip))
        call.parked += 1
        self.count += 1
        return None if group.missing else self._take(group)

    def _take(self, group: _Group[C]) -> list[Part[C]]:
        taken = [parts.popleft() for parts in group.waiting.values()]
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

    def clear(self) -> None:
        """Nothing waits any more."""
        self._groups.clear()
        self.count = 0
