"""Sessions on GPU arrays, against the same session on host arrays: bit for bit, on every route and device choice."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from agreed_integers import Agreed
from async_gpu import AsyncGpu, Caller
from gpu_arrays import GpuArray, foreign_memory, values  # noqa: F401

from espresso_mpi.compressors import register, unregister
from espresso_mpi.errors import ConfigError, GradientError, NonFiniteError, RemoteError
from espresso_mpi.planner.model.timetables import with_schedule
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.workloads.clusters import TESTBEDS
from espresso_mpi.types import ROUTES, Plan, Route, Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

_TYPES = {"float32": "<f4", "float64": "<f8", "float16": "<f2"}


class CupyArray(GpuArray):
    """What CuPy's arrays tell besides: their GPU, and the stream that they were last used in."""

    def __init__(self, array):
        super().__init__(array)
        self.__cuda_array_interface__ |= {"stream": 1, "data": (array.ctypes.data if array.size else 0, False)}

    def __dlpack_device__(self):
        return (2, 0)


class OnlyDlpack:
    """GPU memory of a library that knows no CUDA array interface."""

    def __init__(self, array):
        self.host = array

    def __dlpack__(self, **options):
        return self.host

    def __dlpack_device__(self):
        return (2, 0)


def nodes(world):
    return [[r for r in range(world.size) if r % 2 == m] for m in range(min(2, world.size))]


def methods(route):
    if not route.compressed:
        return ["none"]
    if route.sums_payloads:
        return ["fp16", "randomk:ratio=0.1", "topk_chunked:ratio=0.2,chunk=16"]
    return ["onebit", "topk:ratio=0.1", "int8", "fp16"]


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("device_aware", ["0", "1"])
def test_gpu_arrays_give_the_bits_of_host_arrays(world, open_session, monkeypatch, name, device_aware):
    """Staged messages on a device that does everything at the last moment; device pointers on one that varies."""
    monkeypatch.setenv("ESPRESSO_CUDA_AWARE", device_aware)
    caller = Caller(AsyncGpu(monkeypatch, seed=None if device_aware == "0" else world.rank), 7)
    for compressor in methods(Route.parse(name))[: None if device_aware == "0" else 1]:
        options = {"compressor": compressor, "nodes": nodes(world)}
        host = open_session(route=name, **options)
        gpu = open_session(route=Route.parse(name).on("gpu"), **options)
        for step in range(2):
            expected = values(world.rank, step, 150 if Route.parse(name).sums_payloads else 300, np.float32)
            grad = caller.gradient(expected.copy())
            host.sync(expected)
            gpu.sync(grad)
            assert np.array_equal(grad.host, expected), compressor


def test_a_schedule_with_copies_between_devices(world, open_session):
    """Operations on the GPU, the CPU and both, each on its lane; the bits of host arrays without a schedule."""
    mixed = Route.parse("encode@cpu/alltoall@flat/decode@gpu/encode@gpu/allgather@flat/decode@cpu")
    ways = {"a": mixed, "b": Route.parse("flat-alltoall").on("gpu")}
    grads = {name: values(world.rank, n, 300 + 64 * n, np.float32) for n, name in enumerate([*ways, "e"])}
    strategies = {**{name: Strategy("onebit", way) for name, way in ways.items()}, "e": Strategy("none", "flat")}
    cluster = replace(TESTBEDS["pcie-25g"], nodes=2, gpus_per_node=1, compressors=("onebit",))
    workload = Workload(
        tuple(WorkloadTensor(name, x.size, 1e-3 * (n + 1)) for n, (name, x) in enumerate(grads.items())), "gpu"
    )
    plan = with_schedule(Plan(strategies, fuse_bytes=0), workload, cluster.profile(), "separate", "schedule")
    assert any("payload to gpu" in table.operations for table in plan.schedule.buffers.values())
    plain = Plan({name: Strategy(s.compressor, s.route.on("cpu")) for name, s in strategies.items()}, fuse_bytes=0)
    gpu, host = (open_session(plan=one, nodes=[[0], [1]]) for one in (plan, plain))
    warned = []
    gpu._engine._dispatcher.runner._warn = warned.append
    for step in range(2):
        expected = {name: x + step for name, x in grads.items()}
        found = {name: GpuArray(x.copy()) for name, x in expected.items()}
        host.sync(expected)
        gpu.sync(found)
        for name, x in expected.items():
            assert np.array_equal(found[name].host, x), name
    assert not warned


