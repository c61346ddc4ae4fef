"""Routes over two kinds of devices: each encode and decode runs where its route says, and the bits stay the same.

Host memory plays the GPU's. So do host kernels here, for sums and for a compressor that notes where it is called: this
is about which data is where, and thousands of routes would take hours in numba's simulator.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
from gpu_arrays import foreign_memory  # noqa: F401
from numba import cuda
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from route_tools import ALL, Case, Exact, layouts, open_transport, problems

from espresso_mpi.collectives.data import combining, cuda_sums, reduction
from espresso_mpi.collectives.data.layout import Dense
from espresso_mpi.collectives.program import DecodeStep, EncodeStep, compile_route
from espresso_mpi.compressors import get, register, unregister
from espresso_mpi.planner import routes

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(3600 if ALL else 300)]

SAMPLE = 150
SOME = 80
NOTES: list[tuple[str, str]] = []


def host(array):
    """The memory behind an array, wherever it is meant to be."""
    return array._ary if isinstance(array, FakeCUDAArray) else array


@dataclass(frozen=True)
class Watched(Exact):
    """Loses a little, and notes on which device it was called."""

    drop: int = 12
    name = "test-watched"

    def _encode_cpu(self, x, payload, residual, context):
        NOTES.append(("encode", "cpu"))
        super()._encode_cpu(x, payload, residual, context)

    def _decode_cpu(self, payload, out, add, context):
        NOTES.append(("decode", "cpu"))
        super()._decode_cpu(payload, out, add, context)

    def _encode_cuda(self, x, payload, residual, context):
        NOTES.append(("encode", "gpu"))
        super()._encode_cpu(host(x), host(payload), None if residual is None else host(residual), context)

    def _decode_cuda(self, payload, out, add, context):
        NOTES.append(("decode", "gpu"))
        super()._decode_cpu(host(payload), host(out), add, context)


@pytest.fixture
def watched():
    register(Watched)
    yield Watched.name
    unregister(Watched.name)


@pytest.fixture(autouse=True)
def host_kernels(monkeypatch):
    def on_host(function):
        return lambda *args: function(*map(host, args))

    kernels = {
        "mean_rows": reduction.mean_rows, "max_rows": combining._largest, "add_integers": reduction._add_integers,
        "divide": reduction.divide,
    }  # fmt: skip
    for name, ours in kernels.items():
        monkeypatch.setattr(cuda_sums, name, on_host(ours))


def sample(world, several, count):
    """Some of the routes, others at every run; the number that repeats them is in the output."""
    if ALL:
        return list(several)
    seed = world.bcast(int(os.environ.get("ESPRESSO_ROUTES_SEED", random.SystemRandom().randrange(10**6))))
    print(f"ESPRESSO_ROUTES_SEED={seed} runs these routes again")
    return random.Random(seed).sample(list(several), count)


def expected_notes(case, link):
    """Every call of the compressor in one step, by the schedule of this rank."""
    whole = Dense(0, case.n)
    for step in compile_route(case.route, link.topology, whole, "float32", link.rank, case.method):
        if isinstance(step, (EncodeStep, DecodeStep)):
            kind = "encode" if isinstance(step, EncodeStep) else "decode"
            yield from ((kind, step.device) for copy in step.packed.copies for part in copy if part.size)


def run(case, link):
    """Run a case on an array that plays a GPU's; return what ran on the wrong device."""
    NOTES.clear()
    case.run(link, as_array=cuda.to_device, back=lambda array: np.array(host(array)))
    expected = list(expected_notes(case, link)) * case.steps
    return [] if expected == NOTES else [f"{case.route}: {NOTES} instead of {expected}"]


def check(world, several, compressor):
    assert get(compressor).linear
    ways = list(itertools.product(layouts(world.size)[: 1 if ALL else 2], (False, True)))
    for number, (nodes, device_aware) in enumerate(ways):
        link = open_transport(nodes, device_aware=device_aware)
        cases = [Case(route, compressor, 150, steps=2) for route in several[number :: len(ways)]]
        elsewhere = [wrong for case in cases for wrong in run(case, link)]
        wrong = problems(world, link, cases) + [text for part in world.allgather(elsewhere) for text in part]
        link.close()
        assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:10])


def test_routes_of_the_tree(world, watched):
    check(world, sample(world, routes(), SAMPLE), watched)


def test_routes_that_sum_payloads(world, watched):
    check(world, sample(world, [r for r in routes(linear=True) if r.sums_payloads], SOME), watched)
