"""Candidate sets: the options of tensors of one size, all of them, or few for schedules.

In the order ``schedule`` a set leaves out an option if another one needs no more on every lane and from end to end (see
``needs``). The bound of a search still holds for what was left out, because the relaxation knows no more of an option.
It is not proved that no option left out is in a better schedule: such an option may visit the lanes in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .compiled_routes import Compiled
from .needs import least, needs
from .pricing import Block
from .timeline import OptionTable


@dataclass(frozen=True)
class CandidateSet:
    """The options of tensors of one size.

    Attributes:
        options: priced.
        method: int32 (options,), which of the compressors, -1: none; route: int32, which of the routes.
    """

    options: OptionTable
    method: np.ndarray
    route: np.ndarray

    def only(self, routes: np.ndarray) -> CandidateSet:
        """Some of the options."""
        o = self.options
        kept = OptionTable(o.lane[routes], o.seconds[routes], o.count[routes], o.repeats[routes])
        return CandidateSet(kept, self.method[routes], self.route[routes])


def all_candidates(tables: Compiled, blocks: Sequence[Block]) -> list[CandidateSet]:
    """All options of tensors of each size, unpruned."""
    routes = np.concatenate([block.routes for block in blocks])
    method = np.repeat(np.array([block.method for block in blocks], np.int32), [block.routes.size for block in blocks])
    seconds = np.concatenate([block.slots[:, tables.index[block.routes]] for block in blocks], axis=1)
    repeats = np.concatenate(
        [np.repeat(np.array(block.repeats, np.int32)[:, None], block.routes.size, axis=1) for block in blocks], axis=1
    )
    lane, count, route = tables.lane[routes], tables.count[routes], routes.astype(np.int32)
    return [CandidateSet(OptionTable(lane, s, count, r), method, route) for s, r in zip(seconds, repeats)]


def needed_candidates(tables: Compiled, blocks: Sequence[Block], total: int) -> list[CandidateSet]:
    """Of every size the options that no other one needs less than; see the module."""
    routes = np.concatenate([block.routes for block in blocks])
    method = np.repeat(np.array([block.method for block in blocks], np.int32), [block.routes.size for block in blocks])
    sets = []
    for size in range(len(blocks[0].repeats)):
        values = [
            needs(block.routes, tables.index, tables.lane, tables.count, block.slots[size], block.repeats[size], total)
            for block in blocks
        ]
        kept = least(np.concatenate(values))
        route = routes[kept]
        slots = np.stack([block.slots[size] for block in blocks])
        seconds = slots[method[kept, None] + 1, tables.index[route]]  # the first block is that of the dense options
        repeats = np.array([block.repeats[size] for block in blocks], np.int32)[method[kept] + 1]
        table = OptionTable(tables.lane[route], seconds, tables.count[route], repeats)
        sets.append(CandidateSet(table, method[kept], route.astype(np.int32)))
    return sets
