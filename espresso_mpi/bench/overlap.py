"""``bench overlap``: what a training step takes when gradients travel while the next ones are still being computed.

The main thread multiplies matrices and pushes a gradient after each share of them, the last layer's first, as a
backward pass does. One run measures everything in turns: computing alone, and of every method one ``sync`` of all
gradients (T_s), a ``sync`` of the largest alone, and the step that overlaps. How long a product takes is known from the
one computing that took turns with all of them; a method's T_c is its number of products times that. Unless given, T_c
is about T_s, where there is most to hide.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..cluster import launch
from ..compressors import read_specs
from ..tracing import pictures
from . import blas, python_beside
from .defaults import Overlap as Defaults
from .harness import columns
from .harness.checks import Inputs, wrong_together
from .harness.columns import MS, RATIO, SHARE, Column, Table
from .harness.suite import Suite
from .harness.timing import Repetitions, TimedMethod, interleaved, timed
from .plain_sockets import PlainSockets
from .tensors import shapes_of

SOCKETS = "sockets"
"""The method that moves bytes only, see ``plain_sockets``."""

ALLOWED = 1.15
"""A step may take this much of max(T_c, T_s), and one tensor's sync."""

_SIDE = 192
"""Rows and columns of the matrices: their product takes some 0.2 ms, so that computing can be shared out finely."""

_CALIBRATION_SECONDS = 0.2
"""How long matrices are multiplied to find out how many products make up T_s."""

_WARM_UP, _ESTIMATES = 2, 3
"""Syncs before T_s is estimated, and those that it is estimated from."""


@dataclass(frozen=True)
class Row:
    """One line of the result. Times are medians, over repetitions, of the slowest rank.

    Attributes:
        method: compressor, or ``SOCKETS``.
        tensors, nbytes: how many, and their bytes together.
        compute: T_c, the computing alone, from the products that took turns with all methods.
        sync: T_s, one sync of all tensors alone.
        largest: a sync of the largest tensor alone.
        step: the step that overlaps. step_p99: its 99th percentile.
        allowed: 1.15 · max(T_c, T_s) + largest.
        ratio: step / allowed.
        hidden: the share of min(T_c, T_s) that overlapping hid: 1 if the step takes max(T_c, T_s), 0 if their sum.
        python_slowed, python_waits, python_cpu: see ``python_beside.Slowdown``; the work takes about T_s alone.
        wrong: elements, over all ranks, in which pushing and waiting differs from one sync; none of ``SOCKETS``.
        repeats: repetitions that were made.
    """

    method: str
    tensors: int
    nbytes: int
    compute: float
    sync: float
    largest: float
    step: float
    step_p99: float
    allowed: float
    ratio: float
    hidden: float
    wrong: int
    repeats: int
    python_slowed: float | None = None
    python_waits: float | None = None
    python_cpu: float | None = None


TABLE = Table(
    (
        columns.METHOD,
        Column("T_c", "compute", MS),
        Column("T_s", "sync", MS),
        Column("largest", "largest", MS),
        Column("step", "step", MS),
        Column("p99", "step_p99", MS),
        Column("allowed", "allowed", MS),
        Column("step / allowed", "ratio", RATIO),
        Column("hidden", "hidden", SHARE),
        Column("Python slowed", "python_slowed", SHARE),
        Column("it waits", "python_waits", SHARE),
        Column("by CPU", "python_cpu", SHARE),
        columns.WRONG,
    )
)


