"""Barriers and collectives of the ranks of one node: kernels on shared memory.

Each rank has a flag of its own, a count of its arrivals that only it writes. A rank that has arrived polls the flags of
all. What it wrote before it arrived is seen by whoever has seen its flag: the flag is stored with sequential
consistency and loaded with acquire semantics, on x86-64 and ARM64 alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from espresso_mpi.compressors.kernels.cpu import host

from ..data.reduction import sum_block

LINE = 128
"""Bytes between flags: two cache lines, for processors fetch them in pairs."""

WAITED, STAGE, SATURATED, SHOWN, MET, WAY, REFUSED, BUSY, LEAST, SEARCH, UNDO, SAVED, ODD, LOG = range(14)
"""Places in a kernel's log of int64, and its length: what it reports, and where it was when it returned early.

Three are set before, of sums of float32: ``LEAST``, the bits of the least magnitude that must not be summed, 0 if all
may; ``SEARCH``, whether the arrays of this rank are still to be searched for such; and ``UNDO``, the address of room
for this rank's share, of which ``SAVED`` elements are kept there. ``ODD`` becomes 1 if there are such values: then the
arrays are as before."""

STEP = LINE // 8
"""Numbers between flags. Behind a rank's flag are the sizes of what it shows in each half (1 and 2, ``gather``), where
its array lies (3 and 4, ``joint_reads``), whether it could not read (5) and has found values that must not be summed
(6, ``joint_sums``), and the times of its latest sum (8 to 10, ``agreed_sums``)."""

BLOCK = 2048
_CLOCK_MONOTONIC, _CLOCK_THREAD = 1, 3
PAUSE = 100_000
"""Nanoseconds of a pause that count as one poll more."""

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


def _place(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def load(typingctx, flags, index):  # type: ignore[no-untyped-def]
    """``flags[index]``; what its writer wrote before is seen from here on."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_place(context, builder, sig.args[0], args[0], args[1]), "acquire", 8)

    return types.int64(flags, types.intp), codegen


@intrinsic
def store(typingctx, flags, index, value):  # type: ignore[no-untyped-def]
    """``flags[index] = value``, after all that was written before."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        builder.store_atomic(args[2], _place(context, builder, sig.args[0], args[0], args[1]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(flags, types.intp, types.int64), codegen


@intrinsic
def _clock(typingctx, which):  # type: ignore[no-untyped-def]
    """Nanoseconds of a clock of the system."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        number, place = ir.IntType(64), ir.IntType(32)
        time = cgutils.alloca_once(builder, ir.ArrayType(number, 2))
        kind = ir.FunctionType(place, [place, time.type])
        clock_gettime = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(clock_gettime, [args[0], time])
        seconds, rest = (builder.load(cgutils.gep_inbounds(builder, time, 0, at)) for at in (0, 1))
        return builder.add(builder.mul(seconds, number(1_000_000_000)), rest)

    return types.int64(types.int32), codegen


