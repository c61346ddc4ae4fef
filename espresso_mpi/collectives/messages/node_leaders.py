"""Compiled: small data of all ranks at each of them, between nodes by one rank of each, the leader.

1. Inside a node, every rank shows its data in its slot of the shared window, and the leader collects them in a block.
2. The leaders exchange their blocks in the rounds of ``dissemination``.
3. The leader shows all blocks in its slot, and the other ranks of its node read them.

A rank that is alone on its node only takes part in the second part. Between two parts, and where it waits for long, the
function returns to Python, which calls it again: it continues where it stopped.
"""

from __future__ import annotations

from numba import carray, types

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

from .headers import note, slot_of
from .mpi_calls import CALLS, FLAG, IRECV, ISEND, await_messages, start
from .shared_memory import LOG, SHOWN, STAGE, STEP, await_all, move, store
from .window_places import COUNT, ME, SLOT

MINE, SIZE, HEADER, IGNORED, TIMES, FRESH, EPOCH, USES, PACE = range(9)
"""Places of a frame, an int64 array, that are new in every run: address and bytes of what this rank gives; how many of
them begin it as a header, which is compared with those of the others (0: nothing is), and bits of its first byte that
may differ; address of two marks, for the begin and the end (0: none); whether the run is new; barriers and uses of the
window so far; and the three numbers of ``pace``."""

ROOM, LEADS, NODES, NODE, BLOCK, ROUNDS = range(PACE + 3, PACE + 9)
"""Places that stay: the most bytes that a rank gives; whether this rank is the leader; how many nodes there are, and
which one this is; the most bytes of a block; and the number of rounds."""

WINDOW, FLAGS, BLOCKS, ENDS, FIRSTS, ORDER, WHERE, PLAN, MPI = range(ROUNDS + 1, ROUNDS + 10)
"""Addresses: of the places and flags of the window (0: the node has none); of the blocks; where each ends; of the
number of ranks on the nodes before each one, and of the ranks in that order; of where the data of each rank are, and
their bytes; of the rounds; and of ``Messages.calls``."""

PART, ROUND, HELD, IN_FLIGHT, ERROR, NEAR, FAR, TEXT, TOTAL, EQUAL = range(MPI + 1, MPI + 11)
"""The state: the part, and in it the round; the blocks that are here; messages in flight; MPI's error; bytes sent
inside the node and between nodes; the address of a text that stands for the blocks because the leader missed a rank, or
whether there is one; the bytes of all blocks, or of that text; and whether all headers are equal."""

LOGGED = EQUAL + 1
FRAME = LOGGED + LOG
"""Where the log of ``shared_memory.barrier`` begins, and the length of a frame."""

AT_NODE, AT_LEADER, AT_MESSAGES, FAILED, ENDED, NOTHING = range(1, 7)
"""Why it returned: it waits for ranks of the node, in the first part or in the third one; for messages; MPI reported an
error; it is done. ``NOTHING``: what calls it has not done so, and this rank has shown nothing."""

COLUMNS = 4
"""Of a round: the rank that gets blocks, the one that gives some, how many, and whether the first one is near."""

_IN_NODE, _BETWEEN, _TO_NODE, _READ = range(4)
_PREFIX = 16

_numbers_at, _bytes_at, _flag_at = (pointer_to(kind) for kind in (types.int64, types.uint8, types.int32))


@host.inline
def padded(size):  # type: ignore[no-untyped-def]
    """Data begin at multiples of 16 bytes."""
    return (size + 15) // 16 * 16


