"""Routes in numbers: their operations as places in one list, so that all options are priced as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from espresso_mpi.types import Route

from .cost import Shape, Slot, slots
from .timeline import Lanes, virtual


@dataclass(frozen=True)
class Compiled:
    """Routes in numbers, for one shape of cluster: their operations as places in a list of slots.

    Attributes:
        routes; slots: of all of them.
        index: int32 (routes, most operations), places in ``slots``; beyond ``count`` undefined.
        lane: int8, the same shape, virtual lanes; count: int32 (routes,).
        packed: bool (routes,), whether they compress; sums: whether they sum payloads.
        run: int8, like ``lane``: operations that follow each other on one virtual lane have the same number.
        pattern: int32 (routes,), equal for routes that visit the same lanes in the same order, by runs; steps: the same
            by operations.
    """

    routes: tuple[Route, ...]
    slots: tuple[Slot, ...]
    index: np.ndarray
    lane: np.ndarray
    count: np.ndarray
    packed: np.ndarray
    sums: np.ndarray
    run: np.ndarray
    pattern: np.ndarray
    steps: np.ndarray


def compiled(routes: tuple[Route, ...], shape: Shape, lanes: Lanes, checked: bool) -> Compiled:
    """See ``Compiled``. ``checked``: every tensor is checked before it travels. Kept for the next call."""
    return _compiled_same(Same(routes), shape, lanes, checked)


class Same:
    """Routes as a key by identity: to hash thousands of them takes longer than all that is done with them here."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self.routes = routes

    def __hash__(self) -> int:
        return id(self.routes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.routes is other.routes


@lru_cache(maxsize=64)
def _compiled_same(same: Same, shape: Shape, lanes: Lanes, checked: bool) -> Compiled:
    return _compiled(same.routes, shape, lanes, checked)


@lru_cache(maxsize=64)
def _compiled(routes: tuple[Route, ...], shape: Shape, lanes: Lanes, checked: bool) -> Compiled:
    walks = [slots(route, shape, checked) for route in routes]
    places: dict[Slot, int] = {}
    width = max(map(len, walks), default=0) or 1
    index, lane = np.zeros((len(walks), width), np.int32), np.zeros((len(walks), width), np.int8)
    for row, walk in enumerate(walks):
        index[row, : len(walk)] = [places.setdefault(slot, len(places)) for slot in walk]
        own = np.array([lanes.of(slot.resource) for slot in walk], np.int8)
        lane[row, : len(walk)] = virtual(own, len(walk), lanes.count, lanes.backward)
    return Compiled(
        routes, tuple(places), index, lane, np.array([len(slots) for slots in walks], np.int32),
        np.array([route.compressed for route in routes], bool),
        np.array([route.sums_payloads for route in routes], bool),
        *_patterns(lane, np.array([len(slots) for slots in walks])),
    )  # fmt: skip


def _patterns(lane: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``run``, ``pattern`` and ``steps`` of ``Compiled``."""
    within = np.arange(lane.shape[1]) < count[:, None]
    new = np.ones(lane.shape, bool)
    new[:, 1:] = lane[:, 1:] != lane[:, :-1]
    run = (new.cumsum(axis=1) - 1).astype(np.int8)
    merged = np.full(lane.shape, -1, np.int8)
    at, place = np.nonzero(new & within)
    merged[at, run[at, place]] = lane[at, place]
    by_run, by_step = (
        np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)
        for rows in (merged, np.where(within, lane, -1))
    )
    return run, by_run, by_step
