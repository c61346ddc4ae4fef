"""What a route costs: the operations of one tensor, each on a resource and for a time, from the route that also runs.

A walk along the steps keeps what one rank holds: the part of the tensor, how many payloads of it that are not summed
yet, and on which device. It depends on the route and the cluster's shape alone and is done once; its operations are
then priced for a size, a compressor and a profile. docs/planner.md has the table of sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from espresso_mpi import compressors
from espresso_mpi.compressors import Compressor
from espresso_mpi.errors import ConfigError
from espresso_mpi.timetable import CHECK, Resource
from espresso_mpi.types import (
    ALIGN,
    CLOSING,
    SUMS,
    Collective,
    Decode,
    DeviceKind,
    Encode,
    Level,
    Op,
    Route,
    RouteStep,
    Strategy,
)

from .curve import ZERO, Curve
from .profile import Profile

_INT64 = 2.0**63

MOST_SEGMENTS = 1 << 20
"""Of a tensor: a timeline goes through them one after the other."""

FLOAT32 = 4
"""Bytes of an element while it is compressed, summed after decoding, or copied between devices on the way."""


@dataclass(frozen=True)
class Shape:
    """The cluster as a walk sees it. ``home``: the device of the tensor."""

    nodes: int
    ranks_per_node: int
    home: DeviceKind

    def members(self, level: Level) -> int:
        """Ranks that communicate with each other at a level."""
        by_level = {"intra": self.ranks_per_node, "inter": self.nodes}
        return by_level.get(level, self.nodes * self.ranks_per_node)

    def resource(self, level: Level) -> Resource:
        """What a collective occupies: flat ones the network between nodes, where there is one."""
        return "intra" if level == "intra" or self.nodes == 1 else "inter"


@dataclass(frozen=True)
class Slot:
    """An operation before it is priced.

    Attributes:
        what: the step of the route, or the copy before it.
        kind: how it is priced; device, op, level, alone: of the curve.
        divisor: the rank's part is 1/divisor of the tensor.
        parts: into how many payloads that part is cut.
        copies: how many payloads of each are there.
        packed: it moves payloads, not dense data.
    """

    what: str
    resource: Resource
    kind: Literal["encode", "decode", "move", "copy", "check"]
    device: DeviceKind
    divisor: int
    parts: int = 1
    copies: int = 1
    packed: bool = False
    op: Op = "allreduce"
    level: Level = "flat"
    alone: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation of a tensor: ``what`` occupies ``resource`` for ``seconds``."""

    resource: Resource
    seconds: float
    what: str


# --- the walk ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def walk(route: Route, shape: Shape) -> tuple[Slot, ...]:
    """The operations of one rank along a route, in order; the busiest rank's where ranks differ."""
    going = _Walk(shape)
    for position, step in enumerate(route.steps):
        going.take(step, _until_decode(route.steps[position + 1 :]))
    return going.finished()


def slots(route: Route, shape: Shape, checked: bool) -> tuple[Slot, ...]:
    """The operations of one rank along a route; ``checked``: the values of the tensor are checked first."""
    before = (Slot(CHECK, shape.home, "check", shape.home, 1),) if checked else ()
    return before + walk(route, shape)


def checks(profile: Profile) -> bool:
    """Whether the profile knows what the search for values that are not finite takes, or what each tensor does."""
    return profile.tensor > 0 or any(profile.check.values) or profile.check_on_gpu is not None