def main(
    compressors: str = Defaults.compressors,
    sizes: str | None = None,
    compute_ms: float | None = None,
    repeats: int = Defaults.repeats,
    seconds: float | None = None,
    sockets: bool = False,
    json: Path | None = None,
    trace: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        compressors: comma list of specs.
        sizes: comma list of sizes of float32 arrays in the place of ResNet-101's gradients, the first pushed first.
        compute_ms: T_c in milliseconds; default: about T_s of each method.
        repeats: most timed repetitions of each method.
        seconds: time for each method after which no further repetition is begun, but for the first three.
        sockets: also let threads move the bytes of a dense sum through plain sockets, to see what overlap can reach.
        json: file for the result.
        trace: trace one more step of each compressor to this file, the compressor's name in the file's.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    run = Suite("overlap", world, json, trace=trace)
    specs, shapes = [*read_specs(compressors), *[SOCKETS] * sockets], shapes_of(sizes)
    _one_thread(world)
    with run.repetitions(1, repeats, None if seconds is None else seconds * len(specs)) as repetitions:
        rows = _measured(world, Inputs(world, shapes), specs, compute_ms, repetitions, trace)
    title = f"{rows[0].tensors} tensors, {rows[0].nbytes / 1e6:.1f} MB, {world.size} ranks: compute and sync at once"
    run.publish(TABLE, title, rows, network="ResNet-101" if sizes is None else sizes)
    return rows


def row(method: str, inputs: Mapping[str, np.ndarray], times: np.ndarray, wrong: int) -> Row:
    """The result of one method.

    Args:
        times: seconds, shape (repetitions, 4): computing, sync of all, sync of the largest, step.
    """
    compute, sync, largest, step = (float(t) for t in np.median(times, axis=0))
    allowed = ALLOWED * max(compute, sync) + largest
    hidden = (compute + sync - step) / min(compute, sync)
    p99 = float(np.percentile(times[:, 3], 99))
    nbytes = sum(x.nbytes for x in inputs.values())
    return Row(
        method, len(inputs), nbytes, compute, sync, largest, step, p99, allowed, step / allowed, hidden, wrong,
        len(times),
    )  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(
    comm: Any,
    inputs: Inputs,
    specs: Sequence[str],
    compute_ms: float | None,
    repetitions: Repetitions,
    trace: Path | None,
) -> list[Row]:
    grads = inputs.copies()
    wrong = [0 if spec == SOCKETS else _wrong(comm, inputs, spec) for spec in specs]
    matrices = _Matrices(comm)
    alone = _Compute(matrices, matrices.products(_CALIBRATION_SECONDS), grads)
    steps: list[_Steps] = [
        (_SocketSteps if spec == SOCKETS else _SessionSteps)(comm, inputs, grads, spec, matrices, compute_ms)
        for spec in specs
    ]
    methods = [TimedMethod("compute", alone.alone), *(c for one in steps for c in one.methods())]
    for c in methods:  # allocates, and agrees on each list of tensors
        timed(comm, c.run, c.prepare)
    times = interleaved(comm, methods, repetitions)
    rows = []
    for number, one in enumerate(steps):
        compute = times[:, :1] * (one.work.products / alone.products)
        own = np.column_stack([compute, times[:, 3 * number + 1 : 3 * number + 4]])
        found = row(one.spec, grads, own, wrong[number])
        slowdown = python_beside.measured(comm, found.sync, one.push, one.wait)
        rows.append(replace(found, python_slowed=slowdown.slowed, python_waits=slowdown.waits, python_cpu=slowdown.cpu))
        one.trace(trace)
        one.close()
    return rows


class _Steps(ABC):
    """What is timed of one method. Collective, as are its methods.

    Args:
        grads: arrays for the gradients, in the order in which they are pushed; all methods may share them.
    """

    def __init__(
        self, comm: Any, inputs: Inputs, grads: Mapping[str, np.ndarray], spec: str, matrices: _Matrices,
        compute_ms: float | None,
    ) -> None:  # fmt: skip
        self.inputs, self.grads, self.spec = inputs, dict(grads), spec
        self._open(comm)
        tried = [timed(comm, self.sync, self.refill) for _ in range(_WARM_UP + _ESTIMATES)][_WARM_UP:]
        seconds = float(np.median(tried)) if compute_ms is None else compute_ms / 1e3
        self.work = _Compute(matrices, matrices.products(seconds), self.grads)

    def methods(self) -> list[TimedMethod]:
        """One sync of all, one of the largest, and the step."""
        name = max(self.grads, key=lambda name: self.grads[name].nbytes)
        largest = {name: self.grads[name]}
        return [
            TimedMethod("sync", self.sync, prepare=self.refill),
            TimedMethod("largest", lambda: self.synchronise(largest), prepare=self.refill),
            TimedMethod("step", self.step, prepare=self.refill),
        ]

    def sync(self) -> None:
        """All gradients in one call."""
        self.synchronise(self.grads)

    def refill(self) -> None:
        """Put the values back in place."""
        self.inputs.refill(self.grads)

    @abstractmethod
    def _open(self, comm: Any) -> None:
        """Prepare the method."""

    @abstractmethod
    def synchronise(self, grads: Mapping[str, np.ndarray]) -> None:
        """Some gradients in one call."""

    @abstractmethod
    def step(self) -> None:
        """Each gradient after its share of the work."""

    @abstractmethod
    def push(self) -> None:
        """All gradients in one call that returns at once; ``wait`` follows."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for all."""

    @abstractmethod
    def close(self) -> None:
        """The end."""

    @abstractmethod
    def trace(self, path: Path | None) -> None:
        """Trace one more step to a file, if there is one and the method can be traced."""


class _SessionSteps(_Steps):
    """Of a session with a compressor."""

    def _open(self, comm: Any) -> None:
        from ..session import Session

        self.session = Session(comm, compressor=self.spec)
        self.session.judge_for(None)

    def synchronise(self, grads: Mapping[str, np.ndarray]) -> None:
        self.session.sync(grads)

    def step(self) -> None:
        for name in self.work.between():
            self.session.push(name, self.grads[name])
        self.session.wait_all()

    def push(self) -> None:
        self.refill()
        self.session.push_together(self.grads)

    def wait(self) -> None:
        self.session.wait_all()

    def close(self) -> None:
        self.session.close()

    def trace(self, path: Path | None) -> None:
        if path is not None:
            with pictures.tracing(self.session, path, self.spec):
                self.step()


class _SocketSteps(_Steps):
    """Of plain sockets. All bytes travel from the beginning of a step on, as if all gradients were there at once."""

    def _open(self, comm: Any) -> None:
        self.sockets = PlainSockets(comm)

    def synchronise(self, grads: Mapping[str, np.ndarray]) -> None:
        self.sockets.exchange(sum(x.nbytes for x in grads.values()))

    def step(self) -> None:
        self.push()
        self.work.alone()
        self.wait()

    def push(self) -> None:
        self.sockets.start(sum(x.nbytes for x in self.grads.values()))

    def wait(self) -> None:
        self.sockets.wait()

    def close(self) -> None:
        self.sockets.close()

    def trace(self, path: Path | None) -> None:
        pass


class _Matrices:
    """What is multiplied, and how quickly all ranks do that at once. Collective."""

    def __init__(self, comm: Any) -> None:
        rng = np.random.default_rng(comm.rank)
        self._comm = comm
        self._a, self._b = (rng.standard_normal((_SIDE, _SIDE)).astype(np.float32) for _ in range(2))
        self._c = np.empty_like(self._a)
        self._rate = self._measured()

    def multiply(self, times: int) -> None:
        """That many products."""
        for _ in range(times):
            np.matmul(self._a, self._b, out=self._c)

    def products(self, seconds: float) -> int:
        """How many the slowest rank makes in so many seconds, the same on every rank; at least one. Collective."""
        return max(1, round(self._comm.bcast(seconds * self._rate)))

    def _measured(self) -> float:
        """Products per second of the slowest rank while all compute."""
        from mpi4py import MPI

        count = 64
        while (spent := timed(self._comm, partial(self.multiply, count))) < _CALIBRATION_SECONDS:
            count *= 2
        return self._comm.allreduce(count / spent, MPI.MIN)


class _Compute:
    """Work of the main thread, shared out over the tensors evenly: a network's layers cost about the same each."""

    def __init__(self, matrices: _Matrices, products: int, names: Iterable[str]) -> None:
        self._matrices, self.products, self._names = matrices, products, list(names)
        edges = np.linspace(0, products, len(self._names) + 1).round().astype(int)
        self._shares = [int(share) for share in np.diff(edges)]

    def alone(self) -> None:
        """All of it."""
        for _ in self.between():
            pass

    def between(self) -> Iterable[str]:
        """Names of the tensors, each after its share of the work."""
        for name, share in zip(self._names, self._shares):
            self._matrices.multiply(share)
            yield name


def _wrong(comm: Any, inputs: Inputs, spec: str) -> int:
    """Elements that come out otherwise when tensors are pushed one by one than in one sync, the first time."""
    from ..session import Session

    results: list[dict[str, np.ndarray]] = []
    for synchronise in (_by_sync, _by_push):
        with Session(comm, compressor=spec) as session:
            session.judge_for(None)
            results.append(inputs.copies())
            synchronise(session, results[-1])
    expected, found = results

    def count() -> int:
        return sum(int(np.count_nonzero(found[name] != expected[name])) for name in found)

    return wrong_together(comm, found.values(), count)


def _by_sync(session: Any, grads: Mapping[str, np.ndarray]) -> None:
    session.sync(grads)


def _by_push(session: Any, grads: Mapping[str, np.ndarray]) -> None:
    for name, x in grads.items():
        session.push(name, x)
    session.wait_all()


def _one_thread(comm: Any) -> None:
    """Matrix products of one thread a rank: the others belong to other ranks, or to the communication."""
    if not blas.limit_threads(1) and comm.rank == 0:
        print("bench overlap: cannot limit the threads of numpy's matrix products here; set OMP_NUM_THREADS=1")
    if comm.size > launch.cores() and comm.rank == 0:
        print(
            f"bench overlap: {comm.size} ranks, {launch.cores()} cores here; computing then competes for cores as well"
        )
