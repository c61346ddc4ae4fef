"""What would kill or hang a job of several ranks: each is a small job of its own, which must end by itself, and how."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from rank_jobs import needs_mpirun, run_job

from espresso_mpi.cluster import launch

pytestmark = [pytest.mark.timeout(300), needs_mpirun]

LIMIT = 120
"""Seconds a job may take; a job that hangs ends with launch.TIMED_OUT."""

START = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
import espresso_mpi
world = MPI.COMM_WORLD
rank, size = world.rank, world.size
def fresh(n=1000):
    return np.full(n, rank, np.float32)
def said(act):
    try:
        act()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""
session = espresso_mpi.Session(timeout=20)
"""


def job(tmp_path, body, module=True):
    """Runs a script on two ranks: (exit status, output)."""
    script = tmp_path / "script.py"
    script.write_text(START + textwrap.dedent(body))
    done = run_job(*(["-m", "mpi4py"] if module else []), script, limit=LIMIT)
    return done.returncode, done.stdout + done.stderr


def ends_well(result, *words):
    status, output = result
    assert status == 0, output
    for word in words:
        assert word in output, output
    assert "Traceback" not in output and "terminate called" not in output, output
    return True


@pytest.mark.thorough  # test_messages_under_way_at_the_end has more of them
def test_pushes_nobody_waits_for(tmp_path):
    """The process ends while its thread works, or waits for the other rank."""
    body = """
    for number in range(8):
        session.push(f"w{number}", fresh(300_000))
    world.Barrier()  # a rank that ends before another has pushed would be an error there
    """
    assert ends_well(job(tmp_path, body))


@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))])
def test_messages_under_way_at_the_end(tmp_path, attempt):
    """MPI still writes to their memory when Python has gone: it crashed one job in five."""
    body = """
    session = espresso_mpi.Session(timeout=20, nodes=[[0], [1]])
    session.push("first", fresh()).wait()
    for number in range(8):
        session.push(f"w{number}", fresh(500_000))
    world.Barrier()
    """
    assert ends_well(job(tmp_path, body))


def test_pushes_nobody_waits_for_without_mpi4py_as_the_module(tmp_path):
    body = """
    handles = [session.push(f"w{number}", fresh(300_000)) for number in range(8)]
    world.Barrier()
    """
    assert ends_well(job(tmp_path, body, module=False))


@pytest.mark.thorough  # test_all_that_may_be_under_way_at_the_end has it, among others
def test_a_push_that_the_other_rank_never_makes(tmp_path):
    """One rank ends with a thread that waits for the other, which has ended before."""
    body = """
    if rank == 0:
        session.push("alone", fresh())
        time.sleep(0.5)
    """
    assert ends_well(job(tmp_path, body))


@pytest.mark.thorough  # test_all_that_may_be_under_way_at_the_end has it, among others
def test_a_session_that_nobody_holds_any_more(tmp_path):
    """Its thread still works when the process ends."""
    body = """
    for number in range(8):
        session.push(f"w{number}", fresh(300_000))
    world.Barrier()
    del session
    """
    assert ends_well(job(tmp_path, body))


def test_all_that_may_be_under_way_at_the_end(tmp_path):
    """Pushes nobody waits for, of a session nobody holds, that the other rank never makes, that a thread waits for."""
    body = """
    dropped, alone, awaited = (espresso_mpi.Session(timeout=20) for _ in range(3))
    for number in range(4):
        session.push(f"w{number}", fresh(300_000))
        dropped.push(f"w{number}", fresh(300_000))
    world.Barrier()
    del dropped
    if rank == 0:
        alone.push("alone", fresh())
        handle = awaited.push("alone", fresh())
        threading.Thread(target=lambda: said(handle.wait), daemon=True).start()
        time.sleep(0.5)
    """
    assert ends_well(job(tmp_path, body))


@pytest.mark.thorough  # no job here closes its session; this one has nothing else
def test_a_session_never_closed_after_work(tmp_path):
    body = """
    for step in range(5):
        grad = fresh()
        session.push("w", grad).wait()
        assert np.allclose(grad, 0.5)
    print("done", rank)
    """
    assert ends_well(job(tmp_path, body), "done 0", "done 1")


def test_sys_exit_inside_a_block(tmp_path):
    body = """
    with session:
        grad = fresh()
        session.push("w", grad).wait()
        session.push("v", grad)
        world.Barrier()
        sys.exit(0)
    """
    assert ends_well(job(tmp_path, body))


def test_sys_exit_with_a_status_ends_the_job(tmp_path):
    """The other rank waits for a push that never comes, and hears of the end at once."""
    body = """
    with session:
        if rank == 1:
            sys.exit(7)
        session.push("w", fresh()).wait()
    """
    status, output = job(tmp_path, body)
    assert status not in (0, launch.TIMED_OUT), output


def test_the_rank_that_left_is_named(tmp_path):
    body = """
    if rank == 1:
        with session:
            world.Barrier()
            sys.exit(0)
    world.Barrier()
    kind, text = said(session.push("w", fresh()).wait)
    assert kind == "RemoteError" and "rank 1" in text and "SystemExit" in text, (kind, text)
    print("named")
    """
    assert ends_well(job(tmp_path, body), "named")


