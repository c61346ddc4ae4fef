"""How a small call that is made again runs together with the exchange of headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from espresso_mpi.tracing.recording import Recorder

from ..job import Job
from .expected_call import ExpectedCall, FirstMessages
from .gathered import gathered
from .node_call import NodeCall
from .one_call import OneCall, RepeatedTable
from .running import TableRunner


def small_call(
    runner: TableRunner, jobs: Sequence[Job], arrays: Sequence[np.ndarray], recorder: Recorder, least: int,
    room: Callable[[int], int], first: FirstMessages | None,
) -> RepeatedTable | None:  # fmt: skip
    """What synchronises tensors together with the exchange of headers.

    None: Python must do a part of it; or nobody expects it, and other ranks notice something of it before the first
    barrier of the node, or there is no such barrier and it does more than to gather payloads.

    Args:
        runner: of the table of the tensors.
        jobs, arrays, recorder, least: as of ``RepeatedTable``; room: as of ``NodeCall``.
        first: the first messages of a call that all ranks expect; None: they do not.
    """
    transport, others = runner.transport, (jobs, arrays, recorder, least)
    if runner.table.stages:
        return None
    if first is not None:
        return ExpectedCall(first, room, TableRunner(first.expected.table, transport, runner.sizes), *others)
    window = transport.window_on_host(transport.node)
    if window is not None:
        return OneCall(window, runner, *others) if runner.halts else None
    messages = gathered(runner.table, transport.topology.size)
    if messages is None or messages.nbytes > room(0):
        return None
    return NodeCall(messages, room, runner, *others)