class _Walk:
    """Where a walk has come to; see ``Slot`` for divisor, parts and copies."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.slots: list[Slot] = []
        self.dense_at: DeviceKind = shape.home
        self.payload_at: DeviceKind = shape.home
        self.divisor = self.parts = self.copies = 1
        self.packed = False
        self.opened: list[tuple[Level, Op]] = []

    def take(self, step: RouteStep, later: Sequence[Collective]) -> None:
        if isinstance(step, Encode):
            self._encode(step, later)
        elif isinstance(step, Decode):
            self._decode(step)
        else:
            self._collective(step)

    def _encode(self, step: Encode, later: Sequence[Collective]) -> None:
        self._copy_dense(step.device)
        dealt = [move.level for move in later if move.op in ("alltoall", "reduce_scatter")]
        self.parts = math.prod(self.shape.members(level) for level in dealt)
        self._add(str(step), step.device, "encode", step.device)
        self.payload_at, self.packed, self.copies = step.device, True, 1

    def _decode(self, step: Decode) -> None:
        if self.payload_at != step.device:
            self._add(f"payload to {step.device}", "cpu", "copy", step.device, packed=True)
        self._add(str(step), step.device, "decode", step.device)
        self.dense_at, self.packed, self.parts, self.copies = step.device, False, 1, 1

    def _collective(self, step: Collective) -> None:
        members, resource = self.shape.members(step.level), self.shape.resource(step.level)
        closing = step.level in [level for level, _ in self.opened] and step.op in CLOSING.values()
        if members > 1:
            self._add(str(step), resource, "move", self.dense_at, packed=self.packed, op=step.op, level=step.level,
                      alone=self._alone(step.level))  # fmt: skip
        if closing:
            self.opened.pop()
            if step.op == "allgather":
                self.divisor //= members
                self.parts *= members if self.packed else 1
            return
        if step.op in CLOSING:
            self.opened.append((step.level, step.op))
        if step.op in ("reduce_scatter", "alltoall"):
            self.divisor *= members
            self.parts = self.parts // members if self.packed else 1
        if step.op not in SUMS:
            self.copies *= members

    def _alone(self, level: Level) -> bool:
        """Whether one rank of a node goes on between nodes, the others having handed it all they have."""
        return level == "inter" and self.shape.ranks_per_node > 1 and any(
            CLOSING[op] == "broadcast" for at, op in self.opened if at == "intra"
        )  # fmt: skip

    def _copy_dense(self, where: DeviceKind) -> None:
        if self.dense_at != where and self.shape.home == "gpu":
            self._add(f"tensor to {where}", "cpu", "copy", where)
            self.dense_at = where

    def finished(self) -> tuple[Slot, ...]:
        """All slots, the copy back to the tensor's home among them."""
        self._copy_dense(self.shape.home)
        return tuple(self.slots)

    def _add(self, what: str, resource: Resource, kind: Literal["encode", "decode", "move", "copy"],
             device: DeviceKind, packed: bool = False, op: Op = "allreduce", level: Level = "flat",
             alone: bool = False) -> None:  # fmt: skip
        parts, copies = (self.parts, self.copies) if packed or kind in ("encode", "decode") else (1, 1)
        self.slots.append(
            Slot(what, resource, kind, device, self.divisor, parts, copies, packed, op, level, alone)
        )  # fmt: skip


def _until_decode(later: Sequence[RouteStep]) -> list[Collective]:
    """The collectives before the next encode or decode."""
    found: list[Collective] = []
    for step in later:
        if not isinstance(step, Collective):
            break
        found.append(step)
    return found


# --- prices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """Prices slots of tensors of one size and compressor.

    Attributes:
        n: elements; itemsize: bytes of one of them, while nothing is compressed.
        compressor: None prices dense routes only.
        free_codecs: encodes and decodes take no time (the Upper Bound of the paper).
        pieces: segments that share what the profile says a tensor costs, whatever its size.
    """

    profile: Profile
    n: int
    compressor: Compressor | None = None
    itemsize: int = FLOAT32
    free_codecs: bool = False
    pieces: int = 1

    def seconds(self, slot: Slot) -> float:
        """How long an operation takes."""
        if slot.kind in ("encode", "decode"):
            if self.free_codecs:
                return 0.0
            return slot.parts * slot.copies * self.curve(slot)(self._elements(slot))
        if slot.kind == "check":
            return self.profile.tensor / self.pieces + self.curve(slot)(self.n * self.itemsize)
        return self.curve(slot)(self.nbytes(slot))

    def curve(self, slot: Slot) -> Curve:
        """What an operation takes by its size: bytes, or elements of one payload for encodes and decodes."""
        if slot.kind == "move":
            return self.profile.move(slot.op, slot.level, slot.alone)
        if slot.kind == "copy":
            return self.profile.copy("to_gpu" if slot.device == "gpu" else "to_host")
        if slot.kind == "check":
            return self.profile.checking(slot.device)
        assert self.compressor is not None
        return self.profile.codec(str(self.compressor), slot.device, slot.kind)

    def nbytes(self, slot: Slot) -> int:
        """Bytes that a move or a copy carries, of one rank."""
        if not slot.packed:
            width = self.itemsize if self.compressor is None else FLOAT32
            return -(-self.n // slot.divisor) * width
        assert self.compressor is not None
        return slot.copies * slot.parts * self.compressor.nbytes(self._elements(slot))

    def _elements(self, slot: Slot) -> int:
        """Elements of one payload."""
        return max(1, -(-self.n // (slot.divisor * slot.parts)))

    def segments(self) -> tuple[int, Prices]:
        """Into how many segments the executor cuts the tensor, and the prices of one of them.

        Raises:
            ConfigError: they are more than ``MOST_SEGMENTS``.
        """
        limit, method = self.profile.segment_bytes, self.compressor
        if self.profile.nodes == 1 or not limit or (method is not None and method.whole):
            return 1, self
        nbytes = self.n * self.itemsize if method is None else method.nbytes(self.n)
        count = max(1, min(round(nbytes / limit), -(-self.n // ALIGN)))
        size = -(-self.n // (count * ALIGN)) * ALIGN  # segments begin at multiples, so there may be fewer
        if -(-self.n // size) > MOST_SEGMENTS:
            raise ConfigError(
                f"profile: segment_bytes {limit} cuts {self.n} elements into {-(-self.n // size)} segments; expected "
                f"at most {MOST_SEGMENTS}: profile with larger segments, or 0 for none"
            )
        pieces = -(-self.n // size)
        return pieces, replace(self, n=min(self.n, size), pieces=pieces)


def price_table(prices: Sequence[Prices], slots: Sequence[Slot]) -> np.ndarray:
    """Seconds of every slot at every size, float64 (prices, slots): the same as ``Prices.seconds`` one by one, quicker.

    Args:
        prices: at least one; they differ in ``n``, ``itemsize`` and ``pieces`` alone.
    """
    if not slots:
        return np.zeros((len(prices), 0))
    first, by_curve = prices[0], dict[tuple[object, ...], Slot]()
    keys = [(s.kind, s.device if s.kind != "move" else "", s.op, s.level, s.alone) for s in slots]
    for key, slot in zip(keys, slots):
        by_curve.setdefault(key, slot)
    numbers = {key: number for number, key in enumerate(by_curve)}
    free = ("encode", "decode") if first.free_codecs else ()
    curves = [ZERO if slot.kind in free else first.curve(slot) for slot in by_curve.values()]
    found = _evaluated(curves, np.array([numbers[key] for key in keys]), _sizes(prices, slots))
    checks = np.array([slot.kind == "check" for slot in slots])
    constant = first.profile.tensor / np.array([one.pieces for one in prices])
    return found * [_times(slot) for slot in slots] + np.where(checks, constant[:, None], 0.0)


def _evaluated(curves: Sequence[Curve], which: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Seconds by curves, the same bits as one call each.

    Args:
        which: int (columns,), the curve of each column of ``sizes``, which is (rows, columns).
    """
    pieces = max(len(curve.slopes) for curve in curves)

    def padded(rows: Iterable[Sequence[float]], fill: float) -> np.ndarray:
        return np.array([[*row, *[fill] * pieces][:pieces] for row in rows])[which]

    starts = padded((curve.knots[: len(curve.slopes)] for curve in curves), math.inf)
    values, slopes = padded((c.values for c in curves), 0.0), padded((c.slopes for c in curves), 0.0)
    piece = np.maximum((sizes[..., None] >= starts).sum(axis=-1) - 1, 0)
    column = np.arange(which.size)
    return np.maximum(0.0, values[column, piece] + slopes[column, piece] * (sizes - starts[column, piece]))