def test_the_end_of_a_process_is_told(tmp_path):
    """A rank whose process ends without close, with something under way, tells who waits for it."""
    body = """
    if rank == 1:
        session.push("other", fresh())
        time.sleep(1)
        sys.exit(0)
    kind, text = said(session.push("w", fresh()).wait)
    assert kind == "RemoteError" and "rank 1" in text and "without close" in text, (kind, text)
    print("told")
    """
    assert ends_well(job(tmp_path, body), "told")


def test_ctrl_c(tmp_path):
    """It ends a wait at once; what it means for the session depends on who was driving, and is said. And a sync."""
    body = """
    session.sync([fresh()])  # an interrupt while a kernel is loaded would show in the exit status of Python as well
    if rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        handle = session.push("w", fresh())
        kind, text = said(handle.wait)
        assert kind == "KeyboardInterrupt", (kind, text)
        if session.usable:
            world.send(True, 1)
            handle.wait()
        else:
            world.send(False, 1)
            assert "open a new one" in said(lambda: session.push("v", fresh()))[1]
    else:
        if world.recv(source=0):
            session.push("w", fresh()).wait()
        else:
            kind, text = said(session.push("w", fresh()).wait)
            assert kind == "RemoteError" and "KeyboardInterrupt" in text and "rank 0" in text, (kind, text)
    world.Barrier()

    session = espresso_mpi.Session(timeout=60)
    if rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert said(lambda: session.sync(fresh()))[0] == "KeyboardInterrupt"
        assert not session.usable
        world.Barrier()
    else:
        world.Barrier()
        kind, text = said(lambda: session.sync(fresh()))
        assert kind == "RemoteError" and "KeyboardInterrupt" in text, (kind, text)
    print("survived", rank)
    """
    assert ends_well(job(tmp_path, body), "survived 0", "survived 1")


def test_an_uncaught_error_ends_the_job(tmp_path):
    """``python -m mpi4py`` aborts; nothing of the session's keeps the process alive."""
    body = """
    handle = session.push("w", fresh(100_000))
    if rank == 1:
        raise RuntimeError("my own mistake")
    handle.wait()
    session.push("v", fresh()).wait()
    """
    status, output = job(tmp_path, body)
    assert status not in (0, launch.TIMED_OUT), output
    assert "my own mistake" in output


def test_a_rank_that_is_killed_is_noticed(tmp_path):
    """By the launcher, or else by the timeout: in no case does the job hang."""
    body = """
    session = espresso_mpi.Session(timeout=3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print(said(session.push("w", fresh()).wait))
    sys.exit(3)
    """
    status, output = job(tmp_path, body)
    assert status not in (0, launch.TIMED_OUT), output


@pytest.mark.thorough  # test_all_that_may_be_under_way_at_the_end has it, among others
def test_threads_of_the_users_own_that_still_wait(tmp_path):
    """A daemon thread that waits for what never comes does not keep the process, nor crash it."""
    body = """
    if rank == 0:
        handle = session.push("alone", fresh())
        threading.Thread(target=lambda: said(handle.wait), daemon=True).start()
        time.sleep(0.5)
    """
    assert ends_well(job(tmp_path, body))


def test_without_thread_support_push_says_so(tmp_path):
    script = """
    import mpi4py
    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI
    import numpy as np, espresso_mpi
    session = espresso_mpi.Session(timeout=20)
    grad = np.full(10, MPI.COMM_WORLD.rank, np.float32)
    session.sync(grad)
    assert np.allclose(grad, 0.5)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        try:
            session.push("w", grad)
        except espresso_mpi.errors.ConfigError as error:
            assert "MPI_THREAD_MULTIPLE" in str(error) and "sync" in str(error)
        else:
            raise AssertionError("push was allowed")
    session.close()
    print("said so")
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    done = run_job(path, limit=LIMIT)
    assert ends_well((done.returncode, done.stdout + done.stderr), "said so")


def test_a_plan_of_this_mpi_fits_in_a_script_that_has_not_loaded_it(tmp_path):
    """What a plan was measured with is compared after MPI is loaded, which the session does."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            from espresso_mpi import Plan, Session, Strategy; from espresso_mpi.cluster import environment
            from espresso_mpi.types import MadeFor

            fingerprint = {"mpi": sys.argv[1]} if len(sys.argv) > 1 else {}
            made_for = MadeFor({"w": ((3,), "float32")}, 1, 1, fingerprint=fingerprint)
            with Session(plan=Plan(default=Strategy("none", "flat"), made_for=made_for)):
                print(environment.mpi()["library"], environment.mpi()["version"])
        """)
    )
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT)
    assert found.returncode == 0, found.stderr
    again = subprocess.run(
        [sys.executable, script, found.stdout.strip()], capture_output=True, text=True, timeout=LIMIT
    )
    assert again.stdout == found.stdout, again.stderr
    other = subprocess.run([sys.executable, script, "MPI 0.1"], capture_output=True, text=True, timeout=LIMIT)
    assert f"mpi: MPI 0.1 (the plan), {found.stdout.strip()} (here)" in other.stderr
