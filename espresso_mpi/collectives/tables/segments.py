"""The table of one segment, from the steps of its program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from espresso_mpi.compressors import Compressor

from ..data.layout import Packed
from ..messages.transport import Transport
from ..ops.base import operations
from ..program import DecodeStep, EncodeStep, IdleStep, MoveStep, ProgramStep
from .building import TableBuilder
from .operations import OperationTable

Bound = tuple[ProgramStep, Callable[[Any], Iterator[None]]]
"""A step, and what runs it in Python, given a ``SegmentRun``."""


def segment_table(
    transport: Transport, steps: Sequence[Bound], compressor: Callable[[int], Compressor]
) -> OperationTable | None:
    """The table of a segment; None where a step needs what tables do not have: a GPU, a summary, sums of payloads.

    Args:
        compressor: returns that of an encode point.
    """
    if not any(isinstance(step, EncodeStep) for step, _ in steps) or not all(covered(step) for step, _ in steps):
        return None
    builder = TableBuilder(transport, 1)
    for step, act in steps:
        if isinstance(step, EncodeStep):
            builder.encode(step.packed.nbytes, [(step, compressor(step.point))], [act])
        elif isinstance(step, DecodeStep):
            builder.decode([(step, compressor(step.point))], [act])
        elif isinstance(step, IdleStep):
            builder.idle(operations()[step.op].phases)
        elif isinstance(step, MoveStep):
            _move(builder, step, act)
    return builder.table()


def covered(step: ProgramStep) -> bool:
    """Whether a table may have a step, of its own or as one that Python runs."""
    if isinstance(step, EncodeStep):
        return step.device == "cpu" and not step.agreed
    if isinstance(step, DecodeStep):
        return step.device == "cpu"
    if isinstance(step, MoveStep):
        return not step.of_summary and (not _packed(step) or operations()[step.op].payload_sources(step.move) is not None)
    return isinstance(step, IdleStep)


def _packed(step: MoveStep) -> bool:
    return isinstance(step.move.before[step.move.index], Packed)


def _move(builder: TableBuilder, step: MoveStep, act: Callable[[Any], Iterator[None]]) -> None:
    sources = operations()[step.op].payload_sources(step.move) if _packed(step) else None
    if sources is None:
        builder.python(act, f"{step.op}@{step.move.context.level}")
    else:
        builder.move(step.op, step.move, sources, [1])
