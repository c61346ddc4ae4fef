"""Menus: the options of tensors of one size, all of them, or few for schedules.

In the order ``schedule`` a menu holds only options than which no other one needs less on every lane and from end to end
(see ``needs``). The bound of a search holds for what was left out all the same, as that is all that the relaxation
knows of an option. That no option left out is in a better schedule is no theorem: it may visit the lanes in another
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .compiled_routes import Compiled
from .needs import least, needs
from .pricing import Block
from .timeline import Options


@dataclass(frozen=True)
class Menu:
    """The options of tensors of one size.

    Attributes:
        options: priced.
        method: int32 (options,), which of the compressors, -1: none; route: int32, which of the routes.
    """

    options: Options
    method: np.ndarray
    route: np.ndarray

    def only(self, rows: np.ndarray) -> Menu:
        """Some of the options."""
        o = self.options
        kept = Options(o.lane[rows], o.seconds[rows], o.count[rows], o.repeats[rows])
        return Menu(kept, self.method[rows], self.route[rows])


def full_menus(tables: Compiled, blocks: Sequence[Block]) -> list[Menu]:
    """All options of tensors of each size, unpruned."""
    rows = np.concatenate([block.rows for block in blocks])
    method = np.repeat(np.array([block.method for block in blocks], np.int32), [block.rows.size for block in blocks])
    seconds = np.concatenate([block.slots[:, tables.index[block.rows]] for block in blocks], axis=1)
    repeats = np.concatenate(
        [np.repeat(np.array(block.repeats, np.int32)[:, None], block.rows.size, axis=1) for block in blocks], axis=1
    )
    lane, count, route = tables.lane[rows], tables.count[rows], rows.astype(np.int32)
    return [Menu(Options(lane, s, count, r), method, route) for s, r in zip(seconds, repeats)]


def needed_menus(tables: Compiled, blocks: Sequence[Block], total: int) -> list[Menu]:
    """Of every size the options that no other one needs less than; see the module."""
    rows = np.concatenate([block.rows for block in blocks])
    method = np.repeat(np.array([block.method for block in blocks], np.int32), [block.rows.size for block in blocks])
    menus = []
    for size in range(len(blocks[0].repeats)):
        values = [
            needs(block.rows, tables.index, tables.lane, tables.count, block.slots[size], block.repeats[size], total)
            for block in blocks
        ]
        kept = least(np.concatenate(values))
        route = rows[kept]
        slots = np.stack([block.slots[size] for block in blocks])
        seconds = slots[method[kept, None] + 1, tables.index[route]]  # the first block is that of the dense options
        repeats = np.array([block.repeats[size] for block in blocks], np.int32)[method[kept] + 1]
        options = Options(tables.lane[route], seconds, tables.count[route], repeats)
        menus.append(Menu(options, method[kept], route.astype(np.int32)))
    return menus
