"""Multi-rank tests fail on all ranks together, and never hang."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI
from patience import patient_barrier


class PatientWorld(MPI.Intracomm):
    """All ranks, whose collectives of objects leave the core to others while a rank is late."""

    def allgather(self, sendobj: Any) -> list[Any]:
        patient_barrier(self)
        return super().allgather(sendobj)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        patient_barrier(self)
        return super().allreduce(sendobj, op)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        patient_barrier(self)
        return super().bcast(obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        patient_barrier(self)
        return super().gather(sendobj, root)

    def barrier(self) -> None:
        patient_barrier(self)


def _of_all_ranks(name: str) -> Any:
    """What sessions make of the ranks waits as MPI does."""
    return lambda self, *given, **named: getattr(MPI.COMM_WORLD, name)(*given, **named)


for _name in ("Dup", "Split", "Split_type"):
    setattr(PatientWorld, _name, _of_all_ranks(_name))

_OUTCOMES, _WORLD = PatientWorld(MPI.COMM_WORLD.Dup()), PatientWorld(MPI.COMM_WORLD)
TIMEOUT = 60.0


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Gather every rank's outcome of a test: an assertion that fails on one rank fails the test on all."""
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    skipped = isinstance(error, pytest.skip.Exception)
    mine = None if error is None or skipped else f"{type(error).__name__}: {error}"
    outcomes = _OUTCOMES.allgather((mine, skipped))
    if mine is None:
        others = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text]
        if len({skipped for text, skipped in outcomes if not text}) > 1:
            others.append(f"skipped on some ranks only, by rank: {[skipped for _, skipped in outcomes]}")
        if others:
            outcome.force_exception(AssertionError("failed on another rank:\n" + "\n".join(others)))


@pytest.fixture
def world():
    """All ranks, in step with each other before and after the test."""
    return _WORLD


@pytest.fixture
def open_session():
    """Opens sessions with a short timeout and closes them on all ranks if the test passed."""
    from espresso_mpi import Session

    opened = []

    def opener(comm=None, **options):
        session = Session(comm, **{"timeout": TIMEOUT, "min_bytes": 0, **options})
        opened.append(session)
        return session

    yield opener
    for session in opened:
        session.close()