@intrinsic
def move(typingctx, to, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy bytes from one address to another."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        byte = ir.IntType(8).as_pointer()
        target, origin = builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte)
        cgutils.raw_memcpy(builder, target, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def numbers_at(typingctx, address, like):  # type: ignore[no-untyped-def]
    """An address as a pointer to elements of the type of ``like``, an array."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return types.CPointer(like.dtype)(types.int64, like), codegen


@host.inline
def copy(target, source):  # type: ignore[no-untyped-def]
    """Vectorised; numba's assignment of slices is not."""
    for i in range(source.size):
        target[i] = source[i]


@host.inline
def now():  # type: ignore[no-untyped-def]
    """Nanoseconds of the monotonic clock."""
    return _clock(np.int32(_CLOCK_MONOTONIC))


@host.inline
def worked():  # type: ignore[no-untyped-def]
    """Nanoseconds for which this thread has had a core."""
    return _clock(np.int32(_CLOCK_THREAD))


@host.inline
def polls_since(before):  # type: ignore[no-untyped-def]
    """For how many polls a pause counts that has begun at that time of ``now``."""
    return (now() - before) // PAUSE


@host.inline
def poll_again(polled, pace, nap):  # type: ignore[no-untyped-def]
    """The number of polls after one more; -1: there were enough. Gives the core away before, if ``pace`` says so.

    For ``nap`` microseconds; 0 yields.

    A pause that takes long counts as several polls. Where other work wants the core, it lasts milliseconds, and a
    thousand of them would keep the checks of the timeout away for longer than the timeout.
    """
    if polled >= pace[1]:
        return -1
    if polled < pace[0]:
        return polled + 1
    before = now()
    if nap > 0:
        _usleep(np.uint32(nap))
    else:
        _sched_yield()
    return polled + 1 + polls_since(before)


@host.inline
def _poll(flags, count, epoch, pace):  # type: ignore[no-untyped-def]
    polled = 0
    for rank in range(count):
        while load(flags, rank * STEP) < epoch:
            polled = poll_again(polled, pace, pace[2])
            if polled < 0:
                return False
    return True


@host.inline
def arrived(flags, count, epoch):  # type: ignore[no-untyped-def]
    """Whether all have arrived ``epoch`` times."""
    return _poll(flags, count, epoch, (0, 0, 0))


@host.inline
def await_all(flags, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Poll until all have arrived; False if that takes too many polls. Adds to the time in ``log``."""
    if arrived(flags, count, epoch):
        return True
    began = now()
    here = _poll(flags, count, epoch, pace)
    log[WAITED] += now() - began
    return here


@host.inline
def barrier(flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Arrive and wait for the others; False if some are still missing after a while: call it again.

    All kernels with barriers end with these arguments and return False in that case. Called again, they continue where
    they stopped.

    Args:
        flags: int64, a flag every ``LINE`` bytes.
        epoch: number of barriers so far.
        pace: (polls that keep the core, polls in all, microseconds to sleep at each poll after the first ones; 0
            yields the core instead).
        log: int64 of ``LOG`` places, zero at first; ``WAITED`` becomes the nanoseconds spent in waiting, ``STAGE`` the
            number of barriers that are over.
    """
    store(flags, me * STEP, epoch + 1)
    return await_all(flags, count, epoch + 1, pace, log)


@host.inline
def gather(mine, out, room, sizes, memory, start, stride, half, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Show ``mine`` to all and copy the bytes of rank r to ``out[r * room]`` on, and their number to ``sizes[r]``.

    The number stands beside the flag, where the others look anyway, in a place for each half.
    """
    copy(memory[start + me * stride : start + me * stride + mine.size], mine)
    flags[me * STEP + 1 + half] = mine.size
    if not barrier(flags, me, count, epoch, pace, log):
        return False
    for rank in range(count):
        size = sizes[rank] = flags[rank * STEP + 1 + half]
        place = start + rank * stride
        copy(out[rank * room : rank * room + size], memory[place : place + size])
    return True


@host.inline
def sum_rows(out, span, stride, count, me, how):  # type: ignore[no-untyped-def]
    saturated = 0
    for start in range(0, out.size, BLOCK):
        saturated += sum_block(out[start : start + BLOCK], span, start, stride, count, me, how)
    return saturated


@host.inline
def reduce_small(x, rows, start, stride, how, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Every rank writes x to its row and, after a barrier, sums all rows into x.

    Args:
        rows: the window as elements of x's type; rank r's row begins at ``start + r * stride``.
        how: from ``reduction.arithmetic``.
        log: ``SATURATED`` becomes the number of sums that were cut, of integers or to the largest float16.
    """
    copy(rows[start + me * stride : start + me * stride + x.size], x)
    if not barrier(flags, me, count, epoch, pace, log):
        return False
    log[SATURATED] += sum_rows(x, rows[start:], stride, count, me, how)
    return True


@host.inline
def _chunk_of(edges, rank, first, room):  # type: ignore[no-untyped-def]
    """A chunk of a rank's region, which is from ``edges[2 * rank]`` to the next."""
    a = min(edges[2 * rank + 1], edges[2 * rank] + first)
    return a, min(edges[2 * rank + 1], a + room)


@host.inline
def show_regions(x, edges, first, rows, start, room, stride, parts, me, count):  # type: ignore[no-untyped-def]
    """Write a chunk of what others want into the own row: their regions of x, or (``parts`` 1) the own one."""
    for k in range(1, count):
        rank = (me + k) % count if parts > 1 else me
        a, b = _chunk_of(edges, rank, first, room)
        place = start + me * stride + (rank * room if parts > 1 else 0)
        copy(rows[place : place + b - a], x[a:b])
        if parts == 1:
            break


@host.inline
def _begin_chunk(x, edges, rows, start, room, stride, parts, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Write the current chunk of ``log`` and wait at the barrier; False as ``barrier``."""
    chunk = log[STAGE]
    if log[SHOWN] == 0:
        show_regions(x, edges, chunk * room, rows, start, room, stride, parts, me, count)
        log[SHOWN] = 1
        store(flags, me * STEP, epoch + chunk + 1)
    if not await_all(flags, count, epoch + chunk + 1, pace, log):
        return False
    log[SHOWN], log[STAGE] = 0, chunk + 1
    return True


@host.inline
def reduce_scatter(x, edges, longest, rows, starts, room, stride, own, how, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """``own``, which has this rank's region of x, becomes the sum of all ranks'; in chunks, with one barrier each.

    Args:
        own: may be that region itself; x is not changed otherwise.
        edges: int64 of shape (2 · ranks,): where each rank's region of x begins and ends; longest: elements of one.
        room: elements of each region in a chunk; rank r's row holds those for rank j from ``j * room`` on.
        starts: where the first row begins in the half to use first, and in the other.
    """
    while log[STAGE] * room < longest:
        start, first = starts[log[STAGE] % 2], log[STAGE] * room
        if not _begin_chunk(x, edges, rows, start, room, stride, count, flags, me, count, epoch, pace, log):
            return False
        a, b = _chunk_of(edges, me, first, room)
        out = own[a - edges[2 * me] : b - edges[2 * me]]
        log[SATURATED] += sum_rows(out, rows[start + me * room :], stride, count, me, how)
    return True


@host.inline
def allgather(x, edges, longest, rows, starts, room, stride, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Every rank's region of x at every rank; arguments as for ``reduce_scatter``."""
    while log[STAGE] * room < longest:
        start, first = starts[log[STAGE] % 2], log[STAGE] * room
        if not _begin_chunk(x, edges, rows, start, room, stride, 1, flags, me, count, epoch, pace, log):
            return False
        for k in range(1, count):
            rank = (me + k) % count
            a, b = _chunk_of(edges, rank, first, room)
            copy(x[a:b], rows[start + rank * stride : start + rank * stride + b - a])
    return True


# --- several float32 arrays, whose regions count as one ---------------------------------------------------------------


@host.inline
def _piece(places, begins, edges, array, rank, first, last, like):  # type: ignore[no-untyped-def]
    """What of an array is in elements [first, last) of a rank's joint region, and where in them it begins."""
    a, b = max(first, edges[array, rank]), min(last, edges[array + 1, rank])
    at = places[array] + like.itemsize * (begins[array, rank] + a - edges[array, rank])
    return carray(numbers_at(at, like), (max(0, b - a),)), a - first


@host.inline
def _write(places, begins, edges, rank, first, room, rows, start):  # type: ignore[no-untyped-def]
    """Copy elements [first, first + room) of a rank's joint region to the window."""
    for array in range(places.size):
        piece, place = _piece(places, begins, edges, array, rank, first, first + room, rows)
        if piece.size:
            copy(rows[start + place : start + place + piece.size], piece)


@host.inline
def _read(places, begins, edges, rank, first, room, rows, start):  # type: ignore[no-untyped-def]
    """Copy them from the window."""
    for array in range(places.size):
        piece, place = _piece(places, begins, edges, array, rank, first, first + room, rows)
        if piece.size:
            copy(piece, rows[start + place : start + place + piece.size])


@host.inline
def scatter_joint(places, begins, edges, longest, rows, starts, room, stride, how, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """This rank's regions become the sums of all ranks'; in chunks, with one barrier each.

    Args:
        places: where the arrays begin in memory, see ``joint.addresses``.
        begins, edges, longest: see ``joint.JointRegions``.
        rows, starts, room, stride, how and those from ``flags`` on: as for ``reduce_scatter``.
    """
    while log[STAGE] * room < longest:
        chunk = log[STAGE]
        start, first = starts[chunk % 2], chunk * room
        if log[SHOWN] == 0:
            for k in range(1, count):
                rank = (me + k) % count
                _write(places, begins, edges, rank, first, room, rows, start + me * stride + rank * room)
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + chunk + 1)
        if not await_all(flags, count, epoch + chunk + 1, pace, log):
            return False
        log[SHOWN], log[STAGE] = 0, chunk + 1
        for array in range(places.size):
            piece, place = _piece(places, begins, edges, array, me, first, first + room, rows)
            if piece.size:
                log[SATURATED] += sum_rows(piece, rows[start + me * room + place :], stride, count, me, how)
    return True


@host.inline
def gather_joint(places, begins, edges, longest, rows, starts, room, stride, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Every rank's regions at every rank; arguments as for ``scatter_joint``."""
    while log[STAGE] * room < longest:
        chunk = log[STAGE]
        start, first = starts[chunk % 2], chunk * room
        if log[SHOWN] == 0:
            _write(places, begins, edges, me, first, room, rows, start + me * stride)
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + chunk + 1)
        if not await_all(flags, count, epoch + chunk + 1, pace, log):
            return False
        log[SHOWN], log[STAGE] = 0, chunk + 1
        for k in range(1, count):
            rank = (me + k) % count
            _read(places, begins, edges, rank, first, room, rows, start + rank * stride)
    return True
