"""Jobs of several ranks that tests on one process start."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from espresso_mpi.cluster import launch
from espresso_mpi.errors import ConfigError


def _mpirun_is_missing() -> bool:
    try:
        launch.find_mpirun()
    except ConfigError:
        return True
    return False


needs_mpirun = pytest.mark.skipif(_mpirun_is_missing(), reason="no mpirun")
"""An environment without MPI runs the other serial tests."""


def run_job(*arguments: Any, ranks: int = 2, limit: int = 120) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments on some ranks; a job that hangs ends after ``limit`` seconds.

    Where mpirun has not started any rank, it is tried again.
    """
    command = [sys.executable, "-m", "espresso_mpi", "run", "-n", ranks, "--timeout", limit, "--", "python", *arguments]
    for _ in range(3):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=limit + 30)
        # Open MPI's mpirun fails so now and then on machines that start many jobs; no rank was started.
        if done.returncode == 0 or "listener thread failed to start" not in done.stdout + done.stderr:
            break
    return done
