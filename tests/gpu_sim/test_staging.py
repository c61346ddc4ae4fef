"""Messages of GPU memory, on a GPU that is as late as it may be: what is queued runs when somebody waits for it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from async_gpu import AsyncGpu
from gpu_arrays import GpuArray, foreign_memory, values  # noqa: F401
from mpi4py import MPI
from numba import cuda

from espresso_mpi.arrays import device
from espresso_mpi.arrays.workspace import Staging
from espresso_mpi.collectives.messages import gpu_calls, probe, probe_program
from espresso_mpi.collectives.messages.transport import Transport, TransportSettings
from espresso_mpi.errors import GradientError, RankTimeoutError
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]

SIZES = (1, 1000, 70_001)


@pytest.fixture
def late_gpu(monkeypatch):
    return AsyncGpu(monkeypatch)


@pytest.fixture
def open_transport():
    opened = []

    def opener(**settings):
        settings = TransportSettings(**{"timeout": 20.0, "window_bytes": 0, "device_aware": False, **settings})
        opened.append(Transport.open(None, settings, agree=lambda notes: None))
        return opened[-1]

    yield opener
    for transport in opened:
        transport.close()


def content(rank, size, salt=0):
    return np.random.default_rng([rank, size, salt]).integers(0, 256, size, np.uint8)


def ring(world):
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def passed_on(transport, world, sizes=SIZES, salt=0):
    """Post an exchange with the neighbours: what is pending, and the arrays with what they are to hold."""
    right, left = ring(world)
    sends = [(right, cuda.to_device(content(world.rank, size, salt))) for size in sizes]
    receives = [(left, cuda.to_device(np.zeros(size, np.uint8))) for size in sizes]
    pending = transport.post(sends, receives, transport.workspace)
    return pending, [(array, content(left, size, salt)) for (_, array), size in zip(receives, sizes)]


def all_arrived(arrived):
    return all(np.array_equal(array.copy_to_host(), expected) for array, expected in arrived)


def test_the_host_waits_for_no_copy(world, open_transport, late_gpu):
    """Copies and kernels wait for each other on the device; the host asks an event before it sends."""
    transport = open_transport()
    pending, arrived = passed_on(transport, world)
    assert late_gpu.log[:4] == ["hold"] + 3 * ["out"]
    transport.finish(pending)
    assert late_gpu.log == ["hold"] + 3 * ["out"] + ["hold"] + 3 * ["in"] + ["hold"]
    assert late_gpu.done == 4  # the copies in are queued, and nobody has waited for them
    assert all_arrived(arrived)


def test_what_is_on_the_host_is_not_staged(world, open_transport, late_gpu):
    transport, (right, left) = open_transport(), ring(world)
    received = cuda.to_device(np.zeros(100, np.uint8)), np.zeros(50, np.uint8)
    sends = [(right, content(world.rank, 100)), (right, cuda.to_device(content(world.rank, 50)))]
    transport.exchange(sends, list(zip((left, left), received)))
    assert late_gpu.log == ["hold", "out", "hold", "in", "hold"]
    assert np.array_equal(received[0].copy_to_host(), content(left, 100))
    assert np.array_equal(received[1], content(left, 50))


def test_device_pointers_need_no_wait_and_no_copy(world, open_transport, late_gpu):
    transport = open_transport(device_aware=True)
    pending, arrived = passed_on(transport, world)
    transport.finish(pending)
    assert late_gpu.log == []
    assert all_arrived(arrived)


def test_two_buffers_take_turns(world, open_transport, late_gpu):
    """Two exchanges at a time, the first finished first: each has a buffer of its own."""
    transport = open_transport()
    first, arrived = passed_on(transport, world)
    for size in (10, 20, 70_000, 30):
        second, more = passed_on(transport, world, (size,))
        transport.finish(first)
        first, arrived = second, arrived + more
    transport.finish(first)
    assert all_arrived(arrived)


def test_a_third_exchange_at_a_time_is_refused(world, open_transport):
    transport = open_transport()
    pending = [passed_on(transport, world, (10,)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="third exchange"):
        passed_on(transport, world, (10,))
    for exchange, _ in pending:
        transport.finish(exchange)
    assert all(all_arrived(arrived) for _, arrived in pending)


def received_in_a_row(world, transport, count=5):
    """Exchanges in which odd ranks only receive, so that nothing but the buffers makes them wait."""
    arrived, partner = [], world.rank ^ 1
    if partner >= world.size:
        return arrived
    for number in range(count):
        if world.rank % 2:
            array = cuda.to_device(np.zeros(1000, np.uint8))
            transport.exchange([], [(partner, array)])
            arrived.append((array, content(number, 1000)))
        else:
            transport.exchange([(partner, cuda.to_device(content(number, 1000)))], [])
    return arrived


def test_a_buffer_is_refilled_when_its_copy_is_done(world, open_transport, late_gpu):
    """Without a wait of the host: the message starts later."""
    arrived = received_in_a_row(world, open_transport())
    assert not arrived or late_gpu.log == 5 * ["hold", "in", "hold"]
    assert all_arrived(arrived)


def test_a_buffer_grows_without_a_wait(world, open_transport, late_gpu):
    """Neither for the copies from what it outgrows."""
    transport, arrived = open_transport(), []
    for size in (10, 10, 1000, 2000, 10):
        exchange, more = passed_on(transport, world, (size,))
        transport.finish(exchange)
        arrived += more
    assert not {"wait", "drain"} & set(late_gpu.log)
    assert all_arrived(arrived)


def test_a_gpu_that_hangs_is_named(world, open_transport, late_gpu, monkeypatch):
    """Its own rank is late; nothing of the exchange starts afterwards."""
    transport = open_transport(timeout=1.0)
    monkeypatch.setattr(device.Mark, "passed", lambda mark: False)
    with pytest.raises(RankTimeoutError, match=f"rank {world.rank} "):
        transport.finish(passed_on(transport, world, (10,))[0])
    monkeypatch.undo()
    started = []
    monkeypatch.setattr(transport.gpu_messages, "_send", lambda *given: started.append(given))
    transport.advance()
    assert started == []
    world.barrier()


@pytest.mark.parametrize("left_out", [(device.Mark, "set", None), (Staging, "emptied", True)])
def test_a_missing_wait_is_seen_by_these_tests(world, open_transport, late_gpu, monkeypatch, left_out):
    owner, method, found = left_out
    monkeypatch.setattr(owner, method, lambda *given: found)
    arrived = received_in_a_row(world, open_transport())
    assert not arrived or not all_arrived(arrived)


@pytest.mark.parametrize("device_aware", ["0", "1"])
@pytest.mark.parametrize("name", ["flat", "flat-alltoall", "hierarchical-alltoall-packed"])
def test_a_session_on_a_late_gpu(world, open_session, late_gpu, monkeypatch, name, device_aware):
    monkeypatch.setenv("ESPRESSO_CUDA_AWARE", device_aware)
    halves = [[rank for rank in range(world.size) if rank % 2 == half] for half in (0, 1)]
    options = {"compressor": "none" if name == "flat" else "int8", "nodes": halves}
    host = open_session(route=name, **options)
    gpu = open_session(route=Route.parse(name).on("gpu"), **options)
    for step in range(3):
        expected = values(world.rank, step, 150, np.float32)
        grad = GpuArray(expected.copy())
        host.sync(expected)
        gpu.sync(grad)
        assert np.array_equal(grad.host, expected)


@pytest.mark.parametrize("text", ["encode@gpu/allgather@flat/decode@cpu", "encode@cpu/allgather@flat/decode@gpu"])
def test_a_late_gpu_and_the_host_by_turns(world, open_session, late_gpu, text):
    host = open_session(compressor="onebit", route=Route.parse(text).on("cpu"))
    gpu = open_session(compressor="onebit", route=text)
    for step in range(3):
        expected = values(world.rank, step, 150, np.float32)
        grad = GpuArray(expected.copy())
        host.sync(expected)
        gpu.sync(grad)
        assert np.array_equal(grad.host, expected)


class Elsewhere(GpuArray):
    """An array on another GPU than the current one, number 0."""

    def __dlpack_device__(self):
        return 2, 1


def test_a_tensor_on_another_gpu_is_refused_on_every_rank(world, open_session):
    session = open_session()
    kind = Elsewhere if world.rank == world.size - 1 else GpuArray
    with pytest.raises(GradientError, match=r"GPU 1; expected GPU 0.*select_device\(1\)"):
        session.sync({"w": kind(np.ones(4, np.float32))})


# --- which way --------------------------------------------------------------------------------------------------------


def chosen(transport, caplog):
    """The line of the log, on rank 0."""
    with caplog.at_level(logging.INFO, "espresso_mpi"):
        transport.choose_device_way()
        transport.choose_device_way()  # settled, and not logged again
    lines = [record.getMessage() for record in caplog.records if "GPU tensors" in record.getMessage()]
    assert len(lines) == (transport.rank == 0)
    return "".join(lines)


def nodes(world):
    return [list(range(world.size - 1)), [world.size - 1]]


def test_the_probe_passes_everywhere(world, open_transport, caplog, monkeypatch):
    asked = []
    monkeypatch.setattr(probe, "probe_gpu", lambda limit: asked.append(limit) or probe.ProbeResult(True, "fake"))
    transport = open_transport(device_aware=None, nodes=nodes(world))
    line = chosen(transport, caplog)
    assert transport.device_aware is True
    assert world.rank or "device pointers go to MPI: the probe passed on every node (fake)" in line
    assert asked == ([10.0] if world.rank in (0, world.size - 1) else [])  # half the timeout, one rank per node


def test_one_node_where_it_fails_is_enough(world, open_transport, caplog, monkeypatch):
    monkeypatch.setattr(probe, "probe_gpu", lambda limit: probe.ProbeResult(world.rank == 0, f"fake {world.rank}"))
    transport = open_transport(device_aware=None, nodes=nodes(world))
    line = chosen(transport, caplog)
    last = world.size - 1
    assert transport.device_aware is False
    assert world.rank or f"page-locked host memory: the probe failed on rank {last} (" in line
    assert world.rank or f"fake {last}" in line


@pytest.mark.parametrize("works", [True, False])
def test_nodes_are_probed_together(world, open_transport, caplog, monkeypatch, works):
    """Once, by rank 0, after each by itself."""
    asked, result = [], probe.ProbeResult(works, "fake between", "pml ucx")
    monkeypatch.setattr(probe, "probe_gpu", lambda limit: probe.ProbeResult(True, "fake"))
    monkeypatch.setattr(probe, "probe_nodes", lambda hostnames, limit: asked.append(hostnames) or result)
    transport = open_transport(device_aware=None, message_bytes=1000)
    transport.hostnames = [f"node{rank}" for rank in range(world.size)]
    line = chosen(transport, caplog)
    assert transport.device_aware is works
    assert asked == ([] if world.rank else [transport.hostnames])
    told = "and between nodes (fake between, by pml ucx)" if works else "not between nodes: fake between, by pml ucx"
    assert world.rank or told in line


def test_the_simulator_has_no_device_pointers(world, open_transport, caplog):
    transport = open_transport(device_aware=None)
    line = chosen(transport, caplog)
    assert transport.device_aware is False
    assert world.rank or "simulator" in line


@pytest.mark.parametrize("forced", [True, False])
def test_a_forced_way_is_not_probed(world, open_transport, caplog, monkeypatch, forced):
    monkeypatch.setattr(probe, "probe_gpu", None)
    transport = open_transport(device_aware=forced)
    line = chosen(transport, caplog)
    assert transport.device_aware is forced
    assert world.rank or f"forced by ESPRESSO_CUDA_AWARE={int(forced)}" in line


def test_the_quickest_length_between_nodes(world, open_transport, caplog, monkeypatch):
    """By the slowest rank's times, and the same on all; another one than the usual only if it is worth it."""
    usual, short, long = 60 << 10, *gpu_calls.LENGTHS
    for times, expected in (
        ({usual: 10.0, short: 6.0 + 3 * world.rank, long: 8.0}, long),
        ({usual: 10.0, short: 9.5, long: 9.1}, usual),
    ):
        monkeypatch.setattr(gpu_calls.GpuCalls, "_ring", lambda transport, length, times=times: times[length])
        transport = open_transport(device_aware=False)
        transport.hostnames = [f"node{rank}" for rank in range(world.size)]
        transport.choose_device_way()
        assert transport.gpu_message_bytes == expected
    given = open_transport(device_aware=False, message_bytes=1000)
    given.hostnames = transport.hostnames
    given.choose_device_way()
    assert given.gpu_message_bytes == 1000


