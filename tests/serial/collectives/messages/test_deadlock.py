"""Ranks that wait for each other in different sessions hear of it; ranks that are slow, or have threads, do not."""

import pytest
from rank_jobs import needs_mpirun, run_job

pytestmark = [pytest.mark.timeout(300), needs_mpirun]

PROGRAM = """
import sys, threading, time
import numpy as np
import espresso_mpi
from espresso_mpi.collectives.messages import deadlock, waiting
from espresso_mpi.errors import EspressoError
from mpi4py import MPI

waiting._LOOK, waiting._LOOK_EVERY, deadlock._AGAIN = 0.2, 0.1, 0.4
rank, x = MPI.COMM_WORLD.rank, np.ones(100, np.float32)

def two(timeout):
    return [espresso_mpi.Session(timeout=timeout, window_bytes=int(sys.argv[1])) for _ in range(2)]

def opposite(a, b):
    try:
        for session in (a, b) if rank == 0 else (b, a):
            session.sync(x)
    except EspressoError as error:
        return str(error)

# Legal: a rank is slow.
a, b = two(60)
if rank == 0:
    time.sleep(1.5)
a.sync(x)

# Legal: a second thread synchronises what the first one does not.
if rank == 0:
    def later():
        time.sleep(1.5)
        b.sync(np.ones(100, np.float32))
    thread = threading.Thread(target=later)
    thread.start()
    a.sync(x)
    thread.join()
else:
    b.sync(np.ones(100, np.float32))
    a.sync(x)
a.close()
b.close()
print("fine", flush=True)

# The one thread of every rank waits for a rank that waits in the other session.
text = opposite(*two(1000))
words = ["in different sessions", "rank 0 (", "sync number 1 of session number 3", "of session number 4", "same order"]
print("found" if all(word in text for word in words) else text, flush=True)

# Another thread might still call: only the timeout knows, and tells where the others are.
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
text = opposite(*two(6))
other = "session number 6" if rank == 0 else "session number 5"
good = "waited 6 s for rank" in text and f"[waits in sync number 1 of {other} for" in text
print("timeout" if good or "another rank cannot continue" in text else text, flush=True)
"""


@pytest.mark.parametrize(("ranks", "window_bytes"), [(2, 4 << 20), (3, 0)])
def test_sessions_in_opposite_orders(ranks, window_bytes):
    done = run_job("-m", "mpi4py", "-c", PROGRAM, window_bytes, ranks=ranks, limit=200)
    assert sorted(done.stdout.split()) == ["fine"] * ranks + ["found"] * ranks + ["timeout"] * ranks, done.stderr
