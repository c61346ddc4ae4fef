"""Sessions end with MPI, with the process and at a fork, by a clear error and without touching MPI."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time

import numpy as np
import pytest
from patience import patient_barrier

from espresso_mpi import Session
from espresso_mpi.collectives.messages import leftovers
from espresso_mpi.errors import EspressoError, MismatchError, RankTimeoutError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def in_a_fork(act):
    """The text of what ``act`` raises in a forked child."""
    answers = multiprocessing.get_context("fork").SimpleQueue()

    def child():
        try:
            answers.put(("went on", repr(act())))
        except EspressoError as error:
            answers.put((type(error).__name__, str(error)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0, f"the child hangs or crashed: {process.exitcode}"
    return answers.get()


@pytest.mark.skipif("__import__('mpi4py.MPI').MPI.COMM_WORLD.size != 2", reason="the same on any number of ranks")
def test_a_fork_while_tensors_are_under_way(world, open_session):
    session = open_session(timeout=120.0)
    grads = [np.full(1 << 20, world.rank, np.float32) for _ in range(2)]
    first, second = (f"of rank {rank}" for rank in (world.rank, 1 - world.rank))
    handle = session.push(first, grads[world.rank])  # the other rank pushes it after the forks
    belongs = f"belongs to process {os.getpid()}, from which this one"
    for act in (
        lambda: session.sync(np.ones(3, np.float32)),
        lambda: session.push("x", np.ones(3, np.float32)),
        handle.wait,
        session.wait_all,
    ):
        kind, text = in_a_fork(act)
        assert kind == "EspressoError" and belongs in text, text
    kind, text = in_a_fork(Session)
    assert kind == "StateError" and f"forked from process {os.getpid()}" in text
    assert in_a_fork(lambda: (session.close(), session.usable, bool(session.stats())))[0] == "went on"
    patient_barrier(world)  # if one rank were ahead, the other's tensor would be averaged before its forks
    session.push(second, grads[1 - world.rank])
    session.wait_all()
    assert all(np.all(grad == 0.5) for grad in grads)


@pytest.mark.skipif("__import__('mpi4py.MPI').MPI.COMM_WORLD.size != 2", reason="the same on any number of ranks")
def test_workers_of_a_data_loader(world, open_session):
    torch = pytest.importorskip("torch")
    session = open_session()

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            try:
                session.sync(np.ones(3, np.float32))
            except EspressoError as error:
                return index if "belongs to process" in str(error) else -100
            return -100

    for step in range(2):  # workers start, and end, while a tensor is under way
        grad = np.full(1 << 20, world.rank + step, np.float32)
        handle = session.push("g", grad)
        loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork", timeout=60)
        assert sum(int(x) for x in loader) == 28
        handle.wait()
        assert np.all(grad == 0.5 + step)


@pytest.mark.skipif("__import__('mpi4py.MPI').MPI.COMM_WORLD.size < 2", reason="needs 2 ranks")
def test_variables_of_a_launcher_do_not_matter_where_mpi_has_several_ranks(world, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "64")
    monkeypatch.setenv("SLURM_PROCID", str(world.rank))
    alone = world.Split(world.rank)
    with Session(alone, timeout=60) as session:
        session.sync(np.ones(3, np.float32))
    alone.Free()
    Session(timeout=60).close()


@pytest.mark.skipif("__import__('mpi4py.MPI').MPI.COMM_WORLD.size < 2", reason="needs 2 ranks")
@pytest.mark.parametrize("answers", [False, True], ids=["silent", "answers"])
def test_the_log_says_who_is_waited_for(world, open_session, caplog, answers):
    """``answers``: the late rank pushed something else, so that its thread takes part in what the others do."""
    session, late = open_session(), world.size - 1
    session._transport.waiter.notice = 0.3
    x, y, where = np.ones(100, np.float32), np.ones(100, np.float32), "push('x')" if answers else ""
    with caplog.at_level(logging.WARNING, "espresso_mpi"):
        world.Barrier()
        if world.rank != late:
            handles = [session.push("y", y), session.push("x", x)]
            while not any(f"for rank {late} (" in text and where in text for text in waits(caplog)):
                time.sleep(0.01)  # until the test's own time limit
        elif answers:
            handles = [session.push("y", y)]
        patient_barrier(world)
        if world.rank == late:
            handles = [*(handles if answers else [session.push("y", y)]), session.push("x", x)]
        session.wait_all()
    assert all(handle.done() for handle in handles)


def waits(caplog):
    return [text for record in caplog.records if "waited" in (text := record.getMessage())]


def test_dropped_sessions_are_freed_when_the_next_one_opens(world, monkeypatch):
    freed = []
    monkeypatch.setattr(leftovers.Leftover, "free", lambda self, free=leftovers.Leftover.free: freed.append(free(self)))
    half = world.Split(world.rank % 2, world.rank)
    dropped = [Session(timeout=60), Session(timeout=20, window_bytes=0), Session(half, timeout=20)]
    for session in dropped:
        session.sync(np.ones(5, np.float32))
    kept = dropped.pop(world.rank == world.size - 1) if world.size > 1 else None  # not the same one on all ranks
    del session, dropped
    gc.collect()
    Session(timeout=60).close()
    assert len(freed) == (1 if world.size > 1 else 3), "what some rank still has must not be freed"
    del kept
    gc.collect()
    Session(timeout=60).close()
    assert len(freed) == 3
    half.Free()


@pytest.mark.skipif("__import__('mpi4py.MPI').MPI.COMM_WORLD.size < 2", reason="needs 2 ranks")
def test_a_rank_that_comes_after_others_have_given_up(world):
    """MPI completes what they have begun, so this rank finds out by a message that does not come."""
    comm = world.Dup()
    if world.rank == 0:
        time.sleep(3)
    with pytest.raises(RankTimeoutError, match="in the session to open"):
        Session(comm, timeout=1)
    patient_barrier(world)


@pytest.mark.skipif("__import__('mpi4py.MPI').MPI.COMM_WORLD.size < 2", reason="needs 2 ranks")
def test_a_close_that_fails_ends_the_session(world):
    """The others' own close does not wait for this rank."""
    session = Session(world, timeout=120)
    with pytest.raises(MismatchError):
        session.close() if world.rank == 0 else session.sync(np.ones(3, np.float32))
    if world.rank:
        with pytest.raises(EspressoError, match=r"cannot continue|cannot be used"):
            session.sync(np.ones(3, np.float32))
    assert not session.usable
    patient_barrier(world)
