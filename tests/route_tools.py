"""What the tests of all routes share: layouts of ranks, a compressor that loses nothing, runs and their laws."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from espresso_mpi import compressors
from espresso_mpi.bench.reference import synchronised
from espresso_mpi.collectives.data.layout import Dense
from espresso_mpi.collectives.executor import Program
from espresso_mpi.collectives.job import Job
from espresso_mpi.collectives.messages.transport import Transport, TransportSettings
from espresso_mpi.collectives.program import EncodeStep, compile_route, segments
from espresso_mpi.feedback import AUTO, NO_FEEDBACK, Feedback

NAME = "grads"
_MARK = 0x5EED


@dataclass(frozen=True)
class Exact(compressors.Compressor):
    """The values themselves after a header that says how many they are: linear, loses nothing.

    Unless it is told to: ``drop`` bits of every mantissa.
    """

    drop: int = 0
    name = "test-exact"
    common = True
    element = "float32"

    def nbytes(self, n):
        return 16 + 4 * n

    def header(self, n):
        return 16

    def contraction(self, n):
        return 0.5

    def _encode_cpu(self, x, payload, residual, context):
        payload[:16].view(np.int64)[...] = x.size, _MARK
        body = payload[16:].view(np.float32)
        body[...] = x if residual is None else x + residual
        if residual is not None:
            residual[...] = body
        body.view(np.uint32)[...] &= np.uint32(0xFFFFFFFF << self.drop & 0xFFFFFFFF)
        if residual is not None:
            residual -= body

    def _decode_cpu(self, payload, out, add, context):
        assert payload[:16].view(np.int64).tolist() == [out.size, _MARK], "not the payload that is meant here"
        body = payload[16:].view(np.float32)
        out[...] = out + body if add else body


ALL = bool(os.environ.get("ESPRESSO_ALL_ROUTES"))
"""Whether every test shall run every route on every layout."""


def chosen(routes, number):
    """The routes that a test runs on layout ``number``: all on the first one, a part on the others."""
    return routes if ALL or number == 0 else routes[number % 5 :: 5]


def layouts(size):
    """Ways to see ``size`` ranks as nodes: pairs (2 x 2, 2 + 1), one node, each rank by itself, all but one."""
    ranks = list(range(size))
    pairs = [ranks[i : i + 2] for i in range(0, size, 2)]
    found = [pairs, [ranks], [[r] for r in ranks]]
    if size > 2:
        found.append([ranks[:-1], ranks[-1:]])
    return [list(nodes) for nodes in dict.fromkeys(tuple(map(tuple, nodes)) for nodes in found)]


def values(rank, step, n, dtype=np.float32):
    return np.random.default_rng([rank, step]).standard_normal(n).astype(dtype)


def exact_mean(size, step, n):
    return np.mean([values(rank, step, n).astype(np.float64) for rank in range(size)], axis=0)


def open_transport(nodes, window_bytes=1 << 16, **settings):
    return Transport.open(None, TransportSettings(20.0, window_bytes, nodes=nodes, **settings), list)


@dataclass
class Case:
    """One route run for some steps on all ranks."""

    route: object
    compressor: object
    n: int
    segment_bytes: int = 0
    steps: int = 1
    feedback: Feedback = AUTO

    def __post_init__(self):
        self.method = None if not self.route.compressed else compressors.get(self.compressor)
        self.feedback = NO_FEEDBACK if self.method is None else self.feedback.resolved(self.method, self.n)
        self.memory, self.outputs = {}, []

    def run(self, transport, as_array=np.array, back=np.array):
        """Run it; ``outputs`` has the result of every step, ``memory`` what is kept.

        Args:
            as_array, back: to the array that is synchronised and from it.
        """
        program = Program(transport, self.route, self.method, self.n, "float32", self.segment_bytes)
        for step in range(self.steps):
            x = as_array(values(transport.rank, step, self.n))
            program.run(x, Job(NAME, self.memory, self.feedback, 7, step))
            self.outputs.append(back(x))
        self.memory = {key: back(value) for key, value in self.memory.items()}
        return self

    def simulated(self, topology):
        """The result of the first step on every rank, by the simulation."""
        inputs = [values(rank, 0, self.n) for rank in range(topology.size)]
        return synchronised(self.route, topology, inputs, self.method, self.segment_bytes, NAME, 7)

    def encodes(self, topology, rank):
        """The encodes of all segments."""
        nbytes = self.method.nbytes(self.n) if self.method else 4 * self.n
        cut = 0 if self.method and self.method.whole else self.segment_bytes
        for region in segments(self.n, nbytes, topology, cut):
            steps = compile_route(self.route, topology, region, "float32", rank, self.method)
            yield from (step for step in steps if isinstance(step, EncodeStep))

    def residual(self, memory, step):
        """That of an encode, from a rank's memory; None if it has none."""
        return memory.get(f"{NAME}|{self.n}|{step.point}|{step.region.start}:{step.region.stop}|residual")

    def missing(self, topology, memories):
        """Given - received - held, element by element: zero but for rounding, or something was lost.

        Args:
            memories: of all ranks, in order.
        """
        total = sum(exact_mean(topology.size, step, self.n) for step in range(self.steps))
        total = total - np.sum([np.asarray(out, np.float64) for out in self.outputs], axis=0)
        for rank, memory in enumerate(memories):
            for step in self.encodes(topology, rank):
                residual = self.residual(memory, step)
                if residual is not None:
                    total[step.region.start : step.region.stop] -= step.weight * residual.astype(np.float64)
        return total

    def replicas_differ(self, topology, memories):
        """Whether ranks that encoded the same have different residuals."""
        first: dict[tuple[int, int, Dense], bytes] = {}
        for rank, memory in enumerate(memories):
            for step in self.encodes(topology, rank):
                residual = self.residual(memory, step)
                if residual is not None:
                    bits = residual.tobytes()
                    if first.setdefault((step.point, step.who, step.region), bits) != bits:
                        return True
        return False


def problems(world, transport, cases):
    """What is wrong with cases that were run: the same list on every rank. Each rank looks after its share of them."""
    topology, found = transport.topology, []
    shares = [[(case.outputs, case.memory) for case in cases[rank :: world.size]] for rank in range(world.size)]
    for case, *everything in zip(cases[world.rank :: world.size], *world.alltoall(shares)):
        memories = [memory for _, memory in everything]
        expected = case.simulated(topology)
        allowed = case.steps * 2.0**-20 * max(1.0, *(float(np.abs(out).max(initial=0)) for out in case.outputs))
        wrong = [
            f"rank {rank}, step {step}"
            for rank, (outputs, _) in enumerate(everything)
            for step, out in enumerate(outputs)
            if not np.array_equal(out, everything[0][0][step])
        ]
        if wrong:
            found.append(f"{case.route}: {case.compressor}, {topology}: ranks differ: {wrong[:3]}")
        elif not np.array_equal(everything[0][0][0], expected[0]):
            found.append(f"{case.route}: {case.compressor}, {topology}: not the bits of the simulation")
        elif any(not np.array_equal(a, expected[0]) for a in expected):
            found.append(f"{case.route}: {case.compressor}, {topology}: replicas differ in the simulation")
        lossless = case.method is None or case.method == Exact()
        conserves = lossless or case.feedback.kind == "plain"
        if conserves and not np.abs(case.missing(topology, memories)).max(initial=0) <= allowed:
            found.append(f"{case.route}: {case.compressor}, {topology}: something was lost")
        if case.replicas_differ(topology, memories):
            found.append(f"{case.route}: {case.compressor}, {topology}: replicas have different residuals")
    return [problem for part in world.allgather(found) for problem in part]
