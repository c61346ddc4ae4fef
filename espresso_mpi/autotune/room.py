"""Whether the GPUs have room for what is to be tried, found out by allocating it between two steps.

In the middle of a step, memory that lacks on one rank is an error on all, and ends the session: gradients have been
changed, and messages are under way. So the ranks look before, together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays import device
from ..collectives.messages.agreement import first_failure, on_every_rank
from ..collectives.messages.transport import Transport
from ..errors import PlanError
from ..types import Plan

if TYPE_CHECKING:
    from ..planner.model.workload import Workload

_COPIES = 3
"""Arrays of a tensor's size that an encode of it keeps or works with at most: residual, payload, working memory."""

_MEASURED = 4
"""The same of a measurement, which keeps the values that each encode begins with as well."""

_BESIDES = 16 << 20
"""Bytes that a first step by a plan measures with: what travels together."""


def require_room(transport: Transport, nbytes: int, what: str) -> None:
    """Allocate so many bytes on the GPU of every rank, and give them back. Collective.

    Args:
        what: for the error: what they are for.

    Raises:
        PlanError: on every rank: there is no room on one.
    """

    def allocate() -> None:
        try:
            device.empty(nbytes, np.uint8, "gpu")
        except Exception as error:  # numba's own, or MemoryError
            raise PlanError(f"the GPU has no room for {nbytes} bytes, for {what} ({error})") from error
        _give_back()

    if nbytes:
        on_every_rank(transport, allocate, PlanError, wording=first_failure)


def _give_back() -> None:
    """Return memory of arrays that are gone to the GPU, for other libraries: numba keeps up to a fifth of it all."""
    if not device.simulated():
        from numba import cuda

        cuda.current_context().memory_manager.deallocations.clear()


def needed(plan: Plan, workload: Workload) -> int:
    """Bytes on the GPU, beside the gradients, that a step by this plan may need: an estimate from above."""
    if workload.device != "gpu":
        return 0
    compressed = {name for name, strategy in plan.strategies.items() if strategy.compressor != "none"}
    sizes = [4 * tensor.size for tensor in workload.tensors if tensor.name in compressed]
    return _COPIES * sum(sizes) + _BESIDES if sizes else 0


def needed_to_measure(workload: Workload) -> int:
    """Bytes on the GPU that measurements for a workload need at most: all tensors in one, its payloads and copies."""
    return _MEASURED * workload.nbytes + _BESIDES if workload.device == "gpu" else 0
