"""Tables whose steps are passes: each element is worked on once, in order, and messages leave when they are final."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.collectives.tables import passes
from espresso_mpi.collectives.tables.describing import DescribedWays, table_of
from espresso_mpi.collectives.tables.operations import Code
from espresso_mpi.compressors import get
from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.onebit import OneBit
from espresso_mpi.types import Route

PAIRS = Topology(((0, 1), (2, 3)))


@pytest.fixture(autouse=True)
def one_thread():
    host.limit_threads(1)
    yield
    host.limit_threads(0)


def table(route, method, n, topology=PAIRS, window_bytes=8192, message_bytes=256):
    return table_of(DescribedWays(topology, 0, window_bytes, message_bytes), Route.parse(route), get(method), n)


def unrolled(operations):
    """The operations in the order in which they run, tiles as operations of their own."""
    at = 0
    while at < len(operations):
        one = operations[at]
        body = operations[at + 1 : at + 1 + one.tensor] if one.code == Code.TILES else [one]
        size, tile = (one.size, one.number) if one.code == Code.TILES else (1, 1)
        for first in range(0, size, tile):
            for o in body:
                whole = one.code != Code.TILES or o.code == Code.LAP
                yield o if whole else o.cut(o.at + first, o.at + min(size, first + tile))
        at += 1 + (len(body) if one.code == Code.TILES else 0)


@pytest.mark.parametrize("method", ["onebit:block=192", "int8:block=100", "fp16", "onebit:block=8192"])
def test_every_element_is_summed_encoded_decoded_and_shown_once_in_this_order(monkeypatch, method):
    monkeypatch.setattr(passes, "TILE", 512)
    order = [Code.SUM, Code.ENCODE, Code.DECODE, Code.ADD, Code.DIVIDE, Code.WRITE]
    done = dict.fromkeys(range(4544), 0)  # of rank 0
    for o in unrolled(table("hierarchical-allgather", method, 9000).operations):
        if o.code in order and o.at < 4544:
            assert {done[element] for element in range(o.at, o.at + o.size)} == {order.index(o.code)}, o
            done.update(dict.fromkeys(range(o.at, o.at + o.size), order.index(o.code) + 1))
            assert o.call is None or o.first % o.call.grain == 0
    assert set(done.values()) == {len(order)}


class Reading(DescribedWays):
    """Ranks that read each other's memory."""

    def reads_memory(self, group, nbytes, arrays):
        return True


@pytest.mark.parametrize("method", ["onebit:block=192", "int8:block=100", "fp16", "onebit:block=8192"])
def test_what_is_read_from_other_ranks_is_there_and_stays_until_it_was_read(monkeypatch, method):
    """Sums and encodes take turns, and after the barrier behind them the tensor may change; likewise the decodes."""
    monkeypatch.setattr(passes, "TILE", 512)
    made = table_of(Reading(PAIRS, 0, 8192, 256), Route.parse("hierarchical-allgather"), get(method), 9000)
    order, done = [Code.REACH, Code.ENCODE, Code.DECODE, Code.ADD, Code.DIVIDE], dict.fromkeys(range(4544), 0)
    seen = []
    for o in unrolled(made.operations):
        if o.code in order:
            assert {done[element] for element in range(o.at, o.at + o.size)} == {order.index(o.code)}, o
            done.update(dict.fromkeys(range(o.at, o.at + o.size), order.index(o.code) + 1))
        if o.code in (*order, Code.OFFER, Code.LEARN, Code.FETCH, Code.MEET):
            name = "decode" if o.code in order[2:] else o.code.name.lower()
            seen += [name] if seen[-1:] != [name] and (name != "encode" or "encode" not in seen) else []
    assert set(done.values()) == {len(order)}
    first = [name for at, name in enumerate(seen) if name not in seen[:at] or name in ("offer", "meet", "learn")]
    meeting = ["offer", "meet", "learn"]
    assert first == [*meeting, "reach", "encode", "meet", "decode", *meeting, "fetch", "meet"]
    assert made.reached == 2 and made.room[2] >= 2 * 4 * 512


@pytest.mark.parametrize("method", ["onebit:block=192", "fp16", "int8:block=100"])
def test_messages_leave_in_order_as_soon_as_their_bytes_are_final(method):
    operations = table("hierarchical-allgather", method, 30000).operations
    encodes = [at for at, o in enumerate(operations) if o.code == Code.ENCODE]
    sends = [at for at, o in enumerate(operations) if o.code == Code.SEND]
    assert [operations[at].offset for at in sends] == sorted(operations[at].offset for at in sends)
    early = [at for at in sends if at < encodes[-1]]
    bits = operations[encodes[0]].call.leading
    assert bool(early) == bool(bits)  # scales come first in int8: no byte is final before the last block
    for at in early:
        done = [operations[e].first + operations[e].size for e in encodes if e < at]
        assert operations[at].offset + operations[at].nbytes <= max(done) * bits // 8
    receives = [at for at, o in enumerate(operations) if o.code == Code.RECEIVE]
    assert max(receives) < encodes[0]


def test_kernels_that_cannot_be_cut_work_on_whole_parts(monkeypatch):
    whole = {way: partial(_uncut, getattr(OneBit, way)) for way in ("encoder", "decoder")}
    for way, made in whole.items():
        monkeypatch.setattr(OneBit, way, lambda self, n, made=made: made(self, n))
    operations = table("hierarchical-allgather", "onebit", 9000).operations
    calls = [o for o in unrolled(operations) if o.call is not None]
    assert [(o.code, o.first, o.size) for o in calls] == [
        (Code.ENCODE, 0, 4544), (Code.DECODE, 0, 4544), (Code.ADD, 0, 4544),
    ]  # fmt: skip


def _uncut(made, compressor, n):
    return replace(made(compressor, n), grain=0)


def test_a_buffer_that_is_still_read_receives_nothing():
    topology = Topology(((0,), (1,), (2,)))
    operations = table("flat-alltoall", "fp16", 3000, topology).operations
    reads = [at for at, o in enumerate(operations) if o.code in (Code.DECODE, Code.ADD)]
    first, second = [at for at, o in enumerate(operations) if o.code == Code.WAIT]
    mean = [at for at in reads if first < at < second]
    assert all(at > max(mean) for at, o in enumerate(operations) if o.code == Code.RECEIVE and first < at < second)
    assert any(o.code == Code.SEND for o in operations[mean[-1] : second])


def test_a_node_without_a_window_leaves_dense_steps_to_python():
    ways = DescribedWays(PAIRS, 0, 8192, 256, windows_everywhere=False)
    made = table_of(ways, Route.parse("hierarchical-allgather"), get("onebit"), 9000)
    assert [stage.what for stage in made.stages] == ["reduce_scatter@intra", "allgather@intra"]


def test_times_that_pause_and_go_on_at_once_do_neither():
    operations = table("hierarchical-allgather", "onebit", 100_000, window_bytes=1 << 20).operations
    inside = set()
    for at, o in enumerate(operations):
        if o.code == Code.TILES:
            inside |= set(range(at + 1, at + 1 + o.tensor))
    laps = [(at, o) for at, o in enumerate(operations) if o.code == Code.LAP and at not in inside]
    assert inside and laps
    assert not any(then == at + 1 and other.resumes(one) for (at, one), (then, other) in pairwise(laps))
