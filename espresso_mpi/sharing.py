"""Which tensors travel together if no plan says so: the engine forms buckets by these rules, the planner prices them.

Small dense tensors share a buffer (``fused``). Compressed tensors share messages: they form *payload buckets*
(``form``). A bucket ends where its payloads would be larger than a limit. The first one of a call is smaller where no
other messages are under way, so that communication begins early.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .compressors import Compressor
from .types import Route

T = TypeVar("T")

_FIRST = 8
"""The first bucket of a call takes this part of a bucket: its messages travel while the next ones are encoded."""

_PER_START = 32
"""A bucket takes so many times as long as it takes to start its messages. Measured with ResNet-101 by onebit on 2 x 2
ranks, 1 Gbit: 323 ms apart, 275 by buckets of 250 KB (8 times), 242 by 1 MiB (33 times)."""

_DENSE = 16 << 20
"""Bytes of tensors in a bucket, whatever their payloads: what was summed is still in a cache when it is encoded."""

_LEAST, _MOST = 64 << 10, 4 << 20
"""Bytes between which a measured limit is."""


def payload_limit(start: float, per_byte: float) -> int:
    """The payload bytes of a bucket, from the seconds by which messages start, and those that a byte of payload takes.

    Example:
        >>> payload_limit(start=1e-3, per_byte=8e-8)  # 100 Mbit/s
        400000
    """
    return int(min(max(_PER_START * start / per_byte, _LEAST), _MOST)) if per_byte > 0 else _MOST


def way_of(route: Route, compressor: Compressor) -> tuple[str, ...] | None:
    """Equal for tensors whose payloads can share messages; None: they can with none.

    Payloads that are summed share them if their elements are of one type and the ranks agree on their summaries in one
    way. Where sums are scattered, each rank would own parts of some tensors only.
    """
    if not route.compressed or route.scatters_sums:
        return None
    if not route.sums_payloads:
        return (str(route),)
    summary = compressor.summary(1)
    return str(route), str(compressor.element), "" if summary is None else summary.operator


def fused(items: Iterable[tuple[T, Hashable | None, int]], fuse_bytes: int, room: int) -> list[list[T]]:
    """Buffers of dense items, in the order of their first items; every other item is alone.

    Args:
        items: (item, its kind, bytes). Items of one kind may share a buffer; those of kind None may not.
        fuse_bytes: items from so many bytes on are alone.
        room: most bytes of a buffer.
    """
    found: list[list[T]] = []
    open_: dict[Hashable, list[T]] = {}
    left: dict[Hashable, int] = {}
    for item, kind, nbytes in items:
        if kind is None or nbytes >= fuse_bytes:
            found.append([item])
            continue
        if kind not in open_ or nbytes > left[kind]:
            open_[kind], left[kind] = [], room
            found.append(open_[kind])
        open_[kind].append(item)
        left[kind] -= nbytes
    return found


def form(
    items: Sequence[tuple[T, Hashable | None, str, int, int]], limit: Callable[[T], int], under_way: bool = False
) -> list[list[T]]:
    """Buckets of items that share messages, in the order of their first items.

    Args:
        items: (item, its kind, name, bytes of its payload, bytes of its tensor). Items of one kind may share, but not
            two of one name; those of kind None may not share.
        limit: returns the payload bytes of a bucket of the item's kind. An item with more is alone.
        under_way: whether other messages are: then the first bucket of a kind is as large as the others.
    """
    found: list[list[T]] = []
    rooms: dict[Hashable, int] = {}
    open_: dict[Hashable, _Open[T]] = {}
    for item, kind, name, payload, dense in items:
        if kind is not None and kind not in rooms:
            rooms[kind] = limit(item)
        if kind is None or payload > rooms[kind]:
            found.append([item])
            continue
        bucket = open_.get(kind)
        if bucket is None or not bucket.takes(name, payload, dense):
            part = _FIRST if bucket is None and not under_way else 1
            bucket = open_[kind] = _Open([], set(), rooms[kind] // part, _DENSE // part)
            found.append(bucket.items)
        bucket.items.append(item)
        bucket.names.add(name)
        bucket.payload -= payload
        bucket.dense -= dense
    return found


@dataclass
class _Open(Generic[T]):
    """A bucket that takes more items: those it has, their names, and the bytes that it has room for."""

    items: list[T]
    names: set[str]
    payload: int
    dense: int

    def takes(self, name: str, payload: int, dense: int) -> bool:
        """Whether there is room for an item with this name."""
        return payload <= self.payload and dense <= self.dense and name not in self.names