def _times(slot: Slot) -> int:
    """How often an operation is done, one after the other."""
    return slot.parts * slot.copies if slot.kind in ("encode", "decode") else 1


def _sizes(prices: Sequence[Prices], slots: Sequence[Slot]) -> np.ndarray:
    """What the curves take, int64 (prices, slots): elements of one payload, bytes of all else."""
    method = prices[0].compressor
    n = np.array([one.n for one in prices])[:, None]
    itemsize = np.array([one.itemsize for one in prices])[:, None]
    divisor = np.array([slot.divisor for slot in slots])
    parts, copies = np.array([slot.parts for slot in slots]), np.array([slot.copies for slot in slots])
    elements = np.maximum(1, -(-n // (divisor * parts)))
    dense = -(-n // divisor) * (itemsize if method is None else FLOAT32)
    codec = np.array([slot.kind in ("encode", "decode") for slot in slots])
    packed = np.array([slot.packed and slot.kind in ("move", "copy") for slot in slots])
    found = np.where(codec, elements, dense)
    if packed.any():
        assert method is not None
        different, which = np.unique(elements[:, packed], return_inverse=True)
        payloads = np.array([method.nbytes(int(one)) for one in different], object)
        moved = (copies * parts)[packed] * payloads.astype(np.float64)[which].reshape(len(prices), -1)
        if moved.max() >= _INT64:
            raise ConfigError(
                f"{method}: a rank would move {moved.max():.3g} bytes of payloads, for tensors of up to {n.max()} "
                f"elements; expected less than 2**63: describe a smaller cluster, or leave this compressor out"
            )
        found[:, packed] = (copies * parts)[packed] * payloads.astype(np.int64)[which].reshape(len(prices), -1)
    check = np.array([slot.kind == "check" for slot in slots])
    return np.where(check, n * itemsize, found)


def operations(
    strategy: Strategy, n: int, profile: Profile, home: DeviceKind = "cpu", itemsize: int = FLOAT32
) -> tuple[Operation, ...]:
    """The operations of one tensor, or of one of its segments, in order.

    Args:
        n: elements; home: where the tensor is; itemsize: bytes of an element.

    Raises:
        ConfigError: the profile lacks what the strategy needs.
    """
    method = None if strategy.compressor == "none" else compressors.get(strategy.compressor).at(None)
    _, prices = Prices(profile, n, method, itemsize).segments()
    shape = Shape(profile.nodes, profile.ranks_per_node, home)
    return tuple(Operation(slot.resource, prices.seconds(slot), slot.what) for slot in walk(strategy.route, shape))
