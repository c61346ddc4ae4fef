"""The table of one segment, from the steps of its program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from espresso_mpi.compressors import Compressor

from ..data.layout import Dense, Packed
from ..ops.base import operations
from ..program import DecodeStep, EncodeStep, IdleStep, MoveStep, ProgramStep, SummaryStep, UpdateStep
from .building import Act, Ways
from .exchanges import exchanges_of
from .operations import Code, OperationTable
from .passes import DenseMove
from .summing import SummingBuilder

_WITHOUT_WORK = (Code.PYTHON, Code.YIELD, Code.MARK)

Bound = tuple[ProgramStep, Callable[[Any], Iterator[None]]]
"""A step, and what runs it in Python, given a ``SegmentRun``."""


def segment_table(
    ways: Ways, steps: Sequence[Bound], compressor: Callable[[int], Compressor], n: int
) -> OperationTable | str:
    """The table of a segment, or why there is none: a step needs what tables do not have.

    Args:
        compressor: returns that of an encode point.
        n: elements of the tensor.
    """
    found = next((why for step, _ in steps if (why := obstacle_of(step))), "")
    if found:
        return found
    builder, nbytes = SummingBuilder(ways, [n]), 0
    for step, act in steps:
        if isinstance(step, SummaryStep):
            nbytes = step.packed.nbytes
            builder.summarise(nbytes, [(step, compressor(step.point))], [_into_given(step, compressor(step.point))])
        elif isinstance(step, EncodeStep):
            builder.encode(step.packed.nbytes, [(step, compressor(step.point))], [act])
        elif isinstance(step, DecodeStep):
            builder.decode([(step, compressor(step.point))], [act])
        elif isinstance(step, UpdateStep):
            builder.update([(step, compressor(step.point))], [act])
        elif isinstance(step, IdleStep):
            builder.idle(operations()[step.op].phases)
        elif step.of_summary:
            builder.reduce_summaries(nbytes, step.move, act, [1])
        else:
            _move(builder, step, act)
    table = builder.table()
    if all(operation.code in _WITHOUT_WORK for operation in table.operations):
        return "tables know none of its operations"
    return table


def obstacle_of(step: ProgramStep) -> str:
    """Why a table cannot have a step, of its own or as one that Python runs; empty: it can."""
    if isinstance(step, (SummaryStep, EncodeStep, DecodeStep)):
        return "" if step.device == "cpu" else "the route compresses on the GPU"
    if isinstance(step, MoveStep) and type(step) is not MoveStep:
        return "the collective copies arrays"
    return ""


def _into_given(step: SummaryStep, compressor: Compressor) -> Act:
    """Summarise into the memory that the table has for it."""
    return lambda segment: segment.summarise(step, compressor, into=segment.data.summary)


def _packed(step: MoveStep) -> bool:
    return isinstance(step.move.before[step.move.index], Packed)


def _move(builder: SummingBuilder, step: MoveStep, act: Act) -> None:
    if _packed(step):
        sources = operations()[step.op].payload_sources(step.move)
        if sources is None:
            builder.sum_payloads(step.op, step.move, act, [1])
        else:
            builder.move(step.op, step.move, sources, [1])
        return
    dense = dense_move(builder.ways, [step], [1])
    floats = step.move.dtype == "float32" and step.move.reduce_op.operator == "sum"
    by_messages = floats and not builder.ways.window_room(step.move.group)
    exchanges = exchanges_of(step.op, step.move) if by_messages else None
    if dense is not None:
        builder.dense(dense)
    elif exchanges is not None:
        builder.exchange(step.op, step.move, exchanges, step.inside and builder.ways.windows_everywhere)
    else:
        builder.python(act, f"{step.op}@{step.move.context.level}")


def dense_move(ways: Ways, steps: Sequence[MoveStep], weights: Sequence[int]) -> DenseMove | None:
    """A collective on dense tensors as an operation of tables; None: they do not know it, or no window serves it.

    Args:
        steps: the same collective of each tensor.
        weights: the bytes that each of them sends.
    """
    op, move = steps[0].op, steps[0].move
    known = op in ("reduce_scatter", "allgather") and move.reduce_op.operator == "sum"
    if not (ways.windows_everywhere and steps[0].inside and known):
        return None
    room = ways.window_room(move.group)
    if not room or any(step.move.dtype != "float32" for step in steps):
        return None
    regions = [
        step.move.before if op == "allgather" else operations()[op].advance(step.move.context, step.move.before)
        for step in steps
    ]
    dense = [[region for region in each if isinstance(region, Dense)] for each in regions]
    nbytes = sum(region.size for each in dense for region in each) * 4
    reads = ways.reads_memory(move.group, nbytes, len(steps))
    return DenseMove(op, move.index, dense, room, move.reduce_op.divisor, weights, reads)