@host.inline
def slots_of(room):  # type: ignore[no-untyped-def]
    """How many slots of a window data of at most so many bytes take, one after the other."""
    return max(1, (room + SLOT - 1) // SLOT)


@host.inline
def _collect(frame, window, flags, half, first):  # type: ignore[no-untyped-def]
    """Copy what the ranks of the node show, which are their bytes from ``first`` on, to this node's block."""
    count, block = window[COUNT], frame[BLOCKS]
    sizes, at = carray(_numbers_at(block), (count,)), padded(8 * count)
    for rank in range(count):
        sizes[rank] = flags[rank * STEP + 1 + half]
        part = min(SLOT, sizes[rank] - first)
        if part > 0:
            move(block + at + first, slot_of(window, rank, half), part)
        at += padded(sizes[rank])
    carray(_numbers_at(frame[ENDS]), (2,))[1] = at


@host.inline
def _keep(frame):  # type: ignore[no-untyped-def]
    """The block of a node with one rank."""
    carray(_numbers_at(frame[BLOCKS]), (1,))[0] = frame[SIZE]
    move(frame[BLOCKS] + _PREFIX, frame[MINE], frame[SIZE])
    carray(_numbers_at(frame[ENDS]), (2,))[1] = _PREFIX + padded(frame[SIZE])


@host.inline
def _in_node(frame, window, flags, pace, log):  # type: ignore[no-untyped-def]
    """Show what this rank gives, and collect it; False as ``shared_memory.barrier``.

    Only the leader waits for the last barrier: the others have nothing to read before they meet the next one.
    """
    me, slots = window[ME], slots_of(frame[ROOM])
    while log[STAGE] < slots:
        chunk = log[STAGE]
        half, first, waits = (frame[USES] + chunk) % 2, chunk * SLOT, frame[LEADS] or chunk + 1 < slots
        if log[SHOWN] == 0:
            part = min(SLOT, frame[SIZE] - first)
            if part > 0:
                move(slot_of(window, me, half), frame[MINE] + first, part)
            flags[me * STEP + 1 + half] = frame[SIZE]
            log[SHOWN] = 1
            store(flags, me * STEP, frame[EPOCH] + chunk + (1 if waits else 2))
        if waits and not await_all(flags, window[COUNT], frame[EPOCH] + chunk + 1, pace, log):
            return False
        if frame[LEADS]:
            _collect(frame, window, flags, half, first)
        log[SHOWN], log[STAGE] = 0, chunk + 1
    return True


@host.inline
def _length(frame, node, block):  # type: ignore[no-untyped-def]
    """Bytes of the block of a node that is at an address."""
    firsts = carray(_numbers_at(frame[FIRSTS]), (frame[NODES] + 1,))
    count = firsts[node + 1] - firsts[node]
    sizes, length = carray(_numbers_at(block), (count,)), padded(8 * count)
    for rank in range(count):
        length += padded(sizes[rank])
    return length


@host.inline
def _start(frame, row, ends, mpi):  # type: ignore[no-untyped-def]
    """Start the two messages of a round; returns MPI's error."""
    held, blocks = frame[HELD], row[2]
    error = start(mpi, IRECV, 0, frame[BLOCKS] + ends[held], blocks * frame[BLOCK], row[1])
    if error == 0:
        frame[IN_FLIGHT] = 1
        error = start(mpi, ISEND, 1, frame[BLOCKS], ends[blocks], row[0])
    if error == 0:
        frame[IN_FLIGHT] = 2
        frame[NEAR if row[3] else FAR] += ends[blocks]
    return error


@host.inline
def _between(frame, pace, log):  # type: ignore[no-untyped-def]
    """Exchange blocks with the other leaders; returns why it does not go on, or 0."""
    nodes, mpi = frame[NODES], carray(_numbers_at(frame[MPI]), (CALLS,))
    flag = carray(_flag_at(mpi[FLAG]), (1,))
    ends = carray(_numbers_at(frame[ENDS]), (nodes + 1,))
    plan = carray(_numbers_at(frame[PLAN]), (frame[ROUNDS], COLUMNS))
    while frame[ROUND] < frame[ROUNDS]:
        row = plan[frame[ROUND]]
        if frame[IN_FLIGHT] == 0:
            frame[ERROR] = _start(frame, row, ends, mpi)
            if frame[ERROR] != 0:
                return FAILED
        frame[ERROR], through = await_messages(mpi, frame[IN_FLIGHT], flag, pace, log)
        if frame[ERROR] != 0:
            return FAILED
        if not through:
            return AT_MESSAGES
        frame[IN_FLIGHT] = 0
        for held in range(frame[HELD], frame[HELD] + row[2]):
            ends[held + 1] = ends[held] + _length(frame, (frame[NODE] + held) % nodes, frame[BLOCKS] + ends[held])
        frame[HELD] += row[2]
        frame[ROUND] += 1
    return 0


@host.inline
def _show_all(frame, window, flags, epoch, uses, pace, log):  # type: ignore[no-untyped-def]
    """The leader shows the blocks, or a text that stands for them; False as ``shared_memory.barrier``."""
    me, source = window[ME], frame[TEXT] if frame[TEXT] else frame[BLOCKS]
    if not frame[TEXT]:
        frame[TOTAL] = carray(_numbers_at(frame[ENDS]), (frame[NODES] + 1,))[frame[NODES]]
    while log[STAGE] * SLOT < _PREFIX + frame[TOTAL]:
        chunk = log[STAGE]
        if chunk > 0 and not await_all(flags, window[COUNT], epoch + chunk, pace, log):
            return False
        slot, first = slot_of(window, me, (uses + chunk) % 2), chunk * SLOT - _PREFIX
        if chunk == 0:
            prefix = carray(_numbers_at(slot), (2,))
            prefix[0], prefix[1] = frame[TEXT] != 0, frame[TOTAL]
            move(slot + _PREFIX, source, min(SLOT - _PREFIX, frame[TOTAL]))
        else:
            move(slot, source + first, min(SLOT, frame[TOTAL] - first))
        store(flags, me * STEP, epoch + chunk + 1)
        log[STAGE] = chunk + 1
    # The half of the chunk before the last one may be written again once all have read it. Nothing to read was in the
    # half before the first one.
    return log[STAGE] == 1 or await_all(flags, window[COUNT], epoch + log[STAGE], pace, log)


@host.inline
def _read_shown(frame, window, flags, epoch, uses, pace, log):  # type: ignore[no-untyped-def]
    """The other ranks of the node copy what the leader shows; False as ``shared_memory.barrier``."""
    while log[STAGE] == 0 or log[STAGE] * SLOT < _PREFIX + frame[TOTAL]:
        chunk = log[STAGE]
        if chunk > 0 and log[SHOWN] == 0:  # at the first one, this rank has arrived before
            store(flags, window[ME] * STEP, epoch + chunk + 1)
            log[SHOWN] = 1
        if not await_all(flags, window[COUNT], epoch + chunk + 1, pace, log):
            return False
        slot, first = slot_of(window, 0, (uses + chunk) % 2), chunk * SLOT - _PREFIX
        if chunk == 0:
            prefix = carray(_numbers_at(slot), (2,))
            frame[TEXT], frame[TOTAL] = prefix[0], prefix[1]
            move(frame[BLOCKS], slot + _PREFIX, min(SLOT - _PREFIX, frame[TOTAL]))
        else:
            move(frame[BLOCKS] + first, slot, min(SLOT, frame[TOTAL] - first))
        log[SHOWN], log[STAGE] = 0, chunk + 1
    return True


@host.inline
def _like_mine(frame, place, size):  # type: ignore[no-untyped-def]
    """Whether the data at an address have the size and the header of this rank's, but for the bits that may differ."""
    if size != frame[SIZE]:
        return False
    mine, other = carray(_bytes_at(frame[MINE]), (frame[HEADER],)), carray(_bytes_at(place), (frame[HEADER],))
    differ = (mine[0] ^ other[0]) & ~frame[IGNORED]
    for i in range(1, frame[HEADER]):
        differ |= mine[i] ^ other[i]
    return differ == 0


@host.inline
def _find_all(frame):  # type: ignore[no-untyped-def]
    """Note where the data of each rank are, and compare headers."""
    nodes, at = frame[NODES], 0
    firsts = carray(_numbers_at(frame[FIRSTS]), (nodes + 1,))
    order, where = (
        carray(_numbers_at(frame[ORDER]), (firsts[nodes],)),
        carray(_numbers_at(frame[WHERE]), (firsts[nodes], 2)),
    )
    frame[EQUAL] = frame[HEADER] > 0
    for held in range(nodes):
        node = (frame[NODE] + held) % nodes
        count = firsts[node + 1] - firsts[node]
        sizes = carray(_numbers_at(frame[BLOCKS] + at), (count,))
        at += padded(8 * count)
        for number in range(count):
            rank = order[firsts[node] + number]
            where[rank, 0], where[rank, 1] = at, sizes[number]
            if frame[EQUAL]:
                frame[EQUAL] = _like_mine(frame, frame[BLOCKS] + at, sizes[number])
            at += padded(sizes[number])


@host.inline
def _began(frame, log):  # type: ignore[no-untyped-def]
    """Prepare a new run."""
    log[:] = 0
    for place in (FRESH, PART, ROUND, IN_FLIGHT, NEAR, FAR, TEXT, TOTAL, EQUAL):
        frame[place] = 0
    frame[HELD] = 1
    if frame[TIMES]:
        note(carray(_numbers_at(frame[TIMES]), (2, 2)), 0, log)


@host.inline
def run(address):  # type: ignore[no-untyped-def]
    """Exchange the data of all ranks, given the address of a frame; returns why it stopped."""
    frame = carray(_numbers_at(address), (FRAME,))
    log, pace = frame[LOGGED:FRAME], (frame[PACE], frame[PACE + 1], frame[PACE + 2])
    if frame[FRESH]:
        _began(frame, log)
    shares = frame[WINDOW] != 0
    window = carray(_numbers_at(frame[WINDOW] if shares else address), (COUNT + 1,))
    flags = carray(_numbers_at(frame[FLAGS] if shares else address), (window[COUNT] * STEP,))
    if frame[PART] == _IN_NODE:
        if shares and not _in_node(frame, window, flags, pace, log):
            return AT_NODE
        if not shares:
            _keep(frame)
        frame[PART], log[STAGE] = _BETWEEN, 0
    if frame[PART] == _BETWEEN:
        found = _between(frame, pace, log) if frame[LEADS] else 0
        if found != 0:
            return found
        frame[PART] = _TO_NODE
    if frame[PART] == _TO_NODE and shares:
        slots = slots_of(frame[ROOM])
        epoch, uses = frame[EPOCH] + slots, frame[USES] + slots
        done = (
            _show_all(frame, window, flags, epoch, uses, pace, log)
            if frame[LEADS]
            else _read_shown(frame, window, flags, epoch, uses, pace, log)
        )
        if not done:
            return AT_LEADER
    frame[PART] = _READ
    if frame[TIMES]:
        note(carray(_numbers_at(frame[TIMES]), (2, 2)), 1, log)
    if not frame[TEXT]:
        _find_all(frame)
    return ENDED