def test_cupys_arrays_and_those_that_it_adopts(world, open_session, monkeypatch):
    """CuPy cannot run here: its place takes a module that wraps the memory which DLPack hands over."""
    session = open_session()
    host = {n: values(world.rank, n, n, np.float32).reshape(-1, 10) for n in (0, 30, 70)}
    expected = {n: np.mean(world.allgather(array), axis=0) for n, array in host.items()}
    own, foreign = {str(n): CupyArray(array) for n, array in host.items()}, OnlyDlpack(host[70].copy())
    with pytest.raises(GradientError, match=r"CUDA \(2\) with CuPy imported"):
        session.sync([foreign])
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(from_dlpack=lambda given: CupyArray(given.__dlpack__())))
    assert session.sync({"own": own, "foreign": foreign})["own"] is own
    for n, array in expected.items():
        np.testing.assert_allclose(own[str(n)].host, array, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(foreign.host, expected[70], rtol=1e-6, atol=1e-7)


@pytest.fixture
def without_kernels():
    register(Agreed)
    yield Agreed.name
    unregister(Agreed.name)


@pytest.mark.parametrize("route", ["flat-linear", "flat-allgather"])
@pytest.mark.parametrize("feedback", ["plain", "ef21"])
def test_a_method_without_gpu_kernels_works_through_the_host(world, open_session, without_kernels, route, feedback):
    host = open_session(compressor=without_kernels, route=route, feedback=feedback)
    gpu = open_session(compressor=without_kernels, route=Route.parse(route).on("gpu"), feedback=feedback)
    for step in range(3):
        expected = values(world.rank, step, 200, np.float32)
        grad = GpuArray(expected.copy())
        host.sync(expected)
        gpu.sync(grad)
        assert np.array_equal(grad.host, expected)


def test_integers_are_summed_on_the_gpu(world, open_session):
    host, gpu = (
        open_session(compressor="thc:block=64", route=Route.parse("flat-linear").on(d)) for d in ("cpu", "gpu")
    )
    expected = values(world.rank, 0, 130, np.float32)
    grad = GpuArray(expected.copy())
    host.sync(expected)
    gpu.sync(grad)
    assert np.array_equal(grad.host, expected)


@pytest.mark.parametrize("feedback", ["plain:decay=0.5", "ef21", "ef21:momentum=0.25"])
def test_every_kind_of_feedback(world, open_session, feedback):
    host, gpu = (open_session(compressor="topk:ratio=0.1", feedback=feedback) for _ in range(2))
    for step in range(3):
        expected = values(world.rank, step, 200, np.float32)
        grad = GpuArray(expected.copy())
        host.sync(expected)
        gpu.sync(grad)
        assert np.array_equal(grad.host, expected)


def test_every_step_on_the_device_that_its_route_says(world, open_session):
    """Encode on one device and decode on the other: the same bits, and residuals that follow."""
    texts = ["encode@gpu/allgather@flat/decode@cpu", "encode@cpu/allgather@flat/decode@gpu"]
    texts += ["encode@cpu/alltoall@flat/decode@gpu/encode@gpu/allgather@flat/decode@cpu"]
    for text in texts:
        host = open_session(compressor="onebit", route=Route.parse(text).on("cpu"))
        gpu = open_session(compressor="onebit", route=text)
        for step in range(3):
            expected = values(world.rank, step, 200, np.float32)
            grad = GpuArray(expected.copy())
            host.sync(expected)
            gpu.sync(grad)
            assert np.array_equal(grad.host, expected), text
        state = gpu.state_dict()["arrays"]
        assert all(np.array_equal(state[key], value) for key, value in host.state_dict()["arrays"].items())


@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_element_types_and_fusion(world, open_session, compressor, dtype):
    host, gpu = (open_session(compressor=compressor, min_bytes=200) for _ in range(2))
    arrays = [values(world.rank, step, n, dtype) for step, n in enumerate((200, 9, 3))]
    grads = [GpuArray(a.copy().reshape(1, -1)) for a in arrays]
    host.sync(arrays)
    gpu.sync(grads)
    assert all(np.array_equal(g.host.reshape(-1), a) for g, a in zip(grads, arrays))


def test_default_route_of_a_gpu_array_encodes_on_the_gpu(world, open_session):
    session = open_session(compressor="onebit")
    session.sync(GpuArray(np.ones(200, np.float32)))
    routes = [str(item.strategy.route) for batch in session._intake.batches.values() for item in batch.items]
    assert world.size == 1 or all("@gpu" in route for route in routes)


def test_errors(world, open_session):
    session = open_session()
    for wrong, words in [
        (GpuArray(np.ones((4, 4), np.float32), strides=(4, 16)), "strided"),
        (GpuArray(np.ones(4, np.float32), readonly=True), "read-only"),
        (GpuArray(np.ones(4, np.int32)), "int32"),
    ]:
        with pytest.raises(GradientError, match=words):
            session.sync(wrong)
    bad = GpuArray(np.array([1, np.nan, np.inf], np.float32))
    with pytest.raises(NonFiniteError, match="2 NaN"):
        session.sync(bad)
    with pytest.raises(ConfigError, match="host memory"):
        open_session(compressor="onebit", route="encode@gpu/allgather@flat/decode@gpu").sync(np.ones(9, np.float32))


def test_checksums_and_skipped_calls_on_the_gpu(world, open_session):
    """Debug mode travels by copies and gives the same bits; a call with a NaN becomes NaN as a whole."""
    host, gpu = (open_session(compressor="int8", nonfinite="skip_all", debug=debug) for debug in (False, True))
    mine = {name: values(world.rank, 0, 500, dtype) for name, dtype in (("wide", "float32"), ("half", "float16"))}
    plain, there = ({name: array.copy() for name, array in mine.items()} for _ in range(2))
    for _ in range(2):
        host.sync(plain)
        gpu.sync({name: GpuArray(array) for name, array in there.items()})
    assert all(np.array_equal(there[name], plain[name]) for name in mine)
    if world.rank == world.size - 1:
        there["wide"][3] = np.nan
    gpu.sync({name: GpuArray(array) for name, array in there.items()})
    assert all(np.isnan(array).all() for array in there.values())
    handle = gpu.push("wide", GpuArray(mine["wide"]))
    mine["wide"][7] += 1
    with pytest.raises((GradientError, RemoteError), match="wide: its memory was changed"):
        handle.wait()


def test_collectives_of_every_number(world, open_session):
    """Sums of integers and bool by MPI, and bytes of any type, for which there are no kernels."""
    session, ranks, me = open_session(), world.size, world.rank

    def on_gpu(values, dtype):
        return GpuArray(np.asarray(values, dtype))

    counts = on_gpu([me, -300, 7 * me], np.int16)
    assert session.allreduce(counts, op="max") is counts
    assert counts.host.tolist() == [ranks - 1, -300, 7 * (ranks - 1)]
    wide = session.allreduce(on_gpu([2**40 + me], np.int64), op="sum")
    assert wide.host.tolist() == [ranks * 2**40 + ranks * (ranks - 1) // 2]
    assert session.allreduce(on_gpu([me == 0, True], bool), op="land").host.tolist() == [ranks == 1, True]
    assert session.allreduce(on_gpu([me + 0.5], np.float32), op="max").host.tolist() == [ranks - 0.5]
    complex_ones, flags = on_gpu(np.zeros((ranks, 2)), np.complex64), on_gpu(np.zeros(3 * ranks), bool)
    session.alltoall(on_gpu([[me + 1j * r] * 2 for r in range(ranks)], np.complex64), out=complex_ones)
    assert complex_ones.host.tolist() == [[r + 1j * me] * 2 for r in range(ranks)]
    session.allgather(on_gpu([True, False, me == 1], bool), out=flags)
    assert flags.host.reshape(-1, 3).tolist() == [[True, False, r == 1] for r in range(ranks)]
    assert session.broadcast(on_gpu([me, 5], np.uint8), root=ranks - 1).host.tolist() == [ranks - 1, 5]
