"""Sums in tables: of the tensor by messages, of payloads, and of the summaries on which ranks agree before they encode.

Sums that fit a slot of the shared window, or that pass in messages, are operations of the table. Python does the other
ones, each in one call of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from espresso_mpi.compressors import Compressor
from espresso_mpi.compressors.kernels.cpu import host

from ..data.layout import Dense, Packed
from ..messages.sum_calls import SMALL
from ..messages.window_places import BEHIND_HEADER, SLOT
from ..ops.allreduce import summed
from ..ops.base import Move, operations
from ..program import SummaryStep, UpdateStep, summary_sizes
from .building import Act, TableBuilder, encodes_by_address
from .exchanges import TENSOR, Exchange, SummedValues, exchanges_of, messages_of, rows_of, sum_of
from .operations import NOWHERE, Code, Operation, whole_lines
from .row_kernels import kernel_of

_FLOAT = 4


class SummingBuilder(TableBuilder):
    """The builder of tables. It also knows dense collectives by messages, summaries, sums of payloads, and updates."""

    def exchange(
        self, op: str, move: Move, exchanges: Sequence[Exchange | None], at_once: bool, values: SummedValues = TENSOR,
        weights: Sequence[int] = (1,),
    ) -> None:  # fmt: skip
        """A collective on the only tensor, by messages, or on other values.

        Args:
            at_once: no other work runs meanwhile.
            values: what the exchanges are of.
            weights: of the bytes that are sent, how many are each tensor's.
        """
        self._flush()
        first, sent = self._to.mark(), [0, 0]
        for exchange in exchanges:
            if exchange is None:
                self._await(0, at_once)
                continue
            rows = values.rows_at + rows_of(exchange, move, values)
            self._room[values.rows] = max(self._room[values.rows], rows)
            started = list[Operation]()
            for m in messages_of(exchange, move, values):
                rank = move.group[m.member]
                started += self._message(m.code, rank, m.buffer, m.offset, m.nbytes)
                sent[rank not in self.ways.node] += m.nbytes if m.code == Code.SEND else 0
            self._to.operations += started
            self._await(len(started), at_once)
            if exchange.total.size:
                self._to.operations.append(self._sum_of(exchange, move, values))
        self._posted = [before + new for before, new in zip(self._posted, sent)]
        self._to.shared(op, move.context.level, (first, self._to.mark()), (sent[0], sent[1]), weights)

    def summarise(
        self, nbytes: int, steps: Sequence[tuple[SummaryStep, Compressor]], by_python: Sequence[Act]
    ) -> None:  # fmt: skip
        """Make the summaries of all tensors, one after the other behind where a payload of ``nbytes`` will be.

        Args:
            by_python: what does it where there is no kernel; finds room for all summaries in ``data.summary``.
        """
        first = whole_lines(nbytes)
        sizes = [sum(summary_sizes(compressor, step.packed.copies[0])) for step, compressor in steps]
        edges = list(accumulate(sizes, initial=0))
        self._hold(0, first + _FLOAT * edges[-1])
        found = {
            tensor: self._to.summarise(tensor, step, compressor, 0, first + _FLOAT * edges[tensor])
            for tensor, (step, compressor) in enumerate(steps)
            if encodes_by_address(compressor, step.packed)
        }
        self._encode_found(found, dict.fromkeys(found, "summary"))
        for tensor in sorted(set(range(len(steps))) - found.keys()):
            what = f"summarise {steps[tensor][1]} of tensor {tensor}"
            self.python(by_python[tensor], what, summary=(first, edges[-1]))

    def reduce_summaries(self, nbytes: int, move: Move, by_python: Act, weights: Sequence[int]) -> None:
        """Reduce the summaries over the ranks whose payloads will be summed.

        Args:
            nbytes: as of ``summarise``.
            move: of all summaries, as one array.
            by_python: does it, with ``data.summary``.
            weights: of the bytes that are sent, how many are each tensor's.
        """
        self._flush()
        whole, first = move.before[move.index], whole_lines(nbytes)
        assert isinstance(whole, Dense)
        if not self._sum_values("allreduce", move, [(0, whole)], first, weights):
            self.python(by_python, "allreduce of summaries", summary=(first, whole.size))

    def sum_payloads(self, op: str, move: Move, by_python: Act, weights: Sequence[int]) -> None:
        """Sum the payloads of all tensors, or pass on their sum; the header of each stays.

        Args:
            move: of the payloads; their bodies are summed as one array.
            by_python: does it, with ``data.payload``.
            weights: as of ``reduce_summaries``.
        """
        self._flush()
        regions, inner = summed(move) if op == "allreduce" else ([], move)
        total, done = sum(region.size for region in regions), False
        if op == "allreduce" and not total:
            self.idle(operations()[op].phases)
            return
        if len(regions) == 1 or len(self.sizes) > 1:  # Python joins those of several tensors, and no others
            ends = accumulate((region.size for region in regions), initial=0)
            joined = replace(inner, before=(Dense(0, total),) * len(inner.group))
            done = bool(total) and self._sum_values(op, joined, list(zip(ends, regions)), 0, weights)
        if not done:
            self.python(by_python, f"{op} of payloads", payload=True)
            if op == "broadcast" and move.index != move.context.root:
                self._now = 1 - self._now  # Python receives it into the other buffer
        after = operations()[op].advance(move.context, move.before)[move.index]
        assert isinstance(after, Packed)
        self._hold(self._now, after.nbytes)

    def update(self, steps: Sequence[tuple[UpdateStep, Compressor]], by_python: Sequence[Act]) -> None:
        """Let methods keep something of the summed payloads."""
        self._flush()
        for tensor, (step, compressor) in enumerate(steps):
            sizes = [part.size for copy in step.packed.copies for part in copy if part.size]
            if not (sizes and compressor.updates):
                continue
            if all(host.runs_serial(n) and compressor.updater(n) is not None for n in sizes):
                self._to.work("decode", tensor, self._to.update(tensor, step, compressor, self._now), "update")
            else:
                self.python(by_python[tensor], f"update {compressor} of tensor {tensor}", payload=True)

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _sum_values(
        self, op: str, move: Move, regions: Sequence[tuple[int, Dense]], start: int, weights: Sequence[int]
    ) -> bool:  # fmt: skip
        """Reduce values of the payload buffer over the ranks of a group, as one array; False: Python must.

        Args:
            move: of that array.
            regions: of the buffer, as elements behind byte ``start``, and where each begins in the array.
        """
        whole = move.before[move.index]
        assert isinstance(whole, Dense)
        if not whole.size or not (_is_plain(move) or kernel_of(move.dtype, move.reduce_op)):
            return False
        if self.ways.window_room(move.group):
            return self._sum_by_slots(op, move, regions, start, weights)
        exchanges = exchanges_of(op, move)
        if exchanges is None:
            return False
        itemsize, other, joined = move.bytes_of(Dense(0, 1)), 1 - self._now, len(regions) > 1
        values = SummedValues(self._now, start + regions[0][1].start * itemsize, other, 0, itemsize)
        if joined:
            values = SummedValues(other, 0, other, whole_lines(move.bytes_of(whole)), itemsize)
            self._join(move, regions, start, to_other=True)
        self.exchange(op, move, exchanges, False, values, weights)
        if joined:
            self._join(move, regions, start, to_other=False)
        return True

    def _join(self, move: Move, regions: Sequence[tuple[int, Dense]], start: int, to_other: bool) -> None:
        """Copy regions of the payload buffer side by side into the other one, or back."""
        other = 1 - self._now
        for at, region in regions:
            inside, joined = start + move.bytes_of(Dense(0, region.start)), move.bytes_of(Dense(0, at))
            nbytes = move.bytes_of(region)
            if to_other:
                copy = Operation(Code.COPY, buffer=other, offset=joined, nbytes=nbytes, number=self._now, other=inside)
            else:
                copy = Operation(Code.COPY, buffer=self._now, offset=inside, nbytes=nbytes, number=other, other=joined)
            self._to.operations.append(copy)

    def _sum_of(self, exchange: Exchange, move: Move, values: SummedValues) -> Operation:
        """What makes one of the contributions to an exchange."""
        if _is_plain(move):
            return sum_of(exchange, move, self._to.divisor(move.reduce_op.divisor), values)
        whole, total = move.before[move.index], exchange.total
        counted = total != whole or move.index == 0  # where all members sum everything, one counts what is cut
        return self._reduced(
            move, total.size, values.start + total.start * values.itemsize, counted, tensor=values.place,
            buffer=values.rows, offset=values.rows_at, nbytes=total.size * values.itemsize,
        )  # fmt: skip

    def _reduced(self, move: Move, size: int, at: int, counted: bool, **rows: Any) -> Operation:
        """Elements from a byte on, made one with those of other rows."""
        call = kernel_of(move.dtype, move.reduce_op)
        assert call is not None
        return Operation(
            Code.REDUCE, at=at, size=size, kept_at=int(counted), number=self._to.parameters_of(call), call=call,
            first=move.index, whole=len(move.group), **rows,
        )  # fmt: skip

    def _sum_by_slots(
        self, op: str, move: Move, regions: Sequence[tuple[int, Dense]], start: int, weights: Sequence[int]
    ) -> bool:  # fmt: skip
        """As ``SharedWindow.allreduce`` for small data: each rank sums what all have in their slots."""
        whole = move.before[move.index]
        assert isinstance(whole, Dense)
        if move.bytes_of(whole) > SMALL:
            return False
        begin, shows, sums = self._to.mark(), list[Operation](), list[Operation]()
        divisor = self._to.divisor(move.reduce_op.divisor)
        for at, region in regions:
            inside, nbytes = start + move.bytes_of(Dense(0, region.start)), move.bytes_of(region)
            in_row = BEHIND_HEADER - SLOT + move.bytes_of(Dense(0, at))  # a row begins behind its slot
            shows.append(Operation(Code.SHOW, buffer=self._now, offset=inside, nbytes=nbytes, other=in_row))
            if _is_plain(move):
                first, size = inside // _FLOAT, region.size
                sums.append(Operation(Code.SUM, self._now, first, size, number=divisor, other=in_row))
            else:
                sums.append(
                    self._reduced(
                        move, region.size, inside, move.index == 0, tensor=self._now, buffer=NOWHERE, other=in_row
                    )
                )
        self._to.operations += [*shows, Operation(Code.MEET), *sums]
        sent = move.bytes_of(whole) * (len(move.group) - 1)
        self._window += sent
        self._to.shared(op, move.context.level, (begin, self._to.mark()), (sent, 0), weights)
        for _ in range(operations()[op].phases):
            self._yield()
        return True


def _is_plain(move: Move) -> bool:
    """Whether it is a sum of float32, which tables know themselves."""
    return move.dtype == "float32" and move.reduce_op.operator == "sum"
