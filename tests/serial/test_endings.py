"""Sessions that are still open when MPI ends, or the process."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

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


@pytest.mark.parametrize("program", [FINALIZED, AT_EXIT], ids=["explicit", "at exit"])
def test_mpi_ends_before_the_session(program):
    argv = [sys.executable, "-m", "espresso_mpi", "run", "-n", "2", "--timeout", "90", "--", "python", "-m", "mpi4py"]
    done = subprocess.run([*argv, "-c", program], capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout.split()) == (0, ["good", "good"]), done.stderr
