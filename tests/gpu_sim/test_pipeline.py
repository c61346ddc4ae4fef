"""Exchanges of GPU memory overlap: what begins before what else has ended, on the simulated asynchronous device."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from async_gpu import AsyncGpu, Caller
from gpu_arrays import foreign_memory  # noqa: F401
from numba import cuda

from espresso_mpi import Session
from espresso_mpi.arrays import device
from espresso_mpi.collectives.messages.gpu_messages import GpuMessages
from espresso_mpi.collectives.messages.transport import Transport, TransportSettings
from espresso_mpi.collectives.segment_run import SegmentRun
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]

STAGED, DIRECT = "0", "1"
COUNT = 4


@pytest.fixture
def gpu(monkeypatch):
    """The device, whose log has encodes, exchanges and sends as well."""
    found = AsyncGpu(monkeypatch)
    logged(monkeypatch, found, SegmentRun, "_encode", "encode")
    logged(monkeypatch, found, GpuMessages, "_staged", "copy out")
    logged(monkeypatch, found, Transport, "_send_gpu", "send")
    return found


def logged(patch, gpu, owner, name, what):
    before = getattr(owner, name)
    patch.setattr(owner, name, lambda *given: (gpu.log.append(what), before(*given))[1])


def slow(patch, gpu, what, ahead=1):
    """The memory of an exchange is ready to be sent no sooner than ``what`` was queued for so many of the next ones."""
    advance, posted = GpuMessages.advance, []

    def slowly(messages):
        for exchange in messages._open:
            if exchange not in posted:
                least = min(len(posted) % COUNT + 1 + ahead, COUNT)
                posted.append(exchange)
                for batch in exchange.sends:
                    batch.gate = partial(passed, batch.gate, least)
        advance(messages)

    def passed(gate, least):
        return gpu.log.count(what) >= least and gate()

    patch.setattr(GpuMessages, "advance", slowly)


def steady(world, gpu, monkeypatch, way, tensors=1, **options):
    """What the log has of a call that was made before."""
    monkeypatch.setenv("ESPRESSO_CUDA_AWARE", way)
    halves = [[rank for rank in range(world.size) if rank % 2 == half] for half in (0, 1)]
    session, caller = Session(**{"nodes": halves, "min_bytes": 0, **options}), Caller(gpu, 7)
    for _ in range(2):
        gpu.log.clear()
        session.sync({f"w{n}": caller.gradient(np.ones(256, np.float32)) for n in range(tensors)})
    found = list(gpu.log)
    session.close()
    return found


def runs_ahead(log, what, messages):
    """Whether one more exchange is queued before what was queued last is sent; each sends so many messages."""
    queued = [place for place, name in enumerate(log) if name == what]
    sent = [place for place, name in enumerate(log) if name == "send"][::messages]
    assert len(queued) == len(sent) == COUNT
    return all(after < before for after, before in zip(queued[1:], sent))


DENSE = {"compressor": "none", "route": Route.parse("flat"), "fuse_bytes": 0, "tensors": COUNT}


@pytest.mark.parametrize("way", [STAGED, DIRECT])
def test_a_segment_is_encoded_before_the_one_before_it_is_sent(world, gpu, monkeypatch, way):
    slow(monkeypatch, gpu, "encode")
    route = Route.parse("flat-allgather").on("gpu")
    log = steady(world, gpu, monkeypatch, way, compressor="int8", route=route, segment_bytes=68)
    assert runs_ahead(log, "encode", world.size - 1) and not {"wait", "drain"} & set(log)


def test_a_dense_tensor_is_copied_before_the_one_before_it_is_sent(world, gpu, monkeypatch):
    slow(monkeypatch, gpu, "copy out")
    log = steady(world, gpu, monkeypatch, STAGED, **DENSE)
    assert runs_ahead(log, "copy out", world.size - 1) and not {"wait", "drain"} & set(log)


def test_a_wait_at_every_exchange_is_noticed(world, gpu, monkeypatch):
    """By the tests above: as it was without the pipeline, each tensor is sent before the next one is copied."""
    post = GpuMessages.post

    def at_once(messages, *given):
        exchange = post(messages, *given)
        device.drain()
        while messages._to_send:
            messages.advance()
        return exchange

    monkeypatch.setattr(GpuMessages, "post", at_once)
    log = steady(world, gpu, monkeypatch, STAGED, **DENSE)
    assert not runs_ahead(log, "copy out", world.size - 1) and "drain" in log


def test_dense_steps_of_a_bucket_are_copied_before_the_first_is_sent(world, gpu, monkeypatch):
    """The tensors of a bucket have messages of their own inside a node, and one wait in all."""
    everyone = [list(range(world.size))]
    options = {"compressor": "onebit", "route": Route.parse("hierarchical-allgather").on("gpu"), "nodes": everyone}
    options["fuse_bytes"] = 1 << 20
    slow(monkeypatch, gpu, "copy out", COUNT)
    log = steady(world, gpu, monkeypatch, STAGED, COUNT, **options)
    first = log.index("send")
    assert log[:first].count("copy out") == COUNT and not {"wait", "drain"} & set(log)


# --- one exchange -----------------------------------------------------------------------------------------------------


@contextmanager
def on_streams(monkeypatch, **options):
    """A device, a transport, and streams as those of a session."""
    gpu = AsyncGpu(monkeypatch, **options)
    transport = Transport.open(
        None, TransportSettings(timeout=60.0, window_bytes=0, device_aware=False), lambda notes: None
    )
    with device.leaving_stream():
        device.enter_stream(device.OwnStream())
        yield gpu, transport
    transport.close()


def content(rank, size):
    return np.random.default_rng([rank, size]).integers(0, 256, size, np.uint8)


def test_a_part_is_sent_while_the_next_one_is_copied(world, monkeypatch):
    with on_streams(monkeypatch) as (gpu, transport):
        transport.gpu_messages.unit = 64
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        given, there = cuda.to_device(content(world.rank, 1000)), cuda.to_device(np.zeros(1000, np.uint8))
        copied = []
        logged_done(monkeypatch, transport, gpu, copied)
        transport.exchange([(right, given)], [(left, there)])
        parts = gpu.log.count("out")
        assert parts == gpu.log.count("in") == len(copied) > 3
        assert [done - copied[0] for done in copied] == list(range(parts)), "one more copy before each send"
        assert np.array_equal(there.copy_to_host(stream=device.stream()), content(left, 1000))


def logged_done(patch, transport, gpu, found):
    send = transport.gpu_messages._send
    patch.setattr(transport.gpu_messages, "_send", lambda *given: (found.append(gpu.done), send(*given))[1])


def test_a_part_is_copied_in_while_others_are_under_way(world, monkeypatch):
    """Odd ranks get the first part, and the others no sooner than they have copied it."""
    partner = world.rank ^ 1
    with on_streams(monkeypatch) as (gpu, transport):
        transport.gpu_messages.unit = 64
        array, sends = cuda.to_device(content(world.rank, 1000)), world.rank % 2 == 0
        there = partner < world.size
        ends = [(partner, array)] if there else []
        pending = transport.post(*((ends, []) if sends else ([], ends)), transport.workspace)
        if sends and there:
            transport.gpu_messages.advance()  # an event says "not yet" when it is asked the first time
        world.barrier()
        early = None
        if not sends:
            transport.waiter.until(lambda: (transport.gpu_messages.advance(), gpu.log.count("in"))[1] > 0, list)
            early = gpu.log.count("in")
        world.barrier()
        transport.finish(pending)
        gpu.run()
        assert sends or early == 1 < gpu.log.count("in")
        assert not there or np.array_equal(array._ary, content(min(world.rank, partner), 1000))


def seen_by_kernels(world, patch):
    """What a kernel that was queued before an exchange reads in memory that the exchange writes; odd ranks receive."""
    partner, seen = world.rank ^ 1, []
    with on_streams(patch, eager="in") as (gpu, transport):
        array = cuda.to_device(np.full(100, world.rank, np.uint8))
        device.stream().add("launch", lambda: seen.append(int(array._ary[0])))
        ends = [(partner, array)] if partner < world.size else []
        transport.exchange(*((ends, []) if world.rank % 2 == 0 else ([], ends)))
        gpu.run()
    return seen == [world.rank]


def test_a_copy_in_waits_for_kernels_that_read_there(world, monkeypatch):
    assert seen_by_kernels(world, monkeypatch)


def test_a_copy_in_that_does_not_wait_is_found(world, monkeypatch):
    hold = device.Mark.hold
    monkeypatch.setattr(
        device.Mark, "hold", lambda *given: None if sys._getframe(1).f_code.co_name == "_fetch" else hold(*given)
    )
    assert seen_by_kernels(world, monkeypatch) == (world.rank % 2 == 0)
