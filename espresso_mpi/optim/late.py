"""Parameters that come late in a warm-up: layers that are thawed, and parameter groups that are added.

The bias of the moments of all parameters is corrected for the same number of steps. Moments that begin later would be
corrected too little, that of the second order most, and the steps would be too long. So the first mean gradient of such
a parameter stands for the steps before it. The papers do not treat this case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rules import Slot

Late = tuple[str, ...]
"""Names of parameters that came late and whose first gradient has not come: a part of the state of an optimizer."""


def with_new(late: Late, slots: Sequence[Slot[Any]], steps: int) -> Late:
    """Those of before, and the parameters whose moments begin after so many steps."""
    return tuple(sorted({*late, *(slot.tensor.name for slot in slots if slot.new and steps)}))


def fill_past(slots: Sequence[Slot[Any]], late: Late, steps: int, averaged: int) -> Late:
    """Fill the moments of those that have a mean gradient now, which is their message.

    Args:
        steps, averaged: how many gradients m and v of the other parameters have.

    Returns:
        The names of those that had none.
    """
    found = [slot for slot in slots if slot.tensor.name in late and bool((slot.flat != 0).any())]
    for slot in found:
        first, second = slot.settings.betas
        slot.kept["m"][...] = (1 - first**steps) * slot.flat
        slot.kept["v"][...] = (1 - second**averaged) * slot.flat * slot.flat
    filled = {slot.tensor.name for slot in found}
    return tuple(name for name in late if name not in filled)