@pytest.mark.parametrize("aware", [True, False])
def test_lengths_are_measured_with_what_is_sent(world, open_transport, monkeypatch, aware):
    transport = open_transport(device_aware=aware, nodes=nodes(world))
    monkeypatch.setattr(gpu_calls, "_RING_BYTES", 1000)
    sent, locked, start, pinned = [], [], transport._messages_of, device.pinned
    monkeypatch.setattr(transport, "_messages_of", lambda *given: sent.append(given[2]) or start(*given))
    monkeypatch.setattr(device, "pinned", lambda size: locked.append(pinned(size)) or locked[-1])
    seconds = transport._ring(300)
    leads = world.rank in (0, world.size - 1)
    assert (seconds > 0) == leads and len(sent) == 2 * leads
    assert all(any(array is memory for memory in locked) != aware for array in sent)


# --- what the probe's processes do ------------------------------------------------------------------------------------


def test_the_processes_of_the_probe(world):
    assert probe_program.examine(MPI, world) is None


def test_the_processes_of_the_probe_see_wrong_data(world):
    """Also if only one pair of them sends it."""

    class Wrong:
        """An MPI that leaves a bit behind in every long message from the last rank to the first."""

        def __getattr__(self, name):
            return getattr(world, name)

        def Isend(self, what, rank):  # noqa: N802
            sent = what[0].copy_to_host()
            sent[-1] ^= sent.size > 1 << 19 and (world.rank, rank) == (world.size - 1, 0)
            return world.Isend([sent, what[1]], rank)

    assert "messages of 1048576 bytes" in probe_program.examine(MPI, Wrong())
