"""Sessions that are still open when MPI ends, or the process, and those that never open on some rank."""

import pytest
from rank_jobs import needs_mpirun, run_job

pytestmark = [pytest.mark.timeout(300), needs_mpirun]

FINALIZED = """
import sys
import numpy as np
import espresso_mpi
from espresso_mpi.errors import EspressoError, StateError
from mpi4py import MPI

def expect(kind, words, act):
    try:
        act()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised: {words}")

opened = espresso_mpi.Session()
opened.sync(np.ones(3, np.float32))
left = espresso_mpi.Session(window_bytes=0)
handle = left.push("half", np.ones(1 << 20, np.float32)) if MPI.COMM_WORLD.rank == 0 else None
with espresso_mpi.Session() as entered:
    entered.sync(np.ones(3, np.float32))
    MPI.Finalize()
opened.close()
left.close()
for session in (opened, left, entered):
    expect(EspressoError, "MPI.Finalize was called before close()", lambda: session.sync(np.ones(3, np.float32)))
    expect(EspressoError, "MPI.Finalize was called before close()", lambda: session.push("x", np.ones(3, np.float32)))
expect(EspressoError, "MPI.Finalize", espresso_mpi.Session)
expect(StateError, "MPI.Finalize was called in this process", lambda: espresso_mpi.sync(np.ones(3, np.float32)))
if handle is not None:
    expect(EspressoError, "MPI.Finalize", handle.wait)
try:
    with entered:
        raise KeyError("x")
except KeyError:
    print("good", flush=True)
"""

AT_EXIT = """
import atexit
import numpy as np
import espresso_mpi
from mpi4py import MPI

atexit.register(lambda: (session.close(), print("good", flush=True)))
atexit.register(MPI.Finalize)
session = espresso_mpi.Session()
if MPI.COMM_WORLD.rank == 0:
    session.push("half", np.ones(1 << 20, np.float32))
"""

NEVER_OPENS = """
import os, time
import espresso_mpi
from espresso_mpi.errors import RankTimeoutError
from mpi4py import MPI

world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 1:
    end = time.monotonic() + 8
    while time.monotonic() < end:
        assert not world.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG), "a message that the program has not sent"
        time.sleep(0.01)
else:
    try:
        espresso_mpi.Session(timeout=4)
    except RankTimeoutError as error:
        assert "waited 4 s for rank 1 in the session to open" in str(error), error
    time.sleep(4)
print("good", flush=True)
world.Barrier()
os._exit(0)
"""


def output(program, ranks=2):
    done = run_job("-m", "mpi4py", "-c", program, ranks=ranks)
    return done.returncode, done.stdout.split(), done.stderr


@pytest.mark.parametrize("program", [FINALIZED, AT_EXIT], ids=["explicit", "at exit"])
def test_mpi_ends_before_the_session(program):
    status, lines, errors = output(program)
    assert (status, lines) == (0, ["good"] * 2), errors


def test_a_rank_that_never_opens_a_session_is_named():
    _, lines, errors = output(NEVER_OPENS, ranks=3)  # no end is clean with an opening half done
    assert lines == ["good"] * 3, errors
